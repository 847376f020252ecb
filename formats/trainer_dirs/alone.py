"""Some tensors of several parts, for a process that has not opened them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, Payload, Piece, TensorInfo
from ftckpt.checkpoint.alone import StoredAlone, source_of

if TYPE_CHECKING:
    from .checkpoint import BundleCheckpoint


@dataclass(kw_only=True, repr=False)
class PartsAlone(StoredAlone):
    """Tensors of several parts.

    Attributes:
        parts: what each reads, by the prefix of its files.
        prefixes: of the part that holds each file.
    """

    parts: Mapping[str, Checkpoint]
    prefixes: Mapping[str, str]

    def payload(self, piece: Piece) -> Payload:
        """Let the part find the elements."""
        prefix = self.prefixes[piece.extent.file]
        found = self.parts[prefix].payload(without(piece, prefix))
        record = found.record
        if record is not None:
            place, crc = record
            record = (place._replace(file=prefix + place.file), crc)
        extent = found.extent._replace(file=prefix + found.extent.file)
        return found._replace(extent=extent, record=record)


def without(piece: Piece, prefix: str) -> Piece:
    """Return a piece as its part has it."""
    return piece._replace(extent=piece.extent._replace(file=piece.extent.file.removeprefix(prefix)))


def parts_alone(bundle: BundleCheckpoint, tensors: Mapping[str, TensorInfo]) -> PartsAlone | None:
    """Return tensors of a bundle; None where a part must be opened: see `Checkpoint.for_rank`."""
    source = source_of(bundle.source, tensors)
    if source is None:
        return None
    prefixes: dict[str, str] = {}
    inner: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for key, info in tensors.items():
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in info.pieces:
            prefix = bundle.part_of(piece.extent.file).prefix
            prefixes[piece.extent.file] = prefix
            pieces[prefix].append(without(piece, prefix))
        for prefix, some in pieces.items():
            inner[prefix][key] = info._replace(pieces=some)
    parts: dict[str, Checkpoint] = {}
    for part in bundle.parts:
        if part.prefix in inner:
            found = part.checkpoint.for_rank(inner[part.prefix])
            if found is None or part.prefix in parts:
                return None
            parts[part.prefix] = found
    return PartsAlone(source=source, tensors=tensors, objects={}, parts=parts, prefixes=prefixes)
