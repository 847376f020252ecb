"""The files of a checkpoint, and small values inside its B-tree nodes as if they were files.

A value's file is called `d/NODE//KEY`, which no real file can be, and no listing shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ftckpt.errors import TruncatedError
from ftckpt.extents import Extent
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, Opens, Reader, Traits

from .ocdbt import Value


@dataclass(frozen=True)
class ValueSource(Source):
    """The files of a checkpoint, with the inline values of its databases.

    Attributes:
        inline: values by the names of their files.
    """

    inline: Mapping[str, Value] = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def over(cls, source: Source, inline: Mapping[str, Value]) -> ValueSource:
        """Return `source` with these values as files."""
        return cls(
            source.store, source.base, _WithValues(source.entries, inline), source.single,
            source.named, source.lookahead, inline=inline,
        )  # fmt: skip

    def open(self, name: str) -> Reader:
        """Open a file that must exist, or a value."""
        value = self.inline.get(name)
        if value is None or value.inline is None:
            return super().open(name)
        return _ValueReader(name, value.inline)

    def read_stored(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        if not any(extent.file in self.inline for extent in extents):
            return super().read_stored(extents)
        theirs = iter(super().read_stored([e for e in extents if e.file not in self.inline]))
        return [
            self.open(e.file).read(e.offset, e.length) if e.file in self.inline else next(theirs)
            for e in extents
        ]

    def opener(self, name: str) -> tuple[Opens, str]:
        """Return the opener of a file without read-ahead, and its path there."""
        return (_Opener(self), name) if name in self.inline else super().opener(name)

    def stored(self, name: str) -> str:
        """Return the store's file with the bytes of a name."""
        value = self.inline.get(name)
        return name if value is None else value.extent.file


def value_name(value: Value, key: str) -> str:
    """Return the name of the file of an inline value."""
    return f"{value.extent.file}//{key}"


class _WithValues(Mapping[str, Entry]):
    """The files of the store; values are found by their names and not gone through."""

    def __init__(self, listed: Mapping[str, Entry], inline: Mapping[str, Value]) -> None:
        self._listed = listed
        self._inline = inline

    def __getitem__(self, name: str) -> Entry:
        value = self._inline.get(name)
        if value is None or value.inline is None:
            return self._listed[name]
        return self._listed[value.extent.file]._replace(size=len(value.inline))

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


class _Opener:
    """Opens values."""

    def __init__(self, source: ValueSource) -> None:
        self._source = source

    @property
    def traits(self) -> Traits:
        return self._source.store.traits

    def open(self, path: str) -> Reader:
        return self._source.open(path)


class _ValueReader(Reader):
    """The bytes of one value."""

    def __init__(self, name: str, data: bytes) -> None:
        self._name = name
        self._data = data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError where it is shorter."""
        data = self._data[offset : offset + length]
        if len(data) != length:
            raise TruncatedError(
                f"{self._name} ends at byte {len(self._data)}",
                file=self._name, offset=offset, length=length,
            )  # fmt: skip
        return data

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError where it is shorter."""
        view.cast("B")[:] = self.read(offset, len(view.cast("B")))

    def close(self) -> None:
        """Let go: the checkpoint holds the value."""
