"""Differences that never matter: of a stream that is restored later, of gradients cleared unused.

Trainers restore in their own order. Where a random stream is restored after the first batch is
drawn, it differs as the step begins and is right before anything draws from it. Such a difference
is a note: a verdict rests on what reached the batch, the loss, the gradients or the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftckpt.replay.record.events import BY_KEY, RANDOM, STATE
from ftckpt.replay.record.log import Log

from .differences import Difference

# (step, event, rank): whether it is equal.
Grid = Mapping[tuple[int, str, int], bool]


def split(
    found: Sequence[Difference], reference: Log, other: Log, grid: Grid
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return the differences that last, and those that never mattered, both in causal order.

    A stream's difference never mattered where the stream is the same again at the next place where
    it was recorded, and the uninterrupted run did not draw from it in between, or what was computed
    in between is equal. Other state that differs as a step begins never mattered where it is the
    same as the next one begins, and so is all that was computed in between: it was written over,
    as DDP writes the first rank's buffers over those of the others. Accumulated gradients never
    mattered where the gradients that the optimizer used are equal.
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
    """Return which differences of streams never mattered: step, event, rank and stream."""
    unlike = {
        (d.step, d.event, d.rank, item.name) for d in found if d.event in RANDOM for item in d.items
    }
    passing: set[tuple[int, str, int, str]] = set()
    for rank, name in {(rank, name) for _, _, rank, name in unlike}:
        points = _points(reference, other, rank, name)
        right = False  # at the next point: nothing is known of what comes after the last
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
    """Say whether nothing was drawn between two points, or what was computed there is equal."""
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
    """Say whether all is equal, on every rank, from the batch of one step to the state of another.

    Losses alone show too little: whole tensors have to be there when the other step begins.
    """
    computed = [
        equal for (at, event, _), equal in grid.items()
        if event not in RANDOM
        and ((step <= at < after and event not in STATE) or (step < at <= after and event in STATE))
    ]  # fmt: skip
    shown = any(at == after and BY_KEY[event].heavy for at, event, _ in grid)
    return shown and all(computed)
