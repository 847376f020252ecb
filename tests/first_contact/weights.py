"""Small Hugging Face folders with weights, written as their sources write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def values(*shape: int, seed: int = 0) -> Any:
    """Float32 values that no other seed has."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def save(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(kept, path, None if metadata is None else dict(metadata))


def sharded(folder: Path, names: Sequence[str], index: str = "model.safetensors.index.json") -> Any:
    """Write a matrix into each of some shards and their index; return the tensors by name."""
    tensors: dict[str, Any] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for number, name in enumerate(names):
        one = {f"model.layers.{number}.mlp.up_proj.weight": values(4, 6, seed=number)}
        save(folder / name, one)
        tensors |= one
        weight_map |= dict.fromkeys(one, name)
        total += 4 * 6 * 4
    text = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / index).write_text(json.dumps(text))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return tensors
