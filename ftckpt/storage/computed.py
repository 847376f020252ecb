"""Tensors that are computed when they are read, as files of a source.

A tensor's file is called `ftckpt.computed//KEY`, which no real file can be, and no listing shows
it. So whatever reads tensors reads computed ones: no operation knows of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from .source import Source
from .store import Reader

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
    """

    fill: Callable[[], Fill] = field(kw_only=True, repr=False, compare=False)

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
        )

    def open(self, name: str) -> Reader:
        """Open a file that must be there, or a computed tensor."""
        if name.startswith(_PREFIX):
            return _ComputedReader(self.fill(), name.removeprefix(_PREFIX))
        return super().open(name)


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
