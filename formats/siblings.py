"""Tell from the tensors of a model alone which of its layers or experts lack something.

All layers of one sort have the same tensors of the same shapes. Where one lacks what the others
have, a file lost it, whatever a configuration says. Where a whole layer is away, or several lack
the same, it may be meant: a save of what is trained, layers that share weights, a pruned model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

Shapes = Mapping[str, tuple[int, ...]]

_NUMBER = re.compile(r"\.(\d+)\.")
_DEPTH = 2  # layers, and experts in them
_SORTS = 64  # of layers in one model: more say nothing
_PART = 4  # of what a sibling has is away at most: more is a module that may be left out
_OFTEN = 3  # times as many siblings must have it


def lost(absent: Sequence[str], found: Iterable[str]) -> list[str]:
    """Return those names that a layer or expert lacks although it has all else that others have.

    Args:
        absent: names that the model should have.
        found: names that it has.
    """
    if not absent:
        return []
    held_by: dict[str, dict[str, set[str]]] = {}
    for name in found:
        for family, number, rest in _places(name):
            held_by.setdefault(family, {}).setdefault(number, set()).add(rest)
    units = {
        family: {number: frozenset(held) for number, held in of.items()}
        for family, of in held_by.items()
    }
    lacks = Counter(
        (family, rest)
        for name in absent
        for family, number, rest in _places(name)
        if number in units.get(family, ())
    )
    sorts = {family: _Sorts(of.values()) for family, of in units.items()}

    def is_lost(name: str) -> bool:
        for family, number, rest in _places(name):
            held = units.get(family, {}).get(number)
            if held is None or rest not in sorts[family].lacking(held):
                continue
            if _few(lacks[family, rest], sorts[family].having(rest)):
                return True
        return False

    return [name for name in absent if is_lost(name)]


class _Sorts:
    """The sorts of layers, or of experts, by what they hold."""

    def __init__(self, units: Iterable[frozenset[str]]) -> None:
        self._many = Counter(units)
        self._lacking: dict[frozenset[str], set[str]] = {}
        self._having: dict[str, int] = {}

    def lacking(self, held: frozenset[str]) -> set[str]:
        """Return what sorts have that hold all of these and a little more."""
        if held not in self._lacking:
            found: set[str] = set()
            if len(self._many) <= _SORTS:
                for one in self._many:
                    away = len(one) - len(held)
                    if held < one and away < len(held) and (away == 1 or _PART * away <= len(one)):
                        found |= one - held
            self._lacking[held] = found
        return self._lacking[held]

    def having(self, rest: str) -> int:
        """Return how many hold it."""
        if rest not in self._having:
            self._having[rest] = sum(many for one, many in self._many.items() if rest in one)
        return self._having[rest]


def misshapen(
    wanted: Shapes, found: Shapes, axes: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    """Return the names of other shapes: first those that the model's other tensors contradict.

    A tensor is contradicted where it alone of its layer or expert is other than described, and its
    siblings are as described; without siblings, where all others are as described and two of them
    have one of its axes.

    Args:
        wanted: shapes that the model should have.
        found: those that it has.
        axes: what each axis of a tensor counts, in words.
    """
    other = [one for one, shape in wanted.items() if found.get(one, shape) != shape]
    if not other:
        return [], []
    patterns = Counter(_NUMBER.sub(".#.", one) for one in wanted if one in found)
    bad = Counter(_NUMBER.sub(".#.", one) for one in other)
    units = Counter(_unit(one) for one in other)
    agreed = Counter(
        word
        for one, shape in wanted.items()
        if found.get(one) == shape
        for word in frozenset(axes[one])
    )

    def contradicted(name: str) -> bool:
        if units[_unit(name)] > 1:
            return False
        pattern = _NUMBER.sub(".#.", name)
        if patterns[pattern] > 1:
            return _few(bad[pattern], patterns[pattern] - bad[pattern])
        shape, right = found[name], wanted[name]
        same = len(shape) == len(right)
        differ = [n for n in range(len(right)) if not same or shape[n] != right[n]]
        return len(other) == 1 and any(agreed[axes[name][n]] > 1 for n in differ)

    damaged = [one for one in other if contradicted(one)]
    known = frozenset(damaged)
    return damaged, [one for one in other if one not in known]


def _places(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield what stands before a number, the number, and what stands behind it."""
    for depth, match in enumerate(_NUMBER.finditer(name)):
        if depth == _DEPTH:
            return
        yield name[: match.start()], match[1], name[match.end() :]


def _unit(name: str) -> str:
    """Return the layer or the expert that a tensor is of; "" for neither."""
    end = 0
    for match in _NUMBER.finditer(name):
        end = match.end()
    return name[:end]


def _few(without: int, having: int) -> bool:
    return having > 0 and (without == 1 or having >= _OFTEN * without)
