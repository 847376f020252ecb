"""Read the headers of many safetensors files together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError
from ftckpt.storage.source import Source

from .header import Header, header_length, parse_header

_GUESS = 64 << 10  # holds the header of about 500 tensors
_ROUND = 64 << 20  # bytes of headers in memory at once


def read_headers(source: Source, files: Iterable[str]) -> dict[str, Header | CorruptError]:
    """Return the header of each file, or the damage that was found in it.

    At most two ranged reads a file, all files of a round together; headers take no more memory
    at once than the larger of 64 MiB and one header.

    Raises:
        UnsafeError: any of them is hostile.
    """
    result: dict[str, Header | CorruptError] = {}
    longer: list[tuple[Extent, bytes]] = []
    wanted = list(files)
    sizes: dict[str, int] = {}
    for file in wanted:
        try:
            source.entry(file)
            sizes[file] = source.size(file)
        except CorruptError as error:  # a link to nothing
            result[file] = error
    guesses = [Extent(file, 0, min(size, _GUESS)) for file, size in sizes.items()]
    for batch in _rounds(guesses):
        for extent, head in zip(batch, source.read_many(batch), strict=True):
            file, size = extent.file, sizes[extent.file]
            try:
                need = header_length(head, size, file)
                if need <= len(head):
                    result[file] = parse_header(head[:need], size, file)
                else:
                    longer.append((Extent(file, len(head), need - len(head)), head))
            except CorruptError as error:
                result[file] = error
    heads = {extent.file: head for extent, head in longer}
    for batch in _rounds([extent for extent, _ in longer]):
        for extent, rest in zip(batch, source.read_many(batch), strict=True):
            file = extent.file
            try:
                result[file] = parse_header(heads.pop(file) + rest, sizes[file], file)
            except CorruptError as error:
                result[file] = error
    return {file: result[file] for file in wanted}


def _rounds(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Split `extents` so that each round reads at most `_ROUND` bytes, or one extent."""
    batch: list[Extent] = []
    total = 0
    for extent in extents:
        if batch and total + extent.length > _ROUND:
            yield batch
            batch, total = [], 0
        batch.append(extent)
        total += extent.length
    if batch:
        yield batch
