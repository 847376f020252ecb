"""Decide which Megatron rank writes which part of a tensor into its own file.

A part of a tensor is on every data-parallel rank, and any of them may write it; with
`--ckpt-fully-parallel-save`, Megatron's default, they share the work. A store reads the same,
whichever rank wrote it: this decides only how many files a job reads from, and how even they are.

Source: `RankGenerator` in megatron/core/parallel_state.py: tensor ranks vary first, stages last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import lcm

from ftckpt.formats.megatron.job.stages import Counts, offsets
from ftckpt.formats.megatron.rank_files.grid import MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import expert_of

_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d{1,7})\.")
_LAST = ("decoder.final_layernorm.", "decoder.final_norm.", "output_layer.", "mtp.")


class Owners:
    """The ranks of one job."""

    def __init__(self, grid: MegatronGrid, layers: Counts, experts: int) -> None:
        """Prepare.

        Args:
            grid: sizes of the groups of ranks; without data-parallel ranks as few as can be.
            layers: of each chunk of each stage.
            experts: of the whole model; 0 without.
        """
        self._grid = grid
        least = lcm(grid.tp, grid.etp * grid.ep) // grid.tp if experts else 1
        self._copies = grid.dense_ranks if grid.dp is not None else max(least, grid.cp)
        self._stage = grid.tp * self._copies
        self.world = self._stage * grid.pp  # how many
        self._of_layer: dict[int, int] = {}
        for stage, first in offsets(layers).items():
            for number in range(first, first + layers[stage]):
                self._of_layer[number] = stage.pp
        self._experts = experts
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def stage_of(self, name: str) -> int:
        """Return the pipeline stage of a tensor by its name in the whole model."""
        match = _LAYER.match(name)
        if match is not None:
            return self._of_layer.get(int(match[1]), 0)
        return self._grid.pp - 1 if name.startswith(_LAST) else 0

    def first(self, pp: int, tp: int) -> int:
        """Return the first rank of a stage that is a tensor rank."""
        return pp * self._stage + tp

    def dense(self, pp: int, tp: int) -> tuple[int, ...]:
        """Return the ranks that hold one part of a dense tensor of a stage."""
        begin = pp * self._stage + tp
        return tuple(range(begin, begin + self._stage, self._grid.tp))

    def expert(self, pp: int, tp: int, number: int) -> tuple[int, ...]:
        """Return the ranks that hold one part of one expert's tensor.

        Args:
            pp: the stage.
            tp: tensor rank among the experts'.
            number: of the expert.
        """
        each = max(1, self._experts // self._grid.ep)
        key = (pp, tp, min(number // each, self._grid.ep - 1))
        if key not in self._known:
            etp, ep = self._grid.etp, self._grid.ep
            inside = (r for r in range(self._stage) if (r % etp, r // etp % ep) == key[1:])
            self._known[key] = tuple(pp * self._stage + r for r in inside)
        return self._known[key]


def experts_of(names: Iterable[str]) -> int:
    """Return how many experts a model has, by the names of its tensors; 0 without."""
    found = (expert_of(name) for name in names)
    return max((one[1] for one in found if one is not None), default=-1) + 1


def layers_of(names: Iterable[str]) -> int:
    """Return how many layers a model has, by the names of its tensors."""
    matches = (_LAYER.match(name) for name in names)
    return max((int(m[1]) for m in matches if m is not None), default=-1) + 1
