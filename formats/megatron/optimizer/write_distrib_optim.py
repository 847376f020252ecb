"""Lay out the flat buffers of Megatron's distributed optimizer for another layout.

Which parameters share a buffer, where each begins and where a bucket ends depends on the tensor,
pipeline and data-parallel ranks: `buffers` says it, as Megatron will find it when it
loads. Gaps between parameters are zero. The weights themselves become views of one buffer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.groups import BufferForm, JobOptimizer
from ftckpt.formats.megatron.rank_files.contents import ModelTensor, RankModel, state_key
from ftckpt.formats.megatron.rank_files.grid import Arguments, Coordinate, MegatronGrid
from ftckpt.formats.megatron.rank_files.parts import Parts
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor
from ftckpt.transfer.content import TargetTensor
from ftckpt.transfer.layout import Elements, Segment, Zeros

from .buffers import Buffer, Parameter, lay_out, padded
from .read_distrib_optim import Group, RankBuffers, groups_of, limits

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
