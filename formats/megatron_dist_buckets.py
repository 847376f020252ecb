"""Optimizer state in Megatron's own buckets (`dp_reshardable`), given back to its parameters.

One group of data-parallel ranks (one tensor and pipeline rank, tensor ranks first) stores each
bucket of its buffers as a flat tensor for each kind of state, cut where a parameter begins or ends:

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(PARAM, GRAD).bucket_idx_K.exp_avg

No name stands there. The layout is built again from the model's own tensors: which stage holds
which layers, in what order a layer registers its parameters, what part of each a tensor rank has.
A reconstruction counts only if it is the only one that gives every bucket its recorded size and
every parameter its own cuts; otherwise the buckets stay as they are stored, and a note says so.

Source: `DistributedOptimizer.sharded_param_state_dp_reshardable` in
megatron/core/optimizer/distrib_optimizer.py; orders of registration: `TransformerLayer`,
`SelfAttention`, `MLP`, `TransformerBlock` and `GPTModel` in megatron/core.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.dtypes import DTYPES, DType
from ftckpt.errors import UnsupportedError

from .dcp_tensors import LazyPieces
from .megatron_buffers import Parameter, Slot, lay_out

_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})"
    r"\.gbuf_idx_(?P<buffer>\d{1,4})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)"
    r"\.bucket_idx_(?P<bucket>\d{1,7})\.(?P<state>\w+)"
)
_KINDS = {"param": Kind.MASTER, "exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_NOWHERE = Extent("", 0, 0)
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"

# What a model registers before its layers, in a layer, and after them. The two implementations of
# a layer differ only in where the first norm is; on disk both have Transformer Engine's names.
_BEFORE = (_EMBEDDING, "embedding.position_embeddings.weight")
_AFTER = (
    "decoder.final_layernorm.weight", "decoder.final_layernorm.bias",
    _OUTPUT, "output_layer.bias",
)  # fmt: skip
_NORM = (
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias",
)  # fmt: skip
_PROJECTION = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_REST = (
    "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight", "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight", "mlp.linear_fc2.bias",
)  # fmt: skip
_ORDERS = ((*_NORM, *_PROJECTION, *_REST), (*_PROJECTION, *_NORM, *_REST))


class Bucket:
    """One state of one bucket: a flat tensor, whose chunks are cut at its parameters."""

    def __init__(self, info: TensorInfo) -> None:
        """Keep a stored tensor."""
        assert isinstance(info.pieces, LazyPieces)
        self.info = info
        self.pieces = info.pieces

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """First element, end and index of each chunk, in the order of the bucket."""
        boxes = map(self.pieces.box, range(len(self.pieces)))
        return sorted((o[0], o[0] + s[0], index) for index, (o, s) in enumerate(boxes))

    @cached_property
    def cuts(self) -> frozenset[int] | None:
        """Where chunks begin and end; None where they do not tile the bucket."""
        ends = [0, *(stop for _, stop, _ in self.chunks)]
        if ends[:-1] != [start for start, _, _ in self.chunks] or ends[-1] != self.numel:
            return None
        return frozenset(ends)

    @property
    def numel(self) -> int:
        """Elements of the bucket, without the padding at its end."""
        return self.info.shape[0]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield index, first element, and the part of [start, stop) of each chunk that has some."""
        at = max(bisect_right(self.chunks, (start, self.numel + 1, 0)) - 1, 0)
        for first, end, index in self.chunks[at:]:
            if first >= stop:
                break
            if end > start:
                yield index, first, max(start, first), min(stop, end)


# Buffer -> bucket -> state -> what is stored.
_Group = Mapping[int, Mapping[int, Mapping[str, Bucket]]]


class _Owned(NamedTuple):
    """One rank's part of one parameter: the boxes of its own tensor in order, and its slot."""

    boxes: tuple[Box, ...]
    buckets: Mapping[int, Mapping[str, Bucket]]
    slot: Slot
    replica: int


def is_bucket(info: TensorInfo) -> bool:
    """Return whether a stored tensor is a bucket of optimizer state."""
    return _BUCKET.fullmatch(info.stored_name) is not None


def unbucketed(
    stored: Iterable[TensorInfo], model: Iterable[TensorInfo], tp: int | None, pp: int | None
) -> dict[str, TensorInfo]:
    """Return the optimizer state of each parameter by key, found in buckets.

    Args:
        stored: the buckets, as stored.
        model: the logical tensors of the model.
        tp: number of tensor-parallel ranks, where known.
        pp: number of pipeline stages, where known.

    Raises:
        UnsupportedError: the layout cannot be built again; the message says why.
    """
    groups, dtype = _groups(stored)
    if tp is None or pp is None:
        raise _unknown("how many tensor and pipeline ranks there were is not recorded")
    if sorted(groups) != list(range(tp * pp)):
        raise _unknown(f"there are {len(groups)} groups of buckets for {tp * pp} ranks")
    parameters = {info.name: info for info in model if info.kind is Kind.PARAM}
    layers = _layers(parameters)
    found: list[dict[str, list[_Owned]]] = []
    for order in _ORDERS:
        attempt = _Attempt(groups, dtype, parameters, layers, order, tp, pp)
        owned = attempt.owned()
        if owned is not None and owned not in found:
            found.append(owned)
    if len(found) != 1:
        what = "no order of the parameters fits" if not found else "two orders of parameters fit"
        raise _unknown(f"{what} the buckets")
    return {info.key: info for info in _tensors(parameters, found[0])}


def _unknown(why: str) -> UnsupportedError:
    return UnsupportedError(f"the optimizer's buckets are not given to parameters: {why}")


def _groups(stored: Iterable[TensorInfo]) -> tuple[dict[int, _Group], DType]:
    groups: dict[int, dict[int, dict[int, dict[str, Bucket]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    chains, dtypes = set(), set()
    for info in stored:
        match = _BUCKET.fullmatch(info.stored_name)
        assert match is not None
        chains.add(match["chain"])
        dtypes.add(match["dtype"])
        bucket = Bucket(info)
        if len(info.shape) != 1 or bucket.cuts is None:
            raise _unknown(f"{info.stored_name} is not tiled by its chunks")
        place = groups[int(match["group"])][int(match["buffer"])][int(match["bucket"])]
        place[match["state"]] = bucket
    states = {
        frozenset(bucket)
        for group in groups.values()
        for buffer in group.values()
        for bucket in buffer.values()
    }
    if len(states) > 1:
        raise _unknown("buckets hold different kinds of state")
    if len(chains) > 1:
        raise _unknown("experts have an optimizer of their own")
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        raise _unknown(f"parameters are {' and '.join(sorted(dtypes))}")
    return dict(groups), DTYPES[dtypes.pop()]


def _layers(parameters: Mapping[str, TensorInfo]) -> list[dict[str, TensorInfo]]:
    """Return the parameters of each layer, by their names in it.

    Raises:
        UnsupportedError: the place of a parameter in the order of registration is not known.
    """
    layers: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in parameters.items():
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in _ORDERS[0]:
            layers[int(match[1])][match[2]] = info
        elif name not in _BEFORE and name not in _AFTER:
            raise _unknown(f"where {name} stands among the parameters is not known")
    if sorted(layers) != list(range(len(layers))):
        raise _unknown("the model lacks a layer")
    return [layers[number] for number in range(len(layers))]


class _Attempt:
    """One way to lay the parameters into the buckets."""

    def __init__(
        self,
        groups: Mapping[int, _Group],
        dtype: DType,
        parameters: Mapping[str, TensorInfo],
        layers: Sequence[Mapping[str, TensorInfo]],
        order: Sequence[str],
        tp: int,
        pp: int,
    ) -> None:
        self.groups, self.dtype, self.tp, self.pp = groups, dtype, tp, pp
        self.before = [parameters[n] for n in _BEFORE if n in parameters]
        self.after = [parameters[n] for n in _AFTER if n in parameters]
        self.layers = [[layer[n] for n in order if n in layer] for layer in layers]
        # With tied embeddings the last of several stages has a copy in place of an output layer.
        self.shared = pp > 1 and _OUTPUT not in parameters and _EMBEDDING in parameters
        if self.shared:
            self.after.append(parameters[_EMBEDDING])
        self.parts = {i.name: _parts(i, tp) for i in parameters.values()}

    def owned(self) -> dict[str, list[_Owned]] | None:
        """Return what each rank holds of each parameter, by name; None where something is amiss.

        Chunks of the model are numbered as the stages run through them: all stages, then all again.
        """
        chunks = len(self.groups[0])
        if any(sorted(group) != list(range(chunks)) for group in self.groups.values()):
            return None
        found: dict[str, list[_Owned]] = defaultdict(list)
        seen: Counter[tuple[str, Box]] = Counter()
        at = 0
        for chunk in range(chunks):
            for stage in range(self.pp):
                first = chunk == stage == 0
                last = (chunk, stage) == (chunks - 1, self.pp - 1)
                taken = self._take(chunk, stage, at, first, last)
                if taken is None:
                    return None
                count, held, slots = taken
                at += count
                for rank in range(self.tp):
                    buckets = self.groups[stage * self.tp + rank][chunk]
                    for info in held:
                        boxes = self.parts[info.name][rank]
                        replica = seen[info.name, boxes[0]]
                        seen[info.name, boxes[0]] += 1
                        slot = slots[info.name]
                        found[info.name].append(_Owned(boxes, buckets, slot, replica))
        return dict(found) if at == len(self.layers) else None

    def _take(
        self, chunk: int, stage: int, at: int, first: bool, last: bool
    ) -> tuple[int, list[TensorInfo], Mapping[str, Slot]] | None:
        """Return how many layers from `at` on fill the buckets of a stage, and all it holds."""
        ranks = [self.groups[stage * self.tp + rank][chunk] for rank in range(self.tp)]
        sizes = [tuple(_size(b[k]) for k in sorted(b)) for b in ranks]
        if len(set(sizes)) > 1 or any(sorted(b) != list(range(len(b))) for b in ranks):
            return None
        ends = [self.before] if first else []
        ends += [self.after] if last else []
        fixed = sum(self._numel(info) for part in ends for info in part)
        bare = [sum(map(self._numel, layer)) for layer in self.layers[at:]]
        for count, numel in enumerate(accumulate(bare, initial=fixed)):
            if numel > sum(sizes[0]):
                return None
            held = [info for layer in self.layers[at : at + count] for info in layer]
            held = [*(self.before if first else ()), *held, *(self.after if last else ())]
            # Between two parameters lie at most 63 elements, and between two buckets.
            if not held or sum(sizes[0]) - numel > 64 * len(held):
                continue
            laid = lay_out([self._parameter(info) for info in held], sizes[0])
            if laid.buckets == sizes[0] and all(_fits(laid.slots, b) for b in ranks):
                return count, held, laid.slots
        return None

    def _numel(self, info: TensorInfo) -> int:
        return sum(box.volume for box in self.parts[info.name][0])

    def _parameter(self, info: TensorInfo) -> Parameter:
        shared = self.shared and info.name == _EMBEDDING
        return Parameter(info.name, (self._numel(info),), self.dtype, shared)


def _size(states: Mapping[str, Bucket]) -> int:
    """Return the size of a bucket; -1 where its states disagree."""
    sizes = {bucket.numel for bucket in states.values()}
    return sizes.pop() if len(sizes) == 1 else -1


def _fits(slots: Mapping[str, Slot], buckets: Mapping[int, Mapping[str, Bucket]]) -> bool:
    """Say whether chunks begin and end where parameters do."""
    return all(
        bucket.cuts is not None and {slot.start, slot.start + slot.length} <= bucket.cuts
        for slot in slots.values()
        for bucket in buckets[slot.bucket].values()
    )


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
    blocks = len(boxes)
    uneven = len({box.sizes for box in boxes}) != 1
    if uneven or blocks not in (tp, 2 * tp) or sum(b.volume for b in boxes) != prod(info.shape):
        raise _unknown(f"the chunks of {info.name} do not show what each rank holds")
    if blocks == tp:
        return [(box,) for box in boxes]
    if any(box.sizes[1:] != info.shape[1:] for box in boxes):
        raise _unknown(f"gate and up of {info.name} are not apart on the first axis")
    return [(boxes[rank], boxes[tp + rank]) for rank in range(tp)]


def _tensors(
    parameters: Mapping[str, TensorInfo], owned: Mapping[str, Sequence[_Owned]]
) -> Iterator[TensorInfo]:
    for name, parts in owned.items():
        for state, bucket in parts[0].buckets[parts[0].slot.bucket].items():
            kind = _KINDS.get(state, Kind.OTHER)
            shown = name if kind is not Kind.OTHER else f"{state}.{name}"
            shape, dtype = parameters[name].shape, bucket.info.dtype
            pieces = BucketPieces(state, parts)
            yield TensorInfo("optimizer", shown, kind, shape, dtype, pieces)


class BucketPieces(LazyPieces):
    """The pieces of one parameter's state: ranges of chunks of buckets."""

    __slots__ = ("_found", "_owned", "_state")

    def __init__(self, state: str, owned: Sequence[_Owned]) -> None:
        self._state = state
        self._owned = owned
        self._found: list[tuple[Bucket, int, Piece]] | None = None

    def _ranges(self) -> list[tuple[Bucket, int, Piece]]:
        """Return bucket, chunk and all of the piece but its place in a file."""
        if self._found is None:
            self._found = []
            for boxes, buckets, slot, replica in self._owned:
                bucket = buckets[slot.bucket][self._state]
                start = slot.start
                for box in boxes:
                    for index, first, low, high in bucket.within(start, start + box.volume):
                        flat = (low - start, high - start)
                        piece = Piece(
                            box, _NOWHERE, flat, replica=replica, packed=True, first=low - first
                        )
                        self._found.append((bucket, index, piece))
                    start += box.volume
        return self._found

    def __len__(self) -> int:
        return len(self._ranges())

    def box(self, index: int) -> Box:
        """Return the box of the rank's part that one piece is a range of."""
        return self._ranges()[index][2].box

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        bucket, chunk, piece = self._ranges()[index]
        stored = bucket.pieces.piece(chunk)
        return piece._replace(extent=stored.extent, rank=stored.rank)
