"""Flat partitions made of runs of parameters: the inverse of `deepspeed_tensors`.

How a job partitions: its grid, its stage of ZeRO, the order and place of parameters.

Two options change the order or the place of parameters in a flat partition, and both depend on the
number of partitions, so they are applied anew:

- `round_robin_gradients` orders a group's parameters by partition: 0, n, 2n, …, 1, n+1, …
- `parameter_alignment` begins every parameter at a multiple of 16 bytes of its compute type.

Sources: `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`, the loop over groups),
`runtime/zero/stage3.py` (`_create_fp16_sub_groups`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import Any

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.experts import ExpertLayers
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid, PlacedParameter
from ftckpt.formats.deepspeed.tensors import KINDS
from ftckpt.formats.torch_files.write_tree import Storage, Tensor
from ftckpt.transfer.content import Content, Shard, ShardBox
from ftckpt.transfer.layout import Elements, Segment, Zeros
from ftckpt.transfer.request.renaming import parameter_names, parted

from .partition import FlatGroup, FlatRun, Shape, SlicedGroup

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


@dataclass(eq=False)
class RankFlatGroup:
    """What one model-parallel rank's partitions hold of one flat group.

    Attributes:
        group: name -> shape of the rank's own tensor, in flat order.
        masters: the parameters in full precision, each as the model-parallel rank has it.
        states: leaf -> the same of a state, for states of the parameters' own shapes.
        counters: leaf -> the one number that all parameters of the group have.
        numbers: leaf -> value of states that are no tensors.
        gaps: elements after each parameter.
        ranks: number of partitions; experts have fewer than the job.
    """

    group: Group
    masters: Mapping[str, Shard]
    states: Mapping[str, Mapping[str, Shard]]
    counters: Mapping[str, Shard]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    gaps: tuple[int, ...] = ()
    ranks: int = 1


class RankFlats:
    """What a model-parallel rank holds of the tensors of some content.

    Args:
        content: what is to be written.
        placed: where parameters lie; the others are whole on every rank.
    """

    def __init__(self, content: Content, placed: Mapping[str, PlacedParameter]) -> None:
        self._content, self._placed = content, placed

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, str]]:
        """Parameter -> leaf -> key of what an optimizer keeps of it beside the master."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        names = parameter_names(self._content.tensors.values())
        leaves = {kind: leaf for leaf, kind in KINDS.items()}
        for key, wanted in self._content.tensors.items():
            if wanted.component != "optimizer" or wanted.kind is Kind.MASTER:
                continue
            name, rest = parted(wanted, names)
            found[name][leaves.get(wanted.kind) or rest.removeprefix(".")] = key
        return found

    def owner(self, name: str) -> str:
        """Return the parameter that a name is of; rows of a stacked one have names of their own."""
        placed = self._placed.get(name)
        return name if placed is None else placed.name

    def local(self, key: str, mp: int, rows: str = "") -> Shard:
        """Return what a model-parallel rank holds of a tensor.

        Args:
            key: of the tensor.
            mp: the rank.
            rows: the name of the only rows that are wanted; "" for all.
        """
        wanted = self._content.tensors[key]
        placed = self._placed.get(rows or wanted.name)
        part = None if placed is None else placed.parts.get(mp)
        if part is None or len(wanted.shape) != len(part.shape):
            return self._content.whole(key)
        parts = [ShardBox(slab.local, key, slab.box) for slab in part.slabs]
        return self._content.shard(part.shape, wanted.dtype, parts)

    def flat(self, group: Group, mp: int) -> RankFlatGroup:
        """Return what a model-parallel rank holds of a flat group.

        Raises:
            UnsupportedError: a parameter has no master, or another state than the others.
        """
        tensors = self._content.tensors
        masters: dict[str, Shard] = {}
        for name, shape in group.items():
            key = tensor_key("optimizer", Kind.MASTER, self.owner(name))
            if key not in tensors:
                raise UnsupportedError(
                    f"{key} is not there: ZeRO's partitions are made of master weights",
                    tensor=key,
                )
            masters[name] = self.local(key, mp, name)
            if masters[name].shape != shape:
                raise UnsupportedError(
                    f"{key} is of shape {list(masters[name].shape)} on a rank, and the job has"
                    f" {list(shape)}",
                    tensor=key,
                )
        _one_type(masters)
        held = {name: self.states.get(self.owner(name), {}) for name in group}
        first = next(iter(held.values()), {})
        states: dict[str, dict[str, Shard]] = {}
        counters: dict[str, Shard] = {}
        for name in group:
            if held[name].keys() != first.keys():
                raise UnsupportedError(
                    f"the optimizer keeps {sorted(held[name])} of {name} and"
                    f" {sorted(first)} of others in its group: ZeRO has one state for all",
                    tensor=name,
                )
        for leaf in first:
            keys = {name: held[name][leaf] for name in group}
            if self._is_counter(leaf, keys):
                self._require_equal(list(keys.values()))
                counters[leaf] = self._content.whole(keys[next(iter(group))])
                continue
            states[leaf] = {name: self.local(key, mp, name) for name, key in keys.items()}
            _one_type(states[leaf])
            for name, shard in states[leaf].items():
                if shard.shape != group[name]:
                    raise UnsupportedError(
                        f"{keys[name]} is not of its parameter's shape: ZeRO cannot cut it",
                        tensor=keys[name],
                    )
        return RankFlatGroup(group, masters, states, counters)

    def _is_counter(self, leaf: str, keys: Mapping[str, str]) -> bool:
        tensors = self._content.tensors
        bare = all(tensors[key].shape == () for key in keys.values())
        return bare and leaf not in KINDS

    def _require_equal(self, keys: Sequence[str]) -> None:
        """Require one number of all parameters of a group; small reads at most.

        Raises:
            UnsupportedError: they differ.
        """
        checkpoint, values = self._content.checkpoint, set()
        read: dict[int, bytes] = {}  # the parameters of a flat source share one list of pieces
        for key in keys:
            for copy in self._content.tensors[key].copies:
                pieces = checkpoint.tensors[copy.key].pieces
                if id(pieces) not in read:
                    read[id(pieces)] = read_tensor(checkpoint, copy.key)
                values.add(read[id(pieces)])
        if len(values) > 1:
            raise UnsupportedError(
                f"{keys[0]} and others of its group differ: ZeRO has one counter a group",
                tensor=keys[0],
            )


def _one_type(shards: Mapping[str, Shard]) -> None:
    types = {shard.dtype: name for name, shard in shards.items()}
    if len(types) > 1:
        raise UnsupportedError(
            f"{' and '.join(types.values())} are of different types: ZeRO keeps them in one tensor"
        )


class Partition:
    """One rank's partition of a flat group.

    Attributes:
        runs: what it holds of the parameters, in order.
        held: elements that are no padding at the end.
        size: elements with it.
        ranks: number of partitions.
        is_last: whether it is the last of them.
    """

    def __init__(self, flat: RankFlatGroup, zero: ZeroOptions, rank: int) -> None:
        self._flat = flat
        self.ranks, self.is_last = flat.ranks, rank == flat.ranks - 1
        if zero.stage == 3:
            sliced = SlicedGroup(flat.group, flat.ranks)
            self.runs = list(sliced.runs(rank, 0, sliced.total))
            self.held = self.size = self.total = sliced.total
        else:
            laid = FlatGroup(flat.group, flat.ranks, flat.gaps)
            self.runs = list(laid.runs(rank))
            self.held, self.size, self.total = laid.held(rank), laid.size, laid.total

    def tensor(self, shards: Mapping[str, Shard], length: int) -> Tensor:
        """Return a flat tensor of masters or of a state, zero where no parameter lies."""
        dtype = next(iter(shards.values())).dtype
        segments = tuple(_segments(shards, self.runs, length, dtype))
        return Tensor(Storage(segments), dtype, (length,), (1,))

    def masters(self, length: int) -> Tensor:
        """Return the master weights."""
        return self.tensor(self._flat.masters, length)

    def state(self, length: int) -> dict[str, Any]:
        """Return the state of the base optimizer; empty where it was never stepped."""
        flat = self._flat
        made: dict[str, Any] = dict(flat.numbers)
        made |= {leaf: Tensor.of(shard) for leaf, shard in flat.counters.items()}
        made |= {leaf: self.tensor(shards, length) for leaf, shards in flat.states.items()}
        return made


def _segments(
    shards: Mapping[str, Shard], runs: Sequence[FlatRun], length: int, dtype: DType
) -> Iterator[Segment]:
    at = 0
    for run in runs:
        if run.at > at:
            yield Zeros(dtype.nbytes(run.at - at))
        yield Elements(shards[run.name], run.start, run.stop)
        at = run.at + run.stop - run.start
    if length > at:
        yield Zeros(dtype.nbytes(length - at))


def fragment(shard: Shard, ranks: int, rank: int) -> Tensor:
    """Return one rank's run of a parameter of stage 3 that has no place in a group (frozen)."""
    layout = SlicedGroup({"": shard.shape}, ranks)
    runs = list(layout.runs(rank, 0, layout.total))
    segments = tuple(_segments({"": shard}, runs, layout.total, shard.dtype))
    return Tensor(Storage(segments), shard.dtype, (layout.total,), (1,))
