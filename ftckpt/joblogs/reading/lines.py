r"""Read the lines of a log in bounded memory, whatever the file holds.

A line may be a gigabyte long, a file binary, a gzip stream cut. Of a line only the first bytes are
looked at; progress bars that rewrite their line with `\r` are lines of their own.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from ftckpt.errors import FtckptError, RefusedError
from ftckpt.storage.local.oserror import translate

LONGEST = 1 << 16  # bytes of a line that are looked at
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass
class LineTally:
    """What reading one file has met.

    Attributes:
        lines: their number.
        nbytes: after decompression.
        long: lines of which only the beginning was looked at.
        cut: why the file ends before its end; "" where it does not.
    """

    lines: int = 0
    nbytes: int = 0
    long: int = 0
    cut: str = ""


def lines_of(path: str, tally: LineTally, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; `-` is stdin. `tally` is kept up to date.

    Of a line with more than `longest` bytes only those are given.

    Raises:
        NotFoundError, DeniedError, RefusedError, UnavailableError: it cannot be read.
    """
    rest, skipping = b"", False
    for chunk in _chunks(path, tally):
        tally.nbytes += len(chunk)
        *whole, rest_of_chunk = chunk.replace(b"\r", b"\n").split(b"\n")
        if whole:
            whole[0] = rest + whole[0]
            rest = b""
            if skipping:  # the end of a line that was given out already
                whole = whole[1:]
                skipping = False
        for line in whole:
            tally.lines += 1
            if len(line) > longest:
                tally.long += 1
                line = line[:longest]
            yield line
        if skipping:
            continue
        rest += rest_of_chunk
        if len(rest) > longest:
            tally.lines += 1
            tally.long += 1
            yield rest[:longest]
            rest, skipping = b"", True
    if rest:
        tally.lines += 1
        yield rest


def _chunks(path: str, tally: LineTally) -> Iterator[bytes]:
    try:
        if path == "-":
            yield from _opened(sys.stdin.buffer, path, tally)
            return
        with open(path, "rb", buffering=0) as file:
            yield from _opened(file, path, tally)
    except OSError as error:
        raise _refused(error, path) from error


def _refused(error: OSError, path: str) -> FtckptError:
    if isinstance(error, IsADirectoryError):
        return RefusedError(f"{path} is a directory, not a log", hint=f"name files: {path}/*.log")
    return translate(error, path, "read")


def _opened(file: BinaryIO, path: str, tally: LineTally) -> Iterator[bytes]:
    chunk = file.read(_CHUNK)
    if chunk[:2] == _GZIP:
        yield from _unzipped(file, chunk, tally)
        return
    while chunk:
        yield chunk
        chunk = file.read(_CHUNK)


def _unzipped(file: BinaryIO, chunk: bytes, tally: LineTally) -> Iterator[bytes]:
    """Decompress one gzip member after another; a damaged or cut stream ends the file."""
    stream = zlib.decompressobj(wbits=31)
    begun = True
    try:
        while chunk:
            if stream.eof:
                if not chunk.strip(b"\0"):
                    return  # padding behind the last member
                stream, begun = zlib.decompressobj(wbits=31), True
            made = stream.decompress(chunk, _CHUNK)
            if made:
                yield made
            chunk = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof:
                begun = False
            chunk = chunk or file.read(_CHUNK)
        if begun and (made := stream.flush()):
            yield made
    except zlib.error as error:
        tally.cut = f"damaged gzip: {error}"
        return
    if begun and not stream.eof:
        tally.cut = "the gzip stream is cut"
