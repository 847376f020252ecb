"""The optimizer's state where ZeRO is off: torch's own `state_dict`, in the model's file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.findings import finding
from ftckpt.formats.deepspeed.autoep import expert_name
from ftckpt.formats.deepspeed.checkpoint import StepCopy
from ftckpt.formats.deepspeed.experts import ExpertLayers
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid
from ftckpt.formats.deepspeed.states import ModelState, listed
from ftckpt.formats.deepspeed.tensors import (
    KINDS,
    FlatTensor,
    PlacedWeight,
    RankWeight,
    copies,
    weight_tensor,
)
from ftckpt.formats.deepspeed.weights import Weights
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.ranks.tensors import Report, TensorIdentity
from ftckpt.formats.state.rank_optimizer import (
    OptimizerValue,
    is_optimizer,
    state_entries,
    states,
)
from ftckpt.formats.torch_files.sharded import HeldReader
from ftckpt.formats.torch_files.values import TensorRef


class PlainOptimizer:
    """Collects the state of unpartitioned optimizers.

    Attributes:
        extra: tensors that cannot be given to a parameter, by name.
        steps: the copies of the step counters.
    """

    def __init__(
        self, weights: Weights, grid: DeepSpeedGrid, experts: ExpertLayers, report: Report
    ) -> None:
        self._placed, self._weights = weights.placed, weights.experts
        self._grid, self._experts, self._report = grid, experts, report
        self._held: dict[TensorIdentity, list[PlacedWeight]] = defaultdict(list)
        self._numbers: dict[TensorIdentity, list[FlatTensor]] = defaultdict(list)
        self.extra: list[tuple[str, FlatTensor]] = []
        self.steps: list[StepCopy] = []

    def add(self, model: ModelState) -> None:
        """Add the optimizer in a model's file, if there is one."""
        if not isinstance(model.optimizer, dict):
            return
        if not is_optimizer(model.optimizer):
            self._add_unknown(model)
            return
        file = model.file
        first = 0 if file.expert is None else self._experts.first(file.expert)
        rank = self._grid.rank(file.mp, first)
        prefix = "" if file.expert is None else f"ep_rank_{file.expert}."
        for number, state in enumerate(self._states(model, rank)):
            if not isinstance(state.value, TensorRef):
                continue
            value = state.value
            placed = self._placed.get(state.parameter)
            parameter = state.parameter if placed is None else placed.name
            full = f"{parameter}.{state.leaf}"
            part = None if placed is None else placed.parts.get(file.mp)
            if value.shape == ():
                flat = FlatTensor(file.path, rank, value, model.storages)
                self._numbers[TensorIdentity("optimizer", Kind.OTHER, full)].append(flat)
                if state.leaf == "step":
                    place = flat.extent(0, 1)
                    self.steps.append(StepCopy(file.mp, number, rank, place, value.dtype))
            elif part is not None and value.shape == part.shape:
                kind = KINDS.get(state.leaf, Kind.OTHER)
                name = full if kind is Kind.OTHER else parameter
                weight = RankWeight(file.mp, rank, file, value, model.storages)
                assert placed is not None
                self._held[TensorIdentity("optimizer", kind, name)].append(
                    PlacedWeight(weight, placed)
                )
            else:  # of a parameter whose name cannot be proven, or of another shape than its own
                flat = FlatTensor(file.path, rank, value, model.storages)
                self.extra.append((f"{prefix}optimizer.state.{full}", flat))

    def _states(self, model: ModelState, rank: int) -> Iterator[OptimizerValue]:
        """Yield the states in one file with the names of their parameters.

        Groups of experts hold experts alone, so each kind of group is named by its own parameters.
        """
        views: dict[TensorRef, str] = {}  # a tied weight is one parameter
        for name, ref in model.weights.items():
            if name not in model.buffers:
                views.setdefault(ref, name)
        params = [(name, ref) for ref, name in views.items()]
        own = self._experts.of_rank(self._weights, model.file.expert or 0)
        experts = [(name, ref) for name, ref in own if name not in model.buffers]
        read, groups = HeldReader(rank).read, listed(model.optimizer["param_groups"])
        kinds = [isinstance(group, dict) and group.get("moe") is True for group in groups]
        if not any(kinds):
            yield from states(model.optimizer, _in_order(params, experts), read)
            return
        ids = {
            i
            for group, of_experts in zip(groups, kinds, strict=True)
            for i in (listed(group.get("params")) if of_experts else ())
            if type(i) is int
        }
        for wanted, weights in ((False, params), (True, experts)):
            state = {
                i: one for i, one in state_entries(model.optimizer).items() if (i in ids) is wanted
            }
            part = [g for g, of_experts in zip(groups, kinds, strict=True) if of_experts is wanted]
            yield from states({"state": state, "param_groups": part}, weights, read)

    def _add_unknown(self, model: ModelState) -> None:
        """Keep the tensors of a wrapper (fp16) that stores flat masters with no list of names."""
        rank = self._grid.rank(model.file.mp, model.file.dp)
        for path, value in leaves(model.optimizer):
            if isinstance(value, TensorRef):
                name = ".".join(["optimizer", *map(str, path)])
                self.extra.append((name, FlatTensor(model.file.path, rank, value, model.storages)))
        what = (
            f"{model.file.path} has flat masters of an fp16 optimizer without ZeRO and no list of"
            " what lies where in them: they are kept as they are, as extra:rank<RANK>"
        )
        self._report(finding("note", what, file=model.file.path))

    def tensors(self) -> Iterator[TensorInfo]:
        """Yield the moments, then the counters."""
        for identity, held in self._held.items():
            yield weight_tensor(identity, held, self._report)
        for identity, flats in self._numbers.items():
            yield TensorInfo(
                "optimizer", identity.name, identity.kind, (), flats[0].ref.dtype, copies(flats)
            )


def _in_order(
    params: Sequence[tuple[str, TensorRef]], experts: Sequence[tuple[str, TensorRef]]
) -> list[tuple[str, TensorRef]]:
    """Put the experts of each layer behind its gate, which is where the module has them."""
    found = list(params)
    for name, ref in reversed(experts):
        own = expert_name(name)
        layer = "" if own is None else own.prefix.removesuffix("experts.deepspeed_experts.")
        before = [n for n, (other, _) in enumerate(params) if other.startswith(layer)]
        found.insert(before[-1] + 1 if before else len(params), (name, ref))
    return found
