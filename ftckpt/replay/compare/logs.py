"""Compare two logs of a training: step by step, event by event, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ftckpt.replay.record.events import BY_KEY, EVENTS, RANDOM
from ftckpt.replay.record.floats import value_of
from ftckpt.replay.record.log import ENDED, Items, Log, StepRecord, Value, losses
from ftckpt.reports import UNSAID

from .differences import Difference, ItemDifference
from .harmless import split


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
