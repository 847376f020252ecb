"""Write weights in torchao's NF4 with torch.save, and what they stand for.

Run: python make_nf4.py   (torch 2.13, torchao 0.18, safetensors)

`nf4/<type>.pt` has a matrix and a row, with blocks of other sizes; `nf4/<type>.safetensors` has
what `NF4Tensor.get_original_weight` returns. `nf4/transposed.pt` has a view that it computes wrong.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import NF4Tensor  # type: ignore[import-not-found]

HERE = Path(__file__).parent / "nf4"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        made = torch.Generator().manual_seed(7)
        matrix = NF4Tensor.from_tensor(torch.randn(32, 64, generator=made).to(dtype), 32, 8)
        row = NF4Tensor.from_tensor(torch.randn(512, generator=made).to(dtype) * 3, 64, 4)
        state = {"matrix": nn.Parameter(matrix, requires_grad=False), "row": row}
        torch.save({"model": {**state, "norm": torch.ones(4)}, "step": 3}, HERE / f"{name}.pt")
        truth = {name: one.get_original_weight() for name, one in state.items()}
        save_file(truth, HERE / f"{name}.safetensors")
    torch.save({"model": {"matrix": matrix.t()}}, HERE / "transposed.pt")


if __name__ == "__main__":
    main()
