"""What an optimizer keeps of its parameters that is no tensor: settings of groups, plain numbers.

An example may group parameters otherwise than the source. Settings follow the parameters where the
source says whose they are. Where it says it by numbers alone, they follow what the example's groups
and the source's have in common: everything but the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftckpt.errors import UnsupportedError

from .deepspeed_source import Source

Settings = Mapping[str, Any]

_PARAMS = "params"
# What schedules change; the rest tells one group from another.
_SCHEDULED = frozenset({_PARAMS, "lr", "initial_lr", "max_lr", "min_lr"})


@dataclass
class OfParameters:
    """The settings and numbers of a source.

    Attributes:
        settings: parameter -> settings of its group.
        groups: settings of groups of which nothing says whose they are.
        numbers: parameter -> leaf -> value.
        alike: leaf -> value that all parameters have.
    """

    settings: dict[str, Settings] = field(default_factory=dict)
    groups: list[Settings] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    alike: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source) -> OfParameters:
        """Return those of a DeepSpeed source, which lists the parameters of each group."""
        made = cls()
        for mp, groups in source.groups.items():
            settings = source.settings[mp]
            for number, group in enumerate(groups):
                for name in group:
                    made.numbers[name] = source.numbers[mp][number]
                    if len(settings) == len(groups):
                        made.settings[name] = bare(settings[number])
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
        fits = [one for one in self.groups if _fits(one, example)]
        candidates = self.groups if _all_equal(self.groups) else fits
        return candidates[0] if candidates and _all_equal(candidates) else None

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


def bare(group: Settings) -> dict[str, Any]:
    """Return the settings of a group without its members."""
    return {key: value for key, value in group.items() if key != _PARAMS}


def _fits(one: Settings, example: Settings) -> bool:
    shared = one.keys() & example.keys() - _SCHEDULED
    return bool(shared) and all(one[key] == example[key] for key in shared)


def _all_equal(groups: Sequence[Settings]) -> bool:
    return all(one == groups[0] for one in groups)


def _differing(one: Settings, other: Settings) -> str:
    return ", ".join(sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k)))
