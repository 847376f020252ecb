"""Compute which expert and which partition of it each DeepSpeed rank holds.

The ranks of a data-parallel group of a job with experts form a grid of their own: `ep` ranks share
the experts of a layer evenly, and the `edp` ranks that hold the same experts partition them. A rank
numbers its own experts from 0. A file of an expert has the number in the whole model, in its path
and in the names of its tensors. AutoEP stacks the experts of a rank (see `autoep`): the rank's rows
of a parameter then go by a name of their own, from which `parts` finds the parameter.

    dp = 4, ep = 2, 4 experts    partition 0 1 2 3
    expert first                 holds    0-1 2-3 0-1 2-3
    data first                   holds    0-1 0-1 2-3 2-3

Sources: `deepspeed/runtime/engine.py` (`_save_moe_checkpoint`), `utils/groups.py`
(`_create_expert_and_data_parallel`), `moe/utils.py` and `runtime/zero/stage_1_and_2.py`
(`_configure_moe_settings`) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice, pairwise
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.sharding import Slab
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.torch_files.values import TensorRef

from .autoep import (
    ExpertLayer,
    ExpertName,
    StackedLayer,
    StackedName,
    StackedRows,
    expert_name,
    group_ep,
)
from .geometry import MOST, DeepSpeedGrid, ParameterPart, PlacedParameter
from .names import SHOWN, DeepSpeedFile, FileRole
from .states import ModelState, OptimizerState

# The number of an expert in the name of its row.
_NUMBER = re.compile(r"0|[1-9]\d{0,6}")
# Elements of a group, after which `split_params_into_different_moe_groups_for_optimizer` begins
# another.
_MOST_OF_A_GROUP = 178_956_971


class GroupPartition(NamedTuple):
    """What one rank's file holds of a parameter group.

    Attributes:
        ep: its expert-parallel rank; 0 in groups of other parameters.
        shapes: name in the whole model -> shape, in flat order.
        ranks: number of partitions of these parameters.
        rank: which of them.
    """

    ep: int
    shapes: Mapping[str, Shape]
    ranks: int
    rank: int


def _placed(rows: StackedRows, whole: PlacedParameter) -> PlacedParameter:
    shape = (rows.rows, *whole.shape[1:])
    box = Box((rows.first, *(0 for _ in shape[1:])), shape)
    slabs = (Slab(box, Box.whole(shape)),)
    return whole._replace(parts={mp: ParameterPart(mp, shape, slabs, (0,)) for mp in whole.parts})


def _otherwise() -> UnsupportedError:
    return UnsupportedError(
        "a parameter group of experts that a job of other sizes would divide otherwise",
        hint="ftckpt convert --to deepspeed-universal, where AutoEP stacks them; else --to dcp",
    )


class ExpertLayers:
    """The layers of experts of a job; without any, all parameters are partitioned alike.

    Attributes:
        layers: prefix of the names of its parameters, or name of a parameter that AutoEP stacks
            -> layer.
    """

    def __init__(self, grid: DeepSpeedGrid, head: ModelState) -> None:
        """Take the job.

        Args:
            grid: sizes of its groups.
            head: what any of the model's files records.
        """
        self._grid, self._counts = grid, head.experts
        self._file, self._data_first = head.file.path, head.data_first
        self._files: dict[int, str] = {}
        self._recorded: list[tuple[DeepSpeedFile, tuple[StackedLayer, ...]]] = []
        self._held: dict[str, set[int]] = defaultdict(set)
        self._rows: set[str] = set()
        self._stage3 = head.file.dp is not None
        self._stacked = head.stacked
        self._numbers = {name: one.number for one in head.stacked for name in one.names}
        self.layers: dict[str, ExpertLayer] = {}

    @property
    def stacked(self) -> Mapping[str, ExpertLayer]:
        """The parameters that AutoEP stacks, by name."""
        return {name: self.layers[name] for name in self._numbers if name in self.layers}

    def _named(self, name: str) -> tuple[ExpertName | StackedName, ExpertLayer] | None:
        """Return a rank's parameter of experts and its layer; None for other parameters."""
        if name in self._numbers and name in self.layers:
            return StackedName(name), self.layers[name]
        own = expert_name(name)
        layer = None if own is None else self.layers.get(own.prefix)
        return None if own is None or layer is None else (own, layer)

    @property
    def ep(self) -> int | None:
        """The largest number of ranks that share a layer's experts; None without experts."""
        return max((layer.ep for layer in self.layers.values()), default=None)

    def add_file(self, file: DeepSpeedFile, names: Iterable[str]) -> None:
        """Add the file of one expert, by the names of its tensors.

        Raises:
            CorruptError: it is of another layer or expert than its name says.
        """
        assert file.layer is not None
        if file.layer >= len(self._counts) or (file.expert or 0) >= self._counts[file.layer]:
            counts = ", ".join(map(str, self._counts[:SHOWN])) or "none"
            raise CorruptError(
                f"{file.path} is an expert that the job has not: {self._file} records {counts}",
                kind="world-size",
                file=file.path,
            )
        for name in names:
            row = self._row(name)
            layer = None if row is None else self._numbers[row.name]
            if row is not None and (layer, row.first) == (file.layer, file.expert):
                self._rows.add(row.name)
                continue
            own = expert_name(name)
            prefix = None if own is None else own.prefix
            if own is None or own.number != file.expert:
                raise CorruptError(
                    f"{file.path} holds {name}, which is not a parameter of its expert",
                    kind="bad-metadata",
                    file=file.path,
                )
            if self._files.setdefault(file.layer, own.prefix) != prefix:
                raise CorruptError(
                    f"{file.path} holds {name}, which is of another layer than the other experts",
                    kind="bad-metadata",
                    file=file.path,
                )

    def _row(self, name: str) -> StackedRows | None:
        """Return which row a tensor in the file of an expert is, where AutoEP stacks them."""
        whole, _, number = name.rpartition(".")
        known = whole in self._numbers and _NUMBER.fullmatch(number)
        return StackedRows(whole, int(number), 1) if known else None

    def by_rows(self, refs: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
        """Return the tensors in the file of an expert with the name and the axis of their row."""
        found = {}
        for name, ref in refs.items():
            row = self._row(name)
            if row is not None:
                ref = ref._replace(shape=(1, *ref.shape), strides=(ref.numel, *ref.strides))
            found[name if row is None else row.key] = ref
        return found

    def add_model(self, state: ModelState) -> None:
        """Add a model's file: the parameters that it lists, as a rank names them.

        Raises:
            UnsupportedError: stage 3 has partitioned experts that are not trained.
        """
        self._recorded.append((state.file, state.stacked))
        frozen = next((name for name in state.frozen if name in self._numbers), None)
        if frozen is not None and state.file.dp is not None:
            raise UnsupportedError(
                f"{state.file.path} has a part of {frozen}, which is not trained: at stage 3"
                " DeepSpeed saves no such experts, so how it would share them is not known",
                file=state.file.path,
                tensor=frozen,
            )
        for name in (*(name for group in state.groups for name in group), *state.frozen):
            own = expert_name(name)
            if own is not None:
                self._held[own.prefix].add(own.number)

    def resolve(self, shared: int | None) -> None:
        """Find the layers, when all files were added.

        Args:
            shared: number of ranks that share a layer, where no list of parameters says it.

        Raises:
            CorruptError: the numbers of experts, of ranks and of layers contradict each other.
            UnsupportedError: the job is a pipeline, or shares experts over tensor slices.
        """
        if not self._held and not self._files and not self._stacked:
            return
        if self._stacked and self._grid.tp > 1:
            raise UnsupportedError(
                "experts of AutoEP in a job of tensor slices: how they share them is not recorded",
                file=self._file,
            )
        if self._grid.pp > 1:
            raise UnsupportedError(
                "experts in a pipeline: each stage numbers its layers of experts from 0, and which"
                " stage wrote a file is recorded nowhere",
                file=self._file,
            )
        # A layer of which every file is missing is told, and its place follows from the order.
        numbers = {prefix: number for number, prefix in self._files.items()}
        taken = {*self._files, *(layer.number for layer in self._stacked)}
        if len(numbers) != len(self._files):
            raise self._odd("two layers of experts have files of the same parameters")
        free = iter(n for n in range(len(self._counts)) if n not in taken)
        for prefix in self._held:
            if prefix not in numbers:
                number = next(free, None)
                if number is None:
                    raise self._odd(f"{prefix}* is not among its {len(self._counts)} layers")
                numbers[prefix] = number
        for prefix, number in sorted(numbers.items(), key=lambda item: item[1]):
            experts = self._counts[number]
            held = self._held.get(prefix)
            local = experts // (shared or 1) if held is None else len(held)
            if held is not None and held != {*range(local)}:
                raise self._odd(f"{prefix}* does not number a rank's experts from 0")
            if not experts or not local or experts % local:
                raise self._odd(f"{local} experts a rank of the {experts} of {prefix}*")
            self._add_layer(prefix, ExpertLayer(number, experts, local))
        for recorded in self._stacked:
            if recorded.number in self._files or self._counts[recorded.number :][:1] != (
                recorded.experts,
            ):
                raise self._odd(f"{recorded.prefix} is layer {recorded.number} of experts")
            layer = ExpertLayer(recorded.number, recorded.experts, recorded.local)
            for name in recorded.names:
                self._add_layer(name, layer)

    def _add_layer(self, prefix: str, layer: ExpertLayer) -> None:
        if layer.ep > MOST or self._grid.dp % layer.ep:
            raise self._odd(
                f"{layer.ep} ranks share the experts of {prefix}*, and the job has"
                f" {self._grid.dp} partitions"
            )
        self.layers[prefix] = layer

    def _odd(self, what: str) -> CorruptError:
        return CorruptError(
            f"{self._file} and the experts contradict each other: {what}",
            kind="world-size",
            file=self._file,
        )

    def whole(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return a rank's parameters with the experts of all ranks in place of its own."""
        found: dict[str, Shape] = {}
        for name, shape in shapes.items():
            if (named := self._named(name)) is None:
                found[name] = shape
                continue
            own, layer = named
            if isinstance(own, StackedName) and shape[:1] != (layer.local,):
                raise self._odd(f"{name} is of shape {list(shape)} where a rank has {layer.local}")
            found |= own.whole(shape, layer)
        return found

    def parts(self, placed: Mapping[str, PlacedParameter]) -> dict[str, PlacedParameter]:
        """Return where rows of stacked parameters lie: those of each rank and of each expert.

        Args:
            placed: the parameters.
        """
        found = {}
        for name, layer in self.stacked.items():
            whole = placed.get(name)
            if whole is None:
                continue
            for count in {layer.local, 1}:
                for first in range(0, layer.experts, count):
                    rows = StackedRows(name, first, count)
                    found[rows.key] = _placed(rows, whole)
        return found

    def ordered(
        self, state: OptimizerState, groups: Sequence[Mapping[str, Shape]]
    ) -> Sequence[int]:
        """Return the number of each of a file's parameter groups in the list of the model's file.

        Every rank splits groups of experts by itself, in an order of its own where they are shared
        differently (`split_params_into_different_moe_groups_for_optimizer` walks a set).

        Args:
            state: of one rank.
            groups: as the model's file lists them, which rank 0 wrote.

        Raises:
            CorruptError: the file has parameters that are not listed.
        """
        if not self.layers or len(state.slices) != len(groups):
            return range(len(groups))
        left = list(range(len(groups)))
        found: dict[int, int] = {}
        # A group of which the rank holds padding alone names nothing: it takes what is left.
        for number, names in sorted(enumerate(state.slices), key=lambda item: not item[1]):
            fits = [n for n in left if names.keys() <= groups[n].keys()]
            own = group_ep(state.groups[number]) if number < len(state.groups) else None
            if own is not None:
                fits = [
                    n for n in fits if self._grid.dp == own * self.partition(groups[n], 0).ranks
                ]
            if not fits:
                raise CorruptError(
                    f"{state.file.path} holds parameters that {self._file} lists in no group",
                    kind="bad-metadata",
                    file=state.file.path,
                )
            found[number] = number if number in fits else fits[0]
            left.remove(found[number])
        return [found[number] for number in range(len(groups))]

    def partition(self, shapes: Mapping[str, Shape], dp: int) -> GroupPartition:
        """Return what partition `dp` of the job holds of a parameter group.

        Args:
            shapes: name -> shape as a rank lists them.
            dp: which partition, as the file's name says.

        Raises:
            CorruptError: the group mixes experts that are shared differently.
        """
        named = {name: self._named(name) for name in shapes}
        sizes = {None if own is None else own[1].ep for own in named.values()}
        if len(sizes) > 1:
            raise self._odd("a parameter group has parameters that are partitioned differently")
        ep = next(iter(sizes), None)
        if ep is None:
            return GroupPartition(0, shapes, self._grid.dp, dp)
        ep_rank, rank = self.place(dp, ep)
        made = {}
        for name, own in named.items():
            assert own is not None
            made[own[0].on_rank(ep_rank, own[1])] = shapes[name]
        return GroupPartition(ep_rank, made, self._grid.dp // ep, rank)

    def place(self, dp: int, ep: int) -> tuple[int, int]:
        """Return a partition's rank among those that share experts, and among equal ones."""
        if self._data_first:
            return divmod(dp, self._grid.dp // ep)
        return dp % ep, dp // ep

    def resharded(self, grid: DeepSpeedGrid, ep: int | None) -> ExpertLayers:
        """Return the layers as a job of other sizes has them.

        Args:
            grid: sizes of the job's groups.
            ep: number of ranks that share each layer; None for as many as now.

        Raises:
            UnsupportedError: a layer cannot be shared so.
        """
        made = copy(self)
        made._grid, made.layers = grid, {}
        if len({layer.ep for layer in self.layers.values()}) > 1:
            raise UnsupportedError(
                "layers of experts that are shared by different numbers of ranks: each rank orders"
                " their parameter groups by a hash of its own, also when it loads",
                hint="ftckpt convert --to safetensors or --to dcp",
            )
        for prefix, layer in self.layers.items():
            ranks = ep or layer.ep
            if layer.experts % ranks or grid.dp % ranks:
                raise UnsupportedError(
                    f"{ranks} ranks cannot share the {layer.experts} experts of {prefix}* evenly in"
                    f" a job of {grid.dp} partitions",
                    hint="--ep and --dp give the sizes",
                )
            made.layers[prefix] = layer._replace(local=layer.experts // ranks)
        return made

    def relisted(self, group: Mapping[str, Shape], of: ExpertLayers) -> Mapping[str, Shape]:
        """Return a parameter group of another job with as many experts as a rank of this has.

        Args:
            group: name -> shape, as a rank of the other job lists it.
            of: the layers of that job.

        Raises:
            UnsupportedError: the order of the group's experts is none that DeepSpeed makes.
        """
        if self.layers == of.layers:
            return group
        listed: dict[str, dict[int, dict[str, Shape]]] = {}
        made: dict[str, Shape] = {}
        for name, shape in group.items():
            own = expert_name(name)
            if name in self._numbers:
                made[name] = (self.layers[name].local, *shape[1:])
            elif own is not None and own.prefix in of.layers:
                numbers = listed.setdefault(own.prefix, {})
                numbers.setdefault(own.number, {})[own.rest] = shape
            else:
                made[name] = shape
        order = [*made]
        for prefix, numbers in listed.items():
            first = numbers.get(0, {})
            odd = any(one != first or [*one] != [*first] for one in numbers.values())
            if odd or [*numbers] != [*range(of.layers[prefix].local)]:
                raise UnsupportedError(f"a parameter group has a part of the experts of {prefix}*")
            order += (f"{prefix}{n}{rest}" for n in numbers for rest in first)
            for number in range(self.layers[prefix].local):
                made |= {f"{prefix}{number}{rest}": shape for rest, shape in first.items()}
        if order != [*group] or sum(map(prod, made.values())) > _MOST_OF_A_GROUP:
            raise _otherwise()
        return made

    def rows_of(self, name: str, dp: int) -> str:
        """Return the name of the rows of a stacked parameter that a partition's rank has.

        It is the name itself for other parameters.
        """
        if name not in self._numbers:
            return name
        layer = self.layers[name]
        return StackedName(name).on_rank(self.place(dp, layer.ep)[0], layer)

    def require_the_same_groups(
        self, before: Sequence[Mapping[str, Shape]], after: Sequence[Mapping[str, Shape]]
    ) -> None:
        """Require that groups of stacked experts are those that a job of this size makes.

        Args:
            before: the parameter groups of the source.
            after: the same, as a rank of this job has them.

        Raises:
            UnsupportedError: two groups that were too large together would be one.
        """
        for one, other in zip(pairwise(before), pairwise(after), strict=True):
            if not all(group.keys() & self._numbers.keys() for group in other):
                continue
            sizes = []
            for first, second in (one, other):
                head = next(iter(second.values()))
                sizes.append(sum(map(prod, first.values())) + prod(head))
            if sizes[0] > _MOST_OF_A_GROUP >= sizes[1]:
                raise _otherwise()

    def on_its_rank(self, name: str) -> str:
        """Return a name as the rank has it that holds the expert, or the rows of a parameter."""
        whole, bracket, _ = name.rpartition("[")
        if bracket and whole in self._numbers:
            return whole
        own = expert_name(name)
        layer = None if own is None else self.layers.get(own.prefix)
        if own is None or layer is None:
            return name
        return own._replace(number=own.number % layer.local).full

    def first(self, ep_rank: int) -> int:
        """Return the partition that writes for an expert-parallel rank where ZeRO is off."""
        return ep_rank * (self._grid.dp // (self.ep or 1)) if self._data_first else ep_rank

    def any_row(self, name: str, held: Mapping[str, TensorRef]) -> TensorRef | None:
        """Return one expert's row of a stacked parameter, whichever there is.

        Args:
            name: of the parameter.
            held: the tensors of all files of experts, by name.
        """
        keys = (StackedRows(name, n, 1).key for n in range(self.layers[name].experts))
        return next((held[key] for key in keys if key in held), None)

    def of_rank(
        self, held: Mapping[str, TensorRef], ep_rank: int
    ) -> Iterator[tuple[str, TensorRef]]:
        """Yield the experts' parameters that one expert-parallel rank holds, stacked where it does.

        Args:
            held: those of all files of experts, by name.
            ep_rank: which rank.
        """
        for name, layer in self.stacked.items():
            ref = self.any_row(name, held)
            if ref is not None:
                mine = self.place(self.first(ep_rank), layer.ep)[0] * layer.local
                shape = (layer.local, *ref.shape[1:])
                stack = ref._replace(shape=shape, strides=dense_strides(shape))
                yield StackedRows(name, mine, layer.local).key, stack
        for name, ref in held.items():
            own = expert_name(name)
            its = None if own is None else self.layers.get(own.prefix)
            if own is None or its is None:
                continue
            if own.number // its.local == self.place(self.first(ep_rank), its.ep)[0]:
                yield name, ref

    def check(self, files: Sequence[DeepSpeedFile]) -> Iterator[Finding]:
        """Yield experts that have no file or are not whole, and files of other experts' ranks."""
        yield from self._check_recorded()
        held = {(f.layer, f.expert, f.mp) for f in files if f.role is FileRole.EXPERT}
        # Below stage 3 nothing partitions weights, whatever is recorded.
        stacked = [layer for layer in self._stacked if not (layer.partitioned and self._stage3)]
        without = {layer.number for layer in self._stacked if layer not in stacked}
        absent = (
            (number, expert, mp)
            for number, count in enumerate(self._counts)
            if number not in without
            for expert in range(count)
            for mp in range(self._grid.mp)
            if (number, expert, mp) not in held
        )
        for number, expert, mp in islice(absent, SHOWN):
            name = f"layer_{number}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
            what = f"{name} is missing: expert {expert} of layer {number} has no file"
            yield finding("missing-file", what, file=name)
        for layer in stacked:  # DeepSpeed gives every layer all three
            for name in layer.names:
                if name not in self._rows:
                    what = f"{name} is missing: no file of layer {layer.number}'s experts has it"
                    yield finding("missing-tensor", what, tensor=name)
        of = {f.expert for f in files if f.role is FileRole.EXPERT_OPTIMIZER}
        for rank in sorted({*range(self.ep or 0)} - of) if of else ():
            name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
            what = f"{name} is missing: expert-parallel rank {rank} has no optimizer file"
            yield finding("missing-rank", what, file=name)

    def _check_recorded(self) -> Iterator[Finding]:
        """Yield model's files that record other layers of AutoEP, or another rank's experts."""
        for file, stacked in self._recorded:
            path, dp = file.path, file.dp or 0
            if [one._replace(ep_rank=None) for one in stacked] != [
                one._replace(ep_rank=None) for one in self._stacked
            ]:
                what = f"{path} records other layers of experts than {self._file}"
                yield finding("bad-metadata", what, file=path)
                continue
            for one in stacked:
                if one.partitioned and file.dp is None:
                    what = (
                        f"{path} records that stage 3 has partitioned the weights of {one.prefix},"
                        " and its name is that of a lower stage"
                    )
                    yield finding("bad-metadata", what, file=path)
                    break
                ep_rank = self.place(dp, one.experts // one.local)[0]
                if one.ep_rank not in (None, ep_rank):
                    what = (
                        f"{path} is the file of expert-parallel rank {one.ep_rank}, and"
                        f" partition {dp} is one of rank {ep_rank}"
                    )
                    yield finding("wrong-rank", what, file=path)
                    break
