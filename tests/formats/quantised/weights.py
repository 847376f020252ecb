"""Weights to quantise, the same on every machine: integers and powers of two alone decide them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Shapes that blocks divide, as transformers' quantiser demands.
FP8_CASES = {"one": (128, 256), "experts": (2, 256, 128), "wide": (128, 640)}
MX_CASES = {"gate_up_proj": (2, 64, 48), "down_proj": (2, 96, 64)}


def values(shape: tuple[int, ...], seed: int) -> Array:
    """Return float32 values of a wide range, with outliers, zeros and both zeros."""
    random = np.random.default_rng(seed)
    made = random.integers(-(1 << 20), 1 << 20, shape).astype(np.float32)
    made *= np.exp2(random.integers(-40, -20, shape).astype(np.float32))
    flat = made.reshape(-1)
    flat[::97] *= 64
    flat[::101] = 0
    flat[1::101] = -0.0
    return made


def fp8_weight(name: str) -> Array:
    """Return a weight whose first block is zero, and whose second is tiny."""
    shape = FP8_CASES[name]
    made = values(shape, len(name))
    if name == "wide":
        made[:, :128] = 0
        made[:, 128:256] *= np.float32(2.0**-90)
    return made


def mx_weight(name: str) -> Array:
    """Return experts, input first, with a group of zeros, one of ties, and a tiny one."""
    made = values(MX_CASES[name], 5)
    made[0, :32, 0] = 0
    made[0, :32, 1] = np.arange(-16, 16) / 4
    made[0, :32, 2] *= np.float32(2.0**-100)
    return made


def folder(path: Path, tensors: dict[str, tuple[str, Array]], **config: Any) -> Path:
    """Write a Hugging Face folder.

    Args:
        path: where.
        tensors: type and raw items of each, by name.
        config: of `config.json`.
    """
    path.mkdir()
    at, header, data = 0, {}, b""
    for name, (dtype, raw) in tensors.items():
        held = raw.tobytes()
        header[name] = {"dtype": dtype, "shape": raw.shape, "data_offsets": [at, at + len(held)]}
        at, data = at + len(held), data + held
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return path


def half(made: Array) -> tuple[str, Array]:
    """Return values cut to bfloat16."""
    return "BF16", (np.ascontiguousarray(made).view(np.uint32) >> 16).astype(np.uint16)


def single(made: Array) -> tuple[str, Array]:
    """Return values as float32."""
    return "F32", np.ascontiguousarray(made)
