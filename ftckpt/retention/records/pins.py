"""Pins: requests to keep an entry, each with an owner and a reason."""

from __future__ import annotations

from ftckpt.discovery.roots import Root
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.retention import records
from ftckpt.retention.scan.entries import Pin

_KIND = "pins"


def pin(root: Root, entry: str, *, owner: str, reason: str, now: float) -> Pin:
    """Keep an entry until its owner unpins it; pinning again replaces the reason.

    `reason`, which may be "", is shown to the person who finds a full disk.

    Raises:
        NotFoundError: the root has no such entry.
        UsageError: no owner.
    """
    if not owner.strip():
        raise UsageError("a pin needs an owner")
    records.write(root, _KIND, entry, owner, {"owner": owner, "reason": reason, "time": now})
    return Pin(entry, owner, reason, now)


def unpin(root: Root, entry: str, *, owner: str | None = None) -> tuple[Pin, ...]:
    """Erase the pins of an entry, of one owner or (None) of all; return them.

    Raises:
        NotFoundError: the pin does not exist.
    """
    found = [p for p in pins(root) if p.entry == entry and owner in (None, p.owner)]
    if not found:
        by = "" if owner is None else f" by {owner}"
        raise NotFoundError(f"{entry} of {root.url} is not pinned{by}")
    records.erase(root, [(_KIND, p.entry, p.owner) for p in found])
    return tuple(found)


def pins(root: Root, entry: str | None = None) -> tuple[Pin, ...]:
    """Return the pins of one entry or (None) of all, including entries that are gone."""
    return tuple(
        Pin(
            r.entry, r.label, r.text("reason", "the record of the pin is damaged"), r.number("time")
        )
        for r in records.read(root, _KIND, entry)
    )
