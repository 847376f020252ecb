"""Check whether a plan still holds: read the root again and report changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place
from ftckpt.errors import RefusedError
from ftckpt.progress import NULL, Counter
from ftckpt.retention.apply.check import surveyed
from ftckpt.retention.apply.prepare import Check, Prepared, prepare
from ftckpt.retention.policy.decide import broken_floors, unproven, unproven_floor
from ftckpt.retention.policy.plan import Decision, RetentionPlan
from ftckpt.retention.policy.protections import group_entries
from ftckpt.retention.records import log

from .entries import RootEntry
from .entry import Bases, ScannedEntry, recorded_bases


class Current(NamedTuple):
    """The present state of a plan.

    Attributes:
        going: what is to be dropped.
        absent: names of entries that are gone, or that somebody else is removing.
        found: all entries, by name.
    """

    going: list[Decision]
    absent: list[str]
    found: dict[str, ScannedEntry]


def still_right(
    plan: RetentionPlan,
    place: Place,
    formats: Sequence[Format],
    now: float,
    held: Container[str],
    *,
    bases: Bases = recorded_bases,
    check: Check | None = None,
    counter: Counter = NULL,
) -> Current:
    """Read the root again; return what to drop, if it is unchanged and may still go.

    `held` are the groups of the locked runs; for `bases` see `ScanOptions`, for `check` `prepare`.

    Raises:
        RefusedError: something has changed or is now kept, or a floor would break.
        NotFoundError: the place holds no checkpoint.
        UnavailableError, DeniedError: something could not be read.
    """
    if not plan.drop:
        return Current([], [], {})
    # The plan decides how much to free; whether an entry may go is for the rules alone.
    policy = replace(plan.policy, reclaim=None)
    fresh = prepare(
        place, formats, policy, now, bases=bases, known=plan, check=check, counter=counter
    )
    if place.url != plan.url and not any(d.entry.name in fresh.found for d in plan.decisions):
        raise RefusedError(
            f"nothing of the plan is at {place.url}", hint=f"it was made for {plan.url}"
        )
    going, absent = [], []
    for decision in plan.drop:
        found = fresh.found.get(decision.entry.name)
        if found is not None and found.entry.entry_class is not decision.entry.entry_class:
            found = surveyed(found)
        # A run that is not locked did not exist when the runs were read.
        if found is None or found.entry.group not in held or is_leaving(decision, found.entry):
            absent.append(decision.entry.name)
        else:
            going.append(decision)
    stale = list(_stale(going, fresh))
    if stale:
        more = f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
        raise RefusedError(
            f"the plan is stale: {stale[0]}{more}; nothing was touched", hint="make a new plan"
        )
    _require_floors(plan, going, fresh, checked=check is not None)
    return Current(going, absent, dict(fresh.found))


def _stale(going: Sequence[Decision], fresh: Prepared) -> Iterator[str]:
    decided = {d.entry.name: d for d in fresh.plan.decisions}
    leaving = {d.entry.name for d in going}
    for decision in going:
        name = decision.entry.name
        if decided[name].keep:
            yield f"{name} stays now ({decided[name].reasons[0]})"
        elif not is_same(decision, decided[name].entry):
            yield f"{name} has changed"
    for name, found in fresh.found.items():
        below = [path for path in found.entry.depends_on if path in leaving]
        if below and name not in leaving:
            yield f"{name} depends on {below[0]}"


def is_same(decision: Decision, entry: RootEntry) -> bool:
    """Whether an entry is, file by file, the one that was judged."""
    then, now = decision.entry.contents, entry.contents
    return then is not None and now is not None and then.fingerprint == now.fingerprint


def is_leaving(decision: Decision, entry: RootEntry) -> bool:
    """Whether somebody else is removing an entry, such as a trainer that rotates."""
    then, now = decision.entry.contents, entry.contents
    return then is not None and now is not None and now.files < then.files


def _require_floors(
    plan: RetentionPlan, going: Sequence[Decision], fresh: Prepared, *, checked: bool
) -> None:
    groups: dict[str, list[RootEntry]] = defaultdict(list)
    for found in fresh.found.values():
        groups[found.entry.group].append(found.entry)
    runs = {
        group: group_entries(members, fresh.plan.now, plan.policy)
        for group, members in groups.items()
    }
    times = {group: log.last_applied(root) for group, root in fresh.roots.items()}
    last_run = {group: time for group, time in times.items() if time is not None}
    dropped = [fresh.found[d.entry.name].entry for d in going]
    broken = [*broken_floors(plan.policy, runs, dropped, last_run)]
    if checked and plan.policy.check:
        broken += map(unproven_floor, unproven(runs, dropped))
    replace(plan, broken=tuple(broken)).require()
