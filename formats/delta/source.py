"""The decoded tensors of a delta as files of its source: its bytes are the decoded ones.

A tensor's file is called `ftckpt.delta//KEY`, which no real file can be, and no listing shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from ftckpt.delta import NAME, Fill
from ftckpt.storage.source import Source
from ftckpt.storage.store import Reader

_PREFIX = f"{NAME}//"


def decoded_name(key: str) -> str:
    """Return the name of a tensor's decoded bytes."""
    return _PREFIX + key


@dataclass(frozen=True)
class DecodedSource(Source):
    """The files of a delta, and its tensors as if they were files.

    Attributes:
        fill: returns what decodes; asked when a tensor is first read, because it opens the base.
    """

    fill: Callable[[], Fill] = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def over(cls, source: Source, fill: Callable[[], Fill]) -> DecodedSource:
        """Return `source` with the tensors that `fill` decodes."""
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
        """Open a file that must be there, or a decoded tensor."""
        if name.startswith(_PREFIX):
            return _DecodedReader(self.fill(), name.removeprefix(_PREFIX))
        return super().open(name)


class _DecodedReader(Reader):
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
        """Let go: what is decoded is kept by the checkpoint."""
