"""Find who protects an entry of a root: pointers, pins, leases and tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftckpt.discovery.roots import Root
from ftckpt.errors import NotFoundError, UnavailableError, UnsafeError, UnsupportedError
from ftckpt.retention.locks import leases
from ftckpt.retention.records import pins, tags
from ftckpt.storage.store import join

from .entries import Lease, Pin
from .entry import ScannedEntry


@dataclass(frozen=True, slots=True)
class EntryHolds:
    """What holds the entries of one root, each by the entry's name there.

    Attributes:
        pointers: names of the pointers that mean it.
        pins: who wants it kept.
        leases: who reads it.
        tags: its tags.
    """

    pointers: Mapping[str, Sequence[str]]
    pins: Mapping[str, Sequence[Pin]]
    leases: Mapping[str, Sequence[Lease]]
    tags: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, root: Root, now: float, entry: str | None = None) -> EntryHolds:
        """Read what holds the entries of a root; its pointers are as they were when it was read.

        Args:
            root: of the run.
            now: seconds since the epoch.
            entry: of whose records alone are read, by its name there; None for all.

        Raises:
            UnavailableError, DeniedError: that could not be read; nothing is concluded then.
            UnsafeError: the root's `.ftckpt` is a link.
        """
        pinned: dict[str, list[Pin]] = defaultdict(list)
        leased: dict[str, list[Lease]] = defaultdict(list)
        for pin in pins.pins(root, entry):
            pinned[pin.entry].append(pin)
        for lease in leases.live(root, now, entry):
            leased[lease.entry].append(lease)
        return cls(_pointed(root), pinned, leased, tags.tags(root, entry))

    def added_to(self, found: ScannedEntry) -> ScannedEntry:
        """Return an entry with what holds it, and nothing of what held it before."""
        base = found.root.base
        name = found.place.path.removeprefix(f"{base}/" if base else "")
        return found.now(
            pointers=tuple(self.pointers.get(name, ())),
            pins=tuple(self.pins.get(name, ())),
            leases=tuple(self.leases.get(name, ())),
            tags=tuple(self.tags.get(name, ())),
        )


def _pointed(root: Root) -> dict[str, list[str]]:
    """Return the pointers that mean each candidate.

    A name means the one that has it. A step means every candidate of that step but those whose
    names say that they are not finished.

    Raises:
        UnavailableError: one names a checkpoint that is there, and no listing shows it.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for pointer in root.pointers:
        for candidate in root.candidates:
            if pointer.means_step:
                meant = candidate.step == pointer.step and not candidate.staging
            else:
                meant = candidate.path == pointer.target
            if meant:
                found[candidate.path].append(pointer.name)
        if pointer.target is None:
            _require_listed(root, pointer.says.rstrip("/").rpartition("/")[2])
    return found


def _require_listed(root: Root, name: str) -> None:
    """Refuse a listing that does not show what is there, unless it has come since then."""
    if not name or name in root.foreign:
        return
    path = join(root.base, name)
    try:
        root.store.stat(path)
    except (NotFoundError, UnsafeError, UnsupportedError):  # the last two: no name of a file
        return
    if any(entry.path == path for entry in root.store.children(root.base)):
        return
    raise UnavailableError(
        f"the listing of {root.url} does not show {name}, which is there",
        hint="the listing is behind: try again",
        file=name,
    )
