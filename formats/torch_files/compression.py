"""Whole files that zstd, lz4 or gzip compressed: which one did, and its bytes undone, in order.

The first bytes say what compressed a file; its name does not. Some bytes can unfold to thirty
thousand times as many, so few are handed over at once, and the caller says how many it takes.

Compressed files as their source shows them: themselves, and what was in each beside it.

A checkpoint is read from all over, and its directory stands at its end, while a compressed stream
can only be read forward. Undoing it again for every range would read it once a tensor. So it is
undone once, into a temporary file without a name (in TMPDIR), whose room is looked at first; every
reader then works as on any other file, and memory is bounded by one step of the decompressor.

Only those of the last two checkpoints are kept: a root of a hundred compressed checkpoints needs
the room of two. One that was let go is made again when it is read.
"""

from __future__ import annotations

import os
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, cast

from ftckpt.amounts import human_bytes
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    NoResourceError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.extents import Extent
from ftckpt.storage.decompress import MAX_WINDOW
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, Opens, Reader, Traits
from ftckpt.workers.budget import budget

HEAD = 32  # bytes of a file that `codec_of` and `Codec.declared` look at


class _Decoder(Protocol):
    """What the three libraries have in common; it ends with one frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class Codec(NamedTuple):
    """A way of compressing whole files.

    Attributes:
        name: as a person calls it.
        magic: how its files begin; any of these.
        step: compressed bytes that are handed over at once: they unfold to 64 MiB at most.
        begin: returns what undoes one frame.
        errors: returns what that raises on damage.
        declared: returns the size that a file's first bytes promise; None where they do not.
    """

    name: str
    magic: tuple[bytes, ...]
    step: int
    begin: Callable[[], _Decoder]
    errors: Callable[[], type[Exception]]
    declared: Callable[[bytes], int | None]


def codec_of(head: bytes) -> Codec | None:
    """Return what compressed the file that begins so; None for none of these."""
    return next((codec for codec in _CODECS if head.startswith(codec.magic)), None)


def packed_by(source: Source, name: str) -> Codec | None:
    """Return what compressed a file of a source; None for none of these, whatever its name."""
    return codec_of(source.read(name, 0, min(HEAD, source.size(name))))


def beginning(head: bytes, length: int) -> bytes:
    """Return the first bytes of what is in a compressed file that begins so.

    Fewer where its beginning does not hold them, or is damaged; those of `head` where nothing
    compressed it.
    """
    codec = codec_of(head)
    if codec is None:
        return head[:length]
    found = b""
    try:
        for part in undo(codec, [head], file=""):
            found += part[:length]
            if len(found) >= length:
                break
    except FtckptError:  # it goes on behind what was given
        pass
    return found[:length]


def undo(codec: Codec, stream: Iterable[bytes | memoryview], *, file: str) -> Iterator[bytes]:
    """Yield the bytes of a compressed file, undone: every frame of it, to its very end.

    Raises:
        CorruptError: it is damaged or ends early (`bad-transform`).
        MissingPackageError: what undoes it is not installed.
        UnsupportedError: it needs a dictionary.
        NoResourceError: it needs more memory than is allowed.
    """
    error_type = codec.errors()
    decoder: _Decoder | None = None
    for part in stream:
        view = memoryview(part)
        for start in range(0, len(view), codec.step):
            data = bytes(view[start : start + codec.step])
            while data:
                decoder = decoder or codec.begin()
                try:
                    undone = decoder.decompress(data)
                except error_type as error:
                    raise _refused(codec, str(error), file) from error
                if undone:
                    yield undone
                data = b""
                if decoder.eof:  # another frame may follow
                    data, decoder = decoder.unused_data or b"", None
    if decoder is not None:
        raise CorruptError(
            f"{file} ends before its {codec.name} stream does",
            kind="bad-transform",
            file=file,
            hint="the compressing or a copy of it was cut short",
        )


def _refused(
    codec: Codec, said: str, file: str
) -> CorruptError | NoResourceError | UnsupportedError:
    if "too much memory" in said:
        return NoResourceError(
            f"{file} was compressed with a longer window than {_window() >> 20} MiB",
            hint="raise --max-memory, or compress it without --long",
            file=file,
        )
    if "Dictionary mismatch" in said:
        return UnsupportedError(f"{file} was compressed with a dictionary", file=file)
    return CorruptError(f"{file} cannot be decompressed: {said}", kind="bad-transform", file=file)


def _window() -> int:
    return min(MAX_WINDOW, budget() // 4)


def _begin_zstd() -> _Decoder:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_window()).decompressobj()


def _zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


def _zstd_size(head: bytes) -> int | None:
    import zstandard

    try:
        size = zstandard.frame_content_size(head)
    except zstandard.ZstdError:
        return None
    return size if size >= 0 else None


def _begin_lz4() -> _Decoder:
    from ftckpt.packages import needing

    with needing("a file that lz4 compressed"):
        import lz4.frame
    return cast("_Decoder", lz4.frame.LZ4FrameDecompressor())


def _lz4_size(head: bytes) -> int | None:
    # Of the frame's flags (the fifth byte), the fourth bit says that a size of eight bytes follows.
    if len(head) < 14 or not head[4] & 8:
        return None
    return int.from_bytes(head[6:14], "little")


_CODECS = (
    # A frame, or one that is skipped, with which the parallel tools begin.
    Codec(
        "zstd",
        (b"\x28\xb5\x2f\xfd", *(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))),
        2 << 10,
        _begin_zstd,
        _zstd_error,
        _zstd_size,
    ),
    Codec("lz4", (b"\x04\x22\x4d\x18",), 64 << 10, _begin_lz4, lambda: RuntimeError, _lz4_size),
    Codec(
        "gzip",
        (b"\x1f\x8b\x08",),
        64 << 10,
        lambda: cast("_Decoder", zlib.decompressobj(31)),
        lambda: zlib.error,
        lambda head: None,
    ),
)


def require_plausible(size: int, compressed: int, file: str) -> None:
    """Refuse a file that unfolds to far more than any checkpoint does.

    Args:
        size: bytes that it promises, or has given so far.
        compressed: bytes that it has on the store.
        file: for the message.

    Raises:
        UnsafeError: more than a thousand times as many, and more than a GiB.
    """
    if size > max(_ALWAYS, _RATIO * compressed):
        raise UnsafeError(
            f"{file} has {compressed} bytes and unfolds to more than {_RATIO} times as many",
            hint="no checkpoint compresses so well: if you trust it, decompress it yourself",
            file=file,
        )


_ALWAYS = 1 << 30
_RATIO = 1000


_SLOT = 16  # of the read buffers: the caller may be reading into another
_HELD = 2  # diff compares two checkpoints
_MOST_HELD = 256  # each has a descriptor
_LOOK = 64 << 20  # bytes written between two looks at the room that is left


@dataclass(frozen=True)
class UnpackedSource(Source):
    """Compressed files, and what is in each as a file that no listing shows.

    Attributes:
        packs: name under which content is read -> the compressed file, and what compressed it.
    """

    packs: Mapping[str, Packed] = field(kw_only=True, repr=False)

    @classmethod
    def over(cls, source: Source, codecs: Mapping[str, Codec]) -> UnpackedSource:
        """Undo compressed files of a source, to their ends; return the source that shows both.

        Args:
            source: has the files.
            codecs: compressed file -> what compressed it.

        Raises:
            CorruptError: the stream is damaged or ends early (`bad-transform`).
            UnsafeError: it unfolds to more than is plausible.
            NoResourceError: no room, or more memory is needed than is allowed.
            UnsupportedError: what undoes it is not installed.
        """
        packs, hidden = {}, {}
        for name, codec in codecs.items():
            inside = inside_of(name)
            packs[inside] = Packed(name, codec)
            with _unpack(source, name, codec, len(codecs)) as content:
                hidden[inside] = source.entries[name]._replace(size=content.size)
        return cls(
            source.store, source.base, _Entries(source.entries, hidden), source.single,
            source.named, source.lookahead, packs=packs,
        )  # fmt: skip

    def open(self, name: str) -> Reader:
        """Open a file that must be there, or the content of the compressed one."""
        packed = self.packs.get(name)
        if packed is None:
            return super().open(name)
        return _unpack(self, packed.name, packed.codec, len(self.packs))

    def read_stored(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        if not any(extent.file in self.packs for extent in extents):
            return super().read_stored(extents)
        result = []
        with ExitStack() as opened:
            readers: dict[str, Reader] = {}
            for extent in extents:
                if extent.file not in self.packs:
                    result += super().read_stored([extent])
                    continue
                if extent.file not in readers:
                    readers[extent.file] = opened.enter_context(self.open(extent.file))
                result.append(readers[extent.file].read(extent.offset, extent.length))
        return result

    def opener(self, name: str) -> tuple[Opens, str]:
        """Return what opens a file without reading ahead, and the path to ask it for."""
        return (_Opener(self), name) if name in self.packs else super().opener(name)

    def stored(self, name: str) -> str:
        """Return the file of the store that has the bytes of a name."""
        return self.packs[name].name if name in self.packs else name

    def shown(self, name: str) -> str:
        """Return the name under which the content of a file of the store is read."""
        inside = inside_of(name)
        return inside if inside in self.packs and self.packs[inside].name == name else name


class Packed(NamedTuple):
    """A compressed file, and what compressed it."""

    name: str
    codec: Codec


def inside_of(name: str) -> str:
    """Return the name of what is in a compressed file: its own, less the last suffix."""
    return name.rpartition(".")[0]


class _Opener(NamedTuple):
    """Opens what was unpacked."""

    source: UnpackedSource

    @property
    def traits(self) -> Traits:
        return self.source.store.traits

    def open(self, path: str) -> Reader:
        return self.source.open(path)


class _Entries(Mapping[str, Entry]):
    """The files of the store; what is unpacked is found by its name and not gone through."""

    def __init__(self, listed: Mapping[str, Entry], hidden: Mapping[str, Entry]) -> None:
        self._listed = listed
        self._hidden = hidden

    def __getitem__(self, name: str) -> Entry:
        return self._hidden[name] if name in self._hidden else self._listed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


class _Content(Reader):
    """An unpacked file, by a descriptor of its own: a reader may outlast the cache."""

    def __init__(self, number: int, size: int, file: str) -> None:
        self.size = size
        self.number = number
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def again(self) -> _Content:
        """Return another reader of the same file."""
        return _Content(os.dup(self.number), self.size, self._file)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError where it is shorter."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError where it is shorter."""
        view = view.cast("B")
        if offset + len(view) > self.size:
            raise TruncatedError(
                f"{self._file} ends at byte {self.size}, before the end of the range "
                f"[{offset}, {offset + len(view)})",
                file=self._file, offset=offset, length=len(view),
            )  # fmt: skip
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.number, [view[done:]], offset + done)
            except OSError as error:
                raise translate(error, f"the unpacked {self._file}", "read") from error
            if not got:
                raise CorruptError(f"the unpacked {self._file} was cut short", file=self._file)
            done += got

    def close(self) -> None:
        """Release it."""
        if self.number >= 0:
            os.close(self.number)
            self.number = -1

    def __del__(self) -> None:
        self.close()


_lock = threading.Lock()
_held: OrderedDict[tuple[object, ...], _Content] = OrderedDict()


def _unpack(source: Source, name: str, codec: Codec, beside: int) -> _Content:
    """Return the content of a compressed file, unpacked now or before."""
    entry = source.entry(name)
    place = source.store.identity(source.path(name))
    key = (place, entry.size, entry.mtime, entry.etag)
    with _lock:  # two that were unpacked at the same time would need the room of both
        content = _held.get(key)
        if content is None:
            most = min(_HELD * beside, _MOST_HELD)
            while len(_held) >= most:  # before: its room is needed
                _held.popitem(last=False)[1].close()
            content = _held[key] = _written(source, name, codec)
        _held.move_to_end(key)
        return content.again()


def _written(source: Source, name: str, codec: Codec) -> _Content:
    packed = source.size(name)
    folder = tempfile.gettempdir()
    with source.open(name) as reader:
        declared = codec.declared(reader.read(0, min(HEAD, packed)))
        if declared is not None:
            require_plausible(declared, packed, name)
        try:
            with tempfile.TemporaryFile(prefix="ftckpt-", buffering=0) as file:
                _require_room(file.fileno(), declared or 0, name, folder)
                size = looked = 0
                stream = chunks(reader, 0, packed, size=size_for(source.store), slot=_SLOT)
                for part in undo(codec, stream, file=name):
                    size += len(part)
                    require_plausible(size, packed, name)
                    if size - looked >= _LOOK:
                        _require_room(file.fileno(), 0, name, folder)
                        looked = size
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
                return _Content(os.dup(file.fileno()), size, inside_of(name))
        except OSError as error:
            raise translate(error, folder, f"unpack {name} in") from error


def _require_room(number: int, wanted: int, name: str, folder: str) -> None:
    """Refuse what would fill the disk: others work there too.

    Raises:
        NoResourceError: less than is wanted is free, or little at all.
    """
    space = os.fstatvfs(number)
    free = space.f_bavail * space.f_frsize
    if free < wanted + _LOOK:
        needs = human_bytes(wanted) if wanted else "more"
        raise NoResourceError(
            f"{name} unpacked needs {needs}, and {folder} has {human_bytes(free)} free",
            hint="set TMPDIR to a place with room, or decompress it yourself",
            file=name,
        )
