"""Some tensors of a checkpoint that another process has opened: where they lie, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ftckpt.errors import NotFoundError
from ftckpt.storage.source import Source

from . import Checkpoint, Record, TensorInfo


@dataclass(kw_only=True, repr=False)
class StoredAlone(Checkpoint):
    """Tensors whose bytes lie in files as they are (see `Checkpoint.for_rank`).

    Attributes:
        known: the records with CRC-32s that the process that opened it has found around them.
    """

    format: ClassVar[str] = "stored"
    known: Sequence[Record] = ()

    def members(self) -> Iterable[str]:
        """Return the files that hold the tensors."""
        return self.source.entries

    def load_object(self, name: str) -> Any:
        """Raise NotFoundError: it has no objects."""
        raise NotFoundError(f"{name} was left with the process that opened the checkpoint")

    def records(self) -> Iterable[Record]:  # type: ignore[override]
        """Return the records that were given."""
        return iter(self.known)


def for_rank(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Checkpoint | None:
    """Return what reads some tensors of a checkpoint in another process.

    Returns:
        None where only an opened checkpoint reads them.
    """
    if type(checkpoint).payload is Checkpoint.payload and not checkpoint.decoding:
        return stored_alone(checkpoint, tensors)
    return checkpoint.for_rank(tensors)


def stored_alone(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> StoredAlone | None:
    """Return tensors of a checkpoint whose pieces are not packed; see `Checkpoint.for_rank`."""
    source = source_of(checkpoint.source, tensors)
    if source is None:
        return None
    return StoredAlone(source=source, tensors=tensors, objects={})


def source_of(source: Source, tensors: Mapping[str, TensorInfo]) -> Source | None:
    """Return a source with the files alone that hold some tensors; None where not all are files."""
    files = {piece.extent.file for info in tensors.values() for piece in info.pieces}
    if type(source) is not Source or not files <= source.entries.keys():
        return None
    entries = {name: source.entries[name] for name in sorted(files)}
    return Source(source.store, source.base, entries, source.single, source.named)
