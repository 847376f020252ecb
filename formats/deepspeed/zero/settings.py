"""How a job partitions: its grid, its stage of ZeRO, the order and place of parameters.

Two options change the order or the place of parameters in a flat partition, and both depend on the
number of partitions, so they are applied anew:

- `round_robin_gradients` orders a group's parameters by partition: 0, n, 2n, …, 1, n+1, …
- `parameter_alignment` begins every parameter at a multiple of 16 bytes of its compute type.

Sources: `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`, the loop over groups),
`runtime/zero/stage3.py` (`_create_fp16_sub_groups`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from ftckpt.formats.deepspeed.experts import ExpertLayers
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid

from .partition import Shape

Group = Mapping[str, Shape]

SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's default
_ALIGNED_TO = 16


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """How a job partitions.

    Attributes:
        grid: sizes of its parallel groups.
        experts: its layers of experts.
        stage: of ZeRO, 1 to 3.
        prefix: of its optimizer's files.
        bf16_optimizer: whether BF16_Optimizer writes: it keeps all padding and records no stage.
        elastic: whether the states of stages 1 and 2 are a list and without padding.
        round_robin, aligned: see the module's docstring.
        sub_group_size: elements of a rank at which a sub-group of stage 3 ends.
    """

    grid: DeepSpeedGrid
    experts: ExpertLayers
    stage: int
    prefix: str = ""
    bf16_optimizer: bool = False
    elastic: bool = False
    round_robin: bool = False
    aligned: bool = False
    sub_group_size: int = SUB_GROUP_SIZE

    def flat_groups(self, group: Group) -> list[Group]:
        """Return the flat groups of one parameter group: more than one in stage 3 alone."""
        if self.stage == 3:
            return list(self._sub_groups(group))
        names = list(group)
        if self.round_robin:
            names = [names[n] for n in _round_robin(len(names), self._ranks(group))]
        return [{name: group[name] for name in names}]

    def parameter_group(self, groups: Sequence[Group]) -> Group:
        """Return the parameter group that was partitioned: the inverse of `flat_groups`."""
        flat = {name: shape for group in groups for name, shape in group.items()}
        if self.stage == 3 or not self.round_robin:
            return flat
        names = list(flat)
        back = sorted(zip(_round_robin(len(names), self._ranks(flat)), names, strict=True))
        return {name: flat[name] for _, name in back}

    def _ranks(self, group: Group) -> int:
        """Return the number of partitions of a parameter group."""
        return self.experts.partition(group, 0).ranks

    def gaps(self, group: Group, itemsize: int) -> tuple[int, ...]:
        """Return the elements after each parameter of a flat group of stages 1 and 2.

        Args:
            group: laid out.
            itemsize: bytes of an element in the compute type.
        """
        unit = _ALIGNED_TO // gcd(_ALIGNED_TO, itemsize) if self.aligned else 1
        gaps, end = [], 0
        for shape in group.values():
            end += prod(shape)
            gaps.append(-end % unit)
            end += gaps[-1]
        return (*gaps[:-1], 0) if gaps else ()

    def _sub_groups(self, group: Group) -> Iterator[Group]:
        ranks = self._ranks(group)
        held = {name: -(-prod(shape) // ranks) for name, shape in group.items()}
        if self.sub_group_size >= sum(held.values()):
            yield group
            return
        part: dict[str, Shape] = {}
        size = 0
        for name, shape in group.items():
            part[name] = shape
            size += held[name]
            if size >= self.sub_group_size:
                yield part
                part, size = {}, 0
        if part:
            yield part


def _round_robin(count: int, ranks: int) -> list[int]:
    return [n for rank in range(ranks) for n in range(rank, count, ranks)]
