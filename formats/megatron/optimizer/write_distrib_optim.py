"""Lay out the flat buffers of Megatron's distributed optimizer for another layout.

Which parameters share a buffer, where each begins and where a bucket ends depends on the tensor,
pipeline and data-parallel ranks: `buffers` says it, as Megatron will find it when it
loads. Gaps between parameters are zero. The weights themselves become views of one buffer again.

Lay out the state of Megatron's optimizers that keep it beside the weights, in torch's form.

Numbers count a rank's parameters group by group, and the fp32 masters stand in lists of the same
order (see `per_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.groups import BufferForm, JobOptimizer, Optimizers
from ftckpt.formats.megatron.job.optimizer_tree import GROUPS, INNER, MASTERS, torchs
from ftckpt.formats.megatron.rank_files.grid import Arguments, Coordinate, MegatronGrid
from ftckpt.formats.megatron.rank_files.parts import ModelTensor, Parts, RankModel, state_key
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor
from ftckpt.transfer.content import TargetTensor
from ftckpt.transfer.layout import Elements, Segment, Zeros

from .per_rank import HALF
from .read_distrib_optim import (
    Buffer,
    Group,
    Parameter,
    RankBuffers,
    groups_of,
    lay_out,
    limits,
    padded,
)

_COALESCED = "buckets_coalesced"
UNPADDED = "numel_unpadded"
LIKE = "--like EXAMPLE lays it out as a checkpoint that the job itself saved"


class Buffers(NamedTuple):
    """The buffers of one rank."""

    holdings: RankModel  # what the rank holds
    # of each, the parameters of every buffer and where they lie
    optimizers: list[list[tuple[Group, Buffer]]]

    def held(self, group: Group) -> dict[str, ModelTensor]:
        """Return what the rank holds of the parameters of a buffer, by their names."""
        wanted = {(local.chunk, local.name) for local in group.locals}
        found = ((h.local.chunk, h.local.name) for h in self.holdings.parameters)
        return {
            held.local.name: held
            for held, place in zip(self.holdings.parameters, found, strict=True)
            if place in wanted
        }


class DistributedWriter:
    """Lays out each rank's `distrib_optim.pt`, and its weights as parts of buffers."""

    def __init__(
        self,
        parts: Parts,
        form: BufferForm,
        optimizer: JobOptimizer,
        grid: MegatronGrid,
        args: Arguments,
    ) -> None:
        """Take how tensors are cut, the form of buffers, and the job that is to load them."""
        self.placed: set[str] = set()  # keys of the tensors that were laid out
        self._parts = parts
        self._content = parts.content
        self._form = form
        self._grid = grid
        self._args = args
        self._optimizers, _, self._certain, self._starts = optimizer

    def buffers(self, holdings: RankModel) -> Buffers:
        """Return the buffers of one rank.

        Raises:
            UnsupportedError: the optimizers are chained in a way that is not known.
        """
        locals_ = [held.local for held in holdings.parameters]
        rank = RankBuffers(locals_, {}, holdings.at.pp, self._grid, self._args)
        of_optimizers = []
        for groups in groups_of(len(self._optimizers.trees), rank):
            of_optimizers.append([(group, self._layout(group, rank)) for group in groups])
        return Buffers(holdings, of_optimizers)

    def _layout(self, group: Group, rank: RankBuffers) -> Buffer:
        """Return where the parameters lie that share a buffer, as Megatron will put them.

        Raises:
            UnsupportedError: versions of Megatron put them in different places, or the example
                in another one than all of them.
        """
        parameters = [
            Parameter(p.name, p.ref.shape, p.ref.dtype, p.name in group.shared)
            for p in group.locals
        ]
        if self._starts is not None:
            wanted = {p.name: self._starts.get((rank.pp, p.chunk, p.name)) for p in group.locals}
            for limit in (*limits(group, rank), None):
                layout = lay_out(parameters, limit)
                if layout.starts() == wanted:
                    return layout
            what = "the buckets of the example lie otherwise than Megatron lays them out"
            raise UnsupportedError(what, tensor=group.locals[0].name)
        found = [lay_out(parameters, limit) for limit in limits(group, rank) or (None,)]
        if self._certain and any(other != found[0] for other in found):
            raise UnsupportedError(
                "where buckets of the distributed optimizer end is not certain: versions of"
                " Megatron differ in whether context-parallel ranks count",
                hint=LIKE,
            )
        return found[0]

    def weights(self, buffers: Buffers) -> dict[tuple[int, str], Tensor]:
        """Return the weights of one rank by chunk and name, as views of its buffers."""
        wide = self._args.flag("ddp_pad_buckets_for_high_nccl_busbw")
        found: dict[tuple[int, str], Tensor] = {}
        for group, layout in (one for groups in buffers.optimizers for one in groups):
            begins = (0, *accumulate(padded(b, group.ranks, wide=wide) for b in layout.buckets))
            starts = {name: begins[s.bucket] + s.start for name, s in layout.slots.items()}
            mine = buffers.held(group)
            wanted = {name: held.wanted for name, held in mine.items()}
            storage = self._flat(mine, wanted, starts, begins[-1], buffers.holdings.at)
            for name, held in mine.items():
                view = self._parts.view(held.wanted, held.weight, storage, starts[name])
                found[held.local.chunk, name] = view
        return found

    def tree(self, buffers: Buffers) -> Any:
        """Return what one rank's `distrib_optim.pt` holds.

        Raises:
            UnsupportedError: some parameters of a buffer have a state that others lack.
        """
        at = buffers.holdings.at
        trees: list[Any] = []
        for number, groups in enumerate(buffers.optimizers):
            # Only the first data-parallel rank of an optimizer writes: others of the dense one's
            # ranks can be first among those of the experts.
            if number < self._optimizers.dense and self._grid.first_rank(at) >= self._grid.tp:
                trees.append(None)
                continue
            one: dict[Any, Any] = {_COALESCED: True}
            for place, (group, layout) in enumerate(groups):
                dtype = group.locals[0].ref.dtype
                known = self._form.gradients
                types = (dtype, known.get(dtype) or next(iter(known.values())))
                one[place] = {types: self._buffer(group, layout, buffers)}
            trees.append(one)
        return trees if len(trees) > 1 or self._form.listed else trees[0]

    def _buffer(self, group: Group, layout: Buffer, buffers: Buffers) -> dict[Any, Any]:
        """Return what the file holds of one buffer."""
        starts, mine = layout.starts(), buffers.held(group)
        made: dict[Any, Any] = {}
        for leaf, value in self._form.leaves.items():
            if leaf == UNPADDED:
                made[leaf] = layout.unpadded
            elif not isinstance(value, TensorRef):
                made[leaf] = CopiedTree(value, self._form.storages)
            else:
                keys = {name: state_key(held.weight, str(leaf)) for name, held in mine.items()}
                wanted = {n: w for n, k in keys.items() if (w := self._content.tensors.get(k))}
                lacking = keys.keys() - wanted.keys()
                if wanted and lacking:
                    what = f"a buffer holds {leaf} of all its parameters, and there is none of "
                    raise UnsupportedError(what + mine[min(lacking)].weight)
                if wanted:
                    self.placed.update(keys.values())
                    at = buffers.holdings.at
                    storage = self._flat(mine, wanted, starts, layout.unpadded, at)
                    dtype, shape = next(iter(wanted.values())).dtype, (layout.unpadded,)
                    made[leaf] = Tensor(storage, dtype, shape, dense_strides(shape))
        return made

    def _flat(
        self,
        mine: Mapping[str, ModelTensor],
        wanted: Mapping[str, TargetTensor],
        starts: Mapping[str, int],
        length: int,
        at: Coordinate,
    ) -> Storage:
        """Return a flat tensor with each parameter's part at its start, and zeros between them.

        Raises:
            UnsupportedError: the parts are of several types.
        """
        dtypes = {one.dtype for one in wanted.values()}
        if len(dtypes) != 1:
            names = ", ".join(sorted(dtype.name for dtype in dtypes))
            raise UnsupportedError(f"a buffer cannot hold state of several types: {names}")
        (dtype,) = dtypes
        return Storage(list(self._segments(mine, wanted, starts, dtype.nbytes(length), at)))

    def _segments(
        self,
        mine: Mapping[str, ModelTensor],
        wanted: Mapping[str, TargetTensor],
        starts: Mapping[str, int],
        nbytes: int,
        at: Coordinate,
    ) -> Iterator[Segment]:
        end = 0
        for name, start in sorted(starts.items(), key=lambda item: item[1]):
            part = Elements.all(self._parts.shard(wanted[name], mine[name].weight, at))
            begin = wanted[name].dtype.nbytes(start)
            if begin > end:
                yield Zeros(begin - end)
            yield part
            end = begin + part.nbytes
        if nbytes > end:
            yield Zeros(nbytes - end)


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
