"""Write a folder as mlx-lm does, and the values that mlx itself computes of it.

    pip install 'mlx[cpu]' && python tests/data/first_contact/mlx/make.py

mlx 0.32 wrote what lies here: weights of 4 bits in groups of 64, and modules with settings of their
own, in scales of float16 and bfloat16, with experts on a leading axis.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx  # type: ignore[import-not-found]

HERE = Path(__file__).parent
MODEL = HERE / "model"
# Bits, group, type of the scales, shape.
MODULES = {
    "model.embed_tokens": (4, 64, mx.bfloat16, (6, 128)),
    "model.layers.0.self_attn.q_proj": (4, 64, mx.float16, (8, 64)),
    "model.layers.0.mlp.switch_mlp.up_proj": (4, 64, mx.bfloat16, (2, 4, 64)),
    **{
        f"model.layers.{bits}.mlp.down_proj": (bits, 32, mx.bfloat16, (4, 64))
        for bits in (2, 3, 5, 6, 8)
    },
    "lm_head": (6, 64, mx.float16, (3, 128)),
}


def main() -> None:
    """Write the folder and `truth.safetensors`."""
    mx.random.seed(7)
    default = {"group_size": 64, "bits": 4}
    settings: dict[str, object] = dict(default)
    tensors, truth = {"model.norm.weight": mx.ones((64,), mx.bfloat16)}, {}
    for name, (bits, group, dtype, shape) in MODULES.items():
        weight = (mx.random.normal(shape) * 0.3).astype(dtype)
        codes, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
        tensors |= {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": biases}
        found = mx.dequantize(codes, scales, biases, group_size=group, bits=bits)
        truth[f"{name}.weight"] = found.astype(mx.float32)
        if (bits, group) != (4, 64):
            settings[name] = {"group_size": group, "bits": bits}
    mx.save_safetensors(str(MODEL / "model.safetensors"), tensors, {"format": "mlx"})
    mx.save_safetensors(str(HERE / "truth.safetensors"), truth)
    config = {"model_type": "tiny", "quantization": settings, "quantization_config": settings}
    (MODEL / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
