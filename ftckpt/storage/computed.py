"""Tensors that are computed when they are read, as files of a source.

A tensor's file is called `ftckpt.computed//KEY`, which no real file can be, and no listing shows
it. So whatever reads tensors reads computed ones: no operation knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from ftckpt.extents import Extent

from .source import Source
from .store import Opens, Reader

# Puts the bytes of a tensor (key, offset in its dense C order) into a view.
Fill = Callable[[str, int, memoryview], None]

_PREFIX = "ftckpt.computed//"


def computed_name(key: str) -> str:
    """Return the name of a tensor's computed bytes."""
    return _PREFIX + key


@dataclass(frozen=True)
class ComputedSource(Source):
    """The files of a checkpoint, and tensors as if they were files.

    Attributes:
        fill: returns what computes; called when a tensor is first read, because it may open more.
        under: the source that has the files; they are asked for there.
    """

    fill: Callable[[], Fill] = field(kw_only=True, repr=False, compare=False)
    under: Source = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def over(cls, source: Source, fill: Callable[[], Fill]) -> ComputedSource:
        """Return `source` with the tensors that `fill` computes."""
        return cls(
            source.store,
            source.base,
            source.entries,
            source.single,
            source.named,
            source.lookahead,
            fill=fill,
            under=source,
        )

    def open(self, name: str) -> Reader:
        """Open a file that must be there, or a computed tensor."""
        if name.startswith(_PREFIX):
            return _ComputedReader(self.fill(), name.removeprefix(_PREFIX))
        return self.under.open(name)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent of a file, in order."""
        return self.under.read_many(extents)

    def opener(self, name: str) -> tuple[Opens, str]:
        """Return the opener of a file, and its path there."""
        return self.under.opener(name)

    def stored(self, name: str) -> str:
        """Return the store's file with the bytes of a name."""
        return self.under.stored(name)


class _ComputedReader(Reader):
    """The dense bytes of one tensor."""

    def __init__(self, fill: Fill, key: str) -> None:
        self._fill = fill
        self._key = key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`."""
        data = bytearray(length)
        self._fill(self._key, offset, memoryview(data))
        return bytes(data)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`."""
        self._fill(self._key, offset, view.cast("B"))

    def close(self) -> None:
        """Let go: what computes is kept by the checkpoint."""
