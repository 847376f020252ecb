"""The keep rules: each a pure function of one run's checkpoints.

A rule uses steps and times, never positions in a list, and its choice does not change when an entry
that it did not choose is gone. Therefore a second plan keeps what the first one kept, and an
additional rule never drops more. Checkpoints of one step are kept together, whichever of them a
rule chose: `last.ckpt` beside `step=100.ckpt` is not a second-last save.

Choose the milestones that keep their weights alone.

A milestone is a checkpoint that stays only because a rule over the whole history keeps it: the
nearest to a multiple, the latest of a day, one of the best, one with a tag. What is kept to go on
from (the newest, `--keep-last`, `--keep-within`) and what somebody holds (a pin, a pointer, a
lease, a delta based on it) keeps everything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from ftckpt.amounts import shown_duration
from ftckpt.retention.policy import Metric, Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry

from .plan import Reason
from .protections import EntryGroup

Chosen = Iterator[tuple[RootEntry, Reason]]


def keep(policy: Policy, counted: Sequence[RootEntry]) -> Chosen:
    """Yield every entry that a rule keeps, with that rule.

    `counted` are the committed checkpoints of one run or stretch, each with a step.
    """
    by_step = dict(_by_step(counted))
    for rule in _rules(policy, counted):
        chosen = list(rule)
        yield from chosen
        names = {entry.name for entry, _ in chosen}
        for entry, reason in chosen:
            assert entry.step is not None
            for other in by_step[entry.step]:
                if other.name not in names:
                    names.add(other.name)
                    yield other, Reason(reason.rule, f"of the same step as {entry.name}")


def _rules(policy: Policy, counted: Sequence[RootEntry]) -> Iterator[Chosen]:
    if policy.keep_last is not None:
        yield _last(policy.keep_last, counted)
    if policy.keep_every is not None:
        yield _every(policy.keep_every, counted)
    for unit, name in _PERIODS.items():
        number = getattr(policy, f"keep_{unit}")
        if number is not None:
            yield _periods(unit, name, number, counted)
    if policy.keep_within is not None:
        yield _within(policy.keep_within, counted)
    if policy.keep_best is not None and policy.metric is not None:
        yield _best(policy.keep_best, policy.metric, counted)
    yield (
        (entry, Reason("keep-tag", f"tagged {tag}"))
        for entry in counted
        for tag in entry.tags
        if tag in policy.keep_tags
    )


def _last(number: int, counted: Sequence[RootEntry]) -> Chosen:
    """Keep the N highest steps, and the N steps that were saved last.

    They differ after a restart from an earlier step: its fresh saves have lower steps than the old
    ones, and are the ones to restart from. The latest of a step's checkpoints gives its time.
    """
    counted = [entry for entry in counted if not entry.thinned]  # no run goes on from weights
    highest = _by_step(counted)[::-1][:number]
    for rank, (_, entries) in enumerate(highest):
        for entry in entries:
            yield entry, Reason("keep-last", f"{_ordinal(rank)} of the last {number}")
    steps = {step for step, _ in highest}
    latest: dict[int | None, RootEntry] = {}
    for entry in sorted((e for e in counted if e.time is not None), key=_time_order):
        latest[entry.step] = entry
    saves = sorted(latest.values(), key=_time_order, reverse=True)
    for rank, entry in enumerate(saves[:number]):
        if entry.step not in steps:
            yield (
                entry,
                Reason("keep-last", f"{_ordinal(rank, 'latest')} of the last {number} saves"),
            )


def _every(number: int, counted: Sequence[RootEntry]) -> Chosen:
    """Keep for each reached k from 1 on the step nearest to k times N; a tie goes later.

    Step 0 is a multiple too, but only step 0 itself is kept for it.
    """
    steps = _by_step(counted)
    if not steps:
        return
    # Doubled midpoints between neighbours stay whole numbers; the step nearest to a multiple is the
    # one between whose midpoints it lies.
    middles = [None, *(a + b for (a, _), (b, _) in pairwise(steps)), None]
    for (step, entries), low, high in zip(steps, middles[:-1], middles[1:], strict=True):
        first = number if low is None else max(number, -(-low // (2 * number)) * number)
        last = step // number * number if high is None else (high - 1) // (2 * number) * number
        nearest = (2 * step + number) // (2 * number) * number
        multiple = min(max(first, nearest), last) if first <= last else None
        if step == 0:
            multiple = 0
        if multiple is not None:
            for entry in entries:
                yield entry, Reason("keep-every", f"nearest to step {multiple}")


_PERIODS = {"hourly": "hour", "daily": "day", "weekly": "week", "monthly": "month"}

_PERIOD_OF: dict[str, Callable[[datetime], str]] = {
    "hourly": lambda t: t.strftime("%Y-%m-%d %H:00"),
    "daily": lambda t: t.strftime("%Y-%m-%d"),
    "weekly": lambda t: "{}-W{:02}".format(*t.isocalendar()),
    "monthly": lambda t: t.strftime("%Y-%m"),
}


def _periods(unit: str, name: str, number: int, counted: Sequence[RootEntry]) -> Chosen:
    """Keep the latest save of each of the N latest periods (UTC) that hold one."""
    latest: dict[str, RootEntry] = {}
    for entry in sorted((e for e in counted if e.time is not None), key=_time_order):
        assert entry.time is not None
        try:
            moment = datetime.fromtimestamp(entry.time, UTC)
        except (OverflowError, ValueError, OSError):
            yield entry, Reason(f"keep-{unit}", "its time is not a date")
            continue
        latest[_PERIOD_OF[unit](moment)] = entry
    for period in sorted(latest, reverse=True)[:number]:
        yield latest[period], Reason(f"keep-{unit}", f"the latest of {name} {period} UTC")


def _within(seconds: float, counted: Sequence[RootEntry]) -> Chosen:
    """Keep everything up to `seconds` before the latest save: nothing expires during a pause."""
    newest = max((e.time for e in counted if e.time is not None), default=None)
    if newest is None:
        return
    for entry in counted:
        if entry.time is not None and entry.time >= newest - seconds:
            detail = f"{shown_duration(newest - entry.time)} before the latest"
            yield entry, Reason("keep-within", detail)


def _best(number: int, metric: Metric, counted: Sequence[RootEntry]) -> Chosen:
    """Keep the N best steps by a metric, and those newer than all with the metric.

    The latter are not evaluated yet. They are newer by step or by time: after a restart from an
    earlier step they have lower steps and later times.
    """
    known = [e for e in counted if _shows(e)]
    sign = -1.0 if metric.largest else 1.0
    best: dict[int, float] = {}
    for entry in known:
        assert entry.step is not None
        assert entry.metric is not None
        value = sign * entry.metric
        best[entry.step] = min(value, best.get(entry.step, math.inf))
    # Of equals the later: it has trained longer.
    ranked = sorted(best, key=lambda step: (best[step], -step))[:number]
    for entry in counted:
        if entry.step in ranked:
            place = _ordinal(ranked.index(entry.step), "best")
            yield (
                entry,
                Reason("keep-best", f"{place} by {metric.name}: {sign * best[entry.step]:g}"),
            )
    last = max(best, default=-1)
    ended = max((e.time for e in known if e.time is not None), default=-math.inf)
    for entry in counted:
        assert entry.step is not None
        later = entry.step > last or (entry.time is not None and entry.time > ended)
        if later and not _shows(entry):
            yield entry, Reason("keep-best", f"{metric.name} is not known yet")


def _shows(entry: RootEntry) -> bool:
    return entry.metric is not None and not math.isnan(entry.metric)


def _by_step(counted: Iterable[RootEntry]) -> list[tuple[int, list[RootEntry]]]:
    """Return the entries of each step, the lowest step first."""
    found: dict[int, list[RootEntry]] = defaultdict(list)
    for entry in counted:
        assert entry.step is not None
        found[entry.step].append(entry)
    return sorted(found.items())


def _time_order(entry: RootEntry) -> tuple[float, int, str]:
    assert entry.time is not None
    return entry.time, -1 if entry.step is None else entry.step, entry.name


def _ordinal(rank: int, first: str = "newest") -> str:
    """Return `newest`, `2nd newest`, `11th newest` for a rank counted from 0."""
    number = rank + 1
    if number == 1:
        return first
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'} {first}"


MILESTONES = frozenset(
    {
        "keep-every", "keep-hourly", "keep-daily", "keep-weekly", "keep-monthly", "keep-best",
        "keep-tag",
    }
)  # fmt: skip


def thin(
    policy: Policy, runs: Mapping[str, EntryGroup], reasons: Mapping[str, Sequence[Reason]]
) -> dict[str, Reason]:
    """Return what is to be thinned, and why; and what would be, and why it stays whole.

    Each run and stretch keeps `min_survivors` good checkpoints that are whole: of its milestones
    the newest stay whole for that.

    Args:
        policy: says which are old enough.
        runs: the entries of every group.
        reasons: for each entry why it stays; nothing for one that goes.
    """
    found: dict[str, Reason] = {}
    if not policy.thins:
        return found
    for run in runs.values():
        for stretch in run.stretches:
            found |= _of_stretch(policy, stretch, reasons)
    return found


def _of_stretch(
    policy: Policy, stretch: Sequence[RootEntry], reasons: Mapping[str, Sequence[Reason]]
) -> dict[str, Reason]:
    whole = [e for e in stretch if not e.thinned]
    old = [
        (entry, why)
        for entry in whole
        if reasons[entry.name]
        and all(reason.rule in MILESTONES for reason in reasons[entry.name])
        and (why := _old(policy, entry, whole))
    ]
    good = sum(e.checked and bool(reasons[e.name]) for e in whole)
    found: dict[str, Reason] = {}
    for entry, why in old:  # the oldest first
        if entry.whole:
            found[entry.name] = Reason("whole", entry.whole)
        elif good > policy.min_survivors or not entry.checked:
            found[entry.name] = Reason("thin", why)
            good -= entry.checked
    return found


def _old(policy: Policy, entry: RootEntry, whole: Sequence[RootEntry]) -> str:
    """Return why an entry is old enough; "" if it is not, or nobody knows how old it is."""
    if entry.entry_class is not EntryClass.COMMITTED:
        return ""
    newest = max((e.time for e in whole if e.time is not None), default=None)
    after, number = policy.thin_after, policy.thin_beyond
    if after is not None:
        if entry.time is None or newest is None or newest - entry.time <= after:
            return ""
        return f"saved {shown_duration(newest - entry.time)} before the latest"
    assert number is not None
    later = {e.step for e in whole if e.step is not None and e.step > (entry.step or 0)}
    if len(later) < number:
        return ""
    if entry.time is not None:
        moment = entry.time, entry.step or 0
        since = {e.step for e in whole if e.time is not None and (e.time, e.step or 0) > moment}
        if len(since) < number:
            return ""
    return f"not among the {number} newest"
