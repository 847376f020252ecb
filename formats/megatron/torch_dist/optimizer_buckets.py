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

Buckets of Megatron's distributed optimizer as a DCP store holds them, and pieces of them.

Find which rank of a stage holds which parameters in its buckets.

A group of data-parallel ranks holds the optimizer state of one pipeline stage as one tensor rank
(or, for experts, one expert and tensor rank) has it. How many layers a stage has is not taken from
arguments: that number is the one whose parameters fill the buckets to the last element.
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

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.registration import (
    EMBEDDING,
    OUTPUT,
    Registration,
    expert_of,
    registrations,
)
from ftckpt.formats.megatron.optimizer.read_distrib_optim import ALIGNMENT, Parameter, Slot, lay_out
from ftckpt.formats.torch_files.dtensor import LazyPieces

from .names import state_name

_NOWHERE = Extent("", 0, 0)


class Bucket:
    """One kind of state of one bucket: a flat tensor, whose chunks are cut at its parameters."""

    def __init__(self, info: TensorInfo) -> None:
        """Keep a stored tensor of one dimension."""
        assert isinstance(info.pieces, LazyPieces)
        self.info = info
        self.pieces = info.pieces

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """First element, end and index of each chunk, in the order of the bucket."""
        boxes = map(self.pieces.box, range(len(self.pieces)))
        return sorted((o[0], o[0] + s[0], index) for index, (o, s) in enumerate(boxes))

    @cached_property
    def cuts(self) -> frozenset[int]:
        """Where chunks begin and end; nowhere, where they do not tile the bucket."""
        ends = [0, *(stop for _, stop, _ in self.chunks)]
        tiled = ends[:-1] == [start for start, _, _ in self.chunks] and ends[-1] == self.numel
        return frozenset(ends if tiled else ())

    @property
    def numel(self) -> int:
        """Elements of the bucket, without the padding at its end."""
        return self.info.shape[0]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield index, first element, and the part of [start, stop) of each chunk that has some."""
        at = bisect_right(self.chunks, (start, self.numel + 1, 0)) - 1
        while 0 <= at < len(self.chunks) and self.chunks[at][0] < stop:
            first, end, index = self.chunks[at]
            if end > start:
                yield index, first, max(start, first), min(stop, end)
            at += 1


# Bucket -> kind of state -> what is stored, of one buffer.
Buckets = Mapping[int, Mapping[str, Bucket]]


class Owned(NamedTuple):
    """What one rank has of one parameter."""

    boxes: tuple[Box, ...]  # the boxes of its own part, in the order of that part
    buckets: Buckets  # of the buffer that it is in
    slot: Slot  # where it is there
    replica: int  # 0 for the first rank that has these boxes, then 1, 2, …


class BucketPieces(LazyPieces):
    """The pieces of one kind of a parameter's state: ranges of chunks of buckets."""

    __slots__ = ("_found", "_owned", "_state")

    def __init__(self, state: str, owned: Sequence[Owned]) -> None:
        """Keep the kind of state, and what each rank has of the parameter."""
        self._state = state
        self._owned = owned
        self._found: list[tuple[Bucket, int, Piece]] | None = None

    def _ranges(self) -> list[tuple[Bucket, int, Piece]]:
        """Return bucket, chunk, and the piece but for its place in a file."""
        if self._found is None:
            self._found = []
            for boxes, buckets, slot, replica in self._owned:
                bucket = buckets[slot.bucket][self._state]
                start = slot.start
                for box in boxes:
                    for index, first, low, high in bucket.within(start, start + box.volume):
                        flat = (low - start, high - start)
                        at = low - first
                        piece = Piece(box, _NOWHERE, flat, None, replica, None, True, at)
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


# Name -> the boxes of a rank's own part, in the order of that part.
Parts = Mapping[str, tuple[Box, ...]]


class Attempt:
    """One order of the parameters, and the ranks that may have laid them out so."""

    def __init__(
        self,
        groups: Sequence[Mapping[int, Buckets]],
        ranks: Sequence[Parts],
        order: Registration,
        stages: int,
        dtype: DType,
    ) -> None:
        """Prepare.

        Args:
            groups: of each group, the buckets of each of its buffers; ranks of a stage follow each
                other, then comes the next stage.
            ranks: of each rank of a stage, its parts of the parameters of all stages.
            order: of all parameters; what no rank has is left out.
            stages: number of pipeline stages.
            dtype: of the parameters.
        """
        self._groups, self._ranks, self._stages, self._dtype = groups, ranks, stages, dtype
        self._order = order
        # With tied embeddings the last of several stages has a copy in place of an output layer.
        self._tied = stages > 1 and EMBEDDING in order.before and OUTPUT not in order.after
        self._after = (*order.after, EMBEDDING) if self._tied else order.after

    def owned(self) -> dict[str, list[Owned]] | None:
        """Return what each rank has of each parameter; None where the buckets are others.

        Chunks of the model follow each other through the stages: all stages, and then all again.
        """
        chunks = len(self._groups[0])
        if any(sorted(group) != list(range(chunks)) for group in self._groups):
            return None
        found: dict[str, list[Owned]] = defaultdict(list)
        seen: Counter[tuple[str, Box]] = Counter()
        at = 0
        for chunk in range(chunks):
            for stage in range(self._stages):
                begin = stage * len(self._ranks)
                group = self._groups[begin : begin + len(self._ranks)]
                ends = (
                    self._order.before if chunk == stage == 0 else (),
                    self._after if (chunk, stage) == (chunks - 1, self._stages - 1) else (),
                )
                buckets = [buffers[chunk] for buffers in group]
                taken = self._layers_of(buckets, at, ends)
                if taken is None:
                    return None
                count, laid = taken
                at += count
                for parts, held, slots in zip(self._ranks, buckets, laid, strict=True):
                    for name, slot in slots.items():
                        place = (name, parts[name][0])
                        found[name].append(Owned(parts[name], held, slot, seen[place]))
                        seen[place] += 1
        return None if any(self._order.layers[at:]) else dict(found)

    def _layers_of(
        self, buckets: Sequence[Buckets], at: int, ends: tuple[Sequence[str], Sequence[str]]
    ) -> tuple[int, list[Mapping[str, Slot]]] | None:
        """Return how many layers from `at` on fill the buckets of a stage, and each rank's slots.

        Args:
            buckets: of each rank of the stage.
            at: the first layer that no stage has yet.
            ends: what the stage has before and after its layers.
        """
        before, after = ends
        first = self._ranks[0]
        room = sum(_sizes(buckets[0]))
        fixed = sum(_numel(first, name) for name in (*before, *after))
        layers = self._order.layers[at:]
        filled = accumulate(
            (sum(_numel(first, n) for n in names) for names in layers), initial=fixed
        )
        for count, numel in enumerate(filled):
            held = [*before, *(n for names in layers[:count] for n in names), *after]
            # Between two parameters lie fewer elements than their alignment.
            if numel <= room <= numel + ALIGNMENT * len(held):
                laid = [
                    self._laid(parts, held, own)
                    for parts, own in zip(self._ranks, buckets, strict=True)
                ]
                if all(slots is not None for slots in laid):
                    return count, [slots for slots in laid if slots is not None]
        return None

    def _laid(self, parts: Parts, held: Sequence[str], own: Buckets) -> Mapping[str, Slot] | None:
        """Return the slots of one rank; None where its buckets or their cuts are others."""
        parameters = [
            Parameter(n, (_numel(parts, n),), self._dtype, self._tied and n == EMBEDDING)
            for n in held
            if n in parts
        ]
        sizes = _sizes(own)
        laid = lay_out(parameters, sizes)
        if laid.buckets != sizes or sorted(own) != list(range(len(sizes))):
            return None
        fits = all(
            {slot.start, slot.start + slot.length} <= bucket.cuts
            for slot in laid.slots.values()
            for bucket in own[slot.bucket].values()
        )
        return laid.slots if fits else None


def _numel(parts: Parts, name: str) -> int:
    return sum(box.volume for box in parts.get(name, ()))


def _sizes(buckets: Buckets) -> tuple[int, ...]:
    """Return the size of each bucket; -1 where its states disagree."""
    sizes = ({bucket.numel for bucket in buckets[number].values()} for number in sorted(buckets))
    return tuple(found.pop() if len(found) == 1 else -1 for found in sizes)


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
