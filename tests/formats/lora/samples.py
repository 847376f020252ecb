"""The adapters that PEFT saved (tests/data/adapters), and their values as numpy has them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftckpt
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import raw_dtype, read_tensor
from ftckpt.transfer.casting import cast
from tests.builders.archives import extract

ARCHIVE = Path(__file__).parents[2] / "data" / "adapters" / "adapters.tar.xz"
Array = np.ndarray[Any, Any]


def unpacked(folder: Path) -> Path:
    extract(ARCHIVE, folder)
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


def in_training(case: Path, out: Path, adapter: str = "default") -> None:
    """Write a DCP state as a job with the adapter has it: PEFT's names while it trains."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {}
    for name, one in all_of(str(case / "adapter")).items():
        ends = (".weight", ".bias") if "lora_embedding" not in name else ()
        end = next((e for e in ends if name.endswith(e)), "")
        if "lora_magnitude_vector" in name:
            state[f"{name}.{adapter}.weight"] = torch.tensor(one)
        else:
            state[f"{name.removesuffix(end)}.{adapter}{end}"] = torch.tensor(one)
    for name, one in all_of(base_of(case)).items():
        module, _, last = name.rpartition(".")
        state[f"base_model.model.{module}.base_layer.{last}"] = torch.tensor(one)
    with warnings.catch_warnings(action="ignore"):
        save({"model": state}, checkpoint_id=str(out), no_dist=True)
