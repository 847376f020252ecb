"""Leases: readers' claims on entries, so that gc drops nothing during a restart or copy.

A lease expires, so a killed reader holds nothing for long; a longer reader renews it.
"""

from __future__ import annotations

from ftckpt.amounts import shown_duration
from ftckpt.discovery.roots import Root
from ftckpt.errors import UsageError
from ftckpt.retention import records
from ftckpt.retention.scan.entries import Lease

_KIND = "leases"
LONGEST = 1800.0


def take(root: Root, entry: str, *, holder: str, now: float, seconds: float = LONGEST) -> Lease:
    """Claim an entry for some seconds from now; repeat to renew.

    Raises:
        NotFoundError: the root has no such entry.
        UsageError: longer than `LONGEST`.
    """
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"a lease is for at most {shown_duration(LONGEST)}: take it again instead")
    lease = Lease(entry, holder, now + seconds)
    records.write(root, _KIND, entry, holder, {"holder": holder, "expires": lease.expires})
    return lease


def release(root: Root, lease: Lease) -> None:
    """Give a lease back."""
    records.erase(root, [(_KIND, lease.entry, lease.holder)])


def live(root: Root, now: float, entry: str | None = None) -> tuple[Lease, ...]:
    """Return the unexpired leases of one entry, or (None) of all.

    One without a readable end counts for `LONGEST` from when it was written.
    """
    found = []
    for record in records.read(root, _KIND, entry):
        expires = record.number("expires")
        if expires is None:
            expires = (now if record.time is None else record.time) + LONGEST
        if expires > now:
            found.append(Lease(record.entry, record.label, expires))
    return tuple(found)
