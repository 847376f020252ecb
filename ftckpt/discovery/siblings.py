"""The step of a checkpoint whose content does not say it: a file beside it, or its siblings' names.

A save can lose the counter that its siblings have: with a lost `meta.json`, or a cut file. It must
not leave the order of the root by that. Its name stands in the series as before, and what the
numbers of the names mean is told by the siblings that still have their steps.

A candidate of a root whose headers were read.

The step that a trainer writes beside a file of weights: `epoch_3.yaml` of `epoch_3.pt`.

WeNet (wenet/utils/checkpoint.py, save_checkpoint) writes what it knows of a save, its `step` among
it, into a YAML file of the same stem, because the file itself holds weights alone.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.steps import counters_in
from ftckpt.errors import FtckptError
from ftckpt.storage.state_files import numbers_in, without_numbers
from ftckpt.storage.store import EntryKind, join
from ftckpt.strict_json import JsonError, decode

from . import series
from .listing import open_part
from .roots import Candidate, Child, Root
from .step_names import is_put_aside, stem_of

# The rank of a readable candidate whose content and name show no step.
NO_STEP = -1


class Looked(NamedTuple):
    """A candidate whose headers were read.

    Attributes:
        child: as formats recognise it; None if none does.
        step: by the trainer's record in its content, else by a file beside it, or as its siblings
            show that its name says it (`siblings`); never an optimizer's own count.
        error: why the headers could not be read.
        beside: whether a file beside it says the step, and not its content.
        unknown: whether its files are of no known layout, and may be a save in flight.
        place: its rank among siblings that have a step, where nothing says its own.
        astray: whether siblings have a step, and neither it nor its name says where it stands.
        damaged: whether what says its step could not be read.

    An error may also say why the root has no newest one (`unordered`).
    """

    candidate: Candidate
    child: Child | None = None
    step: int | None = None
    error: FtckptError | None = None
    unknown: bool = False
    beside: bool = False
    place: float | None = None
    astray: bool = False
    damaged: bool = False

    @property
    def rank(self) -> float:
        """Its step for ordering.

        An unreadable candidate whose place nothing tells may be the newest of all; a readable one
        comes last (`NO_STEP`).
        """
        known = self.place if self.known_step is None else self.known_step
        if known is not None:
            return known
        return math.inf if self.damaged or self.error is not None else NO_STEP

    @property
    def known_step(self) -> int | None:
        """Its step, else the one that its name says; None if nothing says it."""
        return self.candidate.step if self.step is None else self.step


_YAML = (".yaml", ".yml")
_JSON = ".json"
# What a trainer writes beside each save is short.
_MOST = 1 << 18
_LINE = re.compile(r"^(?:global_)?step:[ \t]*([0-9]{1,18})[ \t]*\r?$", re.MULTILINE)


def step_beside(root: Root, candidate: Candidate) -> int | None:
    """Return the step in the file of the same stem beside a candidate; None if nothing says it.

    A file that says two steps, or that cannot be read, says none.
    """
    stem = stem_of(candidate.path)
    if candidate.entry.kind is not EntryKind.FILE or stem == candidate.path:
        return None
    foreign = root.memo.setdefault("foreign", frozenset(root.foreign))
    names = [stem + suffix for suffix in (*_YAML, _JSON) if stem + suffix in foreign]
    found = {_said(root, name) for name in names}
    return found.pop() if len(found) == 1 else None


def _said(root: Root, name: str) -> int | None:
    try:
        entry = root.store.stat(join(root.base, name))
        if entry.kind is not EntryKind.FILE or entry.link is not None or entry.size > _MOST:
            return None
        raw = root.store.read(entry.path, 0, entry.size)
        if not name.endswith(_JSON):
            text = raw.decode("utf-8", "replace")
            said = {int(number) for number in _LINE.findall(text)}
        else:
            said = {number for _, number in counters_in(decode(raw))}
    except (FtckptError, JsonError):
        return None
    return said.pop() if len(said) == 1 else None


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
    stepped = {_kind(one): one for one in sorted(found, key=_step) if one.known_step is not None}
    return [
        one._replace(astray=True)
        if _is_last(one) and (beside := stepped.get(_kind(one))) and _is_full(root, one, beside)
        else one
        for one in found
    ]


def _step(one: Looked) -> int:
    return one.known_step or 0


def _is_full(root: Root, one: Looked, beside: Looked) -> bool:
    """Whether a save holds what one with a step does: weights alone are an export beside it."""
    if one.child is None or beside.child is None:
        return False
    if one.child.part.recognition.by_names or one.candidate.entry.kind is not EntryKind.FILE:
        return True
    try:
        mine, its = (
            {info.kind for info in open_part(root.store, child.part).tensors.values()}
            for child in (one.child, beside.child)
        )
    except FtckptError:
        return True
    return mine >= its & {Kind.PARAM, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ}


def _is_last(one: Looked) -> bool:
    """Whether it is what a trainer calls its newest save, and nothing says its step."""
    untold = one.known_step is None and one.child is not None and not one.damaged
    return untold and bool(series.roles_in(one.candidate.path) & series.LAST)


def _kind(one: Looked) -> str:
    return "" if one.child is None else one.child.part.format.name


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
