"""Where two logs of one training part ways: step by step, event by event, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .events import BY_KEY, EVENTS, RANDOM
from .floats import ulps, value_of
from .records import Items, Log, Record, Value, losses
from .streams import difference_in_words, read_stream


class ItemDifference(NamedTuple):
    """One item of an event that differs.

    Attributes:
        name: of the tensor, stream or place.
        reference: its value in the uninterrupted run; None where it is not there.
        other: its value in the other run; None where it is not there.
    """

    name: str
    reference: Value
    other: Value

    @property
    def words(self) -> str:
        """How they differ, as far as the log can tell; of random streams this takes a while."""
        return _words(self.reference, self.other)


@dataclass(frozen=True, slots=True)
class Difference:
    """One event of one step and rank that differs.

    Attributes:
        step: of the training.
        rank: whose record differs.
        event: key of `events.EVENTS`.
        items: what differs in it, in the order of the log.
        of: number of items that the event has in the two runs together.
    """

    step: int
    rank: int
    event: str
    items: tuple[ItemDifference, ...]
    of: int

    @property
    def words(self) -> str:
        """What differs, in words: `loss (3 ULP)`, `gradients (4 of 12, first w)`."""
        return f"{BY_KEY[self.event].title} ({self.detail})"

    @property
    def detail(self) -> str:
        """How it differs, in words: `3 ULP`, `4 of 12, first w`."""
        if self.event in RANDOM:
            return ", ".join(f"{i.name}: {i.words}" for i in self.items)
        if len(self.items) == 1:
            item = self.items[0]
            return item.words if self.of == 1 else f"{item.name}: {item.words}"
        return f"{len(self.items)} of {self.of}, first {self.items[0].name}"


@dataclass(frozen=True)
class Comparison:
    """Two logs, compared.

    Attributes:
        reference: name of the first run.
        other: name of the second.
        first: the first step that was to be compared.
        last: the last.
        steps: those that both runs finished on every rank, ascending.
        ranks: those that both runs have.
        grid: for each (step, event, rank) that both could show, whether it is equal; in order.
        differences: all of them, in causal order.
        problems: why equality would show nothing: steps or ranks missing, losses that are no
            numbers, no event in common.
    """

    reference: str
    other: str
    first: int
    last: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    grid: Mapping[tuple[int, str, int], bool]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs; it shows something only where there are no `problems`."""
        return not self.differences

    def at_first_step(self) -> tuple[Difference, ...]:
        """Return the differences of the first step that has any, in causal order."""
        step = self.differences[0].step if self.differences else 0
        return tuple(d for d in self.differences if d.step == step)


def compare(
    reference: Log, other: Log, first: int, last: int, idle: Collection[str] = ()
) -> Comparison:
    """Compare the steps `first` to `last`, and what is recorded of the state after `last`.

    An event is compared where both runs recorded it; one that is recorded of the same step in one
    run alone differs, unless it is heavy and the other run left it out of that step. Random streams
    that are `idle` (see `idle.idle_streams`) are not compared.
    """
    finished = set(reference.finished()) & set(other.finished())
    steps = tuple(step for step in range(first, last + 1) if step in finished)
    ranks = tuple(rank for rank in reference.ranks if rank in other.steps)
    grid: dict[tuple[int, str, int], bool] = {}
    found: list[Difference] = []
    for step in range(first, last + 2):
        for event in EVENTS:
            for rank in ranks:
                pair = reference.steps[rank].get(step), other.steps[rank].get(step)
                difference = _compare_event(*pair, event.key, idle)
                if difference is None:
                    continue
                grid[step, event.key, rank] = not difference
                if isinstance(difference, Difference):
                    found.append(difference)
    problems = tuple(_problems(reference, other, range(first, last + 1), steps, bool(grid)))
    return Comparison(
        reference.name, other.name, first, last, steps, ranks, grid, tuple(found), problems
    )


def _compare_event(
    a: Record | None, b: Record | None, event: str, idle: Collection[str]
) -> Difference | bool | None:
    """Return the difference, False where the two are equal, None where they cannot be compared."""
    if a is None or b is None:
        return None
    ours, theirs = a.events.get(event), b.events.get(event)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        # A record that was cut short, or in which tensors were not read, shows nothing of it.
        if a.partial or b.partial or BY_KEY[event].heavy:
            return None
        ours, theirs = ours or {}, theirs or {}
    names = list(dict.fromkeys([*ours, *theirs]))
    if event in RANDOM:
        names = [name for name in names if name not in idle]
        if not names:
            return None
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
    """Return what decides whether two values are equal."""
    if isinstance(value, Mapping):
        return value.get("digest") if event in RANDOM else dict(value)
    if value is not None and value.startswith("decimal "):
        number = value_of(value)
        return value if number is None or math.isnan(number) else number
    return value


def _words(ours: Value, theirs: Value) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return difference_in_words(read_stream(ours), read_stream(theirs))
    if ours is None or theirs is None:
        return "not there" if theirs is None else "only there"
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return "differs"
    apart = ulps(ours, theirs)
    if apart is not None:
        return f"{apart:,} ULP"
    a, b = value_of(ours), value_of(theirs)
    if a is not None and b is not None:
        return f"{theirs.rpartition(' ')[2]} instead of {ours.rpartition(' ')[2]}"
    if ours.rpartition(":")[0] != theirs.rpartition(":")[0]:
        return f"{theirs.rpartition(':')[0]} instead of {ours.rpartition(':')[0]}"
    return "bits differ"


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
