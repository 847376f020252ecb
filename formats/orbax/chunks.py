"""Find the pieces of an array: every stored chunk is one, cut where the array ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from struct import iter_unpack
from typing import NamedTuple

from ftckpt.checkpoint import Box, Payload, Piece
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError
from ftckpt.extents import Extent
from ftckpt.storage.source import Source
from ftckpt.workers.budget import demand

from .ocdbt import crc32c
from .zarr import Array

_ABSENT = (1 << 64) - 1
_ROW = 16  # bytes of an index for each chunk: offset and length
_MOST_INDEX = 64 << 20
_CHUNK = 512  # bytes of memory for a chunk of a shard, as a bound


class ChunkForm(NamedTuple):
    """How a chunk is stored; one object serves all chunks of an array that are alike.

    Attributes:
        transforms: to undo.
        nbytes: decoded.
        strides: in elements, None for dense.
        crc: whether four bytes after its extent are its CRC-32C.
    """

    transforms: tuple[str, ...]
    nbytes: int
    strides: tuple[int, ...] | None
    crc: bool


class Chunks(NamedTuple):
    """The chunks of one array.

    Attributes:
        pieces: those that are stored.
        forms: of each of them.
        lacking: number of chunks that are not stored.
        indexes: places of the indexes of shards that have a CRC-32C.
    """

    pieces: tuple[Piece, ...]
    forms: tuple[ChunkForm, ...]
    lacking: int
    indexes: tuple[Extent, ...]


def chunks_of(source: Source, name: str, array: Array, objects: Mapping[str, Extent]) -> Chunks:
    """Return the chunks of an array; reads the indexes of its shards.

    Args:
        source: the files.
        name: of the array, for messages.
        array: its metadata.
        objects: by key below the array's, the place of each stored object.

    Raises:
        CorruptError: the index of a shard is damaged, or points outside it.
    """
    wanted = prod(array.counts)
    if wanted > len(objects):  # never go through a grid that is mostly absent
        present = _present(array, objects)
    else:
        present = [at for at in _cells(array.counts) if array.key(at) in objects]
    places = [objects[array.key(at)] for at in present]
    if array.indexed is None:
        pieces: list[Piece] = []
        forms: list[ChunkForm] = []
        for at, place in zip(present, places, strict=True):
            _add(array, at, place, pieces, forms)
        return Chunks(tuple(pieces), tuple(forms), wanted - len(present), ())
    return _of_shards(source, name, array, present, places)


def _present(array: Array, objects: Mapping[str, Extent]) -> list[tuple[int, ...]]:
    """Return the places in the grid that keys name."""
    found = []
    for key in objects:
        words = key.split(array.separator)
        if array.prefixed:
            words = words[1:] if words[0] == "c" else [""]
        if not all(word.isdecimal() and word.isascii() and len(word) < 20 for word in words):
            continue
        at = tuple(map(int, words)) if array.shape else ()
        named = len(at) == len(array.shape) and array.key(at) == key
        if named and all(a < n for a, n in zip(at, array.counts, strict=True)):
            found.append(at)
    return sorted(found)


def first_outside(array: Array, objects: Mapping[str, Extent]) -> str:
    """Return the key of a stored chunk that lies outside the grid; "" where none does."""
    for key in objects:
        words = key.split(array.separator)
        if array.prefixed:
            words = words[1:] if words[0] == "c" else []
        if not array.shape or len(words) != len(array.shape):
            continue
        if not all(word.isdecimal() and word.isascii() and len(word) < 20 for word in words):
            continue
        at = tuple(map(int, words))
        if array.key(at) == key and any(a >= n for a, n in zip(at, array.counts, strict=True)):
            return key
    return ""


def first_absent(array: Array, objects: Mapping[str, Extent]) -> str:
    """Return the key of a chunk, or shard, that is not stored; "" if all are."""
    cells = _cells(array.counts)
    return next((key for at in cells if (key := array.key(at)) not in objects), "")


def not_stored(array: Array, found: Chunks) -> Iterator[Box]:
    """Yield the boxes of an array that no chunk holds; all of it where there is none."""
    if not found.pieces:
        yield Box.whole(array.shape)
        return
    held = {piece.box.offsets for piece in found.pieces}
    counts = [-(-s // k) for s, k in zip(array.shape, array.chunk, strict=True)]
    for cell in _cells(counts):
        box = _box(array, cell)
        if box.offsets not in held:
            yield box


def filled(box: Box, element: Extent) -> tuple[Piece, ChunkForm]:
    """Return a piece of one element that stands for all of a box."""
    strides = (0,) * len(box.sizes)
    form = ChunkForm((), element.length, strides, crc=False)
    return Piece(box, element, strides=strides), form


def _cells(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places of a grid in C order, one by one: `product` would hold every range."""
    if 0 in counts:
        return
    at = [0] * len(counts)
    while True:
        yield tuple(at)
        axis = len(counts) - 1
        while axis >= 0 and at[axis] + 1 == counts[axis]:
            at[axis] = 0
            axis -= 1
        if axis < 0:
            return
        at[axis] += 1


def _of_shards(
    source: Source,
    name: str,
    array: Array,
    present: Sequence[tuple[int, ...]],
    places: Sequence[Extent],
) -> Chunks:
    assert array.indexed is not None
    count = prod(array.inner)
    length = count * _ROW + 4 * array.indexed.crc
    if length > _MOST_INDEX:
        raise CorruptError(f"{name} has shards of {count} chunks", kind="bad-metadata", tensor=name)
    # Any number of shards may be said to lie at one place, with one large index.
    demand(len(places) * count * _CHUNK, f"the index of {len(places)} shards of {name}")
    indexes = []
    for place in places:
        size = source.size(place.file)
        if place.end > size or place.length < length:
            end = max(place.end, place.offset + length)
            raise CorruptError(
                f"{place.file} ends at byte {size} of {end}: a shard of {name} is cut off",
                kind="truncated-file", file=place.file, tensor=name,
                offset=place.offset, length=place.length,
            )  # fmt: skip
        start = place.offset if array.index_first else place.end - length
        indexes.append(Extent(place.file, start, length))
    pieces: list[Piece] = []
    forms: list[ChunkForm] = []
    raws = source.read_many(indexes)
    for at, place, index, raw in zip(present, places, indexes, raws, strict=True):
        if array.indexed.crc and crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            raise CorruptError(
                f"the index of a shard of {name} in {index.file} does not match its CRC-32C",
                kind="bad-crc", file=index.file, tensor=name,
                offset=index.offset, length=index.length,
            )  # fmt: skip
        rows = iter_unpack("<QQ", memoryview(raw)[: count * _ROW])
        for inside, (offset, nbytes) in zip(_cells(array.inner), rows, strict=True):
            if offset == nbytes == _ABSENT:
                continue
            if offset + nbytes > place.length:
                raise CorruptError(
                    f"a chunk of {name} lies outside its shard in {place.file}",
                    kind="out-of-bounds", file=index.file, tensor=name,
                    offset=index.offset, length=index.length,
                )  # fmt: skip
            cell = tuple(a * n + i for a, n, i in zip(at, array.inner, inside, strict=True))
            if all(c * k < s for c, k, s in zip(cell, array.chunk, array.shape, strict=True)):
                held = Extent(place.file, place.offset + offset, nbytes)
                _add(array, cell, held, pieces, forms)
    cells = prod(-(-s // k) for s, k in zip(array.shape, array.chunk, strict=True))
    checked = tuple(indexes) if array.indexed.crc else ()
    return Chunks(tuple(pieces), tuple(forms), cells - len(pieces), checked)


def _add(
    array: Array, at: tuple[int, ...], place: Extent, pieces: list[Piece], forms: list[ChunkForm]
) -> None:
    box = _box(array, at)
    strides = None if box.sizes == array.chunk else dense_strides(array.chunk)
    form = ChunkForm(array.codec.transforms, array.nbytes, strides, array.codec.crc)
    if array.codec.crc:
        place = place._replace(length=max(0, place.length - 4))
    pieces.append(Piece(box, place, strides=strides, packed=bool(form.transforms)))
    forms.append(form)


def _box(array: Array, at: Sequence[int]) -> Box:
    offsets = tuple(a * c for a, c in zip(at, array.chunk, strict=True))
    sizes = (min(c, s - o) for c, s, o in zip(array.chunk, array.shape, offsets, strict=True))
    return Box(offsets, tuple(sizes))


def payload_of(piece: Piece, form: ChunkForm) -> Payload:
    """Return where the elements of a chunk are."""
    if form.transforms:
        return Payload(piece.extent, form.strides, form.transforms, (0, form.nbytes))
    return Payload(piece.extent, form.strides)
