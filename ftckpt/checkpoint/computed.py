"""A checkpoint with other tensors than it stores: they are computed when they are read.

A checkpoint that shows other tensors of another one, whose files it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ftckpt.storage.computed import ComputedSource, Fill, computed_name

from . import Box, Checkpoint, Decoding, Extent, Payload, Piece, Scalar, TensorInfo


@dataclass(kw_only=True, repr=False)
class CheckpointLayer(Checkpoint):
    """All but the tensors is the other checkpoint's; what a layer has of its own it says.

    Attributes:
        base: the other checkpoint; it may be a layer itself.
    """

    base: Checkpoint

    @property
    def as_stored(self) -> Checkpoint:
        """The checkpoint as its files hold it."""
        return self.base.as_stored

    @property
    def made_from(self) -> Sequence[Checkpoint]:
        """Other checkpoints that its tensors are computed from."""
        return self.base.made_from

    @property
    def decoding(self) -> Decoding:
        """How the stored tensors are decoded."""
        return self.base.decoding

    def members(self) -> Iterable[str]:
        """Return the files of the checkpoint below."""
        return self.base.members()

    def load_object(self, name: str) -> Any:
        """Return an object of the checkpoint below."""
        return self.base.load_object(name)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the counters of the checkpoint below."""
        return self.base.scalars(limit)


@dataclass(kw_only=True, repr=False)
class ComputedCheckpoint(CheckpointLayer):
    """See the module's docstring.

    Attributes:
        made_of: keys of the tensors there that a computed one is read from, by its key.
        replaced: small files that go with the tensors, in place of the checkpoint's own.
        others: further checkpoints that they are computed from.
    """

    format: ClassVar[str] = "computed"

    source: ComputedSource
    made_of: Mapping[str, Sequence[str]]
    replaced: Mapping[str, bytes]
    others: Sequence[Checkpoint] = ()

    @property
    def made_from(self) -> Sequence[Checkpoint]:
        """Other checkpoints that its tensors are computed from."""
        return (*self.base.made_from, *self.others)

    @property
    def source_format(self) -> str:
        """The format of the checkpoint as it is."""
        return self.base.source_format

    @property
    def loads_at_any_world(self) -> bool:
        """Whether the checkpoint itself does."""
        return self.base.loads_at_any_world

    @property
    def stored(self) -> Any:
        """How a folder keeps its objects (see `write_records`)."""
        return getattr(self.base, "stored", None)

    def members(self) -> Iterable[str]:
        """Return the checkpoint's files, without those that no longer hold."""
        return [name for name in self.base.members() if name in self.source.entries]

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece; a computed one is dense."""
        if self.source.computes(piece.extent.file):
            return Payload(piece.extent, piece.strides)
        return self.base.payload(piece)

    def fields(self) -> Iterable[str]:
        """Return the names of its non-tensor state."""
        return self.base.fields()

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield the stored bytes that each tensor is read from."""
        owners: dict[str, list[str]] = {}
        for key in self.tensors:
            for stored in self.made_of.get(key, (key,)):
                owners.setdefault(stored, []).append(key)
        for name in self.objects:
            owners.setdefault(name, []).append(name)
        for extent, name, rank in self.base.extents_by_owner():
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
    # A computed tensor has values of its own.
    tied = checkpoint.aliases.items()
    held["aliases"] = {k: o for k, o in tied if k in placed and o in placed and k not in made_of}
    return ComputedCheckpoint(
        **held, replaced=beside, base=checkpoint, made_of=made_of, others=others
    )
