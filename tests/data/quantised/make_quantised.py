"""Write small folders of quantised weights with the frameworks' own code, and what they stand for.

Run: python make_quantised.py   (torch, transformers, compressed-tensors, bitsandbytes, safetensors)

`truth.json` beside the folders has the XXH3-128 of the bytes of every weight as the framework
dequantises it, by folder, weight and type.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bnb
import torch
import xxhash
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent
Tensors = dict[str, torch.Tensor]
Shapes = list[tuple[int, int]]
Truth = dict[str, dict[str, torch.Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TRUTH: dict[str, dict[str, dict[str, str]]] = {}
NORM = torch.linspace(0.5, 1.5, 24).to(torch.bfloat16)


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    made.view(-1)[::97] *= 40  # outliers, and a wide range of scales
    return made.to(torch.bfloat16)


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def write(name: str, tensors: Tensors, config: dict[str, Any], truth: Truth) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    held = {key: value.contiguous() for key, value in tensors.items()}
    held["model.norm.weight"] = NORM.clone()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    said: dict[str, Any] = {"model_type": "llama", "torch_dtype": "bfloat16"}
    said["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(said, indent=1))
    TRUTH[name] = {key: {d: digest(t) for d, t in by.items()} for key, by in truth.items()}


def fp8_block(name: str, grid: list[int], shapes: Shapes, fmt: str | None = None) -> None:
    config = SimpleNamespace(weight_block_size=grid, scale_fmt=fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    tensors: Tensors = {}
    truth: Truth = {}
    for number, shape in enumerate(shapes):
        key = f"model.layers.{number}.mlp.up_proj.weight"
        made = Fp8Quantize(quantizer)._quantize_one(key, weight(*shape, seed=number))
        tensors |= made
        op = Fp8Dequantize(quantizer)
        scale = made[f"{key}_scale_inv"]
        truth[key] = {d: op._dequantize_one(made[key], scale, t) for d, t in DTYPES.items()}
    said = {"quant_method": "fp8", "weight_block_size": grid, "activation_scheme": "dynamic"}
    write(name, tensors, said | ({"scale_fmt": fmt} if fmt else {}), truth)


def fp8_partial() -> None:
    """DeepSeek's 128 x 128 with blocks that are not full, as its own kernel and torch divide."""
    tensors: Tensors = {}
    truth: Truth = {}
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    value = weight(130, 150).float()
    scale = torch.empty(2, 2)
    codes = torch.empty(130, 150, dtype=torch.float8_e4m3fn)
    for i in range(2):
        for j in range(2):
            at = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scale[i, j] = value[at].abs().max() / 448
            codes[at] = (value[at] / scale[i, j]).to(torch.float8_e4m3fn)
    tensors = {key: codes, f"{key}_scale_inv": scale}
    wide = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :150]
    truth[key] = {d: (codes.float() * wide).to(t) for d, t in DTYPES.items()}
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    write("fp8-partial", tensors, said, truth)


def compressed(name: str, form: str, args: Any, shapes: Shapes, scale_dtype: torch.dtype) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors: Tensors = {}
    truth: Truth = {}
    for number, shape in enumerate(shapes):
        stem = f"model.layers.{number}.mlp.up_proj"
        value = weight(*shape, seed=number)
        state = {"weight": value}
        grouped = value.float()
        strategy = args.strategy
        if strategy == "tensor":
            low, high = grouped.min().reshape(1), grouped.max().reshape(1)
        elif strategy == "channel":
            low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        elif strategy == "block":
            m, n = args.block_structure
            cut = grouped.reshape(shape[0] // m, m, shape[1] // n, n)
            low, high = cut.amin((1, 3)), cut.amax((1, 3))
        else:
            cut = grouped.reshape(shape[0], -1, args.group_size)
            low, high = cut.amin(-1), cut.amax(-1)
        wide = None
        if strategy == "tensor_group":
            wide = (448.0 * 6.0 / grouped.abs().max()).reshape(1).float()
            state["weight_global_scale"] = wide
        scale, _ = calculate_qparams(low, high, args, global_scale=wide)
        state["weight_scale"] = scale.to(scale_dtype)
        made = compressor.compress(state, scheme)
        tensors |= {f"{stem}.{role}": value for role, value in made.items()}
        back = compressor.decompress(dict(made), scheme)["weight"]
        # Its own result is in the scale's type; a cast of that is what is left to do.
        truth[f"{stem}.weight"] = {d: back.to(t) for d, t in DTYPES.items()}
        if back.dtype == torch.float32 or strategy == "tensor_group":
            truth[f"{stem}.weight"] = {"bf16": back.to(torch.bfloat16)}
            if back.dtype == torch.float32:
                truth[f"{stem}.weight"] = {d: back.to(t) for d, t in DTYPES.items()}
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": form}
    said = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip
    write(name, tensors, said, truth)


def gpt_oss() -> None:
    tensors: Tensors = {}
    truth: Truth = {}
    random = torch.Generator().manual_seed(7)
    for proj, rows, columns in (("gate_up_proj", 48, 64), ("down_proj", 32, 96)):
        stem = f"model.layers.0.mlp.experts.{proj}"
        blocks = torch.randint(0, 256, (2, rows, columns // 32, 16), generator=random).byte()
        scales = torch.randint(112, 130, (2, rows, columns // 32), generator=random).byte()
        tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
        truth[stem] = {
            d: convert_moe_packed_tensors(blocks, scales, dtype=t) for d, t in DTYPES.items()
        }
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write("mxfp4-gpt-oss", tensors, said, truth)


def bnb_4bit(kind: str, nested: bool) -> None:
    tensors: Tensors = {}
    truth: Truth = {}
    for number, shape in enumerate(((40, 64), (24, 128), (17, 10))):
        key = f"model.layers.{number}.mlp.up_proj.weight"
        value = weight(*shape, seed=number)
        codes, state = bnb.quantize_4bit(value, quant_type=kind, compress_statistics=nested)
        tensors |= {key: codes} | {
            f"{key}.{role}": held for role, held in state.as_dict(packed=True).items()
        }
        truth[key] = {}
        for d, t in DTYPES.items():
            state.dtype = t
            truth[key][d] = bnb.dequantize_4bit(codes, state)
    said = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip
    write(f"bnb-{kind}{'-nested' if nested else ''}", tensors, said, truth)


def bnb_int8() -> None:
    tensors: Tensors = {}
    truth: Truth = {}
    for number, shape in enumerate(((40, 64), (24, 600))):
        stem = f"model.layers.{number}.mlp.up_proj"
        codes, stats, _ = bnb.int8_vectorwise_quant(weight(*shape, seed=number).half())
        tensors |= {f"{stem}.weight": codes, f"{stem}.SCB": stats}
        tensors[f"{stem}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        back = bnb.int8_vectorwise_dequant(codes, stats)
        truth[f"{stem}.weight"] = {d: back.to(t) for d, t in DTYPES.items()}
    said = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    write("bnb-int8", tensors, said, truth)


def main() -> None:
    fp8_block("fp8-block", [16, 16], [(32, 48), (64, 16)])
    fp8_block("fp8-block-ue8m0", [1, 32], [(24, 64)], "ue8m0")
    fp8_partial()
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    bf16 = torch.bfloat16
    tensor = QuantizationArgs(**eight, strategy="tensor")
    compressed("ct-fp8-tensor", "float-quantized", tensor, [(24, 40)], torch.float32)
    channel = QuantizationArgs(**eight, strategy="channel")
    compressed("ct-fp8-channel", "float-quantized", channel, [(24, 40), (4, 640)], bf16)
    block = QuantizationArgs(**eight, strategy="block", block_structure=[16, 8])
    compressed("ct-fp8-block", "float-quantized", block, [(32, 40)], bf16)
    whole = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    compressed("ct-int8", "int-quantized", whole, [(24, 40)], bf16)
    mx8 = QuantizationArgs(**eight, strategy="group", group_size=32, scale_dtype=torch.uint8)
    compressed("ct-mxfp8", "mxfp8-quantized", mx8, [(24, 64)], bf16)
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    mx4 = QuantizationArgs(**four, strategy="group", group_size=32, scale_dtype=torch.uint8)
    compressed("ct-mxfp4", "mxfp4-pack-quantized", mx4, [(24, 64)], bf16)
    nv = QuantizationArgs(
        **four, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    compressed("ct-nvfp4", "nvfp4-pack-quantized", nv, [(24, 64)], torch.float32)
    gpt_oss()
    bnb_4bit("nf4", False)
    bnb_4bit("nf4", True)
    bnb_4bit("fp4", False)
    bnb_int8()
    (HERE / "truth.json").write_text(json.dumps(TRUTH, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
