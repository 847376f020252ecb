"""A checkpoint with other tensors than it stores: they are computed when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ftckpt.storage.computed import ComputedSource, Fill, computed_name

from . import Box, Checkpoint, Decoding, Extent, Payload, Piece, Scalar, TensorInfo


@dataclass(kw_only=True, repr=False)
class ComputedCheckpoint(Checkpoint):
    """See the module's docstring.

    Attributes:
        stored_in: the checkpoint as it is; it may have computed tensors itself.
        made_of: keys of the tensors there that a computed one is read from, by its key.
        replaced: small files that go with the tensors, in place of the checkpoint's own.
        others: further checkpoints that they are computed from.
    """

    format: ClassVar[str] = "computed"

    source: ComputedSource
    stored_in: Checkpoint
    made_of: Mapping[str, Sequence[str]]
    replaced: Mapping[str, bytes]
    others: Sequence[Checkpoint] = ()

    @property
    def as_stored(self) -> Checkpoint:
        """The checkpoint as its files hold it."""
        return self.stored_in.as_stored

    @property
    def made_from(self) -> Sequence[Checkpoint]:
        """Other checkpoints that its tensors are computed from."""
        return (*self.stored_in.made_from, *self.others)

    @property
    def source_format(self) -> str:
        """The format of the checkpoint as it is."""
        return self.stored_in.source_format

    @property
    def loads_at_any_world(self) -> bool:
        """Whether the checkpoint itself does."""
        return self.stored_in.loads_at_any_world

    @property
    def decoding(self) -> Decoding:
        """How the stored tensors are decoded."""
        return self.stored_in.decoding

    @property
    def stored(self) -> Any:
        """How a folder keeps its objects (see `write_records`)."""
        return getattr(self.stored_in, "stored", None)

    def members(self) -> Iterable[str]:
        """Return the checkpoint's files, without those that no longer hold."""
        return [name for name in self.stored_in.members() if name in self.source.entries]

    def load_object(self, name: str) -> Any:
        """Return an object of the checkpoint."""
        return self.stored_in.load_object(name)

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece; a computed one is dense."""
        if self.source.computes(piece.extent.file):
            return Payload(piece.extent, piece.strides)
        return self.stored_in.payload(piece)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the checkpoint's step."""
        return self.stored_in.scalars(limit)

    def fields(self) -> Iterable[str]:
        """Return the names of its non-tensor state."""
        return self.stored_in.fields()

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield the stored bytes that each tensor is read from."""
        owners: dict[str, list[str]] = {}
        for key in self.tensors:
            for stored in self.made_of.get(key, (key,)):
                owners.setdefault(stored, []).append(key)
        for name in self.objects:
            owners.setdefault(name, []).append(name)
        for extent, name, rank in self.stored_in.extents_by_owner():
            for owner in owners.get(name, ()):
                yield extent, owner, rank


def computed(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    made_of: Mapping[str, Sequence[str]],
    fill: Fill,
    beside: Mapping[str, bytes],
    *,
    without: Sequence[str] = (),
    others: Sequence[Checkpoint] = (),
) -> ComputedCheckpoint:
    """Return a checkpoint with other tensors.

    Args:
        checkpoint: as it is.
        tensors: all that the result has; the computed ones have no pieces yet.
        made_of: see `ComputedCheckpoint`.
        fill: computes bytes of a tensor.
        beside: small files in place of the checkpoint's own.
        without: files that no longer hold.
        others: further checkpoints that tensors are computed from.
    """
    placed = {
        key: info._replace(
            pieces=(Piece(Box.whole(info.shape), Extent(computed_name(key), 0, info.nbytes)),)
        )
        if key in made_of
        else info
        for key, info in tensors.items()
    }
    kept = {name: e for name, e in checkpoint.source.entries.items() if name not in without}
    source = ComputedSource.over(checkpoint.source, lambda: fill, made_of.keys(), kept)
    held = {f.name: getattr(checkpoint, f.name) for f in fields(Checkpoint) if f.init}
    held |= {"source": source, "tensors": placed}
    held |= {
        "aliases": {k: o for k, o in checkpoint.aliases.items() if k in placed and o in placed}
    }
    return ComputedCheckpoint(
        **held, replaced=beside, stored_in=checkpoint, made_of=made_of, others=others
    )
