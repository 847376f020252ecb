"""A checkpoint that shows other tensors of another one, whose files it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import Checkpoint, Decoding, Scalar


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
