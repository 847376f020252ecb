"""An entry together with where it was found, and how a root is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.roots import Child, Root
from ftckpt.retention.policy import Metric
from ftckpt.storage.store import Entry

from .entries import RootEntry

Bases = Callable[[Root, Child], Sequence[str]]


@runtime_checkable
class HasBases(Protocol):
    """A format whose checkpoints can need others to be read (`ftckpt.formats.delta`)."""

    def bases_of_child(self, root: Root, child: Child) -> Sequence[str]:
        """Return the places of what a checkpoint is built on (see `ScanOptions.bases`)."""


def recorded_bases(root: Root, child: Child) -> Sequence[str]:
    """Return the places of what a checkpoint is built on, as its format records them.

    Raises:
        CorruptError: the record is damaged.
        UnsupportedError: it is of another version: what it is built on cannot be known.
        UnavailableError, DeniedError: it could not be read.
    """
    formats = {part.format.name: part.format for part in child.parts}.values()
    asked = [each.bases_of_child(root, child) for each in formats if isinstance(each, HasBases)]
    return tuple(dict.fromkeys(place for places in asked for place in places))


def no_bases(root: Root, child: Child) -> Sequence[str]:
    """Take every checkpoint for whole by itself: a base of a kept delta may be dropped then."""
    return ()


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """An entry, and where it was found.

    Attributes:
        entry: what is known of it.
        root: of its run.
        place: its directory or file.
        child: as the formats recognise it; None where none does.
        sealed: whether a manifest stands with it, or may, in one of several parts.
        names: how many files were seen in its directory; it may have more, there or further down.
        left: which of the files that were seen there a write of ftckpt has left that was killed.
    """

    entry: RootEntry
    root: Root
    place: Entry
    child: Child | None = None
    sealed: bool = False
    names: int = 0
    left: tuple[str, ...] = ()

    def now(self, **known: object) -> ScannedEntry:
        """Return it with more known of the entry."""
        return replace(self, entry=replace(self.entry, **known))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Run:
    """One run, read.

    Attributes:
        root: its root.
        members: everything that lies in it.
    """

    root: Root
    members: Sequence[ScannedEntry]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """How a root is read.

    Attributes:
        formats: in asking order.
        now: seconds since the epoch.
        metric: to look up; None for none.
        bases: returns the places of what a checkpoint depends on: paths in the store, or whole
            ones of what lies elsewhere, so that there is one for each delta.
    """

    formats: Sequence[Format]
    now: float
    metric: Metric | None = None
    bases: Bases = recorded_bases
