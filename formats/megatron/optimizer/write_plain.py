"""Lay out the state of Megatron's optimizers that keep it beside the weights, in torch's form.

Numbers count a rank's parameters group by group, and the fp32 masters stand in lists of the same
order (see `per_rank`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.formats.megatron.job.groups import Optimizers
from ftckpt.formats.megatron.job.optimizer_tree import GROUPS, INNER, MASTERS, torchs
from ftckpt.formats.megatron.rank_files.contents import ModelTensor, RankModel, state_key
from ftckpt.formats.megatron.rank_files.parts import Parts
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor

from .per_rank import HALF

_TENSORS = (TensorRef, SubclassRef, Composite)


class PlainWriter:
    """Lays out what each rank's `model_optim_rng.pt` holds of the optimizers."""

    def __init__(self, parts: Parts, found: Optimizers) -> None:
        self.placed: set[str] = set()  # keys of the tensors that were laid out
        self._parts = parts
        self._content = parts.content
        self._found = found

    def tree(self, holdings: RankModel) -> Any:
        """Return one rank's `optimizer`: of one, or of chained ones as the source keeps them."""
        one = [self._one(number, holdings) for number in range(len(self._found.trees))]
        if self._found.wrapped == "dict":
            return dict(enumerate(one))
        return one if self._found.wrapped else one[0]

    def _one(self, number: int, holdings: RankModel) -> dict[Any, Any]:
        found, tree = self._found, self._found.trees[number]
        groups: list[list[ModelTensor]] = [[] for _ in found.groups[number]]
        for held in holdings.parameters:
            optimizer, group = found.places.get(held.weight, (-1, 0))
            if optimizer == number:
                groups[group].append(held)
        nested = torchs(tree) is not tree
        made: dict[Any, Any] = {}
        for key, value in tree.items():
            if key == INNER and nested:
                made[key] = self._torchs(value, number, groups, holdings)
            elif key == MASTERS:
                made[key] = [self._masters(group, holdings) for group in groups]
            elif nested or key not in ("state", GROUPS):
                made[key] = CopiedTree(value, found.storages)
        return made if nested else self._torchs(tree, number, groups, holdings, made)

    def _torchs(
        self,
        tree: Mapping[Any, Any],
        number: int,
        groups: Sequence[Sequence[ModelTensor]],
        holdings: RankModel,
        rest: Mapping[Any, Any] | None = None,
    ) -> dict[Any, Any]:
        """Return the part in torch's form, with what else stands in it."""
        made: dict[Any, Any] = {}
        for key, value in tree.items():
            if key == "state":
                members = [held for group in groups for held in group]
                states = {n: self._state(held, holdings) for n, held in enumerate(members)}
                made[key] = {n: state for n, state in states.items() if state}
            elif key == GROUPS:
                made[key] = self._groups(number, groups)
            elif rest is not None:
                made[key] = rest[key]
            else:
                made[key] = CopiedTree(value, self._found.storages)
        return made

    def _groups(self, number: int, members: Sequence[Sequence[ModelTensor]]) -> list[CopiedTree]:
        found, first, made = self._found, 0, []
        for group, held in zip(found.groups[number], members, strict=True):
            if "params" in group:
                group = {**group, "params": list(range(first, first + len(held)))}
            first += len(held)
            made.append(CopiedTree(group, found.storages))
        return made

    def _state(self, held: ModelTensor, holdings: RankModel) -> dict[Any, Any]:
        """Return what is kept of one parameter: tensors of the content, and numbers."""
        made: dict[Any, Any] = {}
        for leaf, value in self._found.states.get(held.weight, {}).items():
            if isinstance(value, _TENSORS):
                tensor = self._tensor(held, str(leaf), holdings)
                if tensor is not None:
                    made[leaf] = tensor
            elif type(value) is Tensor:
                made[leaf] = value
            else:
                made[leaf] = CopiedTree(value, self._found.storages)
        return made

    def _masters(self, group: Sequence[ModelTensor], holdings: RankModel) -> list[Any]:
        half = [held for held in group if held.local.ref.dtype.name in HALF]
        made = [self._tensor(held, "param", holdings) for held in half]
        return [tensor for tensor in made if tensor is not None]

    def _tensor(self, held: ModelTensor, leaf: str, holdings: RankModel) -> Any:
        key = state_key(held.weight, leaf)
        wanted = self._content.tensors.get(key)
        if wanted is None:
            return None
        self.placed.add(key)
        return self._parts.tensor(wanted, held.weight, holdings.at)
