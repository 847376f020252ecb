"""The parts of a whole tensor that tensor-parallel ranks hold: the chunks of a torch_dist store.

A store holds whole tensors, and where a chunk ends decides only who reads it. A name that no rule
knows is therefore not refused, as it is where each rank has a file of its own: it is one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.rules import Rule, Rules
from ftckpt.checkpoint.sharding import even_rows, slabs
from ftckpt.errors import UsageError
from ftckpt.formats.megatron.rank_files.grid import MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import is_expert
from ftckpt.formats.state.rule_tables import built_in
from ftckpt.transfer.content import TargetTensor

_FIRST, _SECOND = ".linear_fc1.weight", ".linear_fc2.weight"


class TensorCut(NamedTuple):
    """A part of a tensor."""

    box: Box  # of the whole tensor
    tp: int  # the tensor rank that has it, among the experts' where the tensor is of an expert


class TensorCuts:
    """How tensors are cut over the tensor ranks of one job."""

    def __init__(
        self, weights: Mapping[str, TargetTensor], grid: MegatronGrid, rules: Rules | None
    ) -> None:
        """Prepare.

        Args:
            weights: the model's tensors by name.
            grid: sizes of the groups of ranks.
            rules: asked before the built-in ones.
        """
        table = built_in("megatron", {"gated": int(_is_gated(weights))})
        self._rules = rules.before(table) if rules else table
        self._weights = weights
        self._grid = grid

    def is_vocabulary(self, wanted: TargetTensor) -> bool:
        """Return whether the first axis of a tensor is the vocabulary."""
        rule = self._rules.get(wanted.name)
        return rule is not None and rule.vocabulary and bool(wanted.shape)

    def of(self, wanted: TargetTensor, weight: str) -> list[TensorCut]:
        """Return the parts of a tensor, each once; they tile it.

        Args:
            wanted: a weight, or state of one.
            weight: name of the weight.

        Raises:
            UsageError: it cannot be divided over that many ranks.
        """
        rule = self._rule(wanted, weight)
        parts = self._grid.etp if is_expert(weight) else self._grid.tp
        if rule is None or rule.split.axis is None or parts == 1 or 0 in wanted.shape:
            return [TensorCut(Box.whole(wanted.shape), 0)]
        if rule.vocabulary:  # Megatron pads what it loads to its own size
            return _rows(wanted.shape, parts)
        try:
            return [
                TensorCut(slab.box, tp)
                for tp in range(parts)
                for slab in slabs(wanted.shape, rule.split, parts, tp)
            ]
        except UsageError as error:
            what = f"{wanted.key}: {error.message} tensor ranks"
            raise UsageError(what, tensor=wanted.key) from error

    def _rule(self, wanted: TargetTensor, weight: str) -> Rule | None:
        """Return the rule of a weight and of what has its shape; other state is not cut."""
        of = self._weights.get(weight, wanted)
        cut = wanted.component in ("model", "optimizer") and of.shape == wanted.shape
        return self._rules.get(weight) if cut else None


def _rows(shape: tuple[int, ...], parts: int) -> list[TensorCut]:
    rows, *rest = shape
    zeros = (0,) * len(rest)
    spans = (even_rows(rows, parts, part) for part in range(parts))
    return [
        TensorCut(Box((start, *zeros), (stop - start, *rest)), tp)
        for tp, (start, stop) in enumerate(spans)
        if start < stop
    ]


def _is_gated(weights: Mapping[str, TargetTensor]) -> bool:
    """Return whether first matrices hold a gate too: they have two rows for each column after."""
    for name, first in weights.items():
        if name.endswith(_FIRST):
            second = weights.get(name.removesuffix(_FIRST) + _SECOND)
            if second is not None and len(first.shape) == len(second.shape) == 2:
                return first.shape[0] == 2 * second.shape[1]
    return False
