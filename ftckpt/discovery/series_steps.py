"""The step of a checkpoint whose content does not say it: a file beside it, or its siblings' names.

A save can lose the counter that its siblings have: with a lost `meta.json`, or a cut file. It must
not leave the order of the root by that. Its name stands in the series as before, and what the
numbers of the names mean is told by the siblings that still have their steps.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ftckpt.storage.state_files import without_numbers

from . import series
from .looked import Looked
from .roots import Root
from .step_beside import step_beside

# A trainer may record the step that it has finished or that comes next (DeePMD-kit: one less than
# the name).
_APART = (0, -1, 1)


class PlaceAmongSiblings(NamedTuple):
    """The place of a checkpoint without a step among siblings with one.

    Attributes:
        step: as a number of its name says that is the step in each sibling's; None if none is.
        rank: its step for ordering; None if the names give no place.
    """

    step: int | None
    rank: float | None


def with_steps(root: Root, looked: Iterable[Looked]) -> list[Looked]:
    """Return candidates with the steps that their content and names do not say.

    `looked` should be all siblings without a step in their names: they tell what a number means.
    """
    found = [one if _is_told(one) else _with_step_beside(root, one) for one in looked]
    found = _borne_out(found)
    places = among_siblings({one.candidate.path: one.known_step for one in found})
    return [
        one._replace(step=place.step, place=place.rank, astray=place.rank is None)
        if (place := places.get(one.candidate.path)) is not None
        else one
        for one in found
    ]


def _is_told(one: Looked) -> bool:
    return one.known_step is not None or one.child is None


def _with_step_beside(root: Root, one: Looked) -> Looked:
    said = step_beside(root, one.candidate)
    return one if said is None else one._replace(step=said, beside=True)


def _borne_out(looked: Sequence[Looked]) -> list[Looked]:
    """Return candidates without the steps beside them that do not rise with their series.

    Such a number is a setting of the run, the same in each file, and no step of the save.
    """
    by_series: dict[str, dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for one in looked:
        place = series.place_of(one.candidate.path)
        if one.beside and place is not None and one.step is not None:
            by_series[place.series][place.numbers].add(one.step)
    risen = set()
    for name, own in by_series.items():
        steps = [sorted(own[numbers]) for numbers in sorted(own)]
        if all(a[-1] < b[0] for a, b in pairwise(steps)):
            risen.add(name)
    found = []
    for one in looked:
        place = series.place_of(one.candidate.path) if one.beside else None
        stands = place is None or place.series in risen
        found.append(one if stands else one._replace(step=None, beside=False))
    return found


def among_siblings(steps: Mapping[str, int | None]) -> dict[str, PlaceAmongSiblings]:
    """Return the places of names without a step among siblings that have one.

    Siblings are names that differ in numbers alone. A number that is the step of each sibling (or
    one more, or one less) is the step here. Else a number, or all of them in their order, must
    rise with the steps of at least two siblings, and all that do must agree on the place; a number
    beside a counter's word (`epoch_3`) rises by itself.

    Args:
        steps: of each name of a root; None without one.
    """
    shapes: dict[str, list[str]] = defaultdict(list)
    for name in steps:
        if re.search(r"\d", name):
            shapes[without_numbers(name)].append(name)
    found = {}
    for names in shapes.values():
        told = [(_numbers(name), step) for name in names if (step := steps[name]) is not None]
        if not told:
            continue
        for name in names:
            if steps[name] is None:
                place = _place(name, told)
                if place.rank is None and (own := series.place_of(name)) and own.counter:
                    place = PlaceAmongSiblings(None, _counted(own, names, steps))
                found[name] = place
    return found


def _counted(
    own: series.SeriesPlace, names: Iterable[str], steps: Mapping[str, int | None]
) -> float | None:
    """Return the place by the numbers beside a counter's word, which one sibling bears out."""
    places = ((series.place_of(name), steps[name]) for name in names)
    told = [(p.numbers, s) for p, s in places if p and s is not None and p.series == own.series]
    return _between(own.numbers, told) if told else None


def _place(name: str, told: Sequence[tuple[tuple[int, ...], int]]) -> PlaceAmongSiblings:
    own = _numbers(name)
    # One sibling alone may have its number by chance one beside its step.
    apart = _APART if len({step for _, step in told}) > 1 else (0,)
    exact = {
        own[n] - more
        for n in range(len(own))
        for more in apart
        if all(numbers[n] - more == step for numbers, step in told)
    }
    if len(exact) == 1:
        (step,) = exact
        return PlaceAmongSiblings(step, step)
    if exact:
        return PlaceAmongSiblings(None, None)
    columns: list[Sequence[int]] = [(n,) for n in range(len(own))]
    columns.append(range(len(own)))
    places = {
        _between(
            tuple(own[n] for n in column),
            [(tuple(numbers[n] for n in column), step) for numbers, step in told],
        )
        for column in columns
        if len({step for _, step in told}) > 1
    } - {None}
    return PlaceAmongSiblings(None, places.pop() if len(places) == 1 else None)


def _between(own: tuple[int, ...], told: Sequence[tuple[tuple[int, ...], int]]) -> float | None:
    """Return the place that numbers say; None if they do not rise with the siblings' steps."""
    placed = sorted(set(told))
    if not all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(placed)):
        return None
    at = bisect([numbers for numbers, _ in placed], own)
    return placed[at - 1][1] + 0.5 if at else placed[0][1] - 0.5


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,18}", name))
