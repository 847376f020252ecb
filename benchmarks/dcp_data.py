"""Real DCP checkpoints of a wanted size, saved by torch itself."""

from __future__ import annotations

import warnings
from pathlib import Path


def save_dcp(path: Path, nbytes: int, *, files: int = 8, tensor: int = 32 << 20) -> None:
    """Let torch save `nbytes` of float32 tensors as a DCP checkpoint of `files` data files."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    base = torch.randn(tensor // 4)
    state = {f"layers.{i}.weight": base + i for i in range(max(1, nbytes // tensor))}
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    if files == 1:
        writer = FileSystemWriter(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save({"model": state}, storage_writer=writer, no_dist=True)
