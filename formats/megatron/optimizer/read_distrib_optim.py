"""The state of Megatron's distributed optimizer (`distrib_optim.pt`): flat buffers to parameters.

    {"buckets_coalesced": True, 0: {(bfloat16, float32): {"param": …, "exp_avg": …, …}}, 1: …}

Buffers are numbered chunk by chunk; `buffers` builds their layout again. Experts may have
an optimizer of their own, and then the file is a list, with None for what another rank's file
holds. A layout is accepted only if it has as many elements as the file, and puts each weight where
`model_optim_rng.pt` shows that it lay: with this optimizer the weights are views of one buffer,
and torch.save keeps their places in it.

Source: `DistributedOptimizer.get_parameter_state_dp_zero` and `ChainedOptimizer.
save_parameter_state` in megatron/core/optimizer; `wrap_model_chunks_with_ddp` and
`resolve_ddp_bucket_size` in megatron/training/training.py.

Locate a parameter in the flat buffers of Megatron's distributed optimizer.

Megatron lays the parameters of one model chunk on one tensor-parallel rank into a flat buffer for
each element type, last registered first, cuts the buffer into buckets, and pads each bucket so
that data-parallel ranks own equal parts of it. Checkpoints hold the buffers without the padding at
the ends of buckets and without names, so the layout must be built again:

- each parameter starts at a multiple of 64 elements;
- a bucket closes when it holds `limit` elements or more; an embedding that two pipeline stages
  share has a bucket of its own;
- a closed bucket is padded to a multiple of lcm(dp, 128), so the next one starts aligned.

Parameters of experts have buffers of their own, and an optimizer and a data-parallel group of
their own: build them apart. A checkpoint numbers the buffers of one optimizer model chunk by model
chunk, inside a chunk in the order of `by_dtype`.

Source: `_ParamAndGradBuffer` in megatron/core/distributed/param_and_grad_buffer.py (core 0.16);
`DistributedOptimizer._compute_per_buffer_param_layout` since core 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import lcm, prod
from typing import Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.megatron.rank_files.grid import Arguments, MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor, shared_over_stages
from ftckpt.formats.torch_files.values import TensorRef, is_dense

from .per_rank import OptimizerTensor, Unmapped

ALIGNMENT = 64
_BUCKET_MULTIPLE = 128
# With `--ddp-pad-buckets-for-high-nccl-busbw`.
_WIDE_BUCKET_MULTIPLE = 1 << 16


class Parameter(NamedTuple):
    """One parameter as its tensor-parallel rank holds it."""

    name: str  # any name; it is the key in `Buffer.slots`
    shape: tuple[int, ...]  # on its tensor-parallel rank
    dtype: DType  # of the weight, which decides the buffer
    # whether it is an embedding that the first and the last pipeline stage share, each with a copy
    # (tied embeddings and more than one stage)
    shared: bool = False


class Slot(NamedTuple):
    """The place of one parameter."""

    bucket: int  # number of its bucket in the buffer
    start: int  # its first element, counted from the bucket's first
    length: int  # its elements


class Buffer(NamedTuple):
    """The layout of one buffer."""

    slots: Mapping[str, Slot]  # by parameter name, in the order of the buffer
    buckets: tuple[int, ...]  # elements of each bucket without the padding at its end

    @property
    def unpadded(self) -> int:
        """Elements of all buckets without the padding at their ends (`numel_unpadded`)."""
        return sum(self.buckets)

    def starts(self) -> dict[str, int]:
        """Return each parameter's first element in the unpadded buckets, one after the other.

        This is how `distrib_optim.pt` stores them since buckets are coalesced (2024-02).
        """
        before = (0, *accumulate(self.buckets))
        return {name: before[slot.bucket] + slot.start for name, slot in self.slots.items()}


def default_limit(dp: int) -> int:
    """Return the elements at which a bucket closes where the run set no `--ddp-bucket-size`.

    It holds only with `--overlap-grad-reduce`, on the first pipeline stage and there for the first
    model chunk; anywhere else a buffer is one bucket.

    Args:
        dp: number of data-parallel ranks.
    """
    return max(40_000_000, 1_000_000 * dp)


def padded(numel: int, dp: int, *, wide: bool = False) -> int:
    """Return the elements of a bucket with the padding at its end (`per_bucket_numel`).

    Args:
        numel: without it.
        dp: number of ranks that share the bucket, context-parallel ones included.
        wide: whether the run padded for NCCL's bandwidth.
    """
    multiple = lcm(dp, _WIDE_BUCKET_MULTIPLE if wide else _BUCKET_MULTIPLE)
    return _up(numel, multiple)


def by_dtype(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Split the parameters of a model chunk into those of each of its buffers, in their order."""
    groups: dict[DType, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def lay_out(parameters: Sequence[Parameter], limit: int | Sequence[int] | None = None) -> Buffer:
    """Return the layout of one buffer.

    Args:
        parameters: all of the buffer, in the order of registration.
        limit: elements at which a bucket closes: one number for all buckets; or one a bucket,
            where the checkpoint records their sizes; or None for one bucket. Recorded sizes that
            do not fit show in `Buffer.buckets`, which then differs from them.
    """
    slots: dict[str, Slot] = {}
    buckets: list[int] = []
    end = 0  # of the open bucket, which starts aligned: aligned inside is aligned in the buffer
    empty = True
    for parameter in reversed(parameters):
        start = _up(end, ALIGNMENT)
        if parameter.shared and not empty:
            buckets.append(start)
            start = 0
        length = prod(parameter.shape)
        slots[parameter.name] = Slot(len(buckets), start, length)
        end, empty = start + length, False
        if parameter.shared or end >= _limit(limit, len(buckets), end + 1):
            buckets.append(end)
            end, empty = 0, True
    if not empty:
        buckets.append(end)
    return Buffer(slots, tuple(buckets))


def _limit(limit: int | Sequence[int] | None, bucket: int, beyond: int) -> int:
    """Return the elements at which `bucket` closes; `beyond` where nothing closes it."""
    if limit is None:
        return beyond
    if isinstance(limit, int):
        return limit
    return limit[bucket] if bucket < len(limit) else beyond


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class RankBuffers(NamedTuple):
    """What a rank's buffers hold."""

    parameters: Sequence[LocalTensor]  # of the rank, in order
    numels: Mapping[str, int]  # by key of a storage of `model_optim_rng.pt`: its elements
    pp: int  # the pipeline stage
    grid: MegatronGrid  # sizes of the groups of ranks
    args: Arguments  # of the job


class Group(NamedTuple):
    """The parameters of one buffer."""

    locals: Sequence[LocalTensor]  # in order
    shared: frozenset[str]  # names of those that another pipeline stage has a copy of
    ranks: int  # how many data-parallel ranks share the buffer


def distributed_states(tree: Any, held: RankBuffers) -> Iterator[OptimizerTensor]:
    """Yield the state of the parameters in one `distrib_optim.pt`.

    Raises:
        Unmapped: no layout that the arguments allow fits the buffers.
    """
    optimizers = tree if isinstance(tree, list) else [tree]
    for number, (one, groups) in enumerate(
        zip(optimizers, groups_of(len(optimizers), held), strict=True)
    ):
        if one is not None:
            label = f"{number}." if isinstance(tree, list) else ""
            yield from _optimizer(one, groups, held, label)


def bucket_starts(tree: Any, held: RankBuffers) -> dict[tuple[int, str], int]:
    """Return by chunk and name where each parameter begins in its buffer of one file.

    Raises:
        Unmapped: see `distributed_states`.
    """
    found: dict[tuple[int, str], int] = {}
    for state in distributed_states(tree, held):
        found.setdefault((state.of.chunk, state.of.name), state.held.storage_offset)
    return found


def groups_of(count: int, held: RankBuffers) -> list[list[Group]]:
    """Return the buffers of each optimizer: experts come last, the first chunk may be apart."""
    dense = _groups(held, experts=False)
    apart = [_groups(held, experts=True)] if held.grid.experts_apart and count > 1 else []
    if count - len(apart) == 1:
        return [dense, *apart]
    if count - len(apart) == 2:  # --overlap-param-gather-with-optimizer-step
        first = [group for group in dense if not group.locals[0].chunk]
        return [first, dense[len(first) :], *apart]
    raise Unmapped(f"it chains {count} optimizers")


def _groups(held: RankBuffers, *, experts: bool) -> list[Group]:
    """Return the buffers of the dense optimizer, or of the experts', in the order of the file."""
    apart = held.grid.experts_apart
    tied = held.grid.pp > 1 and not held.args.flag("untie_embeddings_and_output_weights")
    instances = held.args.count("num_distributed_optimizer_instances") or 1
    shares = tied or (held.grid.pp > 1 and held.args.count("mtp_num_layers") > 0)
    found = []
    for chunk in sorted({local.chunk for local in held.parameters}):
        own = [p for p in held.parameters if p.chunk == chunk]
        first = Stage(held.pp, chunk) == Stage(0, 0)
        shared = frozenset(shared_over_stages(own, first=first, tied=tied) if shares else ())
        mine = [p for p in own if (apart and p.expert) == experts]
        by_name = {local.name: local for local in mine}
        for group in by_dtype(Parameter(p.name, p.ref.shape, p.ref.dtype) for p in mine):
            ranks = held.grid.expert_ranks if experts else held.grid.dense_ranks
            sharing = max(1, ranks // instances)
            found.append(Group([by_name[p.name] for p in group], shared, sharing))
    return found


def _optimizer(
    tree: Any, groups: Sequence[Group], held: RankBuffers, label: str
) -> Iterator[OptimizerTensor]:
    if not isinstance(tree, dict) or tree.get("buckets_coalesced") is not True:
        raise Unmapped("its buckets are stored apart, as Megatron did before 2024")
    buffers = {key: value for key, value in tree.items() if type(key) is int}
    if sorted(buffers) != list(range(len(groups))):
        raise Unmapped(f"it has {len(buffers)} buffers where the parameters need {len(groups)}")
    for number, group in enumerate(groups):
        by_type = buffers[number]
        if not isinstance(by_type, dict) or len(by_type) != 1:
            raise Unmapped(f"buffer {number} is not of one type")
        ((types, tensors),) = by_type.items()
        first = types[0] if isinstance(types, tuple) and types else None
        if first is not group.locals[0].ref.dtype or not isinstance(tensors, dict):
            raise Unmapped(f"buffer {number} is of another type than its parameters")
        yield from _buffer(tensors, group, held, f"{label}{number}")


def _buffer(
    tensors: Mapping[Any, Any], group: Group, held: RankBuffers, label: str
) -> Iterator[OptimizerTensor]:
    flats = {key: value for key, value in tensors.items() if isinstance(value, TensorRef)}
    numels = {ref.numel for ref in flats.values()}
    if len(numels) != 1 or not all(is_dense(ref.shape, ref.strides) for ref in flats.values()):
        raise Unmapped(f"the tensors of buffer {label} are not of one length")
    (numel,) = numels
    if tensors.get("numel_unpadded", numel) != numel:
        raise Unmapped(f"buffer {label} has another length than it records")
    starts = _layout(group, held, numel).starts()
    by_name = {local.name: local for local in group.locals}
    for leaf, ref in flats.items():
        for name, start in starts.items():
            local = by_name[name]
            part = ref._replace(
                storage_offset=ref.storage_offset + start,
                shape=local.ref.shape,
                strides=dense_strides(local.ref.shape),
            )
            yield OptimizerTensor(local, str(leaf), part, f"{label}.{leaf}")


def _layout(group: Group, held: RankBuffers, unpadded: int) -> Buffer:
    """Return the one layout that fits the file; by the arguments first, then by one bucket."""
    own = [
        Parameter(p.name, p.ref.shape, p.ref.dtype, p.name in group.shared) for p in group.locals
    ]
    for limit in dict.fromkeys((*limits(group, held), None)):
        layout = lay_out(own, limit)
        if layout.unpadded == unpadded and _agrees(layout, group, held):
            return layout
    raise Unmapped(
        f"no layout of its {len(own)} parameters has the {unpadded} elements of a buffer and the"
        " places of the weights in memory"
    )


def limits(group: Group, held: RankBuffers) -> tuple[int, ...]:
    """Return at how many elements the job may have closed a bucket; none for one bucket."""
    args, grid = held.args, held.grid
    whole = args.flag("overlap_param_gather_with_optimizer_step")
    if not args.flag("overlap_grad_reduce") or held.pp > 0 or group.locals[0].chunk or whole:
        return ()
    buckets = args.count("ddp_num_buckets")
    if buckets:
        return (sum(p.ref.numel for p in held.parameters) // buckets,)
    size = args.get("ddp_bucket_size")
    if type(size) is int and size > 0:
        return (size,)
    # Versions differ in whether context-parallel ranks count.
    return default_limit(grid.dense_ranks), default_limit(grid.dp or 1)


def _agrees(layout: Buffer, group: Group, held: RankBuffers) -> bool:
    """Return whether the weights lie in memory as the layout says, where the file shows it."""
    keys = {local.ref.key for local in group.locals}
    if len(keys) > 1 or len(group.locals) == 1:
        return True  # each weight was saved on its own, which shows nothing
    wide = held.args.flag("ddp_pad_buckets_for_high_nccl_busbw")
    begins, at = [], 0
    for bucket in layout.buckets:
        begins.append(at)
        at += padded(bucket, group.ranks, wide=wide)
    places = {local.name: local.ref.storage_offset for local in group.locals}
    return held.numels.get(keys.pop()) == at and all(
        places[name] == begins[slot.bucket] + slot.start for name, slot in layout.slots.items()
    )
