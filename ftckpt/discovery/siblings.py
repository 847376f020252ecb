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

from ftckpt.storage.state_files import numbers_in, without_numbers

from . import series
from .looked import Looked
from .roots import Root
from .step_beside import step_beside
from .step_names import is_put_aside

# A trainer may record the step that it has finished or that comes next (DeePMD-kit: one less than
# the name).
_APART = (0, -1, 1)
# Of fewer siblings a number rises by chance.
_BORNE_OUT = 3


class PlaceAmongSiblings(NamedTuple):
    """The place of a checkpoint without a step among siblings with one.

    Attributes:
        step: as a number of its name says that is the step in each sibling's; None if none is.
        rank: its step for ordering; None if the names give no place.
        last: whether it comes after all of them, and nothing says how far.
    """

    step: int | None
    rank: float | None
    last: bool = False


_NOWHERE = PlaceAmongSiblings(None, None)


def with_steps(root: Root, looked: Iterable[Looked]) -> list[Looked]:
    """Return candidates with the steps that their content and names do not say.

    `looked` should be all siblings without a step in their names: they tell what a number means.
    """
    found = [one if _is_told(one) else _with_step_beside(root, one) for one in looked]
    found = _borne_out(found)
    steps = {
        one.candidate.path: one.known_step for one in found if not is_put_aside(one.candidate.path)
    }
    top = max((step for step in steps.values() if step is not None), default=0)
    placed = among_siblings(steps)
    for n, one in enumerate(found):
        place = placed.get(one.candidate.path)
        if place is None:
            continue
        # Nothing tells it from the later steps of another series.
        known = place.rank is not None and not (place.last and place.rank < top)
        rank = place.rank if known else None
        found[n] = one._replace(step=place.step, place=rank, astray=not known)
    stepped = {_kind(one) for one in found if one.known_step is not None} - {""}
    return [
        one._replace(astray=True) if _is_last(one) and _kind(one) in stepped else one
        for one in found
    ]


def _is_last(one: Looked) -> bool:
    """Whether it is what a trainer calls its newest save, and nothing says its step."""
    untold = one.known_step is None and one.child is not None and not one.damaged
    return untold and bool(series.roles_in(one.candidate.path) & series.LAST)


def _kind(one: Looked) -> str:
    """Return the format of a save of several parts; "" for any other."""
    part = None if one.child is None else one.child.part
    return part.format.name if part is not None and part.recognition.by_names else ""


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
    rise with the steps of at least three siblings, and all that do must agree on the place; a
    number beside a counter's word (`epoch_3`) rises by itself.

    Args:
        steps: of each name of a root; None without one.
    """
    shapes: dict[str, list[str]] = defaultdict(list)
    for name in steps:
        if re.search(r"\d", name):
            shapes[without_numbers(name)].append(name)
    found = {}
    for names in shapes.values():
        told = [(numbers_in(name), step) for name in names if (step := steps[name]) is not None]
        if not told:
            continue
        for name in names:
            if steps[name] is None:
                place = _place(name, told)
                if place.rank is None and (own := series.place_of(name)) and own.counter:
                    place = _counted(own, names, steps)
                found[name] = place
    return found


def _counted(
    own: series.SeriesPlace, names: Iterable[str], steps: Mapping[str, int | None]
) -> PlaceAmongSiblings:
    """Return the place by the numbers beside a counter's word, which one sibling bears out."""
    places = ((series.place_of(name), steps[name]) for name in names)
    told = [(p.numbers, s) for p, s in places if p and s is not None and p.series == own.series]
    return (_between(own.numbers, told) if told else None) or _NOWHERE


def _place(name: str, told: Sequence[tuple[tuple[int, ...], int]]) -> PlaceAmongSiblings:
    own = numbers_in(name)
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
        return _NOWHERE
    columns: list[Sequence[int]] = [(n,) for n in range(len(own))]
    columns.append(range(len(own)))
    places = {
        _between(
            tuple(own[n] for n in column),
            [(tuple(numbers[n] for n in column), step) for numbers, step in told],
        )
        for column in columns
        if len({step for _, step in told}) >= _BORNE_OUT
    } - {None}
    return (places.pop() if len(places) == 1 else None) or _NOWHERE


def _between(
    own: tuple[int, ...], told: Sequence[tuple[tuple[int, ...], int]]
) -> PlaceAmongSiblings | None:
    """Return the place that numbers say; None if they do not rise with the siblings' steps."""
    placed = sorted(set(told))
    if not all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(placed)):
        return None
    at = bisect([numbers for numbers, _ in placed], own)
    rank = placed[at - 1][1] + 0.5 if at else placed[0][1] - 0.5
    return PlaceAmongSiblings(None, rank, at == len(placed))
