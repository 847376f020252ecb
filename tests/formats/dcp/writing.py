"""Write distributed checkpoints with torch itself, and say what must be read back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from tests.conformance.formats import Truth

DATA = Path(__file__).parents[2] / "data" / "dcp"


def save(state: dict[str, Any], path: Path, *, collectives: bool = True, **writer: Any) -> Path:
    """Save from one process, as `torch.distributed.checkpoint.save` does it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it works without process groups
        save_with_torch(
            state,
            storage_writer=FileSystemWriter(path, **writer),
            no_dist=True,
            use_collectives=collectives,
        )
    return path


def truth_of(tensor: torch.Tensor) -> Truth:
    """Return the elements in C order; by bytes, so that NaN and every type survive."""
    dense = tensor.detach().contiguous().reshape(-1)
    data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return Truth(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
