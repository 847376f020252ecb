"""Whole files that zstd, lz4 or gzip compressed: which one did, and its bytes undone, in order.

The first bytes say what compressed a file; its name does not. Some bytes can unfold to thirty
thousand times as many, so few are handed over at once, and the caller says how many it takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ftckpt.errors import CorruptError, FtckptError, NoResourceError, UnsafeError, UnsupportedError
from ftckpt.storage.decompress import MAX_WINDOW
from ftckpt.workers.budget import budget

if TYPE_CHECKING:
    from ftckpt.storage.source import Source

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
