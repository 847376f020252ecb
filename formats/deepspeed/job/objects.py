"""Name the state in DeepSpeed's files besides weights, masters and moments.

A tensor in it (a random state) is kept as `extra:rank<R>`, anything else as an object, one for each
key at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftckpt.checkpoint import Extent, ObjectInfo, Scalar, StepRole
from ftckpt.checkpoint.steps import is_counter, role_of
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import BASES
from ftckpt.formats.pickles.walk import Path, leaves, step_of
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef

from .rank_states import optimizer_at, state_fields

# Names of state that one file may give; more are of no use to anyone.
MAX_NAMES = 4096


@dataclass
class FileObjects:
    """The objects and further tensors of one file.

    Attributes:
        path: which file.
        role: what it holds.
        prefix: of the names of its objects: "" in the first file of its role, else `rank_R.`; for
            a pipeline's layer "" in the first slice, else `tpT.`.
        rank: whose state it is; None where nobody's.
        pickle: where it lies in the file.
        objects: by name.
        tensors: dotted name -> tensor.
        names: dotted names of everything, as deep as the tree goes.
        counters: step counters.
    """

    path: str
    role: FileRole
    prefix: str
    rank: int | None
    pickle: Extent
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    counters: list[Scalar] = field(default_factory=list)

    def add(self, label: str, at: Path, tree: Any) -> None:
        """Add one value as an object, its tensors on their own.

        Raises:
            UnsafeError: the tree unfolds to far more than a checkpoint has.
        """
        for path, value in leaves(tree):
            name = ".".join([label, *map(str, path)])
            if isinstance(value, TensorRef):
                self.tensors[name] = value
                continue
            full = self.prefix + label
            self.objects.setdefault(full, ObjectInfo(full, self.pickle, self.rank, at))
            if len(self.names) < MAX_NAMES:
                self.names.append(self.prefix + name)
            role = role_of(name, optimizer=name.startswith("optimizer."))
            if role is not None and is_counter(value):
                self.counters.append(Scalar(self.path, name, float(value), StepRole(role)))

    def add_base_states(self, at: Path, base: Any) -> None:
        """Add what the base optimizer keeps of groups that is not a tensor: whole counters."""
        if isinstance(base, dict) and isinstance(base.get("state"), dict):
            at, states = (*at, "state"), base["state"]
        else:
            states = dict(enumerate(base)) if isinstance(base, list) else {}
        for number, state in states.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if not isinstance(value, TensorRef) and value is not None:
                    group, step = step_of(number), step_of(key)
                    self.add(f"optimizer.state.{group}.{step}", (*at, group, step), value)

    def add_optimizer(self, optimizer: Mapping[Any, Any]) -> None:
        """Add what an optimizer without ZeRO keeps; where tensors are among it, each on its own."""
        for key, value in optimizer.items():
            at: Path = ("optimizer", step_of(key))
            found = list(leaves(value, at))
            mixed = any(isinstance(leaf, TensorRef) for _, leaf in found)
            for path, leaf in found if mixed else [(at, value)]:
                if leaf is not None and not isinstance(leaf, TensorRef):
                    self.add(".".join(map(str, path)), path, leaf)


def read_objects(
    file: DeepSpeedFile, stream: TorchStream, rank: int, *, first: bool
) -> FileObjects:
    """Name the state in a model's or an optimizer's file.

    Args:
        file: which file.
        stream: it, parsed.
        rank: whose state it is.
        first: whether it is the first of its role; the others' names begin with `rank_R.`.

    Raises:
        UnsafeError: the tree unfolds to far more than a checkpoint has.
    """
    prefix = "" if first else f"rank_{rank}."
    if file.role is FileRole.EXPERT_OPTIMIZER:
        prefix = f"ep_rank_{file.expert}."
    made = FileObjects(file.path, file.role, prefix, rank, _pickle(file.path, stream))
    tree = stream.tree
    for label, at, key, value in state_fields(file.role, tree):
        if value is not None:
            made.add(label, (*at, step_of(key)), value)
    if file.role is FileRole.OPTIMIZER:
        at, inner = optimizer_at(tree)
        for key in BASES:
            made.add_base_states((*at, key), inner.get(key))
    elif isinstance(tree.get("optimizer"), dict):  # ZeRO is off
        made.add_optimizer(tree["optimizer"])
    return made


def read_layer(file: DeepSpeedFile, stream: TorchStream, rank: int) -> FileObjects:
    """Name what one slice of a pipeline's layer keeps beside its weights.

    Args:
        file: which file.
        stream: it, parsed; its tensors are left out.
        rank: the first that loads it.

    Raises:
        UnsafeError: the tree unfolds to far more than a checkpoint has.
    """
    prefix = f"tp{file.mp}." if file.mp else ""
    made = FileObjects(file.path, file.role, prefix, rank, _pickle(file.path, stream))
    for key, value in stream.tree.items():
        if value is not None:
            step = step_of(key)
            made.add(f"module.{file.layer}.{step}", (step,), value)
    return made


def name_in_layer(file: DeepSpeedFile, key: object) -> str:
    """Return the name of an object that the file of a layer has under a key of its state_dict."""
    return f"{f'tp{file.mp}.' if file.mp else ''}module.{file.layer}.{key}"


def read_number(path: str, label: str, stream: TorchStream) -> FileObjects:
    """Return the state in a file that is one number and nothing else."""
    made = FileObjects(path, FileRole.OPTIMIZER, "", None, _pickle(path, stream))
    made.add(label, (), stream.tree)
    return made


def _pickle(path: str, stream: TorchStream) -> Extent:
    records = (extent for name, extent, _ in stream.records if name == "data.pkl")
    return next(records, Extent(path, 0, 0))
