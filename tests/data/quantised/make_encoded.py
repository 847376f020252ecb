"""Quantise weights with the references' own code, and keep digests of the codes and scales.

Run: python make_encoded.py MXFP   (torch, transformers; MXFP is triton_kernels'
`numerics_details/mxfp.py`, of which the function `downcast_to_mxfp_torch` alone is run)

`encoded.json` has the XXH3-128 of codes and scales by case; `tests/formats/quantised/weights.py`
makes the weights.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.formats.quantised.weights import FP8_CASES, MX_CASES, fp8_weight, mx_weight  # noqa: E402


def triton_function(file: Path) -> Any:
    """Return Triton's reference: it needs torch alone, and its module a GPU's driver."""
    wanted = {"DequantScaleRoundingMode", "right_shift_unsigned", "get_max_quant_val"}
    wanted |= {"downcast_to_mxfp_torch"}
    tree = ast.parse(file.read_text())
    body = [n for n in tree.body if getattr(n, "name", "") in wanted]
    space: dict[str, Any] = {
        "torch": torch, "F": torch.nn.functional, "math": math, "Enum": Enum,
        "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
        "MXFP_BLOCK_SIZE": SimpleNamespace(value=32),
    }  # fmt: skip
    exec(compile(ast.Module(body, []), str(file), "exec"), space)
    return space["downcast_to_mxfp_torch"]


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def main() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    said = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=said))
    made: dict[str, list[str]] = {}
    for name in FP8_CASES:
        value = torch.from_numpy(fp8_weight(name))
        found = quantise._quantize_one("a.weight", value)
        made[f"fp8 {name}"] = [digest(found["a.weight"]), digest(found["a.weight_scale_inv"])]
    downcast = triton_function(Path(sys.argv[1]))
    for name in MX_CASES:
        value = torch.from_numpy(np.ascontiguousarray(mx_weight(name)))
        codes, scales = downcast(value.to(torch.bfloat16), torch.uint8, axis=1)
        made[f"mxfp4 {name}"] = [digest(codes.transpose(1, 2)), digest(scales.transpose(1, 2))]
    (HERE / "encoded.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
