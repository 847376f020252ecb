"""Collect the weights of a DeepSpeed checkpoint from the files of all ranks and pipeline layers.

A pipeline keeps each layer in a file of its own, under its local names; the optimizer calls them
`<layer>.<local name>`, and `tied_modules.<key>.<local name>` where a module is used by several
layers. Which layers those are is recorded nowhere: a layer whose parameters the optimizer does not
know is a tied one, and it is matched by its names and shapes.

Source: `deepspeed/runtime/pipe/module.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections import Counter as Count
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.findings import finding, listed
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.ranks.tensors import Report, TensorIdentity
from ftckpt.formats.state.stored_names import place
from ftckpt.formats.torch_files.values import TensorRef

from .autoep import StackedRows
from .experts import ExpertLayers
from .geometry import DeepSpeedGrid, PlacedParameter, place_all
from .names import DeepSpeedFile
from .slices import WHOLE, CutOf, SliceCut
from .states import ModelState, Storages
from .tensors import PlacedWeight, RankWeight, fragment_tensor, weight_tensor

_TIED = "tied_modules."
_EXPERTS = ".deepspeed_experts."  # each has a file of its own


class Weights:
    """The weights that the files hold, by name.

    Attributes:
        buffers: names that a model's file calls buffers.
        experts: name -> tensor of every expert's parameters, by layer and number.
        placed: where each parameter lies that the optimizer or a list of frozen ones names.
    """

    def __init__(self, grid: DeepSpeedGrid, report: Report) -> None:
        self._grid, self._report = grid, report
        self._held: dict[int, dict[str, Shape]] = {}
        self._weights: dict[str, list[RankWeight]] = defaultdict(list)
        self._fragments: dict[str, list[RankWeight]] = defaultdict(list)
        self._layers: dict[int, list[tuple[DeepSpeedFile, Mapping[str, TensorRef], Storages]]] = (
            defaultdict(list)
        )
        self._pipeline = False
        self._states: list[ModelState] = []
        self.buffers: set[str] = set()
        self.experts: dict[str, TensorRef] = {}
        self.placed: dict[str, PlacedParameter] = {}
        self.stages: dict[int, int] = {}

    def add_model(self, state: ModelState) -> None:
        """Add a `*_model_states.pt`."""
        file = state.file
        rank = self._grid.rank(file.mp, file.dp)
        shapes = {name: shape for group in state.groups for name, shape in group.items()}
        shapes |= state.frozen
        self._held.setdefault(file.mp, shapes)
        self.buffers |= state.buffers
        self._pipeline |= bool(state.groups) and not state.weights
        self._states.append(state)
        for name, ref in state.weights.items():
            partitioned = prod(shapes.get(name, (1,))) > 0 and name not in state.buffers
            if file.dp is not None and partitioned and not ref.numel:
                continue  # an empty placeholder of stage 3
            self._weights[name].append(RankWeight(file.mp, rank, file, ref, state.storages))
        for name, ref in state.fragments.items():
            if file.dp is not None:
                self._fragments[name].append(RankWeight(file.mp, rank, file, ref, state.storages))
            elif state.weights.get(name) != ref:  # where both are one view, it is not stored twice
                self._weights[name].append(RankWeight(file.mp, rank, file, ref, state.storages))

    def add_layer(
        self, file: DeepSpeedFile, refs: Mapping[str, TensorRef], storages: Storages
    ) -> None:
        """Add the file of one layer and tensor slice."""
        assert file.layer is not None
        self._layers[file.layer].append((file, refs, storages))

    def add_expert(
        self, file: DeepSpeedFile, refs: Mapping[str, TensorRef], storages: Storages
    ) -> None:
        """Add the file of one expert; its tensors' names may be those of rows (`StackedRows`)."""
        for name, ref in refs.items():
            self.experts.setdefault(name, ref)
            self._weights[name].append(RankWeight(file.mp, None, file, ref, storages))

    def place(self, cut_of: CutOf, experts: ExpertLayers, *, layers: bool) -> None:
        """Find where every parameter lies; call it once, when all files were added.

        Args:
            cut_of: see `deepspeed_slices.cuts_of`.
            experts: the layers of experts.
            layers: whether a pipeline must have the files of its layers.

        Raises:
            UnsupportedError: no rule says how a parameter is cut over tensor-parallel ranks.
        """
        self._held = {mp: experts.whole(shapes) for mp, shapes in self._held.items()}
        self.buffers = set(experts.whole(dict.fromkeys(self.buffers, ())))
        self.placed = place_all(self._held, self._grid, cut_of, self._report)
        self._place_rows(cut_of, experts)
        known = {name for shapes in self._held.values() for name in shapes}
        stages = {name: min(p.parts) // self._grid.tp for name, p in self.placed.items()}
        for layer, files in sorted(self._layers.items()):
            prefix = self._prefix(layer, files[0][1], known)
            for file, refs, storages in files:
                for local, ref in refs.items():
                    stage = stages.get(prefix + local, 0)
                    self.stages.setdefault(layer, stage)
                    mp = stage * self._grid.tp + file.mp
                    weight = RankWeight(mp, None, file, ref, storages)
                    self._weights[prefix + local].append(weight)
        if layers and self._pipeline:
            self._check_layers(known)
        if not self._pipeline:
            self._check_module(experts)
        self._place_rest(cut_of)

    def _place_rows(self, cut_of: CutOf, experts: ExpertLayers) -> None:
        """Place the rows of stacked parameters, which no list has where ZeRO is off."""
        stacked, shapes = experts.stacked, dict[str, Shape]()
        for name in stacked.keys() - self.placed.keys():
            ref = experts.any_row(name, self.experts)
            if ref is not None:
                shapes[name] = (stacked[name].experts, *ref.shape[1:])
        self.placed |= place_all({0: shapes}, self._grid, cut_of, self._report)
        for name in stacked.keys() & self._weights.keys():
            # Of a frozen one the first file has a copy of what its own rank holds.
            for weight in self._weights.pop(name):
                for number in range(stacked[name].local):
                    row = weight._replace(ref=_row(weight.ref, number))
                    self._weights[StackedRows(name, number, 1).key].append(row)
        self.placed |= experts.parts(self.placed)

    def _check_layers(self, known: set[str]) -> None:
        """Report layers of which the optimizer knows parameters and no file has any."""
        numbers = {name.partition(".")[0] for name in known - self._weights.keys()}
        for layer in sorted(int(n) for n in numbers if n.isdecimal() and len(n) < 8):
            name = f"layer_{layer:02d}-model_states.pt"
            what = f"{name} is missing: the optimizer has parameters of layer {layer}"
            self._report(finding("missing-file", what, file=name))
        for name in sorted(known - self._weights.keys()):
            # Only layers that call the tied module itself are stored, so one file is enough.
            if name.startswith(_TIED):
                what = f"the file of a layer is missing: none holds {name}"
                self._report(finding("missing-file", what, tensor=name))

    def _check_module(self, experts: ExpertLayers) -> None:
        """Report what a file lists as its parameters and buffers and does not hold.

        Stage 3 keeps empty placeholders there. A trainer may put a tree of its own in the module's
        place, none of whose names are listed.
        """
        # Of stage 3 the first rank alone lists what is shared.
        tied = {name for state in self._states for name in state.shared}
        for state in self._states:
            params = {name for group in state.groups for name in group} | state.frozen.keys()
            params -= experts.stacked.keys()  # `ExpertLayers.check` asks for their files
            if not params & state.weights.keys():
                continue
            unsure = _elsewhere(state, params, tied)
            sure = params - unsure - state.fragments.keys()
            for kind, names in ("missing-tensor", sure), ("state-unknown", state.buffers | unsure):
                gone = sorted(n for n in names - state.weights.keys() if _EXPERTS not in n)
                if gone:
                    path = state.file.path
                    pronoun = "it" if len(gone) == 1 else "them"
                    what = f"{path} lists {listed(gone, 3)} and does not hold {pronoun}"
                    self._report(finding(kind, what, file=path, tensor=gone[0]))

    def _prefix(self, layer: int, refs: Mapping[str, TensorRef], known: set[str]) -> str:
        """Return what a layer's names begin with in the whole model."""
        own = f"{layer}."
        trained = {n: r.shape for n, r in refs.items() if self._kind(own + n, r) is Kind.PARAM}
        if not trained or any(own + name in known for name in trained):
            return own
        keys = sorted({n[len(_TIED) :].partition(".")[0] for n in known if n.startswith(_TIED)})
        fits = [key for key in keys if self._is_tied(f"{_TIED}{key}.", trained)]
        if len(fits) == 1:
            return f"{_TIED}{fits[0]}."
        if fits:
            what = (
                f"layer {layer} holds one of the tied modules {', '.join(fits)}, and which one is"
                f" recorded nowhere: its weights keep the names {own}*"
            )
            self._report(finding("note", what, file=self._layers[layer][0][0].path))
        return own

    def _is_tied(self, prefix: str, trained: Mapping[str, Shape]) -> bool:
        for shapes in self._held.values():
            mine = {n[len(prefix) :]: s for n, s in shapes.items() if n.startswith(prefix)}
            if mine:
                return mine == trained
        return False

    def _place_rest(self, cut_of: CutOf) -> None:
        """Place what no list of parameters names: buffers, all parameters where ZeRO is off."""
        rest: dict[int, dict[str, Shape]] = defaultdict(dict)
        for name, weights in self._weights.items():
            if name not in self.placed:
                for weight in weights:
                    rest[weight.mp].setdefault(name, weight.ref.shape)
        params: dict[int, dict[str, Shape]] = {}
        for mp, shapes in rest.items():
            params[mp] = {
                name: shape
                for name, shape in shapes.items()
                if self._kind(name, self._weights[name][0].ref) is Kind.PARAM
            }
        self.placed |= place_all(params, self._grid, cut_of, self._report)

    def _kind(self, name: str, ref: TensorRef) -> Kind:
        if name in self.buffers:
            return Kind.BUFFER
        return place("", ["model", name], ref.dtype).kind

    def tensors(self) -> Iterator[TensorInfo]:
        """Yield every weight and buffer, in the order of the files.

        Raises:
            UnsupportedError: a view or a fragment that the data model cannot hold.
        """
        split = 0
        parts: dict[str, list[PlacedWeight]] = defaultdict(list)
        for name, weights in self._weights.items():
            placed = self.placed.get(name)
            if placed is not None and name not in self.buffers:
                parts[placed.name] += (PlacedWeight(weight, placed) for weight in weights)
        for name, weights in self._weights.items():
            placed = self.placed.get(name)
            kind = self._kind(name, weights[0].ref)
            if placed is not None and name not in self.buffers:
                held = parts.pop(placed.name, None)
                if held is not None:
                    identity = TensorIdentity("model", Kind.PARAM, placed.name)
                    yield weight_tensor(identity, held, self._report)
            elif kind is Kind.BUFFER:
                slices = {weight.mp % self._grid.tp for weight in weights}
                split += len(slices) > 1
                yield from self._buffer(name, weights, bare=len(slices) == 1)
        for name, fragments in self._fragments.items():
            placed = self.placed.get(name)
            if placed is not None and name not in self._weights:
                identity = TensorIdentity("model", Kind.PARAM, name)
                yield fragment_tensor(identity, placed, fragments, self._grid, self._report)
        if split:
            what = (
                f"nothing records how {split} buffers are split over tensor-parallel ranks: they"
                " are kept one a rank, as extra:tp<RANK>, and not merged"
            )
            self._report(finding("note", what))

    def _buffer(
        self, name: str, weights: Sequence[RankWeight], *, bare: bool
    ) -> Iterator[TensorInfo]:
        """Yield a buffer, or one for each tensor slice; every rank of a slice has a copy."""
        slices: dict[int, list[RankWeight]] = defaultdict(list)
        for weight in weights:
            slices[weight.mp % self._grid.tp].append(weight._replace(mp=0))
        for tp, own in sorted(slices.items()):
            identity = TensorIdentity("model" if bare else f"extra:tp{tp}", Kind.BUFFER, name)
            whole = place_all(
                {0: {name: own[0].ref.shape}}, DeepSpeedGrid(1, 1, 1), _whole, self._report
            )
            held = [PlacedWeight(weight, whole[name]) for weight in own]
            yield weight_tensor(identity, held, self._report)


def _elsewhere(state: ModelState, params: set[str], tied: set[str]) -> set[str]:
    """Return the parameters that are not in a module, and that a hook of it may have moved.

    It may leave out all of a group, or give tensors other names: then nothing lists as many of that
    shape, or of no elements, as stage 3 keeps them. What the fragments hold is not lost.
    """
    named = params | state.buffers | tied
    free = Count(ref.shape for name, ref in state.weights.items() if name not in named)
    found: set[str] = set()
    for group in (*state.groups, state.frozen):
        names = params & group.keys() - state.fragments.keys()
        gone = {n for n in names - state.weights.keys() if _EXPERTS not in n}
        lost = Count(group[name] for name in gone)
        empty = sum(count for shape, count in free.items() if not prod(shape))
        for name in gone:
            moved = lost[group[name]] <= free[group[name]] or len(gone) <= empty
            if moved or not names & state.weights.keys():
                found.add(name)
    return found


def _row(ref: TensorRef, number: int) -> TensorRef:
    """Return one row of a stack; a tensor of fewer rows as it is, which its shape then shows."""
    if not ref.shape or number >= ref.shape[0]:
        return ref
    offset = ref.storage_offset + number * ref.strides[0]
    return ref._replace(storage_offset=offset, shape=(1, *ref.shape[1:]))


def _whole(name: str, shapes: Sequence[Shape]) -> SliceCut:
    return WHOLE
