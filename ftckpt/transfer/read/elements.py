"""Fill runs of a shard's elements from the source's files, copying each byte as rarely as it can.

What fills a shard is worked out once for some megabytes of it (see `moves`), and a run of its
elements only clips that. Where both sides are dense the bytes are read straight into place. Else
the span around them is read into a small buffer and copied with strides.

List what a transfer reads of its source, in roughly the order of reading.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_ahead import extents_in_order, extents_of
from ftckpt.checkpoint.read_tensor import dense_strides, raw_dtype
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Extent
from ftckpt.transfer.casting import cast
from ftckpt.transfer.content import Content, Shard, SourceBox
from ftckpt.transfer.forms import pairs
from ftckpt.transfer.layout import Elements, Layout, Stored
from ftckpt.workers.buffers import buffer

from .copies_plan import (
    Boxes,
    ElementMove,
    PlannedRead,
    StoredBox,
    boxes_of_range,
    is_run,
    meeting,
    readings,
    whole_rows,
)
from .source_bytes import Places, ReadObserver, SourceBytes

if TYPE_CHECKING:
    from ftckpt.transfer.casting import Array
    from ftckpt.workers.limits import RateLimit


SPAN = 4 << 20  # bytes read at once where elements must be picked out of a wider span
REMOTE = 8 << 20  # and made at once, where a request has a latency to hide
_REGION = 64 << 20  # bytes of a shard for which moves are kept: it may have very many pieces
_PICK_SLOT = 1
_NESTED_SLOT = 64  # and above: of what is gathered to compute what is gathered
_nesting = threading.local()


class Region(NamedTuple):
    """Elements of a shard, and what fills them.

    Attributes:
        shard: of which.
        start: the first element, in the shard's C order.
        stop: one more than the last.
        moves: their places do not overlap.
        full: whether the moves fill all of them; the others are zero.
    """

    shard: Shard
    start: int
    stop: int
    moves: Sequence[ElementMove]
    full: bool


class Gatherer:
    """Reads elements of one checkpoint into place; may be used from many threads.

    Args:
        checkpoint: the source, opened.
        limiter: bounds the rate of reading.
        observer: is told of what is read.

    Attributes:
        chunk: bytes that are best asked for at once: what is made stays in the processor's cache
            from the gathering to the writing. More where the files lie behind a latency.
    """

    chunk = 2 << 20

    def __init__(
        self,
        checkpoint: Checkpoint,
        limiter: RateLimit | None = None,
        observer: ReadObserver | None = None,
    ) -> None:
        self.bytes = SourceBytes(checkpoint, limiter, observer)
        self._span = SPAN
        if not checkpoint.source.store.traits.local:
            self.chunk, self._span = max(self.chunk, REMOTE), REMOTE
        self._thread = threading.local()

    def fill(self, shard: Shard, start: int, stop: int, out: memoryview) -> None:
        """Put elements `start` to `stop` of a shard into `out`, dense and little-endian.

        Raises:
            CorruptError: the source's bytes are missing, or its pieces leave a hole.
            UnsupportedError: a part of a tensor whose elements are smaller than a byte, or a cast
                that torch does not have.
        """
        size = shard.dtype.itemsize
        if size == 0:
            self._fill_packed(shard, start, stop, out)
            return
        held = self._dense(shard) if len(out) <= self._span else None
        if held is not None:
            self.bytes.get(held, held.origin + start * size, out)
            return
        at = start
        while at < stop:
            region = self._region(shard, at)
            end = min(stop, region.stop)
            self.place(region, at, end, out[(at - start) * size : (end - start) * size])
            at = end

    def fill_piece(
        self, info: TensorInfo, piece: Piece, start: int, stop: int, out: memoryview
    ) -> None:
        """Put elements of a piece's box into `out` as this piece holds them, main or replica.

        Args:
            info: a tensor of the checkpoint.
            piece: one of its pieces, of some volume.
            start: the first element, in the box's C order; inside the piece's flat range.
            stop: one more than the last.
            out: dense and little-endian.

        Raises:
            CorruptError: bytes are missing.
            UnsupportedError: a part of a tensor whose elements are smaller than a byte.
        """
        size = info.dtype.itemsize
        if size == 0:
            self._get_packed(info, piece, start, out)
            return
        box, places = piece.box, self.bytes.places(info, piece)
        held = _one_run(places, box.sizes, size)
        if held is not None:
            self.bytes.get(held, held.origin + start * size, out)
            return
        steps = dense_strides(box.sizes)
        met = (meeting(held, box, 0, steps, info.dtype) for held in places.near(box))
        moves = [move for move in met if move is not None]
        shard = Shard(box.sizes, info.dtype, ())
        full = sum(prod(move.sizes) for move in moves) == shard.numel
        self.place(Region(shard, 0, shard.numel, moves, full), start, stop, out)

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
        size = shard.dtype.itemsize
        if not size:
            whole = memoryview(bytearray(shard.dtype.nbytes(last - first)))
            self.fill(shard, first, last, whole)
            out[:] = whole[cut : cut + len(out)]
            return
        # An element that is cut is read by itself: it is read for both of its parts.
        one = memoryview(bytearray(size))
        done = 0
        if cut:
            self.fill(shard, first, first + 1, one)
            done = min(size - cut, len(out))
            out[:done] = one[cut : cut + done]
            first += 1
        count = (len(out) - done) // size
        if count:
            self.fill(shard, first, first + count, out[done : done + count * size])
            done += count * size
        if done < len(out):
            self.fill(shard, first + count, first + count + 1, one)
            out[done:] = one[: len(out) - done]

    def copy(self, extent: Extent, out: memoryview) -> None:
        """Put bytes of a source file into `out` as they are."""
        self.bytes.read(extent.file, extent.offset, out)

    def close(self) -> None:
        """Close every file."""
        self.bytes.close()

    def place(self, region: Region, start: int, stop: int, out: memoryview) -> None:
        """Put elements `start` to `stop` of a region into `out`."""
        import numpy as np

        dtype = region.shard.dtype
        size, raw_type = dtype.itemsize, raw_dtype(dtype.itemsize)
        if not region.full:
            np.frombuffer(out, np.uint8)[:] = 0
        for reading in self.readings(region, start, stop):
            move = reading.moves[0]
            same = move.dtype == dtype
            at = (move.start - start) * size
            if same and move.is_run and len(reading.moves) == 1:
                self.bytes.get(reading.held, reading.offset, out[at : at + reading.nbytes])
                continue
            raw = self._picked(reading)
            for move in reading.moves:
                found = raw_dtype(move.dtype.itemsize)
                skip = move.offset - reading.offset
                items = np.ndarray(move.sizes, found, raw, skip, move.strides)
                at, steps = (move.start - start) * size, tuple(s * size for s in move.steps)
                target = np.ndarray(move.sizes, raw_type, out, at, steps)
                if same:
                    target[...] = items
                else:
                    target[...] = self.cast(np.ascontiguousarray(items), move.dtype, dtype)

    def _picked(self, reading: PlannedRead) -> memoryview:
        """Return the bytes of a reading in this thread's buffer.

        A computed tensor may gather others meanwhile, which must not use that buffer too.
        """
        depth = getattr(_nesting, "depth", 0)
        raw = buffer(reading.nbytes, _NESTED_SLOT + depth if depth else _PICK_SLOT)
        _nesting.depth = depth + 1
        try:
            self.bytes.get(reading.held, reading.offset, raw)
        finally:
            _nesting.depth = depth
        return raw

    def cast(self, items: Array, source: DType, target: DType) -> Array:
        """Return elements in another type; see `casting.cast`."""
        return cast(items, source, target)

    def readings(self, region: Region, start: int, stop: int) -> Iterator[PlannedRead]:
        """Yield what to read for elements `start` to `stop` of a region, a bounded span each."""
        return readings(region.moves, start, stop, most=self._span, gap=self.bytes.gap)

    def _dense(self, shard: Shard) -> StoredBox | None:
        """Return where a shard lies that is a whole tensor, dense; None where it is not so plain.

        A checkpoint may have very many small tensors: most of the time went into geometry.
        """
        fill = shard.fills[0] if len(shard.fills) == 1 else None
        info = None if fill is None else self.bytes.checkpoint.tensors[fill.key]
        if fill is None or info is None or info.dtype != shard.dtype:
            return None
        if not info.shape == shard.shape == fill.source.sizes == fill.local.sizes:
            return None
        return _one_run(self.bytes.places(info), info.shape, info.dtype.itemsize)

    def _region(self, shard: Shard, start: int) -> Region:
        """Return the region of a shard that holds an element; each thread keeps its last one."""
        known: Region | None = getattr(self._thread, "region", None)
        if (
            known is not None
            and known.start <= start < known.stop
            and (known.shard is shard or known.shard == shard)
        ):
            return known
        step = whole_rows(shard.shape, _REGION // shard.dtype.itemsize)
        begin = start // step * step
        stop = min(begin + step, shard.numel)
        moves = list(self._moves(shard, begin, stop))
        full = sum(prod(move.sizes) for move in moves) == stop - begin
        found = self._thread.region = Region(shard, begin, stop, moves, full)
        return found

    def _moves(self, shard: Shard, start: int, stop: int) -> Iterator[ElementMove]:
        """Yield what fills elements `start` to `stop` of a shard."""
        fills: Iterable[SourceBox] = shard.fills
        if stop - start < shard.numel:
            boxes = list(boxes_of_range(shard.shape, start, stop))
            fills = (part for fill in fills for box in boxes for part in _clipped(fill, box))
        steps = dense_strides(shard.shape)
        for local, key, source in fills:
            at = sum(o * s for o, s in zip(local.offsets, steps, strict=True))
            lead = len(steps) - len(source.sizes)
            yield from self._of_source(key, source, at, steps[lead:] if lead else steps)

    def _of_source(
        self, key: str, box: Box, start: int, steps: Sequence[int]
    ) -> Iterator[ElementMove]:
        """Yield what fills a box of a source tensor that begins at an element of a shard."""
        info = self.bytes.checkpoint.tensors[key]
        found = 0
        for held in self.bytes.places(info).near(box):
            move = meeting(held, box, start, steps, info.dtype)
            if move is not None:
                yield move
                found += prod(move.sizes)
        if found != box.volume:
            raise CorruptError(
                f"{box.volume - found} elements of {info.key} are in no piece",
                kind="hole",
                tensor=info.key,
            )

    def _fill_packed(self, shard: Shard, start: int, stop: int, out: memoryview) -> None:
        """Copy a tensor whose elements are smaller than a byte; only as one whole piece."""
        fill = shard.fills[0] if len(shard.fills) == 1 else None
        if fill is not None:
            info = self.bytes.checkpoint.tensors[fill.key]
            main = [piece for piece in info.pieces if not piece.replica]
            whole = fill.source == Box.whole(info.shape) and info.dtype == shard.dtype
            if whole and len(main) == 1:
                self._get_packed(info, main[0], start, out)
                return
        raise _smaller_than_a_byte(shard.dtype)

    def _get_packed(self, info: TensorInfo, piece: Piece, start: int, out: memoryview) -> None:
        """Copy elements smaller than a byte from a piece that holds all of a tensor."""
        first, cut = divmod(start * info.dtype.bits, 8)
        if cut or piece.box != Box.whole(info.shape) or piece.strides is not None:
            raise _smaller_than_a_byte(info.dtype)
        payload = self.bytes.checkpoint.payload(piece)
        held = StoredBox(Box((), ()), payload.extent.file, payload.extent.offset, (), None)
        if payload.transforms:
            assert payload.inner is not None
            held = held._replace(origin=payload.inner[0], undone=payload)
        self.bytes.get(held, held.origin + first, out)


def _smaller_than_a_byte(dtype: DType) -> UnsupportedError:
    return UnsupportedError(
        f"elements of {dtype.name} are smaller than a byte: such a tensor can only be copied whole"
    )


def _one_run(places: Places, sizes: Sequence[int], itemsize: int) -> StoredBox | None:
    """Return the place where a box lies as one dense run; None where it is not so plain."""
    held = places.only
    if held is None or held.box.sizes != sizes:
        return None
    return held if is_run(sizes, held.strides, itemsize) else None


def _clipped(fill: SourceBox, box: Box) -> Iterator[SourceBox]:
    """Yield what of a fill lies in a box of the shard, if anything does."""
    part = intersection(fill.local, box)
    if part is None:
        return
    lead = len(part.sizes) - len(fill.source.sizes)
    begin = zip(fill.source.offsets, part.offsets[lead:], fill.local.offsets[lead:], strict=True)
    source = Box(tuple(s + p - f for s, p, f in begin), part.sizes[lead:])
    yield SourceBox(part, fill.key, source)


def of_layout(layout: Layout, checkpoint: Checkpoint) -> Iterator[Extent]:
    """Yield the places of what fills a layout, file by file."""
    near = _Near(checkpoint)
    seen: set[int] = set()
    used: set[str] = set()
    for file in layout.files:
        for segment in file.segments:
            if isinstance(segment, Stored):
                yield segment.extent
            if not isinstance(segment, Elements) or id(segment.shard) in seen:
                continue
            seen.add(id(segment.shard))
            for fill in segment.shard.fills:
                used.add(fill.key)
                for piece in near.pieces(fill.key, fill.source):
                    yield piece.extent
    # A format may decode tensors from other bytes than those that its pieces name.
    yield from extents_of(checkpoint, used)


def of_content(content: Content, but: Collection[str] = ()) -> Iterator[Extent]:
    """Return the places of all tensors and objects of some content, in its order.

    `but` are the keys of tensors that are not read.
    """
    wanted = (one for key, one in content.tensors.items() if key not in but)
    keys = (copy.key for one in wanted for copy in one.copies)
    return extents_in_order(content.checkpoint, keys, content.objects)


def of_result(content: Content, result: Checkpoint, but: Collection[str] = ()) -> Iterator[Extent]:
    """Yield the places of all that a result holds, in the order of the content.

    `but` are the keys of the content's tensors that are not read.
    """
    for pair in pairs(content, result):
        for piece in pair.info.pieces if pair.key not in but else ():
            yield piece.extent
    if but:
        known = {pair.info.key for pair in pairs(content, result) if pair.key in but}
        yield from extents_of(result, (result.tensors.keys() | result.objects.keys()) - known)
    else:
        yield from extents_of(result)


class _Near:
    """Finds the pieces of tensors that a box may meet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, tuple[Sequence[Piece], Boxes | None]] = {}

    def pieces(self, key: str, box: Box) -> Sequence[Piece]:
        """Return the main pieces of a tensor that share elements with a box, or perhaps do."""
        known = self._known.get(key)
        if known is None:
            info = self._checkpoint.tensors[key]
            main = [one for one in info.pieces if not one.replica and one.box.volume]
            indexed = len(main) > 1 and bool(info.shape)
            known = main, Boxes.of([one.box for one in main]) if indexed else None
            self._known[key] = known
        pieces, boxes = known
        return pieces if boxes is None else [pieces[number] for number in boxes.near(box)]
