"""Save adapters of packed experts with PEFT, and what `merge_and_unload` makes of them.

Run: python make_packed_experts.py   (torch, transformers 5, peft 0.21, safetensors)

transformers holds the experts of a layer in one parameter and stores one module each, so
`packed_experts.tar.xz` gets of each DTYPE `DTYPE/base` with modules, `DTYPE/adapter` of the
parameters (`target_parameters`), and `DTYPE/merged` with modules again.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

HERE = Path(__file__).parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Make all, and pack them."""
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=6, num_experts=3,
        num_experts_per_tok=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in DTYPES.items():
            out = Path(folder) / name
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).to(dtype)
            for one in model.parameters():
                one.data.normal_(0, 0.5)
            model.save_pretrained(out / "base")
            parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            said = LoraConfig(
                r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=parameters
            )
            adapted = get_peft_model(model, said)
            torch.manual_seed(3)
            for key, one in adapted.named_parameters():
                if "lora_" in key:
                    one.data = torch.randn_like(one) * 0.3
            adapted.save_pretrained(out / "adapter")
            adapted.merge_and_unload().save_pretrained(out / "merged")
        with tarfile.open(HERE / "packed_experts.tar.xz", "w:xz") as packed:
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix != ".md"):
                if path.is_file() and path.name != "generation_config.json":
                    packed.add(path, path.relative_to(folder).as_posix(), filter=plain)


def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made it, and when."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
