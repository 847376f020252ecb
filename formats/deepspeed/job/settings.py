"""State of an optimizer that is not a tensor: settings of groups, plain numbers.

An example may group parameters otherwise than the source. Settings follow the parameters where the
source says whose they are. Where it says it by numbers alone, they follow what the example's groups
and the source's have in common: everything but the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.formats.torch_files.write_tree import CopiedTree

from . import DeepSpeedJob

Settings = Mapping[str, Any]

_PARAMS = "params"
# What schedules change; the rest tells one group from another.
_SCHEDULED = frozenset({_PARAMS, "lr", "initial_lr", "max_lr", "min_lr"})


class GroupSettings(NamedTuple):
    """The settings of one parameter group, and its number."""

    number: int
    settings: Settings


@dataclass
class ParameterSettings:
    """The settings and numbers of a source.

    Attributes:
        settings: parameter -> settings of its group.
        groups: settings of groups of which nothing says whose they are.
        places: parameter -> number of its group; None where ranks number it otherwise.
        numbers: parameter -> leaf -> value.
        alike: leaf -> value that all parameters have.
    """

    settings: dict[str, Settings] = field(default_factory=dict)
    groups: list[GroupSettings] = field(default_factory=list)
    places: dict[str, int | None] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    alike: dict[str, Any] = field(default_factory=dict)
    _found: list[Settings] = field(default_factory=list)

    @classmethod
    def of(cls, source: DeepSpeedJob) -> ParameterSettings:
        """Return those of a DeepSpeed source, which lists the parameters of each group."""
        made = cls()
        for mp, groups in source.groups.items():
            settings = source.settings[mp]
            for number, group in enumerate(groups):
                for name in group:
                    known = made.places.setdefault(name, number)
                    made.places[name] = number if known == number else None
                    made.numbers[name] = source.numbers[mp][number]
                    if len(settings) == len(groups):
                        made.settings[name] = without_params(settings[number])
        return made

    def of_group(self, names: Iterable[str], example: Settings) -> Settings | None:
        """Return the settings of a group of the example; None where nothing says which they are.

        Args:
            names: of the group's parameters in the source.
            example: the settings that the example has.

        Raises:
            UnsupportedError: the parameters have different ones.
        """
        known = {name: self.settings[name] for name in names if name in self.settings}
        if known:
            first, found = next(iter(known.items()))
            for name, other in known.items():
                if other != found:
                    raise UnsupportedError(
                        f"{first} and {name} have other settings in the source, and the example"
                        " has them in one group",
                        hint="--drop optimizer.param_groups: the example's settings are kept",
                        tensor=name,
                    )
            return found
        candidates = [one.settings for one in self._candidates(example)]
        if not candidates or not all_equal(candidates):
            return None
        self._found.append(candidates[0])
        return candidates[0]

    @property
    def unused(self) -> bool:
        """Whether no group of the example got the settings of some group; known at the end."""
        return any(one.settings not in self._found for one in self.groups)

    def place_of_group(self, names: Iterable[str], example: Settings) -> int | None:
        """Return the number that a group of the example had in the source, where that is known.

        Args:
            names: of the group's parameters in the source.
            example: the settings that the example has.
        """
        known = {self.places[name] for name in names if name in self.places}
        if not known:
            known = {one.number for one in self._candidates(example)}
        return known.pop() if len(known) == 1 else None

    def _candidates(self, example: Settings) -> Sequence[GroupSettings]:
        """Return the groups that may be the example's."""
        if all_equal([one.settings for one in self.groups]):
            return self.groups
        return [one for one in self.groups if _fits(one.settings, example)]

    def numbers_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the numbers that the parameters of a group have.

        Raises:
            UnsupportedError: they differ.
        """
        found: dict[str, Any] | None = None
        for name in names:
            own = self.alike | self.numbers.get(name, {})
            if found is not None and own != found:
                raise UnsupportedError(
                    f"{name} and others of its group differ in {_differing(own, found)}: ZeRO has"
                    " one number a group",
                    tensor=name,
                )
            found = own
        return found or {}


def without_params(group: Settings) -> dict[str, Any]:
    """Return the settings of a group without its members."""
    return {key: value for key, value in group.items() if key != _PARAMS}


def _fits(one: Settings, example: Settings) -> bool:
    one, example = _values(one), _values(example)
    shared = one.keys() & example.keys() - _SCHEDULED
    return bool(shared) and all(one[key] == example[key] for key in shared)


def all_equal(groups: Sequence[Settings]) -> bool:
    """Say whether groups have the same settings."""
    values = [_values(one) for one in groups]
    return all(one == values[0] for one in values)


def _values(group: Settings) -> dict[str, Any]:
    """Return settings without where they were read: that is another place for each group."""
    return {k: v.value if type(v) is CopiedTree else v for k, v in group.items()}


def _differing(one: Settings, other: Settings) -> str:
    return ", ".join(sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k)))
