"""Take the names of experts' parameters apart, as ranks and as the whole model have them."""

from __future__ import annotations

import re
from typing import NamedTuple

from ftckpt.formats.deepspeed.zero.partition import Shape

from .autoep import StackedRows

# What the name of an expert's parameter begins with, its number, and the rest.
_NAME = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)", re.DOTALL)
# The name of a parameter group of experts says over how many ranks they are shared.
_GROUP = re.compile(r"ep_size_(\d{1,7})")


class ExpertLayer(NamedTuple):
    """One layer of experts.

    Attributes:
        number: of the layer, as the names of its files have it.
        experts: number of them in the whole model.
        local: number of them on one rank.
    """

    number: int
    experts: int
    local: int

    @property
    def ep(self) -> int:
        """Number of ranks that share the experts."""
        return self.experts // self.local


class ExpertName(NamedTuple):
    """The name of an expert's parameter, in three parts."""

    prefix: str
    number: int
    rest: str

    @property
    def full(self) -> str:
        """The name."""
        return f"{self.prefix}{self.number}{self.rest}"

    def on_rank(self, ep_rank: int, layer: ExpertLayer) -> str:
        """Return the name in the whole model of what an expert-parallel rank calls so."""
        return self._replace(number=self.number + ep_rank * layer.local).full

    def whole(self, shape: Shape, layer: ExpertLayer) -> dict[str, Shape]:
        """Return what all ranks together call so, by their names in the whole model."""
        numbers = range(self.number, layer.experts, layer.local)
        return {self._replace(number=number).full: shape for number in numbers}


class StackedName(NamedTuple):
    """The name of a parameter that AutoEP stacks; the same on all ranks."""

    full: str

    def on_rank(self, ep_rank: int, layer: ExpertLayer) -> str:
        """Return the name of the rows that an expert-parallel rank has."""
        return StackedRows(self.full, ep_rank * layer.local, layer.local).key

    def whole(self, shape: Shape, layer: ExpertLayer) -> dict[str, Shape]:
        """Return the parameter with the rows of all ranks."""
        return {self.full: (layer.experts, *shape[1:])}


def expert_name(name: str) -> ExpertName | None:
    """Take the name of an expert's parameter apart; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else ExpertName(match[1], int(match[2]), match[3])


def group_ep(group: object) -> int | None:
    """Return over how many ranks a parameter group of experts says they are shared."""
    name = group.get("name") if isinstance(group, dict) and group.get("moe") is True else None
    match = _GROUP.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) or None if match is not None else None
