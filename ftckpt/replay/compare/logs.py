"""Compare two logs of a training: step by step, event by event, rank by rank.

Find differences without effect: a stream restored later, gradients cleared unused.

Trainers restore in their own order. A random stream that is restored after the first batch differs
as the step begins and is right before anything draws from it. Such a difference is a note: a
verdict counts only differences that reached the batch, the loss, the gradients or the state.

Find random streams that are never seeded and never used.

A script that seeds torch alone also has a Python and a NumPy generator. The operating system seeds
both anew in every process, so they differ between any two runs and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ftckpt.replay.record.log import (
    BY_KEY,
    ENDED,
    EVENTS,
    RANDOM,
    STATE,
    Items,
    Log,
    StepRecord,
    Value,
    losses,
    value_of,
)
from ftckpt.reports import UNSAID

from .differences import Difference, ItemDifference

# (step, event, rank): whether it is equal.
Grid = Mapping[tuple[int, str, int], bool]


def split(
    found: Sequence[Difference], reference: Log, other: Log, grid: Grid
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return the lasting differences, and those without effect, both in causal order.

    A stream's difference has no effect if the stream is equal at the next place where it was
    recorded, and the uninterrupted run did not draw from it in between, or everything computed in
    between is equal. Other state that differs as a step begins has no effect if it is equal as the
    next one begins, and so is everything computed in between: it was overwritten, as DDP overwrites
    the other ranks' buffers with the first rank's. Accumulated gradients have no effect if the
    gradients that the optimizer used are equal.
    """
    passing = _passing_streams(found, reference, other, grid)
    lasting: list[Difference] = []
    passed: list[Difference] = []
    for difference in found:
        if difference.event in STATE and difference.event not in RANDOM:
            (passed if _was_overwritten(difference, grid) else lasting).append(difference)
            continue
        gone = {
            item.name for item in difference.items
            if (difference.step, difference.event, difference.rank, item.name) in passing
        }  # fmt: skip
        if not gone:
            lasting.append(difference)
            continue
        passed.append(_only(difference, gone))
        rest = {item.name for item in difference.items} - gone
        if rest:
            lasting.append(_only(difference, rest))
    return tuple(lasting), tuple(passed)


def _only(difference: Difference, names: set[str]) -> Difference:
    return replace(difference, items=tuple(i for i in difference.items if i.name in names))


def _passing_streams(
    found: Sequence[Difference], reference: Log, other: Log, grid: Grid
) -> set[tuple[int, str, int, str]]:
    """Return the stream differences without effect: step, event, rank and stream."""
    unlike = {
        (d.step, d.event, d.rank, item.name) for d in found if d.event in RANDOM for item in d.items
    }
    passing: set[tuple[int, str, int, str]] = set()
    for rank, name in {(rank, name) for _, _, rank, name in unlike}:
        points = _points(reference, other, rank, name)
        right = False  # at the next point; after the last one nothing is known
        for place in range(len(points) - 1, -1, -1):
            step, event, _ = points[place]
            if (step, event, rank, name) not in unlike:
                right = True
                continue
            right = right and place + 1 < len(points) and _of_no_effect(
                points[place], points[place + 1], rank, grid
            )  # fmt: skip
            if right:
                passing.add((step, event, rank, name))
    return passing


def _points(reference: Log, other: Log, rank: int, name: str) -> list[tuple[int, str, object]]:
    """Return where both runs recorded a stream, in order, with its state in the reference."""
    points: list[tuple[int, str, object]] = []
    for step, record in sorted(reference.steps.get(rank, {}).items()):
        theirs = other.steps.get(rank, {}).get(step)
        for event in ("rng_start", "rng"):
            ours = record.events.get(event, {}).get(name)
            if theirs is None or name not in theirs.events.get(event, {}):
                continue
            points.append((step, event, ours.get("digest") if isinstance(ours, Mapping) else ours))
    return points


def _of_no_effect(
    here: tuple[int, str, object], following: tuple[int, str, object], rank: int, grid: Grid
) -> bool:
    """Whether nothing was drawn between two points, or everything computed there is equal."""
    if here[2] == following[2]:
        return True
    step, after = here[0], following[0]
    if step == after:
        return grid.get((step, "batch", rank), False)
    return _nothing_came_of(step, after, grid)


def _was_overwritten(difference: Difference, grid: Grid) -> bool:
    step, event, rank = difference.step, difference.event, difference.rank
    if event == "grad_start":
        return grid.get((step, "grad", rank), False)
    return grid.get((step + 1, event, rank), False) and _nothing_came_of(step, step + 1, grid)


def _nothing_came_of(step: int, after: int, grid: Grid) -> bool:
    """Whether all is equal, on every rank, from the batch of one step to the state of another.

    Losses alone prove too little: whole tensors must be recorded as the other step begins.
    """
    computed = [
        equal for (at, event, _), equal in grid.items()
        if event not in RANDOM
        and ((step <= at < after and event not in STATE) or (step < at <= after and event in STATE))
    ]  # fmt: skip
    shown = any(at == after and BY_KEY[event].heavy for at, event, _ in grid)
    return shown and all(computed)


@dataclass(frozen=True)
class Comparison:
    """Two logs, compared.

    Attributes:
        reference: name of the first run.
        other: name of the second.
        first: the first step to compare.
        last: the last.
        steps: those that both runs finished on every rank, ascending.
        ranks: those that both runs have.
        grid: for each (step, event, rank) that both could show, whether it is equal; in order.
        differences: all of them, in causal order.
        problems: why equality would prove nothing: missing steps or ranks, losses that are not
            numbers, no event in common.
        passing: differences without effect (`harmless.split`), not in `differences`.
    """

    SAID: ClassVar = {
        "equal": "equal", "steps": "step_count", "events": "events",
        "differences": "difference_count", "first": "at_first_step",
    }  # fmt: skip

    reference: str
    other: str
    first: int = field(metadata=UNSAID)
    last: int = field(metadata=UNSAID)
    steps: tuple[int, ...] = field(metadata=UNSAID)
    ranks: tuple[int, ...]
    grid: Mapping[tuple[int, str, int], bool] = field(metadata=UNSAID)
    differences: tuple[Difference, ...] = field(metadata=UNSAID)
    problems: tuple[str, ...] = field(default=(), metadata=UNSAID)
    passing: tuple[Difference, ...] = field(default=(), metadata=UNSAID)

    @property
    def equal(self) -> bool:
        """Whether nothing differs; a proof only without `problems`."""
        return not self.differences

    @property
    def step_count(self) -> int:
        """Number of steps that both runs finished."""
        return len(self.steps)

    @property
    def events(self) -> list[str]:
        """What both could show, in the order of the alphabet."""
        return sorted({event for _, event, _ in self.grid})

    @property
    def difference_count(self) -> int:
        """Number of all differences."""
        return len(self.differences)

    @property
    def at_first_step(self) -> tuple[Difference, ...]:
        """Return the differences of the first step that has any, in causal order."""
        step = self.differences[0].step if self.differences else 0
        return tuple(d for d in self.differences if d.step == step)


def compare(
    reference: Log, other: Log, first: int, last: int, idle: Collection[str] = ()
) -> Comparison:
    """Compare the steps `first` to `last`, and the recorded state after `last`.

    An event is compared if both runs recorded it; an event of only one run differs, unless it is
    heavy and the other run left it out of that step. Random streams in `idle` (see
    `unused_rng.idle_streams`) are not compared.
    """
    finished = set(reference.finished()) & set(other.finished())
    steps = tuple(step for step in range(first, last + 1) if step in finished)
    ranks = tuple(rank for rank in reference.ranks if rank in other.steps)
    grid: dict[tuple[int, str, int], bool] = {}
    found: list[Difference] = []
    for step in range(first, last + 2):
        for event in (event for event in EVENTS if event.compared):
            for rank in ranks:
                pair = reference.steps[rank].get(step), other.steps[rank].get(step)
                difference = _compare_event(*pair, event.key, idle)
                if difference is None:
                    continue
                grid[step, event.key, rank] = not difference
                if isinstance(difference, Difference):
                    found.append(difference)
    problems = tuple(_problems(reference, other, range(first, last + 1), steps, bool(grid)))
    lasting, passing = split(found, reference, other, grid)
    return Comparison(
        reference.name, other.name, first, last, steps, ranks, grid, lasting, problems, passing
    )


def _compare_event(
    a: StepRecord | None, b: StepRecord | None, event: str, idle: Collection[str]
) -> Difference | bool | None:
    """Return the difference, False if the two are equal, None if they cannot be compared."""
    if a is None or b is None:
        return None
    ours, theirs = a.events.get(event), b.events.get(event)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        # A record that was cut short, or without tensors, shows nothing of it.
        if a.partial or b.partial or BY_KEY[event].heavy:
            return None
        ours, theirs = ours or {}, theirs or {}
    names = list(dict.fromkeys([*ours, *theirs]))
    # A record that was cut short shows nothing of what comes after the cut.
    names = [n for n in names if (n in ours or not a.partial) and (n in theirs or not b.partial)]
    if event in RANDOM:
        # A training that ended has drawn nothing for a further step, and one that goes on may have.
        if (ENDED in a.notes) != (ENDED in b.notes):
            return None
        names = [name for name in names if name not in idle]
        if not names:
            return None
    if event == "masters":  # a module that is called later in a step has its weights here
        names = [name for name in names if name in ours and name in theirs]
    items = tuple(_differing(event, names, ours, theirs))
    if not items:
        return False
    record = a if ours else b
    return Difference(record.step, record.rank, event, items, len(names))


def _differing(event: str, names: Sequence[str], a: Items, b: Items) -> Iterator[ItemDifference]:
    for name in names:
        ours, theirs = a.get(name), b.get(name)
        if _bits(event, ours) != _bits(event, theirs):
            yield ItemDifference(name, ours, theirs)


def _bits(event: str, value: Value) -> object:
    """Return the part of a value that decides equality."""
    if isinstance(value, Mapping):
        return value.get("digest") if event in RANDOM else dict(value)
    if value is not None and value.startswith("decimal "):
        number = value_of(value)
        return value if number is None or math.isnan(number) else number
    return value


def _problems(
    a: Log, b: Log, wanted: range, steps: Sequence[int], something: bool
) -> Iterator[str]:
    for log, other in ((a, b), (b, a)):
        missing = [rank for rank in other.ranks if rank not in log.steps]
        if log.world_size is not None:
            missing += [r for r in range(log.world_size) if r not in log.steps and r not in missing]
        if missing:
            ranks = ", ".join(map(str, sorted(missing)))
            yield f"{log.name} has no log of rank {ranks}"
        if len(steps) < len(wanted):
            done = [step for step in log.finished() if step in wanted]
            if len(done) < len(wanted):
                absent = next(step for step in wanted if step not in done)
                yield (
                    f"{log.name} logged {len(done)} of the {len(wanted)} steps; "
                    f"step {absent} is the first that is missing"
                )
        bad = _first_not_a_number(log, wanted)
        if bad is not None:
            yield f"{log.name} has a loss that is {bad[1]} at step {bad[0]}: equality shows nothing"
    if a.world_size and b.world_size and a.world_size != b.world_size:
        yield f"{a.name} ran on {a.world_size} ranks and {b.name} on {b.world_size}"
    if steps and not something:
        yield f"{a.name} and {b.name} log no event in common"


def _first_not_a_number(log: Log, wanted: range) -> tuple[int, str] | None:
    for step in wanted:
        for of in log.steps.values():
            for text in losses(of[step]) if step in of else ():
                value = value_of(text)
                if value is not None and not math.isfinite(value):
                    return step, "NaN" if math.isnan(value) else "infinite"
    return None


def idle_streams(repetitions: Sequence[Log], others: Sequence[Log]) -> tuple[str, ...]:
    """Return the names of streams that differ between runs without consequence.

    A seeded stream counts even if nothing draws from it in these steps, because later draws, at the
    end of an epoch, depend on it. So only a stream is left out that already differs between two
    runs that began alike (`repetitions`), and that no rank of any run has moved. `others` are the
    runs to compare with them.
    """
    began: dict[tuple[int, str], set[str]] = {}
    moved: set[str] = set()
    for number, log in enumerate((*repetitions, *others)):
        for place, states in _states(log).items():
            if len(states) > 1:
                moved.add(place[1])
            if number < len(repetitions):
                began.setdefault(place, set()).update(states)
    unlike = {name for (_, name), states in began.items() if len(states) > 1}
    return tuple(sorted(unlike - moved))


def _states(log: Log) -> Mapping[tuple[int, str], set[str]]:
    """Return the digests of every state in a log, by rank and stream."""
    found: dict[tuple[int, str], set[str]] = {}
    for rank, of in log.steps.items():
        for record in of.values():
            for name, digest in _streams(record):
                found.setdefault((rank, name), set()).add(digest)
    return found


def _streams(record: StepRecord) -> Iterator[tuple[str, str]]:
    for event in RANDOM:
        for name, value in record.events.get(event, {}).items():
            if isinstance(value, dict) and isinstance(value.get("digest"), str):
                yield name, value["digest"]
