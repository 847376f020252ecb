"""Put weights, masters and moments of a DeepSpeed checkpoint together from the files of all ranks.

What contradicts the other files is reported and left out, so that a tensor shows a hole and can
never be read as if it were whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import KINDS as STATE_KINDS
from ftckpt.errors import UnsupportedError
from ftckpt.findings import counted, finding
from ftckpt.formats.deepspeed.zero.partition import FlatGroup, FlatRun, Shape, SlicedGroup
from ftckpt.formats.ranks.tensors import PieceBoxes, RankEntry, Report, TensorIdentity, odd
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.values import TensorRef

from .checkpoint import StepCopy
from .experts import ExpertLayers
from .geometry import DeepSpeedGrid, ParameterPart, PlacedParameter, ranges
from .names import DeepSpeedFile
from .states import ModelState, OptimizerState, Storages

# Masters lie in flat buffers of their own, under no name of a state.
KINDS: Mapping[str, Kind] = {
    leaf: kind for leaf, kind in STATE_KINDS.items() if kind is not Kind.MASTER
}


class RankWeight(NamedTuple):
    """A tensor of the model as one model-parallel rank holds it."""

    mp: int
    rank: int | None
    file: DeepSpeedFile
    ref: TensorRef
    storages: Storages


class PlacedWeight(NamedTuple):
    """What one file holds of a tensor, and where that lies in it."""

    weight: RankWeight
    placed: PlacedParameter


def weight_tensor(
    identity: TensorIdentity, held: Sequence[PlacedWeight], report: Report
) -> TensorInfo:
    """Return a weight or buffer from the ranks' own tensors, each dense or strided.

    Raises:
        UnsupportedError: a conjugate view, or bytes inside the pickle.
    """
    boxes = PieceBoxes()
    dtype = held[0].weight.ref.dtype
    for weight, placed in held:
        part = placed.parts.get(weight.mp)
        entry = RankEntry(weight.rank, weight.file.path, weight.ref, weight.storages)
        if part is None or weight.ref.shape != part.shape:
            needs = None if part is None else list(part.shape)
            report(odd("shape-mismatch", identity, entry, f"needs {needs} and is another shape in"))
        elif weight.ref.dtype is not dtype:
            report(odd("dtype-mismatch", identity, entry, f"is not {dtype.name} in"))
        else:
            patches = [Patch(slab.box, slab.local.offsets) for slab in part.slabs]
            boxes.add(entry, weight.ref, patches)
    return _info(identity, held[0].placed.shape, dtype, boxes.pieces)


def _info(
    identity: TensorIdentity, shape: Shape, dtype: DType, pieces: Sequence[Piece]
) -> TensorInfo:
    return TensorInfo(
        identity.component, identity.name, identity.kind, shape, dtype, tuple(pieces),
        identity.stored_name,
    )  # fmt: skip


class FlatTensor(NamedTuple):
    """A flat tensor of one rank, of which runs are parameters' elements."""

    path: str
    rank: int | None
    ref: TensorRef
    storages: Storages

    def extent(self, at: int, numel: int) -> Extent:
        """Return the bytes of a run.

        Raises:
            UnsupportedError: the tensor is not a dense vector in the file.
        """
        place = self.storages[self.ref.key]
        if place.inline is not None or self.ref.conj or self.ref.neg or not self.ref.dense:
            raise UnsupportedError(
                f"a flat partition in {self.path} is not a dense vector", file=self.path
            )
        size = self.ref.dtype.itemsize
        first = place.extent.offset + (self.ref.storage_offset + at) * size
        return Extent(self.path, first, numel * size)


class _Group(NamedTuple):
    """A parameter group of one model-parallel and, for experts, one expert-parallel rank."""

    mp: int
    number: int
    ep: int


class Partitions:
    """Collects the pieces of everything that ZeRO partitions.

    Attributes:
        extra: tensors that are no partition of anything, by name.
    """

    def __init__(
        self,
        placed: Mapping[str, PlacedParameter],
        grid: DeepSpeedGrid,
        experts: ExpertLayers,
        report: Report,
    ) -> None:
        self._placed, self._grid, self._report = placed, grid, report
        self._experts = experts
        self._pieces: dict[tuple[Kind, str, str], list[Piece]] = defaultdict(list)
        self._dtypes: dict[tuple[Kind, str, str], DType] = {}
        self._counters: dict[tuple[_Group, str], list[FlatTensor]] = defaultdict(list)
        self._members: dict[_Group, list[str]] = {}
        self._layouts: dict[_Group, FlatGroup] = {}
        self._sliced: dict[tuple[int, tuple[int, ...]], SlicedGroup] = {}
        self.extra: list[tuple[str, FlatTensor]] = []

    def add(self, state: OptimizerState, model: ModelState) -> None:
        """Add what one rank's optimizer file holds of its model-parallel rank's parameters."""
        groups = model.groups
        if len(groups) == 1 and len(state.masters) > 1 and state.stage < 3:
            raise UnsupportedError(
                f"{model.file.path} lists all parameters as one group, {state.file.path} has"
                f" {len(state.masters)}: which parameter is in which is not recorded",
                file=model.file.path,
            )
        if state.stage == 3:
            self._add_stage3(state, groups)
        else:
            self._add_groups(state, model)

    def _add_groups(self, state: OptimizerState, model: ModelState) -> None:
        file, dp, groups = state.file, state.file.dp or 0, model.groups
        if len(groups) != len(state.masters):
            self._odd("bad-metadata", file, f"has {len(state.masters)} parameter groups where the"
                      f" model's file lists {len(groups)}")  # fmt: skip
            return
        held: list[tuple[_Group, FlatGroup, int, list[FlatRun]]] = []
        for number, place in enumerate(self._experts.ordered(state, groups)):
            ep, shapes, ranks, rank = self._experts.partition(groups[place], dp)
            group = _Group(file.mp, place, ep)
            own = {name: self._experts.on_its_rank(name) for name in shapes}
            called = {name: model.called.get(one, one) for name, one in own.items()}
            layout = self._layouts.get(group)
            gaps = state.gaps[number] if number < len(state.gaps) else ()
            if layout is None:
                if gaps and len(gaps) != len(shapes):
                    self._odd("bad-metadata", file, f"records {len(gaps)} gaps between the"
                              f" {len(shapes)} parameters of group {number}")  # fmt: skip
                    return
                layout = self._layouts[group] = FlatGroup(shapes, ranks, gaps)
            runs = list(layout.runs(rank))
            told = state.slices[number] if number < len(state.slices) else {}
            if what := _contradiction(told, runs, called):
                self._odd("wrong-rank", file, f"records that it holds {what} of group {number}: it"
                          f" is not the file of partition {rank}")  # fmt: skip
                return
            held.append((group, layout, rank, runs))
        for number, (group, layout, rank, runs) in enumerate(held):
            self._members.setdefault(group, list(layout.shapes))
            for kind, leaf, flat in self._flats(state, number, group):
                # With the padding or without: both forms are in use, even in one file.
                if self._fits(flat, layout.held(rank), layout.size, (kind, leaf), number):
                    self._put(flat, kind, leaf, file.mp, runs)

    def _add_stage3(self, state: OptimizerState, groups: Sequence[Mapping[str, Shape]]) -> None:
        """Walk the flat tensors of all sub-groups as one: old versions list shapes otherwise."""
        file, dp = state.file, state.file.dp or 0
        parts = [self._experts.partition(group, dp) for group in groups]
        told = state.ranks if self._experts.layers else ()
        for part, (own, ranks) in zip(parts, told, strict=False):
            if (own, len(ranks)) != (part.rank, part.ranks) or ranks[part.rank] != dp:
                self._odd("wrong-rank", file, f"records partition {str(own)[:20]} of {len(ranks)},"
                          f" and its name is that of {part.rank} of {part.ranks}")  # fmt: skip
                return
        eps = tuple(part.ep for part in parts)
        layout = self._sliced.get((file.mp, eps))
        if layout is None:
            shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
            counts = {name: part.ranks for part in parts for name in part.shapes}
            layout = self._sliced[file.mp, eps] = SlicedGroup(shapes, counts)
        rank = [part.rank for part in parts for _ in part.shapes]
        has = sum(master.numel for master in state.masters)
        if has != layout.total:
            self._odd("size-mismatch", file, f"holds {has} elements of master weights where the"
                      f" shapes need {layout.total}")  # fmt: skip
            return
        begin = 0
        for number, master in enumerate(state.masters):
            end = begin + master.numel
            group = _Group(file.mp, number, eps[number] if len(eps) > number else 0)
            self._members.setdefault(group, layout.names(begin, end))
            runs = list(layout.runs(rank, begin, end))
            for kind, leaf, flat in self._flats(state, number, group):
                if self._fits(flat, master.numel, master.numel, (kind, leaf), number):
                    self._put(flat, kind, leaf, file.mp, runs)
            begin = end

    def _flats(
        self, state: OptimizerState, number: int, group: _Group
    ) -> list[tuple[Kind, str, FlatTensor]]:
        """Return the flat tensors of one group; counters, which are of no dimension, are kept."""
        file = state.file
        rank = self._grid.rank(file.mp, file.dp)
        found = [
            (Kind.MASTER, "", FlatTensor(file.path, rank, state.masters[number], state.storages))
        ]
        for leaf, value in state.states[number].items():
            if not isinstance(value, TensorRef):
                continue
            flat = FlatTensor(file.path, rank, value, state.storages)
            if value.shape == ():
                self._counters[group, leaf].append(flat)
            else:
                found.append((KINDS.get(leaf, Kind.OTHER), leaf, flat))
        return found

    def _fits(
        self, flat: FlatTensor, least: int, most: int, what: tuple[Kind, str], number: int
    ) -> bool:
        has = flat.ref.numel
        if len(flat.ref.shape) == 1 and least <= has <= most:
            return True
        kind, leaf = what
        if kind is Kind.OTHER:  # an optimizer's own workspace
            self.extra.append((f"optimizer.state.{number}.{leaf}", flat))
        else:
            name = leaf or "master weights"
            self._odd("size-mismatch", flat, f"holds {has} elements of {name} of group"
                      f" {number} where the shapes need {least}")  # fmt: skip
        return False

    def _put(
        self, flat: FlatTensor, kind: Kind, leaf: str, mp: int, runs: Sequence[FlatRun]
    ) -> None:
        for run in runs:
            placed = self._placed.get(run.name)
            part = None if placed is None else placed.parts.get(mp)
            if placed is None or part is None:
                continue  # its parts contradict each other, which is reported
            key = (kind, placed.name, leaf if kind is Kind.OTHER else "")
            if self._dtypes.setdefault(key, flat.ref.dtype) is not flat.ref.dtype:
                self._odd("dtype-mismatch", flat, f"holds {leaf or 'masters'} of {run.name} as"
                          f" {flat.ref.dtype.name}, other files do not")  # fmt: skip
                continue
            self._pieces[key] += _pieces(flat, part, run)

    def tensors(self) -> list[TensorInfo]:
        """Return everything that was added, by kind and in the order of the groups."""
        found = []
        kinds, order = list(Kind), {name: n for n, name in enumerate(self._placed)}
        for key in sorted(self._pieces, key=lambda k: (kinds.index(k[0]), k[2], order[k[1]])):
            kind, name, leaf = key
            full = f"{name}.{leaf}" if leaf else name
            pieces = tuple(sorted(self._pieces[key], key=lambda p: p.replica))
            shape = self._placed[name].shape
            found.append(TensorInfo("optimizer", full, kind, shape, self._dtypes[key], pieces))
        return found + self._counter_tensors()

    def _counter_tensors(self) -> list[TensorInfo]:
        """Return a group's counters as one tensor a parameter, as torch's own optimizers have it.

        All parameters of a group share the group's one number; every rank has a copy.
        """
        made: dict[tuple[tuple[_Group, ...], str], tuple[Piece, ...]] = {}
        owners: dict[str, list[_Group]] = defaultdict(list)
        for place, names in sorted(self._members.items()):
            for name in names:
                placed = self._placed.get(name)
                owners[name if placed is None else placed.name].append(place)
        found = []
        for leaf in dict.fromkeys(leaf for _, leaf in self._counters):
            for name, places in owners.items():
                flats = [f for place in places for f in self._counters.get((place, leaf), ())]
                if not flats or name not in self._placed:
                    continue
                pieces = made.get((tuple(places), leaf))
                if pieces is None:
                    pieces = made[tuple(places), leaf] = copies(flats)
                dtype = flats[0].ref.dtype
                found.append(
                    TensorInfo("optimizer", f"{name}.{leaf}", Kind.OTHER, (), dtype, pieces)
                )
        return found

    def steps(self) -> list[StepCopy]:
        """Return every copy of the groups' step counters."""
        return [
            StepCopy(group.mp, group.number, flat.rank, flat.extent(0, 1), flat.ref.dtype)
            for (group, leaf), flats in self._counters.items()
            if leaf == "step"
            for flat in flats
        ]

    def _odd(self, kind: str, file: DeepSpeedFile | FlatTensor, what: str) -> None:
        rank = file.rank if isinstance(file, FlatTensor) else self._grid.rank(file.mp, file.dp)
        self._report(finding(kind, f"{file.path} {what}", file=file.path, rank=rank))


def _contradiction(
    told: Mapping[str, tuple[int, int] | None],
    runs: Sequence[FlatRun],
    called: Mapping[str, str],
) -> str:
    """Return what a rank's record of its own elements says that its place does not; "" for nothing.

    Args:
        told: parameter -> (elements, first), by the names of the optimizer's file.
        runs: what a file of this name holds.
        called: name -> that of the optimizer's file, of all the group's parameters.
    """
    if not told or not told.keys() <= set(called.values()):
        return ""  # not recorded, or under names of another kind
    places = {called[run.name]: (run.stop - run.start, run.at) for run in runs}
    for name in dict.fromkeys((*told, *places)):
        has, needs = told.get(name), places.get(name)
        if has is None and name in told:
            continue
        if has is None:
            return f"nothing of {name}"
        if has != needs:
            return f"{counted(has[0], 'element')} of {name} from {has[1]} on"
    return ""


def _pieces(flat: FlatTensor, part: ParameterPart, run: FlatRun) -> list[Piece]:
    return [
        Piece(
            place.box,
            flat.extent(run.at + place.at, place.numel),
            place.flat,
            replica=place.replica,
            rank=flat.rank,
        )
        for place in ranges(part, run.start, run.stop)
    ]


def copies(flats: Sequence[FlatTensor]) -> tuple[Piece, ...]:
    """Return the pieces of a 0-d tensor of which every rank has a copy."""
    return tuple(
        Piece(Box((), ()), flat.extent(0, 1), replica=number, rank=flat.rank)
        for number, flat in enumerate(flats)
    )


def rank_tensor(name: str, flat: FlatTensor) -> TensorInfo:
    """Return a tensor that is one rank's own and no part of a parameter."""
    boxes = PieceBoxes()
    shape = flat.ref.shape
    entry = RankEntry(flat.rank, flat.path, flat.ref, flat.storages)
    boxes.add(entry, flat.ref, [Patch(Box.whole(shape), (0,) * len(shape))])
    identity = TensorIdentity(f"extra:rank{flat.rank}", Kind.OTHER, name)
    return _info(identity, shape, flat.ref.dtype, boxes.pieces)


def fragment_tensor(
    identity: TensorIdentity,
    placed: PlacedParameter,
    held: Sequence[RankWeight],
    grid: DeepSpeedGrid,
    report: Report,
) -> TensorInfo:
    """Return a frozen parameter of stage 3, of which each rank's file holds a run.

    Raises:
        UnsupportedError: a fragment is not a dense vector.
    """
    pieces: list[Piece] = []
    dtype = held[0].ref.dtype
    for fragment in held:
        file, part = fragment.file, placed.parts.get(fragment.mp)
        flat = FlatTensor(file.path, fragment.rank, fragment.ref, fragment.storages)
        if part is None:
            continue
        layout = SlicedGroup({placed.name: part.shape}, grid.dp)
        runs = list(layout.runs(file.dp or 0, 0, layout.total))
        entry = RankEntry(flat.rank, flat.path, flat.ref, flat.storages)
        if flat.ref.numel < sum(run.stop - run.start for run in runs):
            what = f"needs {layout.total} elements and has {flat.ref.numel} in"
            report(odd("size-mismatch", identity, entry, what))
        elif flat.ref.dtype is not dtype:
            report(odd("dtype-mismatch", identity, entry, f"is not {dtype.name} in"))
        else:
            for run in runs:
                pieces += _pieces(flat, part, run)
    pieces.sort(key=lambda piece: piece.replica)
    return _info(identity, placed.shape, dtype, pieces)
