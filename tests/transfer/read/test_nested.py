"""A tensor computed of gathered ones is gathered itself: neither takes the memory of the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import ftckpt
from ftckpt.checkpoint import Box, Kind, TensorInfo
from ftckpt.checkpoint.computed import computed
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.transfer.content import Shard, SourceBox
from ftckpt.transfer.read.elements import Gatherer

SIZE = 64


def test_memory_is_not_shared(tmp_path: Path) -> None:
    values = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    header = {"a": {"dtype": "F32", "shape": values.shape, "data_offsets": [0, values.nbytes]}}
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    base = ftckpt.open_checkpoint(str(path))
    half, dtype = SIZE // 2, DTYPES["float32"]

    def columns(key: str, first: int) -> Shard:
        """Half of the columns, which are picked out of a wider span."""
        box = Box((0, first), (SIZE, half))
        return Shard((SIZE, half), dtype, (SourceBox(Box.whole((SIZE, half)), key, box),))

    inner = Gatherer(base)

    def fill(_: str, offset: int, view: memoryview) -> None:
        """Put the columns of both halves one behind the other, a half at a time."""
        made = bytearray(values.nbytes)
        assert (offset, len(view)) == (0, SIZE * half * 8 - half * 4)
        for first in (0, half):
            at = first * SIZE * 4
            inner.fill(
                columns("a", first), 0, SIZE * half, memoryview(made)[at : at + SIZE * half * 4]
            )
            end = min(at + SIZE * half * 4, len(view))
            view[at:end] = made[at:end]

    info = TensorInfo("model", "b", Kind.PARAM, (SIZE, SIZE), dtype, ())
    layer = computed(base, {"b": info}, {"b": ["a"]}, fill, {})
    out = bytearray(SIZE * half * 4)
    Gatherer(layer).fill(columns("b", 0), 0, SIZE * half, memoryview(out))
    want = np.concatenate([values[:, :half].reshape(-1), values[:, half:].reshape(-1)])
    want = want.reshape(SIZE, SIZE)[:, :half]
    assert np.array_equal(np.frombuffer(out, np.float32).reshape(SIZE, half), want)
