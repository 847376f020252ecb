"""Floors: limits that a plan must keep, whatever the rules choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from ftckpt.findings import counted
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
        yield from _survivors(policy.min_survivors, group, run, gone)
    entries = [e for run in runs.values() for e in run.entries if e.entry_class not in _NOT_OURS]
    yield from _at_once(policy, len(entries), dropped, last_run)


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
