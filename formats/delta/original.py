"""Write what a delta was packed from as the very files that it lay in."""

from __future__ import annotations

from collections.abc import Callable

from ftckpt.checkpoint import Checkpoint, Extent
from ftckpt.delta.index.parse import GROWTH
from ftckpt.delta.original_files import Original, laid_out
from ftckpt.discovery.recognise import Format
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.catalog import formats
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, Stored
from ftckpt.workers.budget import demand

from .checkpoint import DeltaCheckpoint
from .reader import FILES, PLAIN_REST, REST, original_places

MOST_IN_MEMORY = 64 << 20  # bytes beside tensors that are compressed and restored as one
_MOST_LIST = 512 << 20  # bytes of a list of files; as much as of an index


class OriginalWriter:
    """Lays a delta out as its original files: a `Writer` for what that one delta holds.

    Args:
        delta: opened; it has them (`has_original`).

    Attributes:
        delta: as given.
        original: its files.

    Raises:
        CorruptError, UnsafeError: what it says of them cannot be trusted.
    """

    supported_options = ()  # the files are what they were

    def __init__(self, delta: DeltaCheckpoint) -> None:
        self.delta = delta
        self.original = original_of_delta(delta)
        self.name = delta.source_format
        self.single = self.original.single

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out the files.

        Raises:
            CorruptError: they do not fit the tensors.
        """
        return Layout(files=laid_out(self.original, content, self.rest()))

    def rest(self) -> Callable[[int, int], Literal | Stored]:
        """Return what gives bytes beside tensors, of all files one after the other.

        It takes where the bytes begin and how many they are.

        Raises:
            CorruptError: there are more or fewer of them than the files need.
        """
        places, size = original_places(self.delta.index), self.original.rest_bytes
        plain = places.get(PLAIN_REST)
        if plain is not None:
            if plain.length != size:
                raise _bad("what its files held beside tensors has another length")
            return _within(plain)
        held = _undone(self.delta, places[REST], MOST_IN_MEMORY)
        if len(held) != size:
            raise _bad("what its files held beside tensors has another length")
        return _literal(held)


def has_original(delta: DeltaCheckpoint) -> bool:
    """Say whether a delta holds the files that were packed."""
    places = original_places(delta.index)
    return FILES in places and (REST in places or PLAIN_REST in places)


def original_of_delta(delta: DeltaCheckpoint) -> Original:
    """Return the files that were packed, of a delta that has them.

    Raises:
        CorruptError, UnsafeError: what it says of them cannot be trusted.
    """
    place = original_places(delta.index)[FILES]
    return Original.parse(_undone(delta, place, _MOST_LIST, growth=GROWTH))


def compressed(data: bytes) -> bytes:
    """Return a zstd frame that says its content size."""
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(data)


def _undone(delta: DeltaCheckpoint, place: Extent, most: int, growth: int = 1) -> bytes:
    """Return what a frame of a delta unfolds to; not more than allowed, nor than it says.

    Args:
        delta: that has it.
        place: of the frame.
        most: bytes that it may unfold to.
        growth: what becomes of one of them in memory.
    """
    import zstandard

    data = delta.source.read(place.file, place.offset, place.length)
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise _bad(f"a record would unfold to {size} bytes")
        demand(growth * size, "what a delta says of the files that were packed")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise _bad("a record is not a zstd frame") from error


def _within(place: Extent) -> Callable[[int, int], Stored]:
    return lambda at, length: Stored(Extent(place.file, place.offset + at, length))


def _literal(data: bytes) -> Callable[[int, int], Literal]:
    return lambda at, length: Literal(data[at : at + length])


def _bad(what: str) -> CorruptError:
    return CorruptError(f"the delta contradicts itself: {what}", kind="bad-delta")


def format_of(delta: DeltaCheckpoint) -> Format:
    """Return the format that reads the files that were packed.

    Raises:
        UnsupportedError: this version does not know it.
    """
    for one in formats(None):
        if one.name == delta.source_format:
            return one
    raise UnsupportedError(f"the format {delta.source_format} is not known here")


def same_objects_there(source: Checkpoint, result: Checkpoint) -> SameObject:
    """Return what compares objects of a delta with those in its original files.

    Tensors inside the objects are listed by the files' own reader and not by the delta's.
    """
    return SameObject(result, source)
