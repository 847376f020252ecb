"""The adapters that PEFT saved (tests/data/adapters), and their values as numpy has them."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ftckpt
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import raw_dtype, read_tensor
from ftckpt.transfer.casting import cast

ARCHIVE = Path(__file__).parents[2] / "data" / "adapters" / "adapters.tar.xz"
Array = np.ndarray[Any, Any]


def unpacked(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return folder


def base_of(case: Path) -> str:
    return str(case.parent / "bases" / (case / "base.txt").read_text())


def adapters_of(case: Path) -> list[str]:
    return [str(case / name) for name in ("adapter", "second") if (case / name).exists()]


def values(checkpoint: Checkpoint, key: str) -> Array:
    """Return a tensor as float32."""
    info = checkpoint.tensors[key]
    raw = np.frombuffer(read_tensor(checkpoint, key), raw_dtype(info.dtype.itemsize))
    return cast(raw, info.dtype, DTYPES["float32"]).view(np.float32).reshape(info.shape)


def rounded(numbers: Array, dtype: str) -> Array:
    """Return numbers as they are in another type, as float32."""
    singles = numbers.astype(np.float32)
    if dtype == "float32":
        return singles
    made = cast(singles.view(np.uint32), DTYPES["float32"], DTYPES[dtype])
    return cast(made, DTYPES[dtype], DTYPES["float32"]).view(np.float32)


def all_of(path: str) -> dict[str, Array]:
    opened = ftckpt.open_checkpoint(path)
    return {key: values(opened, key) for key in opened.tensors}


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rewrite(folder: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Change the tensors of an adapter, by name, as float32."""
    from safetensors.numpy import save_file

    held = all_of(str(folder))
    change(held)
    save_file(held, folder / "adapter_model.safetensors")
