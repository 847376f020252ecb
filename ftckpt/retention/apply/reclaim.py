"""Compute the bytes that dropping frees, and which entries free a number of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ftckpt.retention.scan.entries import RootEntry


class LinkLedger:
    """Counts the hard links that are left of each file: the last one frees the bytes."""

    def __init__(self) -> None:
        self._gone: dict[str, int] = defaultdict(int)

    def drop(self, entry: RootEntry) -> int | None:
        """Count an entry as gone; return the bytes that it frees, None if unknown."""
        contents = entry.contents
        if contents is None:
            return None
        freed = contents.unshared
        for file in contents.shared:
            before = self._gone[file.inode]
            self._gone[file.inode] = before + file.here
            if before < file.links <= before + file.here:
                freed += file.size
        return freed


def drop_order(entries: Iterable[RootEntry]) -> list[RootEntry]:
    """Return entries in drop order: the oldest first, what depends on another before it."""
    ordered = sorted(entries, key=lambda e: e.age_order)
    inside = {e.name for e in ordered}
    dependants: dict[str, list[RootEntry]] = defaultdict(list)
    for entry in ordered:
        for base in entry.depends_on:
            if base in inside:
                dependants[base].append(entry)
    placed: dict[str, None] = {}
    for entry in ordered:
        _place(entry, dependants, placed)
    by_name = {e.name: e for e in ordered}
    return [by_name[name] for name in placed]


def _place(
    entry: RootEntry, dependants: Mapping[str, Sequence[RootEntry]], placed: dict[str, None]
) -> None:
    """Place an entry after its dependants; a loop is cut where it closes."""
    waiting, entered = [(entry, False)], set()
    while waiting:
        one, ready = waiting.pop()
        if ready:
            placed.setdefault(one.name)
        elif one.name not in placed and one.name not in entered:
            entered.add(one.name)
            waiting.append((one, True))
            waiting += [(d, False) for d in reversed(dependants.get(one.name, ()))]


def enough(
    order: Sequence[RootEntry], wanted: int | None
) -> tuple[list[RootEntry], dict[str, int | None]]:
    """Return the first of `order` that free `wanted` bytes (None: all), and the bytes of each.

    The last hard link of a file frees it, so an entry's bytes depend on those before it.
    """
    ledger, freed, chosen = LinkLedger(), 0, []
    frees: dict[str, int | None] = {}
    for entry in order:
        if wanted is not None and freed >= wanted:
            break
        frees[entry.name] = ledger.drop(entry)
        freed += frees[entry.name] or 0
        chosen.append(entry)
    return chosen, frees
