"""Hold roots while something is changed there; and by whose clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from ftckpt.discovery.roots import Root
from ftckpt.errors import RefusedError
from ftckpt.retention.records import log
from ftckpt.retention.trash import Trash
from ftckpt.retention.trash.open import open_trash

# Clocks of a cluster differ by up to this many seconds, and ages are of hours.
SKEW = 300.0


@contextmanager
def hold(roots: Iterable[Root], actor: str, now: float) -> Iterator[Mapping[str, Trash]]:
    """Lock roots, and give the trash of each by its group.

    Args:
        roots: of a place; each is locked, in one order, so that two who want several never wait
            for each other.
        actor: who.
        now: seconds since the epoch.

    Raises:
        RefusedError: another gc holds one.
        UnsupportedError: a store can keep nobody away.
        UnsafeError: a link stands where a root's own files belong.
    """
    with ExitStack() as held:
        trashes: dict[str, Trash] = {}
        for root in sorted(roots, key=lambda r: r.base):
            trash = open_trash(root)
            held.enter_context(trash.lock(actor, now))
            trashes[root.base] = trash
        yield trashes


def require_clock(roots: Iterable[Root], now: float) -> None:
    """Refuse a clock that has gone back: by it, ages would be computed wrong.

    Raises:
        RefusedError: something was done in one of the roots later than now, by its log.
    """
    for root in roots:
        last = log.last_time(root)
        if last is not None and last > now + SKEW:
            then, here = (
                datetime.fromtimestamp(t, UTC).isoformat(" ", "seconds") for t in (last, now)
            )
            raise RefusedError(
                f"it is {here} by this machine, and the log of {root.url} goes to {then}",
                hint="set the clock; if the log was written by a wrong one, move it away",
            )
