"""Fill runs of a shard's elements from the source's files, copying each byte as rarely as it can.

A run of the shard is a few boxes; each meets boxes of source tensors, and each of those lies at a
regular place in a file: a `Move`. Where both sides are dense the bytes are read straight into
place. Else the span around them is read into a small buffer and copied with strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.assembly import raw_dtype
from ftckpt.buffers import buffer
from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.coverage import intersection
from ftckpt.dtypes import DType
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Extent

from .casting import cast
from .content import Fill, Shard
from .regions import Held, boxes_of_range, is_run, reach
from .source_bytes import SourceBytes

if TYPE_CHECKING:
    import numpy as np

    from ftckpt.limits import RateLimit

    Array = np.ndarray[Any, Any]

SPAN = 4 << 20  # bytes read at once where elements must be picked out of a wider span
_PICK_SLOT = 1


class Move(NamedTuple):
    """Elements that lie at a regular place in a file, and where they go.

    Attributes:
        held: the file, or the stream to undone first.
        offset: of the first element's first byte.
        sizes: how many elements along each axis.
        place: index of the elements in the array of the box that is filled.
        dtype: what they are in the file.
    """

    held: Held
    offset: int
    sizes: tuple[int, ...]
    place: Any
    dtype: DType

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        return reach(self.sizes, self.held.strides, self.dtype.itemsize)


class Gatherer:
    """Reads elements of one checkpoint into place; may be used from many threads.

    Args:
        checkpoint: the source, opened.
        limiter: bounds the rate of reading.

    Attributes:
        chunk: bytes that are best asked for at once: what is made stays in the processor's cache
            from the gathering to the writing.
    """

    chunk = 2 << 20

    def __init__(self, checkpoint: Checkpoint, limiter: RateLimit | None = None) -> None:
        self.bytes = SourceBytes(checkpoint, limiter)

    def fill(self, shard: Shard, start: int, stop: int, out: memoryview) -> None:
        """Put elements `start` to `stop` of a shard into `out`, dense and little-endian.

        Raises:
            CorruptError: the source's bytes are missing, or its pieces leave a hole.
            UnsupportedError: a part of a tensor whose elements are smaller than a byte, or a cast
                that torch does not have.
        """
        import numpy as np

        if shard.dtype.itemsize == 0:
            self._fill_packed(shard, start, stop, out)
            return
        held = self._dense(shard) if len(out) <= SPAN else None
        if held is not None:
            self.bytes.get(held, held.origin + start * shard.dtype.itemsize, out)
            return
        flat = np.frombuffer(out, raw_dtype(shard.dtype.itemsize))
        done = 0
        for box in boxes_of_range(shard.shape, start, stop):
            target = flat[done : done + box.volume].reshape(box.sizes)
            self.place(list(self._moves(shard, box)), shard.dtype, target)
            done += box.volume

    def fill_bytes(self, shard: Shard, offset: int, out: memoryview) -> None:
        """Put the bytes of a shard that begin at an offset into `out`; they may cut elements.

        Raises:
            CorruptError, UnsupportedError: see `fill`.
        """
        bits = shard.dtype.bits
        first = offset * 8 // bits
        last = min(-(-(offset + len(out)) * 8 // bits), shard.numel)
        cut = offset - first * bits // 8
        if not cut and shard.dtype.nbytes(last - first) == len(out):
            self.fill(shard, first, last, out)
            return
        whole = memoryview(bytearray(shard.dtype.nbytes(last - first)))
        self.fill(shard, first, last, whole)
        out[:] = whole[cut : cut + len(out)]

    def copy(self, extent: Extent, out: memoryview) -> None:
        """Put bytes of a source file into `out` as they are."""
        self.bytes.read(extent.file, extent.offset, out)

    def close(self) -> None:
        """Close every file."""
        self.bytes.close()

    def place(self, moves: list[Move], dtype: DType, out: Array) -> None:
        """Carry out the moves that fill one box; what none of them fills is zero.

        Args:
            moves: in any order; their places do not overlap.
            dtype: what the elements become.
            out: raw items, dense.
        """
        import numpy as np

        if sum(prod(move.sizes) for move in moves) < out.size:
            out[...] = np.zeros((), out.dtype)
        for move in moves:
            target, size = out[move.place], move.dtype.itemsize
            same = move.dtype == dtype
            if same and target.flags.c_contiguous and is_run(move.sizes, move.held.strides, size):
                self.bytes.get(move.held, move.offset, _bytes(target))
                continue
            raw = buffer(move.span, _PICK_SLOT)
            self.bytes.get(move.held, move.offset, raw)
            items = np.ndarray(move.sizes, raw_dtype(size), raw, strides=move.held.strides)
            target[...] = items if same else cast(np.ascontiguousarray(items), move.dtype, dtype)

    def _dense(self, shard: Shard) -> Held | None:
        """Return where a shard lies that is a whole tensor, dense; None where it is not so plain.

        A checkpoint may have very many small tensors: most of the time went into geometry.
        """
        fill = shard.fills[0] if len(shard.fills) == 1 else None
        info = None if fill is None else self.bytes.checkpoint.tensors[fill.key]
        if fill is None or info is None or info.dtype != shard.dtype:
            return None
        if not info.shape == shard.shape == fill.source.sizes == fill.local.sizes:
            return None
        held = self.bytes.places(info).only
        if held is None or held.box.sizes != info.shape:
            return None
        return held if is_run(info.shape, held.strides, info.dtype.itemsize) else None

    def _moves(self, shard: Shard, box: Box) -> Iterator[Move]:
        """Yield what fills a box of a shard, each read in one piece of bounded length."""
        for fill in shard.fills:
            part = _shared(fill.local, box)
            if part is None or not part.volume:
                continue
            lead = len(part.sizes) - len(fill.source.sizes)
            inside = tuple(p - b for p, b in zip(part.offsets, box.offsets, strict=True))
            for move in self._of_source(fill.key, _in_source(fill, part, lead), inside[lead:]):
                if lead:
                    move = move._replace(place=(*inside[:lead], *move.place))
                yield from self._cut(move)

    def _of_source(self, key: str, box: Box, at: tuple[int, ...]) -> Iterator[Move]:
        """Yield where a box of a source tensor lies; it goes to `at` in the box that is filled."""
        info = self.bytes.checkpoint.tensors[key]
        found = 0
        for held in self.bytes.places(info).near(box):
            part = _shared(held.box, box)
            if part is None or not part.volume:
                continue
            goes = zip(part.offsets, box.offsets, at, part.sizes, strict=True)
            steps = zip(part.offsets, held.box.offsets, held.strides, strict=True)
            offset = held.origin + sum((p - h) * s for p, h, s in steps)
            place = (*(slice(a + p - b, a + p - b + n) for p, b, a, n in goes), ...)
            yield Move(held, offset, part.sizes, place, info.dtype)
            found += part.volume
        if found != box.volume:
            raise CorruptError(
                f"{box.volume - found} elements of {info.key} are in no piece",
                kind="hole",
                tensor=info.key,
            )

    def _cut(self, move: Move) -> Iterator[Move]:
        """Cut a move whose elements lie too far apart, or span too much, to be read at once."""
        sizes, strides, size = move.sizes, move.held.strides, move.dtype.itemsize
        axis = next((d for d, n in enumerate(sizes) if n > 1), None)
        if axis is None or (is_run(sizes, strides, size) and move.span <= SPAN):
            yield move
            return
        rows = sizes[axis]
        between = strides[axis] - reach(sizes[axis + 1 :], strides[axis + 1 :], size)
        if between > self.bytes.gap:  # what lies between two rows is not worth reading
            rows = 1
        elif move.span > SPAN:
            rows = max(1, SPAN // max(strides[axis], 1))
        if rows >= sizes[axis]:
            yield move
            return
        at = len(move.place) - 1 - len(sizes) + axis  # the last of `place` is the ellipsis
        first = move.place[at].start
        for row in range(0, sizes[axis], rows):
            count = min(rows, sizes[axis] - row)
            place = (
                *move.place[:at],
                slice(first + row, first + row + count),
                *move.place[at + 1 :],
            )
            yield from self._cut(
                move._replace(
                    offset=move.offset + row * strides[axis],
                    sizes=(*sizes[:axis], count, *sizes[axis + 1 :]),
                    place=place,
                )
            )

    def _fill_packed(self, shard: Shard, start: int, stop: int, out: memoryview) -> None:
        """Copy a tensor whose elements are smaller than a byte; only as one whole piece."""
        checkpoint = self.bytes.checkpoint
        fill = shard.fills[0] if len(shard.fills) == 1 else None
        info = checkpoint.tensors[fill.key] if fill is not None else None
        pieces = [p for p in info.pieces if p.replica == 0] if info is not None else []
        whole = (
            fill is not None
            and info is not None
            and info.dtype == shard.dtype
            and fill.source == Box.whole(info.shape)
            and len(pieces) == 1
            and (start * shard.dtype.bits) % 8 == 0
        )
        if not whole:
            raise UnsupportedError(
                f"elements of {shard.dtype.name} are smaller than a byte: such a tensor can only "
                "be copied whole"
            )
        payload = checkpoint.payload(pieces[0])
        held = Held(Box((), ()), payload.extent.file, payload.extent.offset, (), None)
        if payload.transforms:
            assert payload.inner is not None
            held = held._replace(origin=payload.inner[0], undone=payload)
        self.bytes.get(held, held.origin + start * shard.dtype.bits // 8, out)


def _bytes(array: Array) -> memoryview:
    """Return the bytes of a dense array."""
    flat: Any = array.reshape(-1).view("u1")
    return memoryview(flat)


def _shared(box: Box, other: Box) -> Box | None:
    return intersection(box, other) if box.sizes else box


def _in_source(fill: Fill, part: Box, lead: int) -> Box:
    """Return which box of the source tensor fills `part` of the shard."""
    begin = zip(fill.source.offsets, part.offsets[lead:], fill.local.offsets[lead:], strict=True)
    return Box(tuple(s + p - f for s, p, f in begin), part.sizes[lead:])
