"""Sort what one rank's file holds: tensors by what they are, everything else by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Extent, Kind, ObjectInfo, StepRole
from ftckpt.checkpoint.steps import role_of
from ftckpt.errors import FtckptError
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.pickles.walk import at as inner_at
from ftckpt.formats.state.coded_shards import cuts_of
from ftckpt.formats.state.rank_optimizer import OPTIMIZERS, is_local, is_optimizer, placed, states
from ftckpt.formats.state.stored_names import AVERAGES, MODELS, StoredName, is_generator, place
from ftckpt.formats.state.stored_names import OPTIMIZERS as NAMES_OF_OPTIMIZERS
from ftckpt.formats.torch_files.sharded import Distributed, Held, HeldReader, Listed
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef

from .names import RankFile, Role
from .recorded_job import MOST, Evidence
from .specs import Spec, data_key, mappings_for_all, mesh_of, spec_of, specs_for_all

_TENSORS = (TensorRef, SubclassRef, Composite)
# Names of state that one file may give; more are of no use to anyone.
MAX_NAMES = 4096


class RankTensor(NamedTuple):
    """One tensor of one rank: what it is, and what the rank holds of it."""

    where: StoredName
    stored_name: str
    held: Held
    spec: Spec | None = None


class StepNumber(NamedTuple):
    """A number of the non-tensor state that is a step by its name."""

    name: str
    value: float
    role: StepRole


class Contents:
    """What one file of one rank holds.

    Attributes:
        file: which file.
        tensors: all tensors, in the file's order.
        objects: non-tensor state, one for each key at the top.
        names: dotted names of the non-tensor state.
        numbers: step counters among it.
        evidence: what the file records of its job.
        sharded: whether any tensor is a DTensor or a ShardedTensor.
        flat: whether it has flattened parameters of FSDP, whose names and shapes it does not tell.
    """

    def __init__(
        self, file: RankFile, stream: TorchStream, weights: list[tuple[str, Held]], owner: str
    ) -> None:
        self.file = file
        self.tensors: list[RankTensor] = []
        self.objects: dict[str, ObjectInfo] = {}
        self.names: list[str] = []
        self.numbers: list[StepNumber] = []
        self._reader = HeldReader(file.rank, records=True)
        self._whose = owner
        self._owner = f"{owner}rank_{file.rank}"
        self._pickle = next(
            (extent for name, extent, _ in stream.records if name == "data.pkl"),
            Extent(file.path, 0, 0),
        )
        self.evidence = Evidence(file.path, file.rank)
        self._mappings = mappings_for_all(stream.tree)
        self._mesh = mesh_of(stream.tree)
        self._for_all = specs_for_all(stream.tree, self._mappings)
        self._sort(stream.tree, weights)
        self.evidence.read(stream.tree)
        for found in self.tensors:
            self.evidence.see(found.held)
            spec = found.spec or Spec()
            if spec.mesh and len(spec.placements or ()) == len(spec.mesh):
                self.evidence.least = max(self.evidence.least, min(prod(spec.mesh), MOST))
        self.sharded = any(isinstance(f.held, (Distributed, Listed)) for f in self.tensors)
        self.flat = any(is_flat(f.where) for f in self.tensors)

    def _sort(self, tree: Any, weights: list[tuple[str, Held]]) -> None:
        role = self.file.role
        if role is Role.OPTIMIZER:
            self._optimizer(tree, (), weights)
        elif role is Role.EXTRA:
            self._state(tree, (), "")
        elif role is Role.WHOLE and is_training_state(tree):
            for key, value in tree.items():
                if key == OPTIMIZERS and is_local(tree):
                    self._local(value, key)
                elif key in NAMES_OF_OPTIMIZERS and is_optimizer(value):
                    own = [(f.where.name, f.held) for f in self.tensors
                           if f.where.component == "model"]  # fmt: skip
                    self._optimizer(value, (key,), own)
                elif _holds_parts(key, value):
                    self._model(value, (key,), (key if key in AVERAGES else "model",))
                elif key not in self._mappings:
                    self._state(value, (key,), "")
        else:
            self._model(tree, (), ("model",))

    def _model(self, tree: Any, at: Path, top: Path) -> None:
        for path, value, key in _entries(tree):
            if isinstance(value, _TENSORS):
                name = ".".join(map(str, path)) or "tensor"
                held = self._held(value, name)
                if isinstance(value, TensorRef) and is_generator(
                    name, held.dtype.name, held.shape
                ):  # each rank has its own, however many there are
                    self._state(value, (*at, *path), name)
                    continue
                where = place("", [*top, name], held.dtype)
                stored = (*at, *path, key) if key else (*at, *path)
                spec = self._spec(tree, path, held, name) if key else self._said(name, held)
                self.tensors.append(RankTensor(where, ".".join(map(str, stored)), held, spec))
            elif path and (at or path[0] not in self._mappings):
                self._object((*at, *path), ".".join(map(str, (*top, *path))))
                if not at and len(path) == 1:
                    self._name(str(path[0]), value)  # a counter beside a bare state_dict

    def _spec(self, tree: Any, path: Path, held: Held, name: str) -> Spec:
        return self._on_mesh(spec_of(inner_at(tree, path), held.shape, name))

    def _on_mesh(self, spec: Spec) -> Spec:
        """Return a spec with the mesh at the top of the file, where it has none of its own."""
        return spec if spec.mesh else spec._replace(mesh=self._mesh)

    def _said(self, name: str, held: Held) -> Spec | None:
        """Return what a mapping for all tensors at the top of the file says of one."""
        said = self._for_all.get(name)
        return None if said is None else self._on_mesh(spec_of(said, held.shape, name))

    def _optimizer(self, tree: Any, at: Path, weights: list[tuple[str, Held]]) -> None:
        if not is_optimizer(tree):
            self._state(tree, at, "optimizer")
            return
        for state in states(tree, weights, self._read_entry):
            path, value, spec = (*at, *state.path), state.value, None
            if key := data_key(value):
                path, entry, value = (*path, key), value, value[key]
                spec = spec_of(entry, value.shape, state.parameter)
            if isinstance(value, _TENSORS):
                name = f"{state.parameter}.{state.leaf}"
                held = self._held(value, name)
                where = place("", ["optimizer", "state", state.parameter, state.leaf], held.dtype)
                self.tensors.append(RankTensor(where, ".".join(map(str, path)), held, spec))
            else:
                self._object((*at, "state"), "optimizer.state")
                self._name(f"optimizer.state.{state.parameter}.{state.leaf}", state.value)
        for key in tree:
            if key != "state":
                groups = key if key == "param_groups" else ""
                self._state(tree[key], (*at, key), f"optimizer.{key}", groups)

    def _local(self, optimizers: list[Any], key: str) -> None:
        """Sort the optimizers of FSDP, and give the local shards before them their places."""
        weights = [(f.where.name, f.held) for f in self.tensors if f.where.component == "model"]
        places = placed(optimizers, weights, self._read_entry)
        self.tensors = [
            f._replace(held=places.get(f.where.name, f.held)) if f.where.component == "model" else f
            for f in self.tensors
        ]
        own = [(name, places.get(name, held)) for name, held in weights]
        for number, one in enumerate(optimizers):
            if len(optimizers) == 1:
                self._optimizer(one, (key, number), own)
            else:  # which parameters each has, nothing says
                self._state(one, (key, number), f"{key}.{number}")

    def _read_entry(self, value: Any) -> Held | None:
        key = data_key(value)
        return self._reader.read(value[key] if key else value)

    def _state(self, tree: Any, at: Path, label: str, groups: str = "") -> None:
        for path, value in leaves(tree, at):
            name = ".".join(map(str, path))
            if label:
                name = ".".join([label, *map(str, path[len(at) :])])
            if isinstance(value, _TENSORS):
                held = self._held(value, name)
                whose = f"{self._whose}{name or 'tensor'}"  # an actor's is not its critic's
                # A part with a record of its place is one of the same tensor in all ranks.
                parts = isinstance(held, (Distributed, Listed))
                own = "extra:state" if parts else f"extra:rank{self.file.rank}"
                where = StoredName(own, Kind.OTHER, whose)
                if groups:  # a learning rate that is a tensor
                    steps = ".".join([groups, *map(str, path[len(at) :])])
                    where = StoredName("optimizer", Kind.OTHER, steps)
                self.tensors.append(RankTensor(where, name, held))
            else:
                inside = at or path[:1]
                shown = ".".join([label, *map(str, path[:1])]).strip(".") if not at else label
                self._object(inside, shown or ".".join(map(str, inside)) or str(self.file.role))
                self._name(name or str(self.file.role), value)

    def _held(self, value: Any, name: str) -> Held:
        try:
            held = self._reader.read(value)
            if isinstance(held, Distributed) and held.record is not None:
                cuts_of(held.record)  # refuses a class of which nothing is known
        except FtckptError as error:
            error.tensor, error.file = error.tensor or name, error.file or self.file.path
            raise
        assert held is not None
        return held

    def _object(self, field: Path, label: str) -> None:
        name = f"{self._owner}.{label}"
        self.objects.setdefault(name, ObjectInfo(name, self._pickle, self.file.rank, field))

    def _name(self, name: str, value: Any) -> None:
        if len(self.names) < MAX_NAMES:
            self.names.append(f"{self._owner}.{name}")
        role = role_of(name)
        if type(value) in (int, float) and role is not None:
            self.numbers.append(StepNumber(name, float(min(max(value, -1e18), 1e18)), role))


def is_flat(where: StoredName) -> bool:
    """Say whether a tensor is a flattened parameter of FSDP: many parameters, one after another.

    Source: torch/distributed/fsdp/_flat_param.py (`FLAT_PARAM`), until torch 2.0 `flat_param`.
    """
    return where.name.rpartition(".")[2] in ("_flat_param", "flat_param")


# A state of one rank may also stand under a word for its part.
_PARTS = frozenset(
    {
        "tensors", "shard", "shards", "model_shard", "model_shards", "local_shard", "param_shards",
        "weight_shards", "local_state", "local_state_dict", "local_tensors",
    }
)  # fmt: skip
_MODELS = MODELS | AVERAGES | _PARTS


def _entries(tree: Any) -> Iterator[tuple[Path, Any, str]]:
    """Yield (path, value, key): leaves, and for `{"data": tensor, "dim": 0}` the tensor itself.

    The tensor of such an entry comes before what stands beside it.
    """
    found: Path | None = None
    for path, value in leaves(tree):
        parent = path[:-1]
        if path and parent != found:
            key = data_key(inner_at(tree, parent))
            if key:
                found = parent
                yield parent, inner_at(tree, parent)[key], key
        if found is None or path[: len(found)] != found:
            yield path, value, ""


def is_training_state(tree: Any) -> bool:
    """Say whether a rank's state has its model under a key, beside other state."""
    return isinstance(tree, dict) and any(_holds_parts(k, v) for k, v in tree.items())


def _holds_parts(key: Any, value: Any) -> bool:
    """Say whether a key at the top of a training state is the model or its average."""
    return key in _MODELS and isinstance(value, dict) and any(_tensors_below(value))


def _tensors_below(tree: Mapping[Any, Any]) -> Iterator[bool]:
    for _, value in leaves(tree):
        if isinstance(value, _TENSORS):
            yield True
