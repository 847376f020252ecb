"""Find what protects the entries of a root: pointers, pins, leases and tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftckpt.discovery.roots import Root
from ftckpt.errors import NotFoundError, UnavailableError, UnsafeError, UnsupportedError
from ftckpt.own_files import weights_of
from ftckpt.retention.locks import leases
from ftckpt.retention.records import pins, tags
from ftckpt.storage.store import join

from .entries import Lease, Pin
from .entry import ScannedEntry


@dataclass(frozen=True, slots=True)
class EntryHolds:
    """What holds the entries of one root, by entry name."""

    pointers: Mapping[str, Sequence[str]]
    pins: Mapping[str, Sequence[Pin]]
    leases: Mapping[str, Sequence[Lease]]
    tags: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, root: Root, now: float, entry: str | None = None) -> EntryHolds:
        """Read what holds the entries of a root, or one entry; pointers as the root was read.

        Raises:
            UnavailableError, DeniedError: something could not be read.
            UnsafeError: the root's `.ftckpt` is a link.
        """
        pinned: dict[str, list[Pin]] = defaultdict(list)
        leased: dict[str, list[Lease]] = defaultdict(list)
        tagged: dict[str, tuple[str, ...]] = {}
        # What was asked of a checkpoint before gc thinned it holds for its weights.
        for name in (None,) if entry is None else (entry, *filter(None, [weights_of(entry)])):
            for pin in pins.pins(root, name):
                pinned[pin.entry].append(pin)
            for lease in leases.live(root, now, name):
                leased[lease.entry].append(lease)
            tagged |= {one: tuple(said) for one, said in tags.tags(root, name).items()}
        return cls(_pointed(root), pinned, leased, tagged)

    def added_to(self, found: ScannedEntry) -> ScannedEntry:
        """Return an entry with its present holds instead of its former ones."""
        base = found.root.base
        name = found.place.path.removeprefix(f"{base}/" if base else "")
        was = weights_of(name)
        tagged = dict.fromkeys((*self.tags.get(name, ()), *self.tags.get(was, ())))
        return found.now(
            pointers=tuple(self.pointers.get(name, ())),
            pins=(*self.pins.get(name, ()), *self.pins.get(was, ())),
            leases=tuple(self.leases.get(name, ())),
            tags=tuple(tagged),
        )


def _pointed(root: Root) -> dict[str, list[str]]:
    """Return the pointers to each candidate.

    A name means the candidate with that name. A step means every candidate of that step except
    those whose names mark them as unfinished.

    Raises:
        UnavailableError: a pointer's target exists, and no listing shows it.
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
    """Refuse a listing that lacks an existing name, unless that is new."""
    if not name or name in root.foreign:
        return
    path = join(root.base, name)
    try:
        root.store.stat(path)
    except (NotFoundError, UnsafeError, UnsupportedError):  # the last two: not the name of a file
        return
    if any(entry.path == path for entry in root.store.children(root.base)):
        return
    raise UnavailableError(
        f"the listing of {root.url} does not show {name}, which is there",
        hint="the listing is behind: try again",
        file=name,
    )
