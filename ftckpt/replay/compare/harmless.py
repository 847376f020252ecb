"""Find differences without effect: a stream restored later, gradients cleared unused.

Trainers restore in their own order. A random stream that is restored after the first batch differs
as the step begins and is right before anything draws from it. Such a difference is a note: a
verdict counts only differences that reached the batch, the loss, the gradients or the state.
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
