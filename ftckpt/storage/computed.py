"""Tensors that are computed when they are read, as files of a source.

A tensor's file is called `ftckpt.computed//KEY`, which no real file can be, and no listing shows
it. So whatever reads tensors reads computed ones: no operation knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.extents import Extent

from .source import Source
from .store import Entry, Opens, Reader

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
        keys: of the tensors that it computes; None for all that are asked for.
        inner: reads everything else: the checkpoint's own files, and tensors that are computed
            there.
    """

    fill: Callable[[], Fill] = field(kw_only=True, repr=False, compare=False)
    keys: Collection[str] | None = field(kw_only=True, repr=False, compare=False)
    inner: Source = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def over(
        cls,
        source: Source,
        fill: Callable[[], Fill],
        keys: Collection[str] | None = None,
        entries: Mapping[str, Entry] | None = None,
    ) -> ComputedSource:
        """Return `source` with the tensors that `fill` computes.

        Args:
            source: reads everything else.
            fill: see the class.
            keys: see the class.
            entries: the files that are shown; None for those of `source`.
        """
        return cls(
            source.store,
            source.base,
            source.entries if entries is None else entries,
            source.single,
            source.named,
            source.lookahead,
            fill=fill,
            keys=keys,
            inner=source,
        )

    def computes(self, name: str) -> bool:
        """Return whether a file's name is that of a tensor which is computed here."""
        if not name.startswith(_PREFIX):
            return False
        return self.keys is None or name.removeprefix(_PREFIX) in self.keys

    def open(self, name: str) -> Reader:
        """Open a file that must be there, or a computed tensor."""
        if self.computes(name):
            return _ComputedReader(self.fill(), name.removeprefix(_PREFIX))
        return self.inner.open(name)

    def read_stored(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent of a file, in order."""
        if any(self.computes(extent.file) for extent in extents):
            return super().read_stored(extents)
        return self.inner.read_stored(extents)

    def size(self, name: str) -> int:
        """Return the size of a file that must exist."""
        return self.inner.size(name)

    def opener(self, name: str) -> tuple[Opens, str]:
        """Return the opener of a file without read-ahead, and its path there."""
        return self.inner.opener(name)

    def stored(self, name: str) -> str:
        """Return the store's file with the bytes of a name."""
        return self.inner.stored(name)

    def shown(self, name: str) -> str:
        """Return the name of a file's readable content."""
        return self.inner.shown(name)


class _ComputedReader(Reader):
    """The dense bytes of one tensor."""

    def __init__(self, fill: Fill, key: str) -> None:
        self._fill = fill
        self._key = key

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`."""
        self._fill(self._key, offset, view.cast("B"))

    def close(self) -> None:
        """Let go: what computes is kept by the checkpoint."""
