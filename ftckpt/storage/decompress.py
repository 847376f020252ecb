"""Decode the stream transforms that a checkpoint format may apply to a record.

torch's distributed checkpoint names them in its metadata (`_StorageInfo.transform_descriptors`), as
`stream.zstd` or `stream.zstd/1`; torch registers only zstd
(torch/distributed/checkpoint/_extension.py). A few kilobytes of zstd can expand to terabytes, so
nothing here decodes more than the caller needs. zarr's compressors have names of ours, `zarr.gzip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

from ftckpt.errors import CorruptError, UnsupportedError

from .ranges import chunks, size_for

if TYPE_CHECKING:
    from ftckpt.extents import Extent
    from ftckpt.workers.limits import RateLimit

    from .source import Source
    from .store import Reader

ZSTD = "stream.zstd"
GZIP, ZLIB, BLOSC = "zarr.gzip", "zarr.zlib", "zarr.blosc"
_WINDOWS = {GZIP: 31, ZLIB: 15}

# torch compresses with level 3, whose window is 2 MiB; the highest level needs 128 MiB.
MAX_WINDOW = 128 << 20
_PART = 1 << 20
_STEP = 128 << 10  # compressed bytes per step: bounds what one call can expand to


def base_name(transform: str) -> str:
    """Return a descriptor without its domain and version: `stream.zstd@x/1` is `stream.zstd`."""
    return transform.partition("/")[0].partition("@")[0]


def supported(transforms: Sequence[str]) -> bool:
    """Whether `undo` knows all of `transforms`."""
    return all(t in (GZIP, ZLIB, BLOSC) or _is_zstd(t) for t in transforms)


def _is_zstd(transform: str) -> bool:
    return base_name(transform) == ZSTD and transform.partition("/")[2].split(".")[0] in ("", "1")


def undo(
    transforms: Sequence[str], stream: Iterable[bytes | memoryview], *, limit: int, file: str = ""
) -> Iterator[bytes]:
    """Yield the decoded bytes of `stream`, undoing the last transform first.

    Args:
        transforms: names as in the metadata, in the order in which they were applied.
        stream: the stored bytes, in order.
        limit: number of bytes to yield; the rest is ignored.
        file: for messages.

    Raises:
        UnsupportedError: a transform is not known.
        CorruptError: the stream is damaged or ends early (`bad-transform`).
    """
    if not supported(transforms):
        raise UnsupportedError(
            f"{file or 'a record'} is stored behind {', '.join(transforms)}, which is not known",
            file=file or None,
        )
    layers: Iterable[bytes | memoryview] = stream
    for number, name in enumerate(reversed(transforms), 1):
        # Every layer but the last feeds another decompressor, which bounds it.
        bound = limit if number == len(transforms) else None
        if name in _WINDOWS:
            layers = _unzlib(layers, bound, file, _WINDOWS[name])
        elif name == BLOSC:
            layers = _unblosc(layers, file)
        else:
            layers = _unzstd(layers, bound, file)
    left = limit
    for part in layers:
        if left <= 0:
            return
        yield bytes(part[:left])
        left -= len(part)


def _unzstd(stream: Iterable[bytes | memoryview], limit: int | None, file: str) -> Iterator[bytes]:
    import zstandard

    given = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    source = cast("IO[bytes]", _Steps(stream))
    try:
        with decompressor.stream_reader(source, read_size=_STEP, read_across_frames=True) as reader:
            while limit is None or given < limit:
                part = reader.read(1 << 20)
                if not part:
                    break
                given += len(part)
                yield part
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"{file or 'a record'} cannot be decompressed: {error}",
            kind="bad-transform",
            file=file or None,
        ) from error


def _unzlib(
    stream: Iterable[bytes | memoryview], limit: int | None, file: str, window: int
) -> Iterator[bytes]:
    """Undo gzip, of one member or several, or zlib."""
    import zlib

    given, part = 0, b""
    source = _Steps(stream)
    engine = zlib.decompressobj(window)
    data = source.read(_STEP)
    try:
        while limit is None or given < limit:
            if not data and len(part) < _PART:  # of a full part more may be inside
                raise zlib.error("it ends early")
            part = engine.decompress(data, _PART)
            given += len(part)
            yield part
            data = engine.unconsumed_tail
            if engine.eof:
                data = engine.unused_data or source.read(_STEP)
                if not data:
                    return
                if window == _WINDOWS[ZLIB]:
                    raise zlib.error("bytes follow its end")
                engine = zlib.decompressobj(window)
            elif not data:
                data = source.read(_STEP)
    except zlib.error as error:
        raise CorruptError(
            f"{file or 'a record'} cannot be decompressed: {error}",
            kind="bad-transform", file=file or None,
        ) from error  # fmt: skip


def _unblosc(stream: Iterable[bytes | memoryview], file: str) -> Iterator[bytes]:
    """Undo Blosc, whose blocks lie in any order: what is stored is held."""
    from ftckpt.workers.budget import demand

    from .blosc import decode_blosc

    held = bytearray()
    for part in stream:
        demand(2 * (len(held) + len(part)), f"a compressed record of {file or 'a file'}")
        held += part
    yield from decode_blosc(bytes(held), file=file)


class _Steps:
    """A stream of buffers, read in the decompressor's steps."""

    def __init__(self, stream: Iterable[bytes | memoryview]) -> None:
        self._stream = iter(stream)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        while not self._rest:
            part = next(self._stream, None)
            if part is None:
                return b""
            self._rest = memoryview(part)
        taken = bytes(self._rest[:size])
        self._rest = self._rest[size:]
        return taken


def open_stream(
    reader: Reader,
    extent: Extent,
    transforms: Sequence[str],
    *,
    limit: int,
    size: int = 1 << 20,
    limiter: RateLimit | None = None,
) -> Iterator[bytes]:
    """Yield up to `limit` bytes of the record at `extent`, transforms undone; see `undo`."""
    stored = chunks(reader, extent.offset, extent.length, size=size, limiter=limiter)
    try:
        yield from undo(transforms, stored, limit=limit, file=extent.file)
    except CorruptError as error:
        if error.offset is None:
            error.offset, error.length = extent.offset, extent.length
        raise


def undo_into(
    reader: Reader,
    extent: Extent,
    transforms: Sequence[str],
    out: memoryview,
    *,
    size: int = 1 << 20,
    limiter: RateLimit | None = None,
) -> int:
    """Fill `out` from the record at `extent`, transforms undone; return how many bytes it gave.

    One layer of zstd is decoded where it is wanted: new memory for every part takes longer.

    Raises:
        UnsupportedError, CorruptError: see `undo`.
    """
    if len(transforms) != 1 or not _is_zstd(transforms[0]):
        at = 0
        stream = open_stream(reader, extent, transforms, limit=len(out), size=size, limiter=limiter)
        for part in stream:
            out[at : at + len(part)] = part
            at += len(part)
        return at
    stored = chunks(reader, extent.offset, extent.length, size=size, limiter=limiter)
    with _decoder(stored, extent) as decoder:
        at = 0
        while at < len(out):
            got = decoder(out[at : at + _PART])
            if not got:
                break
            at += got
        return at


def undone_length(reader: Reader, extent: Extent, transforms: Sequence[str], *, limit: int) -> int:
    """Return how many bytes the record at `extent` unfolds to, `limit` at most.

    Raises:
        UnsupportedError, CorruptError: see `undo`.
    """
    if len(transforms) != 1 or not _is_zstd(transforms[0]):
        return sum(map(len, open_stream(reader, extent, transforms, limit=limit)))
    scratch = memoryview(bytearray(min(limit, _PART)))
    found = 0
    with _decoder(chunks(reader, extent.offset, extent.length), extent) as decoder:
        while found < limit and (got := decoder(scratch[: limit - found])):
            found += got
    return found


@contextmanager
def _decoder(
    stored: Iterable[bytes | memoryview], extent: Extent
) -> Iterator[Callable[[memoryview], int]]:
    """Yield what fills a view with the next bytes of a record of zstd."""
    import zstandard

    engine = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    source = cast("IO[bytes]", _Steps(stored))
    try:
        with engine.stream_reader(source, read_size=_STEP, read_across_frames=True) as reader:
            yield reader.readinto
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"{extent.file} cannot be decompressed: {error}",
            kind="bad-transform",
            file=extent.file,
            offset=extent.offset,
            length=extent.length,
        ) from error


def read_undone(
    source: Source, extent: Extent, transforms: Sequence[str], inner: tuple[int, int]
) -> bytes:
    """Return `inner` = (offset, length) of the decoded stream at `extent`.

    Raises:
        UnsupportedError, CorruptError: see `undo`; also if the stream ends before the range.
    """
    offset, length = inner
    result = bytearray()
    position = 0
    with source.open(extent.file) as reader:
        size = size_for(source.store)
        for part in open_stream(reader, extent, transforms, limit=offset + length, size=size):
            result += part[max(0, offset - position) :]
            position += len(part)
    if len(result) != length:
        raise short(extent, offset + length, position)
    return bytes(result)


def short(extent: Extent, wanted: int, got: int) -> CorruptError:
    """Return the error for a stream that decodes to too few bytes."""
    return CorruptError(
        f"{extent.file} holds a compressed record of {got} bytes where {wanted} are needed",
        kind="bad-transform",
        file=extent.file,
        offset=extent.offset,
        length=extent.length,
    )
