"""What must stay, by docs/retention.md alone: each thing is asked on its own, by definition.

Plain values go in and plain values come out. Nothing of `ftckpt.retention` is used, so that the
page and the program can only agree because both say the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

DAY = 86400.0

PERIODS: dict[str, Callable[[float], int]] = {
    "hourly": lambda t: int(t // 3600),
    "daily": lambda t: int(t // 86400),
    # Day 0 of the epoch was a Thursday, and a week begins on Monday.
    "weekly": lambda t: (int(t // 86400) + 3) // 7,
    "monthly": lambda t: time.gmtime(t).tm_year * 12 + time.gmtime(t).tm_mon,
}


@dataclass(frozen=True)
class Thing:
    """One name in a root, in the words of the page.

    `damaged` is what would be found if it were opened: the class that it has then. `copied` is what
    a person named, `aside` what somebody put aside.
    """

    name: str
    run: str
    kind: str
    step: int | None = None
    time: float | None = None
    verified: bool = False
    named: bool = False
    pointed: bool = False
    pinned: bool = False
    leased: bool = False
    tags: frozenset[str] = frozenset()
    upon: tuple[str, ...] = ()
    metric: float | None = None
    damaged: str = ""
    checked: bool = False
    copied: bool = False
    aside: bool = False


@dataclass(frozen=True)
class Asked:
    """The flags, each as it is typed."""

    last: int | None = None
    every: int | None = None
    periods: Mapping[str, int] = field(default_factory=dict)
    within: float | None = None
    best: int | None = None
    largest: bool = False
    tags: frozenset[str] = frozenset()
    delete_corrupt: bool = False
    min_survivors: int = 2
    max_delete: int | None = None
    percent: bool = False

    @property
    def any_rule(self) -> bool:
        """Whether there is at least one keep rule."""
        numbers = (self.last, self.every, self.within, self.best)
        return any(n is not None for n in numbers) or bool(self.periods or self.tags)


def opened(
    things: Sequence[Thing], asked: Asked, now: float
) -> tuple[list[Thing], dict[str, set[str]]]:
    """Return what things turn out to be when all that stays is opened; and what keeps each."""
    while True:
        words = verdicts(things, asked, now)
        found = [t for t in things if words[t.name] and t.damaged] if asked.any_rule else []
        if not found:
            return list(things), words
        known = {t.name: replace(t, kind=t.damaged, damaged="") for t in found}
        things = [known.get(t.name, t) for t in things]


def verdicts(things: Sequence[Thing], asked: Asked, now: float) -> dict[str, set[str]]:
    """Return for each thing the words of all that keeps it; none for those that may go."""
    words = {t.name: _protected(t, things, asked, now) for t in things}
    for run in {t.run for t in things}:
        counted = [t for t in things if t.run == run and counts(t, now)]
        steps = {step_of(t) for t in counted}
        leaps = {s for s in steps if leaps_to(s, steps)}
        for thing in counted:
            if thing.step in leaps:
                words[thing.name].add("step-jump")
        for first in {max((x for x in leaps if x <= s), default=-1) for s in steps}:
            beyond = min((x for x in leaps if x > first), default=None)
            part = [
                t
                for t in counted
                if step_of(t) >= first and (beyond is None or step_of(t) < beyond)
            ]
            for word, names in {**_newest(part), **_ruled(part, asked)}.items():
                for name in names:
                    words[name].add(word)
    if not asked.any_rule:
        for held in words.values():
            held.add("no-rule")
    changed = True
    while changed:
        needed = {b for t in things if words[t.name] for b in t.upon if b in words}
        changed = any("base" not in words[name] for name in needed)
        for name in needed:
            words[name].add("base")
    return words


def counts(thing: Thing, now: float) -> bool:
    """Whether rules count it."""
    in_future = thing.time is not None and thing.time > now
    trainers = not (thing.copied or thing.aside)
    return thing.kind == "COMMITTED" and thing.step is not None and trainers and not in_future


def step_of(thing: Thing) -> int:
    assert thing.step is not None
    return thing.step


def leaps_to(step: int, steps: Collection[int]) -> bool:
    """Whether the step is beyond any training after the one below it."""
    below = max((s for s in steps if s < step), default=0)
    return below > 1 and step > 100 * max(below, 1000)


def _protected(one: Thing, things: Sequence[Thing], asked: Asked, now: float) -> set[str]:
    words = {
        word
        for word, holds in (
            ("pointer", one.pointed),
            ("pinned", one.pinned),
            ("lease", one.leased),
            ("corrupt", one.kind == "CORRUPT" and not asked.delete_corrupt),
        )
        if holds
    }
    if one.kind in ("STAGING", "FOREIGN", "TRASH"):
        words.add(one.kind.lower())
    if one.kind == "ABANDONED":
        finished = [t for t in things if t.run == one.run and counts(t, now)]
        if one.time is None or not any(t.time is not None and t.time > one.time for t in finished):
            words.add("unfinished")
    if one.kind in ("COMMITTED", "CORRUPT", "ABANDONED") and (one.aside or one.copied):
        no_step = one.kind == "COMMITTED" and one.step is None
        words.add("put-aside" if one.aside else "no-step" if no_step else "not-of-the-series")
    if one.kind == "COMMITTED":
        if one.named:
            words.add("named")
        if one.step is None:
            words.add("put-aside" if one.aside else "no-step")
        elif one.copied or one.aside:
            pass
        elif one.time is not None and one.time > now:
            words.add("future")
        if one.time is None and (asked.periods or asked.within is not None):
            words.add("no-time")
    return words


def _newest(part: Sequence[Thing]) -> dict[str, set[str]]:
    highest = {max(map(step_of, part))} if part else set()
    saved = when_saved(part)
    last = {max(saved, key=lambda s: (saved[s], s))} if saved else set()
    verified = [t for t in part if t.verified]
    best = max(verified, key=lambda t: (step_of(t), _or_never(t), t.name), default=None)
    timed = [t for t in verified if t.time is not None]
    late = max(timed, key=lambda t: (_or_never(t), step_of(t), t.name), default=None)
    names = {best.name} if best else set()
    if best and late and late.step != best.step:
        names.add(late.name)
    return {
        "newest": {t.name for t in part if t.step in highest | last},
        "newest-verified": names,
    }


def _ruled(part: Sequence[Thing], asked: Asked) -> dict[str, set[str]]:
    """Return for each rule the names that it keeps, with all others of their steps."""
    steps = {step_of(t) for t in part}
    saved = when_saved(part)
    chosen: dict[str, set[int]] = {}
    if asked.last is not None:
        chosen["keep-last"] = {
            s
            for s in steps
            if len([x for x in steps if x > s]) < asked.last
            or (s in saved and len([x for x in saved if _later(x, s, saved)]) < asked.last)
        }
    if asked.every is not None:
        near = {nearest(m, steps) for m in multiples(steps, asked.every)}
        chosen["keep-every"] = near | (steps & {0})
    for unit, number in asked.periods.items():
        period = PERIODS[unit]
        held = {period(t.time) for t in part if t.time is not None}
        among = [p for p in held if len([x for x in held if x > p]) < number]
        chosen[f"keep-{unit}"] = set()
        for one in among:
            inside = [t for t in part if t.time is not None and period(t.time) == one]
            last = max(inside, key=lambda t: (_or_never(t), step_of(t)))
            chosen[f"keep-{unit}"].add(step_of(last))
    if asked.within is not None:
        newest = max(saved.values(), default=0.0)
        chosen["keep-within"] = {
            step_of(t) for t in part if t.time is not None and t.time >= newest - asked.within
        }
    if asked.best is not None:
        chosen["keep-best"] = _best(part, asked.best, largest=asked.largest)
    chosen["keep-tag"] = {step_of(t) for t in part if t.tags & asked.tags}
    return {rule: {t.name for t in part if t.step in held} for rule, held in chosen.items()}


def _best(part: Sequence[Thing], number: int, *, largest: bool) -> set[int]:
    showing = [t for t in part if t.metric is not None]
    values: dict[int, float] = {}
    for thing in showing:
        assert thing.metric is not None
        value = -thing.metric if largest else thing.metric
        values[step_of(thing)] = min(value, values.get(step_of(thing), value))
    better = {
        s: len([x for x in values if values[x] < v or (values[x] == v and x > s)])
        for s, v in values.items()
    }
    times = [t.time for t in showing if t.time is not None]
    waiting = {
        step_of(t)
        for t in part
        if t.metric is None
        and (
            all(step_of(t) > x for x in values)
            or (t.time is not None and all(t.time > x for x in times))
        )
    }
    return {s for s in values if better[s] < number} | waiting


def when_saved(part: Sequence[Thing]) -> dict[int, float]:
    """Return when each step was saved: when the latest of its checkpoints was."""
    saved: dict[int, float] = {}
    for thing in part:
        if thing.time is not None:
            saved[step_of(thing)] = max(thing.time, saved.get(step_of(thing), thing.time))
    return saved


def _later(one: int, other: int, saved: Mapping[int, float]) -> bool:
    return (saved[one], one) > (saved[other], other)


def _or_never(thing: Thing) -> float:
    return -1.0 if thing.time is None else thing.time


def multiples(steps: Collection[int], number: int) -> Collection[int]:
    """Return all multiples that were reached; of very many those around steps and between them."""
    highest = max(steps, default=0)
    if highest < 5000 * number:
        return range(number, highest + 1, number)
    around = {(s + o) // 2 for s in steps for o in steps}
    near = {p // number * number + d * number for p in around for d in (-1, 0, 1)} | {number}
    return {m for m in near if 0 < m <= highest}


def nearest(multiple: int, steps: Collection[int]) -> int:
    """Return the step nearest to a multiple; of two at one distance the higher."""
    return min(steps, key=lambda s: (abs(s - multiple), -s))


def broken(
    things: Sequence[Thing], dropped: set[str], asked: Asked, now: float, last_run: float | None
) -> set[str]:
    """Return the flags of the floors that dropping these breaks."""
    found = set() if asked.any_rule else {"--keep-last"}
    for lost in things:
        if lost.name not in dropped or not counts(lost, now):
            continue
        peers = [t for t in things if t.run == lost.run and counts(t, now)]
        steps = {step_of(t) for t in peers}
        low_high = [(min(lost.step, t.step), max(lost.step, t.step), t) for t in peers]  # type: ignore[type-var]
        near = [
            t
            for low, high, t in low_high
            if not any(low < s <= high and leaps_to(s, steps) for s in steps)  # type: ignore[operator]
        ]
        if len([t for t in near if t.name not in dropped and t.checked]) < asked.min_survivors:
            found.add("--min-survivors")
    total = [t for t in things if t.kind not in ("FOREIGN", "TRASH")]
    gone = [t for t in things if t.name in dropped]
    if asked.max_delete is None:
        old = [t for t in gone if last_run is None or t.time is None or t.time <= last_run]
        too_many = len(old) > max(50, len(total) // 2)
    elif asked.percent:
        too_many = len(gone) * 100 > len(total) * asked.max_delete
    else:
        too_many = len(gone) > asked.max_delete
    return found | ({"--max-delete"} if too_many else set())


def iso_week(t: float) -> tuple[int, int]:
    """Return year and number of the ISO week, by the calendar: a check on `PERIODS`."""
    year, week, _ = date(*time.gmtime(t)[:3]).isocalendar()
    return year, week
