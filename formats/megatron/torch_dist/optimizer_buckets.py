"""Optimizer state in Megatron's own buckets (`dp_reshardable`), given back to its parameters.

One group of data-parallel ranks (one tensor rank of one pipeline stage, tensor ranks first) stores
each bucket of its buffers as a flat tensor for each kind of state, cut where a parameter begins or
ends. Experts have an optimizer and groups of their own, where their ranks are others:

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(PARAM, GRAD).bucket_idx_K.exp_avg
    chained_1.optimizer.distributed.dp_group_idx_G. …

No name stands there. The layout is built again from the model's own tensors: in what order they
are registered, which stage holds which layers, what part of each a rank has. A reconstruction
counts only if it is the only one that gives every bucket its recorded size and every parameter its
own cuts; otherwise the buckets stay as they are stored.

Source: `DistributedOptimizer.sharded_param_state_dp_reshardable` in
megatron/core/optimizer/distrib_optimizer.py, `get_megatron_optimizer` beside it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from ftckpt.checkpoint import Box, Kind, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.registration import expert_of, registrations
from ftckpt.formats.torch_files.lazy_pieces import LazyPieces

from .bucket_solver import Attempt, Parts
from .chunks import Bucket, BucketPieces, Buckets, Owned
from .names import state_name

_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})"
    r"\.gbuf_idx_(?P<buffer>\d{1,4})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)"
    r"\.bucket_idx_(?P<bucket>\d{1,7})\.(?P<state>\w+)"
)

_Groups = Sequence[Mapping[int, Buckets]]


def is_bucket(info: TensorInfo) -> bool:
    """Return whether a stored tensor is a bucket of optimizer state."""
    return _BUCKET.fullmatch(info.stored_name) is not None


def unbucketed(
    stored: Iterable[TensorInfo], model: Iterable[TensorInfo], topology: Topology
) -> dict[str, TensorInfo]:
    """Return the optimizer state of each parameter by key, found in buckets.

    Args:
        stored: the buckets, as stored.
        model: the logical tensors of the model.
        topology: what is known of the ranks.

    Raises:
        UnsupportedError: the layout cannot be built again; the message says why.
    """
    tp, pp = topology.tp, topology.pp
    if tp is None or pp is None:
        raise UnsupportedError("how many tensor ranks and stages there were is not recorded")
    optimizers, dtype = _optimizers(stored)
    parameters = {info.name: info for info in model if info.kind is Kind.PARAM}
    dense, experts = parameters, {}
    if len(optimizers) == 2:
        experts = {n: i for n, i in parameters.items() if expert_of(n) is not None}
        dense = {n: i for n, i in parameters.items() if n not in experts}
    elif len(optimizers) != 1:
        raise UnsupportedError(f"there are {len(optimizers)} optimizers")
    if not parameters:
        raise UnsupportedError("the model is not in the checkpoint")
    teams = [(optimizers[0], _tensor_ranks(dense, tp))]
    if experts:
        ranks = len(optimizers[1]) // pp
        teams.append((optimizers[1], _expert_ranks(experts, ranks, topology.ep)))
    elif len(optimizers) == 2:
        raise UnsupportedError("there are two optimizers, and no experts")
    owned: dict[str, list[Owned]] = {}
    for groups, ranks_ in teams:
        if len(groups) != pp * len(ranks_):
            raise UnsupportedError(f"{len(groups)} groups of buckets do not fit the ranks")
        owned |= _only(groups, ranks_, list(parameters), pp, dtype)
    return {info.key: info for info in _tensors(parameters, owned)}


def _optimizers(stored: Iterable[TensorInfo]) -> tuple[list[_Groups], DType]:
    """Return the buckets of each optimizer, in their order: group, buffer, bucket, state."""
    found: dict[int, dict[int, dict[int, dict[int, dict[str, Bucket]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    )
    dtypes: set[str] = set()
    states: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for info in stored:
        match = _BUCKET.fullmatch(info.stored_name)
        assert match is not None
        dtypes.add(match["dtype"])
        bucket = Bucket(info)
        if len(info.shape) != 1 or not bucket.cuts:
            raise UnsupportedError(f"{info.stored_name} is not tiled by its chunks")
        place = tuple(int(match[part] or 0) for part in ("chain", "group", "buffer", "bucket"))
        chain, group, buffer, number = place
        found[chain][group][buffer][number][match["state"]] = bucket
        states[place].add(match["state"])
    if len(set(map(frozenset, states.values()))) > 1:
        raise UnsupportedError("buckets hold different kinds of state")
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        raise UnsupportedError(f"parameters are stored as {' and '.join(sorted(dtypes))}")
    optimizers: list[_Groups] = []
    for _, groups in sorted(found.items()):
        if sorted(groups) != list(range(len(groups))):
            raise UnsupportedError("a group of buckets is missing")
        optimizers.append([groups[number] for number in range(len(groups))])
    return optimizers, DTYPES[dtypes.pop()]


def _only(
    groups: _Groups, ranks: Sequence[Parts], names: Sequence[str], pp: int, dtype: DType
) -> dict[str, list[Owned]]:
    """Return what each rank has of each parameter, by the one order that fits."""
    found: list[dict[str, list[Owned]]] = []
    held = {name for parts in ranks for name in parts}
    for order in registrations(names):
        own = order.of(held)
        owned = Attempt(groups, ranks, own, pp, dtype).owned()
        if owned is not None and owned not in found:
            found.append(owned)
    if len(found) != 1:
        raise UnsupportedError(f"{'two orders' if found else 'no order'} of the parameters fit")
    return found[0]


def _tensor_ranks(parameters: Mapping[str, TensorInfo], tp: int) -> list[Parts]:
    parts = {name: _parts(info, tp) for name, info in parameters.items()}
    return [{name: boxes[rank] for name, boxes in parts.items()} for rank in range(tp)]


def _expert_ranks(experts: Mapping[str, TensorInfo], ranks: int, ep: int | None) -> list[Parts]:
    """Return the parts of each rank of a stage: its experts, and its share of each.

    Tensor ranks come first. How many there are shows in the model's chunks: the second matrix of an
    expert is divided into one block for each.
    """
    etp = max((len(i.pieces) for n, i in experts.items() if n.endswith("fc2.weight")), default=1)
    count = 1 + max(number for n in experts if (number := expert_of(n)) is not None)
    size, rest = divmod(ranks, etp)
    if rest or not size or count % size or ep not in (None, size):
        raise UnsupportedError(f"{count} experts do not fit {ranks} ranks")
    share = count // size
    parts = _tensor_ranks(experts, etp)
    return [
        {n: boxes for n, boxes in parts[t].items() if (expert_of(n) or 0) // share == e}
        for e in range(size)
        for t in range(etp)
    ]


def _parts(info: TensorInfo, tp: int) -> list[tuple[Box, ...]]:
    """Return the boxes of each tensor rank's own part, in the order of that part.

    The model's own chunks say how it is divided: not at all, into a block for each rank, or (gate
    and up of a gated MLP) into two.

    Raises:
        UnsupportedError: they say something else.
    """
    assert isinstance(info.pieces, LazyPieces)
    boxes = sorted({info.pieces.box(index) for index in range(len(info.pieces))})
    if boxes == [Box.whole(info.shape)]:
        return [tuple(boxes)] * tp
    even = len({box.sizes for box in boxes}) == 1
    if even and sum(box.volume for box in boxes) == prod(info.shape):
        if len(boxes) == tp:
            return [(box,) for box in boxes]
        if len(boxes) == 2 * tp and all(box.sizes[1:] == info.shape[1:] for box in boxes):
            return [(boxes[rank], boxes[tp + rank]) for rank in range(tp)]
    raise UnsupportedError(f"the chunks of {info.name} do not show what each rank has of it")


def _tensors(
    parameters: Mapping[str, TensorInfo], owned: Mapping[str, Sequence[Owned]]
) -> Iterator[TensorInfo]:
    for name, parts in owned.items():
        for state, bucket in parts[0].buckets[parts[0].slot.bucket].items():
            kind = KINDS.get(state, Kind.OTHER)
            shown = name if kind is not Kind.OTHER else state_name(name, state)
            pieces = BucketPieces(state, parts)
            shape = parameters[name].shape
            yield TensorInfo("optimizer", shown, kind, shape, bucket.info.dtype, pieces)
