"""What must stay, said a second time and in another way: each entry is asked on its own.

Nothing here is shared with `ftckpt.retention` but the records and the policy. Everything is counted
over and over by definition, which is slow and easy to believe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import lru_cache

from ftckpt.retention.entries import RootEntry
from ftckpt.retention.policy import Policy

PERIODS: dict[str, Callable[[float], int]] = {
    "hourly": lambda t: int(t // 3600),
    "daily": lambda t: int(t // 86400),
    # Day 0 of the epoch was a Thursday, and a week begins on Monday.
    "weekly": lambda t: (int(t // 86400) + 3) // 7,
    "monthly": lambda t: time.gmtime(t).tm_year * 12 + time.gmtime(t).tm_mon,
}


def verdicts(entries: Sequence[RootEntry], policy: Policy, now: float) -> dict[str, set[str]]:
    """Return for each entry the words of all that keeps it; none for those that may go."""
    words = {e.name: _own_words(e, entries, policy, now) for e in entries}
    if not policy.rules:
        for held in words.values():
            held.add("no-rule")
    while True:
        more = [
            base
            for e in entries
            if words[e.name]
            for base in e.bases
            if base in words and "base" not in words[base]
        ]
        if not more:
            return words
        words[more[0]].add("base")


def _own_words(
    one: RootEntry, entries: Sequence[RootEntry], policy: Policy, now: float
) -> set[str]:
    words = set()
    words |= {"pinned"} if one.pins else set()
    words |= {"pointer"} if one.pointers else set()
    words |= {"lease"} if one.leases else set()
    run = [e for e in entries if e.group == one.group]
    kind = str(one.entry_class)
    if kind in ("STAGING", "FOREIGN", "TRASH"):
        words.add(kind.lower())
    if kind == "CORRUPT" and not policy.delete_corrupt:
        words.add("corrupt")
    if kind == "ABANDONED":
        after = [e for e in run if counts(e, now) and later(e.time, one.time)]
        words |= set() if after else {"unfinished"}
    if kind != "COMMITTED":
        return words
    if one.named:
        words.add("named")
    if one.step is None:
        words.add("no-step")
    elif one.time is not None and one.time > now:
        words.add("future")
    by_time = (policy.keep_hourly, policy.keep_daily, policy.keep_weekly, policy.keep_monthly)
    if one.time is None and any(v is not None for v in (*by_time, policy.keep_within)):
        words.add("no-time")
    if not counts(one, now):
        return words
    peers = [e for e in run if counts(e, now)]
    steps = frozenset(_step(e) for e in peers)
    if _step(one) in leaps(steps):
        words.add("step-jump")
    return words | _ruled(one, [e for e in peers if same_stretch(one, e, steps)], policy)


def _ruled(one: RootEntry, peers: Sequence[RootEntry], policy: Policy) -> set[str]:
    """Return the words of the rules, and of being newest, among the peers of one stretch."""
    words = set()
    steps = {_step(e) for e in peers}
    step = _step(one)
    timed = [e for e in peers if e.time is not None]
    newer = [e for e in timed if one.time is not None and _moment(e) > _moment(one)]
    if step == max(steps) or (one.time is not None and not newer):
        words.add("newest")
    if one.verified and not any(e.verified and e.age_order > one.age_order for e in peers):
        words.add("newest-verified")
    if policy.keep_last is not None:
        above = len({s for s in steps if s > step})
        if above < policy.keep_last or (one.time is not None and len(newer) < policy.keep_last):
            words.add("keep-last")
    if policy.keep_every is not None and any(
        nearest(m, steps) == step for m in multiples(step, steps, policy.keep_every)
    ):
        words.add("keep-every")
    for unit, period in PERIODS.items():
        number = getattr(policy, f"keep_{unit}")
        if number is None or one.time is None:
            continue
        own = period(one.time)
        later_periods = {period(_time(e)) for e in timed if period(_time(e)) > own}
        last = not any(period(_time(e)) == own for e in newer)
        if last and len(later_periods) < number:
            words.add(f"keep-{unit}")
    latest = max((_time(e) for e in timed), default=0.0)
    within = policy.keep_within
    if within is not None and one.time is not None and one.time >= latest - within:
        words.add("keep-within")
    number, metric = policy.keep_best, policy.metric
    if number and metric and is_best(step, peers, number, largest=metric.largest):
        words.add("keep-best")
    if set(one.tags) & set(policy.keep_tags):
        words.add("keep-tag")
    return words


def is_best(step: int, peers: Sequence[RootEntry], number: int, *, largest: bool) -> bool:
    """Whether a step is among the best, or later than all whose metric is known."""
    values = {}
    for s in {_step(e) for e in peers}:
        own = [e.metric for e in peers if _step(e) == s and e.metric is not None]
        if own:
            values[s] = max(own) if largest else min(own)
    if step not in values:
        return all(step > s for s in values)
    better = [
        s
        for s, v in values.items()
        if (v > values[step] if largest else v < values[step]) or (v == values[step] and s > step)
    ]
    return len(better) < number


def counts(one: RootEntry, now: float) -> bool:
    """Whether rules reckon by it."""
    return (
        str(one.entry_class) == "COMMITTED"
        and one.step is not None
        and not (one.time is not None and one.time > now)
    )


@lru_cache(maxsize=256)
def leaps(steps: frozenset[int]) -> set[int]:
    """Return the steps that lie beyond any training after the one below them."""
    found = set()
    for step in steps:
        below = [s for s in steps if s < step]
        if below and max(below) > 1 and step > 100_000 and step > 100 * max(below):
            found.add(step)
    return found


def same_stretch(one: RootEntry, other: RootEntry, steps: frozenset[int]) -> bool:
    """Whether no leap lies between two."""
    low, high = sorted((_step(one), _step(other)))
    return not any(low < leap <= high for leap in leaps(steps))


def multiples(step: int, steps: Iterable[int], number: int) -> set[int]:
    """Return multiples among which there is one that `step` is nearest to, if there is any."""
    around = {step, *((step + other) // 2 for other in steps)}
    near = {p // number * number + d * number for p in around for d in (-1, 0, 1)} | {number}
    return {m for m in near if 0 < m <= max(steps)} | ({0} if step == 0 else set())


def nearest(multiple: int, steps: Iterable[int]) -> int:
    """Return the step nearest to a multiple; of two at one distance the later."""
    return min(steps, key=lambda s: (abs(s - multiple), -s))


def later(a: float | None, b: float | None) -> bool:
    """Whether both times are known and the first is the later."""
    return a is not None and b is not None and a > b


def broken(
    entries: Sequence[RootEntry],
    dropped: set[str],
    policy: Policy,
    now: float,
    last_run: float | None,
) -> set[str]:
    """Return the flags of the floors that dropping these breaks."""
    found = set() if policy.rules else {"--keep-last"}
    counted = [e for e in entries if counts(e, now)]
    for lost in counted:
        if lost.name in dropped:
            peers = [e for e in counted if e.group == lost.group]
            steps = frozenset(_step(e) for e in peers)
            left = [e for e in peers if e.name not in dropped and same_stretch(lost, e, steps)]
            if sum(e.checked for e in left) < policy.min_survivors:
                found.add("--min-survivors")
    total = sum(str(e.entry_class) not in ("FOREIGN", "TRASH") for e in entries)
    gone = [e for e in entries if e.name in dropped]
    if policy.max_delete is None:
        old = [e for e in gone if last_run is None or e.time is None or e.time <= last_run]
        too_many = len(old) > 50 and len(old) > total // 2
    elif policy.max_delete.percent:
        too_many = len(gone) * 100 > total * policy.max_delete.amount
    else:
        too_many = len(gone) > policy.max_delete.amount
    return found | ({"--max-delete"} if too_many else set())


def _step(one: RootEntry) -> int:
    assert one.step is not None
    return one.step


def _time(one: RootEntry) -> float:
    assert one.time is not None
    return one.time


def _moment(one: RootEntry) -> tuple[float, int, str]:
    return _time(one), _step(one), one.name


def iso_week(t: float) -> tuple[int, int]:
    """Return year and number of the ISO week, by the calendar: a check on `PERIODS`."""
    year, week, _ = date(*time.gmtime(t)[:3]).isocalendar()
    return year, week
