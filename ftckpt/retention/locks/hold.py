"""Lock roots while they are changed, and check the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from ftckpt.discovery.roots import Root
from ftckpt.errors import RefusedError
from ftckpt.retention.records import log
from ftckpt.retention.trash import Trash
from ftckpt.retention.trash.open import open_trash

# Clocks of a cluster differ by up to this many seconds; ages are hours.
SKEW = 300.0


@contextmanager
def hold(roots: Iterable[Root], actor: str, now: float) -> Iterator[Mapping[str, Trash]]:
    """Lock roots in one fixed order, which prevents deadlocks; yield their trashes by group.

    Raises:
        RefusedError: another gc holds one.
        UnsupportedError: a store cannot exclude other writers.
        UnsafeError: a link stands in place of a root's own files.
    """
    with ExitStack() as held:
        trashes: dict[str, Trash] = {}
        for root in sorted(roots, key=lambda r: r.base):
            trash = open_trash(root)
            held.enter_context(trash.lock(actor, now))
            trashes[root.base] = trash
        yield trashes


def require_clock(roots: Iterable[Root], now: float) -> None:
    """Refuse a clock that has gone back: ages would be wrong.

    Raises:
        RefusedError: the log of a root has a later event than `now`.
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
