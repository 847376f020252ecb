"""Read logical tensors: put the bytes of pieces into place in the global tensor.

For one tensor, or one box of it, in memory. Operations on whole checkpoints plan their copies
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Box
from ftckpt.storage.decompress import open_stream, read_undone, short
from ftckpt.storage.source import Source

from .coverage import check_coverage, intersection
from .pieces import Payload, Piece, TensorInfo, TensorSource

if TYPE_CHECKING:
    import numpy as np

    from ftckpt.workers.limits import RateLimit

    Array = np.ndarray[Any, Any]

BLOCK = 4 << 20


def read_tensor(checkpoint: TensorSource, key: str) -> bytes:
    """Return the elements of one logical tensor: dense, C order, little-endian.

    Raises:
        CorruptError: bytes are missing, or the main pieces do not tile the tensor (`hole`,
            `overlap`, `out-of-bounds`).
        UnsupportedError: pieces of a type smaller than a byte that are not one whole piece.
    """
    info = checkpoint.tensors[key]
    for gap in check_coverage(info.shape, info.pieces):
        raise CorruptError(f"{key}: {gap.message}", kind=gap.kind, tensor=key)
    if info.dtype.itemsize == 0:
        return _read_packed_bits(checkpoint, info)
    return read_box(checkpoint, info, Box.whole(info.shape)).tobytes()


def read_box(
    checkpoint: TensorSource, info: TensorInfo, box: Box, limiter: RateLimit | None = None
) -> Array:
    """Return the elements of `box` as an array of raw items (see `raw_dtype`), C order.

    The main pieces must tile the tensor (`ftckpt.checkpoint.coverage`), because overlaps hide
    missing elements. `limiter` bounds the rate of reading.

    Raises:
        CorruptError: bytes or elements are missing.
    """
    import numpy as np

    result = np.empty(box.sizes, raw_dtype(info.dtype.itemsize))
    filled = 0
    for piece in info.pieces:
        if piece.replica:
            continue
        if piece.flat is not None:
            filled += _place_flat(checkpoint, info, piece, box, result, limiter)
            continue
        shared = intersection(piece.box, box) if box.sizes else piece.box
        if shared is None or not piece.box.volume:
            continue
        result[_slices(shared, box)] = read_part(checkpoint, info, piece, shared, limiter)
        filled += shared.volume
    if filled != box.volume:
        raise CorruptError(
            f"{box.volume - filled} elements of {info.key} are in no piece",
            kind="hole",
            tensor=info.key,
        )
    return result


def read_part(
    checkpoint: TensorSource,
    info: TensorInfo,
    piece: Piece,
    box: Box,
    limiter: RateLimit | None = None,
) -> Array:
    """Return the elements of `box`, which lies inside a piece without a flat range.

    Reads only the span from the first to the last of them, so a slab of a large piece costs only
    the slab. (A compressed piece must be decoded from its start.) `limiter` bounds the rate.

    Raises:
        CorruptError: the piece has fewer bytes than its elements need (`size-mismatch`).
    """
    import numpy as np

    payload = checkpoint.payload(piece)
    itemsize = info.dtype.itemsize
    held = payload.inner[1] if payload.inner else payload.extent.length
    strides = payload.strides or dense_strides(piece.box.sizes)
    if len(strides) != len(piece.box.sizes):
        raise _size_mismatch(info, piece, held, piece.box.volume * itemsize)
    reach = _reach(piece.box.sizes, strides) * itemsize
    if held < reach or (payload.strides is None and held != reach):
        raise _size_mismatch(info, piece, held, reach)
    if not box.volume:
        return np.empty(box.sizes, raw_dtype(itemsize))
    inside = [b - p for b, p in zip(box.offsets, piece.box.offsets, strict=True)]
    start = sum(i * s for i, s in zip(inside, strides, strict=True)) * itemsize
    limiter = checkpoint.source.limited(limiter)
    if limiter is not None:
        limiter.take(_reach(box.sizes, strides) * itemsize)
    data = _read_span(checkpoint.source, payload, start, _reach(box.sizes, strides) * itemsize)
    steps = tuple(s * itemsize for s in strides)
    flat = np.frombuffer(data, raw_dtype(itemsize))
    return np.lib.stride_tricks.as_strided(flat, box.sizes, steps, writeable=False)


def slabs(box: Box, nbytes: int, itemsize: int) -> Iterator[Box]:
    """Cut a box, in C order, into boxes of about `nbytes`: each a run of rows of one axis."""
    if not box.volume:
        return
    axis = 0
    while axis < len(box.sizes) - 1 and prod(box.sizes[axis + 1 :]) * itemsize > nbytes:
        axis += 1
    if not box.sizes:
        yield box
        return
    row = prod(box.sizes[axis + 1 :]) * itemsize
    rows = max(1, nbytes // max(row, 1))
    for lead in product(*(range(n) for n in box.sizes[:axis])):
        outer = tuple(o + i for o, i in zip(box.offsets[:axis], lead, strict=True))
        for start in range(0, box.sizes[axis], rows):
            count = min(rows, box.sizes[axis] - start)
            yield Box(
                (*outer, box.offsets[axis] + start, *box.offsets[axis + 1 :]),
                (*(1 for _ in lead), count, *box.sizes[axis + 1 :]),
            )


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array in C order."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided box."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def _read_span(source: Source, payload: Payload, start: int, length: int) -> bytes:
    if payload.transforms:
        assert payload.inner is not None
        inner = (payload.inner[0] + start, length)
        return read_undone(source, payload.extent, payload.transforms, inner)
    file, offset, _ = payload.extent
    with source.open(file) as reader:
        return reader.read(offset + start, length)


def stream_payload(
    source: Source, payload: Payload, limiter: RateLimit | None = None
) -> Iterator[bytes]:
    """Yield the raw bytes of a payload in blocks of at most `BLOCK`; `limiter` bounds the rate."""
    limiter = source.limited(limiter)
    if payload.transforms:
        assert payload.inner is not None
        yield from _stream_undone(source, payload, *payload.inner, limiter)
        return
    file, offset, length = payload.extent
    if not length:
        return
    with source.open(file) as reader:
        for begin in range(offset, offset + length, BLOCK):
            size = min(BLOCK, offset + length - begin)
            if limiter is not None:
                limiter.take(size)
            yield reader.read(begin, size)


def _stream_undone(
    source: Source, payload: Payload, start: int, length: int, limiter: RateLimit | None
) -> Iterator[bytes]:
    at = 0
    with source.open(payload.extent.file) as reader:
        for block in open_stream(
            reader, payload.extent, payload.transforms, limit=start + length, limiter=limiter
        ):
            if at + len(block) > start:
                yield block[max(start - at, 0) :]
            at += len(block)
    if at < start + length:
        raise short(payload.extent, start + length, at)


@cache
def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """Return the numpy type that moves items of `itemsize` bytes without reading them."""
    import numpy as np

    return np.dtype(f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}")


def _place_flat(
    checkpoint: TensorSource,
    info: TensorInfo,
    piece: Piece,
    box: Box,
    result: Array,
    limiter: RateLimit | None,
) -> int:
    """Put a flat range of a piece's box into `result`; return the number of its elements."""
    import numpy as np

    assert piece.flat is not None
    shared = intersection(piece.box, box) if box.sizes else piece.box
    start, stop = piece.flat
    if shared is None or start >= stop:
        return 0
    payload = checkpoint.payload(piece)
    data = b"".join(stream_payload(checkpoint.source, payload, limiter))
    flat = np.frombuffer(data, raw_dtype(info.dtype.itemsize))
    if flat.size != stop - start:
        raise _size_mismatch(info, piece, len(data), (stop - start) * info.dtype.itemsize)
    # Find the elements of the wanted box in the range, numbered in the piece's C order.
    order = np.arange(piece.box.volume, dtype=np.int64).reshape(piece.box.sizes)
    wanted = order[_slices(shared, piece.box)]
    held = (wanted >= start) & (wanted < stop)
    target = result[_slices(shared, box)]
    target[held] = flat[wanted[held] - start]
    return int(held.sum())


def _slices(inner: Box, outer: Box) -> tuple[Any, ...]:
    spans = (
        slice(i - o, i - o + n)
        for i, o, n in zip(inner.offsets, outer.offsets, inner.sizes, strict=True)
    )
    return (*spans, ...)  # the ellipsis keeps a 0-d array an array


def _read_packed_bits(checkpoint: TensorSource, info: TensorInfo) -> bytes:
    main = [p for p in info.pieces if p.replica == 0]
    if len(main) != 1 or main[0].strides is not None:
        raise UnsupportedError(
            f"{info.key} is sharded or strided and its elements are smaller than a byte",
            tensor=info.key,
        )
    return b"".join(stream_payload(checkpoint.source, checkpoint.payload(main[0])))


def _size_mismatch(info: TensorInfo, piece: Piece, has: int, needs: int) -> CorruptError:
    return CorruptError(
        f"a piece of {info.key} has {has} bytes and needs {needs}",
        kind="size-mismatch",
        file=piece.extent.file,
        tensor=info.key,
        offset=piece.extent.offset,
        length=piece.extent.length,
    )
