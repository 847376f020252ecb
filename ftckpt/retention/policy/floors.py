"""Floors: limits that a plan must keep, whatever the rules choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from ftckpt.findings import counted, listed
from ftckpt.retention.policy import DEFAULT_NUMBER, DEFAULT_SHARE, Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry

from .plan import BrokenFloor
from .protections import EntryGroup

# Entries that the run did not make do not count in the share that a plan may drop.
_NOT_OURS = (EntryClass.FOREIGN, EntryClass.TRASH)


def broken_floors(
    policy: Policy,
    runs: Mapping[str, EntryGroup],
    dropped: Sequence[RootEntry],
    last_run: Mapping[str, float],
) -> Iterator[BrokenFloor]:
    """Yield each floor that dropping these entries would break.

    `runs` are the entries of every group; `last_run` is when a plan was last carried out, by group.
    """
    gone = {e.name for e in dropped}
    for group, run in sorted(runs.items()):
        yield from _nothing_left(group, run, gone)
        yield from _survivors(policy.min_survivors, group, run, gone)
    entries = [e for run in runs.values() for e in run.entries if e.entry_class not in _NOT_OURS]
    yield from _at_once(policy, len(entries), dropped, last_run)


def unproven(runs: Mapping[str, EntryGroup], dropped: Sequence[RootEntry]) -> list[list[RootEntry]]:
    """Return the survivors, the newest first, where none has passed a check of its content.

    Each list is of one run (or stretch of it) that loses a checkpoint, or of one that loses damaged
    ones. An empty one has no survivor.
    """
    gone = {e.name for e in dropped}
    found = []
    for _, run in sorted(runs.items()):
        lefts = [
            [e for e in stretch if e.checked and not e.thinned and e.name not in gone]
            for stretch in run.stretches
        ]
        for stretch, left in zip(run.stretches, lefts, strict=True):
            if any(e.name in gone for e in stretch) and not any(e.content_passed for e in left):
                found.append(left[::-1])
        every = [e for left in lefts for e in left]
        damaged = any(e.entry_class is EntryClass.CORRUPT and e.name in gone for e in run.entries)
        if damaged and not found and not any(e.content_passed for e in every):
            found.append(every[::-1])
    return found


def unproven_floor(left: Sequence[RootEntry]) -> BrokenFloor:
    """Return the floor that a plan breaks whose survivors cannot be shown to be good."""
    names = listed([e.name for e in left], 3)
    return BrokenFloor(
        "--no-check",
        f"none of what would be left has passed a check of its content: {names}",
        "--no-check allows it" if left else "",
    )


def _nothing_left(group: str, run: EntryGroup, gone: set[str]) -> Iterator[BrokenFloor]:
    """Refuse to drop the last of a run: no flag allows it."""
    if not any(e.name in gone for e in run.entries):
        return
    left = (e for e in run.entries if e.entry_class is EntryClass.COMMITTED)
    if not any(e.name not in gone for e in left):
        of = f" of {group}" if group else ""
        yield BrokenFloor("keeps-nothing", f"no finished checkpoint{of} would be left", "")


def _survivors(least: int, group: str, run: EntryGroup, gone: set[str]) -> Iterator[BrokenFloor]:
    for stretch in run.stretches:
        good = sum(e.checked and not e.thinned and e.name not in gone for e in stretch)
        if good >= least or not any(e.name in gone for e in stretch):
            continue
        of = f" of {group}" if group else ""
        yield BrokenFloor(
            "--min-survivors",
            f"{counted(good, 'good checkpoint')}{of} would be left, and at least {least} must be",
            f"--min-survivors {good} allows it" if good else "",
        )


def _at_once(
    policy: Policy, entries: int, dropped: Sequence[RootEntry], last_run: Mapping[str, float]
) -> Iterator[BrokenFloor]:
    """Limit the number of dropped entries.

    By default saves since the last run do not count: after missed runs there are more of them, and
    no earlier run has decided to keep them.
    """
    limit = policy.max_delete
    number = len(dropped)
    if limit is None:
        most = max(DEFAULT_NUMBER, int(DEFAULT_SHARE * entries))
        number = sum(e.time is None or e.time <= last_run.get(e.group, inf) for e in dropped)
        says = f"the larger of {DEFAULT_SHARE:.0%} and {DEFAULT_NUMBER}"
    else:
        most = entries * limit.amount // 100 if limit.percent else limit.amount
        says = f"--max-delete {limit}"
    if number > most:
        yield BrokenFloor(
            "--max-delete",
            f"{number} of {entries} entries would be dropped at once, and {most} is most ({says})",
            f"--max-delete {len(dropped)} allows it",
        )
