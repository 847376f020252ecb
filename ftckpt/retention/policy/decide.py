"""Decide what stays: a pure function of the entries, the policy and the time.

Floors: limits that a plan must keep, whatever the rules choose.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from types import MappingProxyType

from ftckpt.discovery.series import newest_first
from ftckpt.findings import counted, listed
from ftckpt.own_files import weights_of
from ftckpt.retention.apply.outcome import drop_order, enough
from ftckpt.retention.policy import DEFAULT_NUMBER, DEFAULT_SHARE, Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry, SharedFile

from . import rules
from .plan import BrokenFloor, Decision, Reason, RetentionPlan
from .protections import EntryGroup, averages_of, group_entries, protect
from .rules import thin

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


_UNFINISHED = (EntryClass.STAGING, EntryClass.ABANDONED)
# Why what is of no series stays.
_OUTSIDE = ("named", "not-of-the-series", "put-aside")
# The keep flags, named to a user who gave none.
_NO_RULE = BrokenFloor(
    "--keep-last",
    "no rule says what to keep, so that everything is kept",
    "--keep-last 3 --keep-every 1000",
)
# What protects from rules, and not from a person who names the entry: its place in an order, its
# name, its damage. What else needs it still holds it, and floors say how many must be left.
_AGAINST_RULES = frozenset(
    {"newest", "newest-verified", "not-of-the-series", "put-aside", "named", "half", "start"}
    | {"step-jump", "future", "no-step", "no-time"}
)


def decide(
    entries: Iterable[RootEntry],
    policy: Policy,
    now: float,
    *,
    url: str = "",
    last_run: Mapping[str, float] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> RetentionPlan:
    """Return which entries to keep and drop, with every reason.

    Deterministic: the order of `entries` does not matter. Deciding again on the kept entries keeps
    all of them, and an additional keep rule never drops more (except with `reclaim`: then others
    may go instead).

    Args:
        entries: all entries of all runs; names are unique.
        policy: the rules and floors.
        now: seconds since the epoch.
        url: the place, for the plan.
        last_run: when a plan was last carried out, by group; absent if unknown.
        notes: for the plan.

    Returns:
        The plan with its broken floors; `RetentionPlan.require` raises the first.

    Raises:
        ValueError: two entries have one name.
    """
    groups: dict[str, list[RootEntry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda e: e.name):
        groups[entry.group].append(entry)
    runs = {group: group_entries(members, now, policy) for group, members in groups.items()}
    every = [entry for members in groups.values() for entry in members]
    if len({entry.name for entry in every}) < len(every):
        raise ValueError("two entries of a root have one name")
    reasons = _reasons(runs, policy)
    if policy.only:
        _keep_but(policy.only, reasons)
    elif not policy.rules:
        for entry in every:
            reasons[entry.name] = [*reasons[entry.name], Reason("no-rule", _NO_RULE.message)]
    _hold_other_names(every, reasons)
    _hold_averages(runs, reasons)
    _close(every, reasons)
    _hold_averages(runs, reasons)
    thinned = thin(policy, runs, reasons)
    for name, reason in thinned.items():
        reasons[name].append(reason)
    for entry in every:  # a killed run has made them already
        if entry.entry_class in _UNFINISHED and weights_of(entry.name) in thinned:
            reasons[entry.name].append(Reason("thin", entry.why))
    free = drop_order(e for e in every if not reasons[e.name])
    dropped, frees = enough(free, policy.reclaim)
    for entry in free[len(dropped) :]:
        reasons[entry.name].append(Reason("enough-freed", "older ones free as much as was asked"))
    for entry in dropped:
        asked = Reason("named", "a person wants it gone")
        reasons[entry.name].append(asked if policy.only else _why_dropped(entry))
    broken = list(broken_floors(policy, runs, dropped, last_run))
    if policy.only:
        broken[:0] = _held(policy.only, reasons, frees, url)
    elif not policy.rules:
        broken.insert(0, _NO_RULE)
    return RetentionPlan(
        url=url,
        now=now,
        policy=policy,
        decisions=tuple(
            Decision(
                e,
                e.name not in frees,
                tuple(reasons[e.name]),
                frees.get(e.name),
                e.name in thinned and not e.whole,
            )
            for e in sorted(every, key=_shown_order)
        ),
        order=tuple(e.name for e in dropped),
        broken=tuple(broken),
        notes=tuple(notes),
    )


def _keep_but(only: Sequence[str], reasons: dict[str, list[Reason]]) -> None:
    """Keep everything but what a person names; of that, what others need."""
    for name, held in reasons.items():
        if name in only:
            held[:] = [
                reason
                for reason in held
                if reason.rule not in _AGAINST_RULES and not reason.rule.startswith("keep-")
            ]
        else:
            held.append(Reason("not-named", "it is not named"))


def _held(
    only: Sequence[str],
    reasons: Mapping[str, Sequence[Reason]],
    frees: Mapping[str, int | None],
    url: str,
) -> Iterator[BrokenFloor]:
    """Yield what a person wants gone, and what holds it."""
    for name in only:
        if name not in frees:
            why = reasons[name][0] if reasons.get(name) else Reason("absent", "it is not there")
            unpin = f"{shlex.join(['ftckpt', 'pin', url, name, '--remove'])} takes your pin away"
            yield BrokenFloor("held", f"{name} stays: {why}", unpin if why.rule == "pinned" else "")


def _reasons(runs: Mapping[str, EntryGroup], policy: Policy) -> dict[str, list[Reason]]:
    """Return for each entry why it stays; nothing for those that may go."""
    reasons: dict[str, list[Reason]] = {e.name: [] for run in runs.values() for e in run.entries}
    for run in runs.values():
        kept = (rules.keep(policy, stretch) for stretch in run.stretches)
        for entry, reason in chain(protect(run, policy), *kept):
            if reason not in reasons[entry.name]:
                reasons[entry.name].append(reason)
    return reasons


def _hold_other_names(every: Sequence[RootEntry], reasons: dict[str, list[Reason]]) -> None:
    """Keep the members of a series that have a second name outside: a hard link.

    timm's `model_best.pth.tar` is one of `checkpoint-3.pth.tar`.
    """
    outside = {
        file.inode: entry.name
        for entry in every
        if any(reason.rule in _OUTSIDE for reason in reasons[entry.name])
        for file in _single_file(entry)
    }
    for entry in every:
        for file in _single_file(entry):
            other = outside.get(file.inode, entry.name)
            if other != entry.name and entry.entry_class is EntryClass.COMMITTED:
                reasons[entry.name].append(Reason("pointer", f"{other} is a hard link of it"))


def _hold_averages(runs: Mapping[str, EntryGroup], reasons: dict[str, list[Reason]]) -> None:
    """Keep an average with its weights, and the weights with their average."""
    for run in runs.values():
        for average, weights in averages_of(run.entries).items():
            for one, other in ((average, weights), (weights, average)):
                if reasons[other] and not reasons[one]:
                    reasons[one].append(Reason("average", f"it goes with {other}, which stays"))


def _single_file(entry: RootEntry) -> Sequence[SharedFile]:
    """Return the file of a one-file checkpoint, if that has other names; a manifest lies beside."""
    contents = entry.contents
    return () if contents is None or contents.files > 2 else contents.shared


def _close(every: Sequence[RootEntry], reasons: dict[str, list[Reason]]) -> None:
    """Keep what kept entries depend on, in any run."""
    depends_on = {e.name: e.depends_on for e in every}
    waiting = [e.name for e in every if reasons[e.name]]
    while waiting:
        name = waiting.pop()
        for base in depends_on[name]:
            if base in reasons:
                if not reasons[base]:
                    waiting.append(base)
                reason = Reason("base", f"{name} depends on it")
                if reason not in reasons[base]:
                    reasons[base].append(reason)


def _why_dropped(entry: RootEntry) -> Reason:
    match entry.entry_class:
        case EntryClass.ABANDONED:
            return Reason("abandoned", entry.why)
        case EntryClass.CORRUPT:
            return Reason("corrupt", f"--delete-corrupt, and {entry.why}")
        case _:
            return Reason("expired", "no rule keeps it")


def _shown_order(entry: RootEntry) -> tuple[str, float, tuple[float, ...], float, str]:
    """Order the newest of each run first; entries without a step before all."""
    step = float("inf") if entry.step is None else float(entry.step)
    above = newest_first(entry.name) if entry.step is None else ()
    return entry.group, -step, above, -(entry.time or 0.0), entry.name
