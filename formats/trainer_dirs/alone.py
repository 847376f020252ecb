"""Some tensors of several parts, for a process that has not opened them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ftckpt.checkpoint import Checkpoint, Payload, Piece, TensorInfo
from ftckpt.checkpoint.alone import StoredAlone, for_rank, source_of

if TYPE_CHECKING:
    from ftckpt.storage.source import Source


class BundlePart(Protocol):
    """A part of several."""

    @property
    def prefix(self) -> str:
        """What its files' names begin with."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The part, opened."""


@dataclass(kw_only=True, repr=False)
class PartsAlone(StoredAlone):
    """Tensors of several parts.

    Attributes:
        parts: the prefix of the files of each, and what reads it.
        of: which part holds a file, by its number.
    """

    parts: Sequence[tuple[str, Checkpoint]]
    of: Mapping[str, int]

    def payload(self, piece: Piece) -> Payload:
        """Let the part find the elements."""
        prefix, part = self.parts[self.of[piece.extent.file]]
        found = part.payload(without(piece, prefix))
        record = found.record
        if record is not None:
            place, crc = record
            record = (place._replace(file=prefix + place.file), crc)
        extent = found.extent._replace(file=prefix + found.extent.file)
        return found._replace(extent=extent, record=record)


def without(piece: Piece, prefix: str) -> Piece:
    """Return a piece as its part has it."""
    return piece._replace(extent=piece.extent._replace(file=piece.extent.file.removeprefix(prefix)))


def parts_alone(
    source: Source,
    parts: Sequence[BundlePart],
    part_of: Callable[[str], BundlePart],
    tensors: Mapping[str, TensorInfo],
) -> PartsAlone | None:
    """Return tensors of a bundle; None where a part must be opened: see `Checkpoint.for_rank`.

    Args:
        source: of the bundle.
        parts: all of them.
        part_of: returns the part that holds a file.
        tensors: which.
    """
    own = source_of(source, tensors)
    if own is None:
        return None
    numbers = {id(part): number for number, part in enumerate(parts)}
    of: dict[str, int] = {}
    inner: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for key, info in tensors.items():
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for piece in info.pieces:
            part = part_of(piece.extent.file)
            number = of[piece.extent.file] = numbers[id(part)]
            pieces[number].append(without(piece, part.prefix))
        for number, some in pieces.items():
            inner[number][key] = info._replace(pieces=some)
    made: list[tuple[str, Checkpoint]] = []
    for number, part in enumerate(parts):
        found = for_rank(part.checkpoint, inner.get(number, {}))
        if found is None:
            return None
        made.append((part.prefix, found))
    return PartsAlone(source=own, tensors=tensors, objects={}, parts=made, of=of)
