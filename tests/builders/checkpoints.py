"""Small real checkpoints for tests, and damage done to them."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions


def save_dcp(path: Path, *, compressed: bool = False, step: int = 7) -> Path:
    """Let torch save a DCP checkpoint of a few tensors and objects, by one process."""
    import torch
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    state = {
        "model": {f"layers.{i}.weight": torch.randn(64, 33) for i in range(4)},
        "step": step,
        "notes": "x" * 1000,
    }
    extensions: Any = [ZStandard()] if compressed else []
    writer = FileSystemWriter(path, _extensions=extensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(state, storage_writer=writer, no_dist=True)
    return path


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open the one checkpoint at a path or URL."""
    return open_target(str(path), FORMATS, StoreOptions()).open()


def copy(path: Path, to: Path) -> Path:
    """Copy a checkpoint, so that a test may damage it."""
    shutil.copytree(path, to)
    return to


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
