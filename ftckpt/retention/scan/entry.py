"""An entry together with its place, and the options of a scan."""

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
        """Return the places of a checkpoint's bases (see `ScanOptions.bases`)."""


def recorded_bases(root: Root, child: Child) -> Sequence[str]:
    """Return the places of a checkpoint's bases, as its format records them.

    Raises:
        CorruptError: the record is damaged.
        UnsupportedError: it is of another version: the bases cannot be known.
        UnavailableError, DeniedError: it could not be read.
    """
    by = child.part.format
    return by.bases_of_child(root, child) if isinstance(by, HasBases) else ()


def no_bases(root: Root, child: Child) -> Sequence[str]:
    """Treat every checkpoint as complete by itself: bases of kept deltas may be dropped then."""
    return ()


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """An entry, and where it was found.

    Attributes:
        root: of its run.
        place: its directory or file.
        child: as the formats recognise it; None if none does.
        sealed: whether it has a manifest.
        names: number of files seen in its directory; there may be more, there or deeper.
        left: those of the seen files that a killed write of ftckpt left.
    """

    entry: RootEntry
    root: Root
    place: Entry
    child: Child | None = None
    sealed: bool = False
    names: int = 0
    left: tuple[str, ...] = ()

    def now(self, **known: object) -> ScannedEntry:
        """Return a copy with updated fields of the entry."""
        return replace(self, entry=replace(self.entry, **known))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Run:
    """One scanned run: its root and everything in it."""

    root: Root
    members: Sequence[ScannedEntry]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """How to read a root.

    Attributes:
        formats: in the order in which they are tried.
        now: seconds since the epoch.
        metric: to look up; None for none.
        bases: returns the places of a checkpoint's bases: paths in the store, or full paths
            elsewhere; one for each delta.
        needs: whether to list local checkpoints, too, for what they need (`RootEntry.needs`).
    """

    formats: Sequence[Format]
    now: float
    metric: Metric | None = None
    bases: Bases = recorded_bases
    needs: bool = False
