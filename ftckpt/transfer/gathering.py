"""Fill runs of a shard's elements from the source's files, copying each byte as rarely as it can.

A run of the shard is a few boxes; each meets boxes of source tensors, and each of those lies at a
regular place in a file. Where both sides are dense the bytes are read straight into place. Else the
span around them is read into a small buffer and copied with strides.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ftckpt.assembly import raw_dtype
from ftckpt.buffers import buffer
from ftckpt.checkpoint import Box, Checkpoint, Payload, TensorInfo
from ftckpt.coverage import intersection
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Extent
from ftckpt.memory import demand
from ftckpt.transforms import read_undone

from .casting import cast
from .content import Fill, Shard
from .regions import Held, boxes_of_range, held_by, is_run, reach

if TYPE_CHECKING:
    import numpy as np

    from ftckpt.limits import RateLimit
    from ftckpt.store import Reader

    Array = np.ndarray[Any, Any]

SPAN = 4 << 20  # bytes read at once where elements must be picked out of a wider span
_OPEN_FILES = 128
_KNOWN_TENSORS = 1024
_UNDONE = 4  # decompressed records that are kept: their neighbours are asked for next

# Slots of `ftckpt.buffers` that one thread needs at the same time.
_PICK, _CAST = 1, 2


class Gatherer:
    """Reads elements of one checkpoint into place; may be used from many threads.

    Args:
        checkpoint: the source, opened.
        limiter: bounds the rate of reading.
    """

    def __init__(self, checkpoint: Checkpoint, limiter: RateLimit | None = None) -> None:
        self._checkpoint = checkpoint
        self._limiter = limiter
        self._gap = checkpoint.source.store.traits.gap
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._held: OrderedDict[str, tuple[Held, ...]] = OrderedDict()
        self._streams: OrderedDict[Extent, bytes] = OrderedDict()

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
        flat = np.frombuffer(out, raw_dtype(shard.dtype.itemsize))
        done = 0
        for box in boxes_of_range(shard.shape, start, stop):
            self._fill_box(shard, box, flat[done : done + box.volume].reshape(box.sizes))
            done += box.volume

    def copy(self, extent: Extent, out: memoryview) -> None:
        """Put bytes of a source file into `out` as they are."""
        self._read(extent.file, extent.offset, out)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()

    def _fill_box(self, shard: Shard, box: Box, out: Array) -> None:
        shared = [(fill, _shared(fill.local, box)) for fill in shard.fills]
        found = [(fill, part) for fill, part in shared if part is not None and part.volume]
        if sum(part.volume for _, part in found) < box.volume:
            out.view("u1" if out.dtype.kind == "V" else out.dtype)[...] = 0
        for fill, part in found:
            lead = len(part.sizes) - len(fill.source.sizes)
            inside = [p - b for p, b in zip(part.offsets, box.offsets, strict=True)]
            place: list[Any] = list(inside[:lead])
            place += [
                slice(i, i + n) for i, n in zip(inside[lead:], part.sizes[lead:], strict=True)
            ]
            self._convert(fill, _in_source(fill, part, lead), shard, out[(*place, ...)])

    def _convert(self, fill: Fill, box: Box, shard: Shard, out: Array) -> None:
        """Read a box of a source tensor into `out`, cast where the types differ."""
        info = self._checkpoint.tensors[fill.key]
        if info.dtype == shard.dtype:
            self._read_box(info, box, out)
            return
        import numpy as np

        size = info.dtype.itemsize
        raw = buffer(box.volume * size, _CAST)
        source = np.frombuffer(raw, raw_dtype(size)).reshape(box.sizes)
        self._read_box(info, box, source)
        out[...] = cast(source, info.dtype, shard.dtype)

    def _read_box(self, info: TensorInfo, box: Box, out: Array) -> None:
        found = 0
        for held in self._places(info):
            part = _shared(held.box, box)
            if part is None or not part.volume:
                continue
            inside = zip(part.offsets, box.offsets, part.sizes, strict=True)
            place: Any = (*(slice(p - b, p - b + n) for p, b, n in inside), ...)
            steps = zip(part.offsets, held.box.offsets, held.strides, strict=True)
            offset = held.origin + sum((p - h) * s for p, h, s in steps)
            self._read_strided(held, offset, part.sizes, out[place])
            found += part.volume
        if found != box.volume:
            raise CorruptError(
                f"{box.volume - found} elements of {info.key} are in no piece",
                kind="hole",
                tensor=info.key,
            )

    def _read_strided(self, held: Held, offset: int, sizes: tuple[int, ...], out: Array) -> None:
        """Read a strided box of a file (or undone stream) into an array of the same sizes."""
        import numpy as np

        size = out.dtype.itemsize
        if is_run(sizes, held.strides, size) and out.flags.c_contiguous:
            self._get(held, offset, _bytes(out))
            return
        axis, rows = self._at_once(sizes, held.strides, size)
        if rows < sizes[axis]:
            for row in range(0, sizes[axis], rows):
                count = min(rows, sizes[axis] - row)
                part = (*sizes[:axis], count, *sizes[axis + 1 :])
                place: Any = (*(slice(None),) * axis, slice(row, row + count), ...)
                self._read_strided(held, offset + row * held.strides[axis], part, out[place])
            return
        raw = buffer(reach(sizes, held.strides, size), _PICK)
        self._get(held, offset, raw)
        flat = np.frombuffer(raw, raw_dtype(size), count=len(raw) // size)
        out[...] = np.lib.stride_tricks.as_strided(flat, sizes, held.strides, writeable=False)

    def _at_once(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> tuple[int, int]:
        """Return an axis, and how many of its rows are best read together."""
        axis = next((d for d, n in enumerate(sizes) if n > 1), len(sizes) - 1)
        between = strides[axis] - reach(sizes[axis + 1 :], strides[axis + 1 :], itemsize)
        if between > self._gap:  # what lies between two rows is not worth reading
            return axis, 1
        if reach(sizes, strides, itemsize) > SPAN:
            return axis, max(1, SPAN // max(strides[axis], 1))
        return axis, sizes[axis]

    def _get(self, held: Held, offset: int, out: memoryview) -> None:
        if held.undone is None:
            self._read(held.file, offset, out)
        else:
            out[:] = memoryview(self._undone(held.undone))[offset : offset + len(out)]

    def _read(self, file: str, offset: int, out: memoryview) -> None:
        if self._limiter is not None:
            self._limiter.take(len(out))
        self._reader(file).readinto(offset, out)

    def _places(self, info: TensorInfo) -> tuple[Held, ...]:
        """Return where the main pieces of a tensor lie; found once while it is worked on."""
        with self._lock:
            known = self._held.get(info.key)
            if known is not None:
                return known
        size = info.dtype.itemsize
        places: list[Held] = []
        for piece in info.pieces:
            if piece.replica or not piece.box.volume:
                continue
            payload = self._checkpoint.payload(piece)
            has = payload.inner[1] if payload.inner else payload.extent.length
            for held in held_by(piece, payload, size):
                begin = payload.inner[0] if payload.inner else payload.extent.offset
                end = held.origin + reach(held.box.sizes, held.strides, size)
                if end > begin + has:
                    raise CorruptError(
                        f"a piece of {info.key} has {has} bytes and needs {end - begin}",
                        kind="size-mismatch",
                        file=piece.extent.file,
                        tensor=info.key,
                        offset=piece.extent.offset,
                        length=piece.extent.length,
                    )
                places.append(held)
        with self._lock:
            self._held[info.key] = tuple(places)
            while len(self._held) > _KNOWN_TENSORS:
                self._held.popitem(last=False)
        return tuple(places)

    def _reader(self, file: str) -> Reader:
        with self._lock:
            reader = self._readers.get(file)
            if reader is None:
                reader = self._readers[file] = self._checkpoint.source.open(file)
                if len(self._readers) > _OPEN_FILES:
                    # Another thread may still read from it: the last reference closes it.
                    self._readers.popitem(last=False)
            return reader

    def _undone(self, payload: Payload) -> bytes:
        """Return the whole undone stream of a payload up to its tensor's end."""
        with self._lock:
            known = self._streams.get(payload.extent)
        if known is not None:
            return known
        assert payload.inner is not None
        length = sum(payload.inner)
        demand(length * _UNDONE, f"a compressed record of {payload.extent.file}")
        data = read_undone(self._checkpoint.source, payload.extent, payload.transforms, (0, length))
        with self._lock:
            self._streams[payload.extent] = data
            while len(self._streams) > _UNDONE:
                self._streams.popitem(last=False)
        return data

    def _fill_packed(self, shard: Shard, start: int, stop: int, out: memoryview) -> None:
        """Copy a tensor whose elements are smaller than a byte; only as one whole piece."""
        fill = shard.fills[0] if len(shard.fills) == 1 else None
        info = self._checkpoint.tensors[fill.key] if fill is not None else None
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
        payload = self._checkpoint.payload(pieces[0])
        offset = start * shard.dtype.bits // 8
        held = Held(Box((), ()), payload.extent.file, payload.extent.offset, (), None)
        if payload.transforms:
            assert payload.inner is not None
            held = held._replace(origin=payload.inner[0], undone=payload)
        self._get(held, held.origin + offset, out)


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
