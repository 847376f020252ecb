"""A layout made into files in the plainest way: one segment after the other, all in memory.

It shares nothing with the engine but the layout: the oracle of the one, and how writers are tested
without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import raw_dtype, read_box, read_tensor
from ftckpt.transfer.content import Shard
from ftckpt.transfer.layout import (
    Checksums,
    Elements,
    Layout,
    Literal,
    OutputFile,
    Segment,
    Stored,
    Zeros,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def materialise(layout: Layout, checkpoint: Checkpoint, directory: Path) -> None:
    """Write all files of a layout below `directory`, its commit files last."""
    held: dict[str, Array] = {}
    for file in (*layout.files, *layout.commit):
        path = directory / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists(), f"{file.path} is laid out twice"
        path.write_bytes(file_bytes(file, checkpoint, held))


def file_bytes(
    file: OutputFile, checkpoint: Checkpoint, held: dict[str, Array] | None = None
) -> bytes:
    """Return the bytes of one file; `held` keeps tensors that other files need too."""
    made = bytearray()
    held = {} if held is None else held
    for segment in file.segments:
        part = _segment_bytes(segment, checkpoint, made, held)
        assert len(part) == segment.nbytes, (file.path, segment, len(part))
        made += part
    return bytes(made)


def _segment_bytes(
    segment: Segment, checkpoint: Checkpoint, before: bytearray, held: dict[str, Array]
) -> bytes:
    match segment:
        case Literal(data):
            return data
        case Zeros(nbytes):
            return bytes(nbytes)
        case Elements(shard, start, stop):
            whole = shard_bytes(shard, checkpoint, held)
            return whole[shard.dtype.nbytes(start) : shard.dtype.nbytes(stop)]
        case Stored(extent):
            return checkpoint.source.read(*extent)
        case Checksums():
            assert all(0 <= start <= stop <= len(before) for start, stop in segment.ranges)
            return segment.build([zlib.crc32(before[a:b]) for a, b in segment.ranges])
    raise AssertionError(segment)


def shard_bytes(
    shard: Shard, checkpoint: Checkpoint, held: dict[str, Array] | None = None
) -> bytes:
    """Return a shard's elements: the fills, and zeros where there is none."""
    import numpy as np

    held = {} if held is None else held
    if shard.dtype.itemsize == 0:  # types smaller than a byte go whole or not at all
        (fill,) = shard.fills
        info = checkpoint.tensors[fill.key]
        assert fill.local == Box.whole(shard.shape)
        assert (fill.source, shard.dtype) == (Box.whole(info.shape), info.dtype)
        return read_tensor(checkpoint, fill.key)
    result = np.zeros(shard.shape, raw_dtype(shard.dtype.itemsize))
    filled = np.zeros(shard.shape, np.int64)
    for fill in shard.fills:
        info = checkpoint.tensors[fill.key]
        if fill.key not in held:
            held[fill.key] = read_box(checkpoint, info, Box.whole(info.shape))
        data = held[fill.key][_slices(fill.source)].tobytes()
        if info.dtype is not shard.dtype:
            data = cast(data, info.dtype, shard.dtype)
        inside = _slices(fill.local)
        assert prod(fill.local.sizes) == prod(fill.source.sizes)
        result[inside] = np.frombuffer(data, result.dtype).reshape(fill.local.sizes)
        filled[inside] += 1
    assert (filled <= 1).all(), "fills overlap"
    return result.tobytes()


def cast(data: bytes, of: DType, to: DType) -> bytes:
    """Return elements of one type as torch casts them to another."""
    import torch

    if not data:
        return b""
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, of.name))
    raw: Array = values.to(getattr(torch, to.name)).view(torch.uint8).numpy()
    return raw.tobytes()


def _slices(box: Box) -> Sequence[Any]:
    spans = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return (*spans, ...)
