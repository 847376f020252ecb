"""Name the state in DeepSpeed's files besides weights, masters and moments.

A tensor in it (a random state) is kept as `extra:rank<R>`, anything else as an object, one for each
key at the top. What only says how the files are cut is not state and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftckpt.checkpoint import Extent, ObjectInfo, Scalar, StepRole
from ftckpt.checkpoint.steps import is_counter, role_of
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import (
    BASES,
    LAYOUT_OF_MODEL,
    LAYOUT_OF_OPTIMIZER,
    MASTERS,
    MODULE,
    OPTIMIZER,
)
from ftckpt.formats.pickles.walk import Path, leaves, step_of
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef

# Names of state that one file may give; more are of no use to anyone.
MAX_NAMES = 4096


@dataclass
class OtherFileState:
    """The state in one file that is not laid out by ZeRO.

    Attributes:
        path: which file.
        role: what it holds.
        prefix: of the names of its objects: "" in the first file of its role, else `rank_R.`; for
            a pipeline's layer "" in the first slice, else `tpT.`.
        rank: whose state it is; None where nobody's.
        objects: by name.
        tensors: dotted name -> tensor.
        names: dotted names of everything, as deep as the tree goes.
        counters: step counters.
    """

    path: str
    role: FileRole
    prefix: str
    rank: int | None
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    counters: list[Scalar] = field(default_factory=list)


def read_rest(
    file: DeepSpeedFile, stream: TorchStream, rank: int, *, first: bool
) -> OtherFileState:
    """Sort what is left in a file.

    Args:
        file: which file.
        stream: it, parsed.
        rank: whose state it is.
        first: whether it is the first of its role; the others' names begin with `rank_R.`.

    Raises:
        UnsafeError: the tree unfolds to far more than a checkpoint has.
    """
    rest = OtherFileState(file.path, file.role, "" if first else f"rank_{rank}.", rank)
    pickle, tree = _pickle(file.path, stream), stream.tree
    if file.role is FileRole.OPTIMIZER:
        at: Path = (OPTIMIZER,)
        inner = tree.get(OPTIMIZER)
        if not isinstance(inner, dict) or not any(key in inner for key in MASTERS):
            at, inner = (), tree  # a universal checkpoint has no file of partitions around it
        else:
            _sort(rest, pickle, "optimizer.", (), tree, {OPTIMIZER})
        _sort(rest, pickle, "optimizer.", at, inner, {*LAYOUT_OF_OPTIMIZER, *MASTERS, *BASES})
        for key in BASES:
            _sort_base(rest, pickle, (*at, key), inner.get(key))
    else:
        optimizer = tree.get("optimizer")
        _sort(rest, pickle, "", (), tree, {*LAYOUT_OF_MODEL, MODULE, "optimizer"})
        module = tree[MODULE]
        held = {n for n, v in module.items() if isinstance(v, TensorRef)} if module else ()
        _sort(rest, pickle, "module.", (MODULE,), module or {}, held)  # a module's extra state
        if isinstance(optimizer, dict):  # ZeRO is off
            _sort_objects(rest, pickle, optimizer)
    return rest


def read_layer(file: DeepSpeedFile, stream: TorchStream, rank: int) -> OtherFileState:
    """Sort what one slice of a pipeline's layer keeps beside its weights.

    Args:
        file: which file.
        stream: it, parsed; its tensors are left out.
        rank: the first that loads it.

    Raises:
        UnsafeError: the tree unfolds to far more than a checkpoint has.
    """
    rest = OtherFileState(file.path, file.role, _of_slice(file), rank)
    _sort(rest, _pickle(file.path, stream), _of_layer(file), (), stream.tree, ())
    return rest


def name_in_layer(file: DeepSpeedFile, key: object) -> str:
    """Return the name of an object that the file of a layer has under a key of its state_dict."""
    return f"{_of_slice(file)}{_of_layer(file)}{key}"


def _of_slice(file: DeepSpeedFile) -> str:
    return f"tp{file.mp}." if file.mp else ""


def _of_layer(file: DeepSpeedFile) -> str:
    return f"module.{file.layer}."


def read_number(path: str, label: str, stream: TorchStream) -> OtherFileState:
    """Return the state in a file that is one number and nothing else."""
    rest = OtherFileState(path, FileRole.OPTIMIZER, "", None)
    _add(rest, _pickle(path, stream), label, (), stream.tree)
    return rest


def _pickle(path: str, stream: TorchStream) -> Extent:
    records = (extent for name, extent, _ in stream.records if name == "data.pkl")
    return next(records, Extent(path, 0, 0))


def _sort(
    rest: OtherFileState,
    pickle: Extent,
    label: str,
    at: Path,
    tree: Mapping[Any, Any],
    skipped: Collection[str],
) -> None:
    for key, value in tree.items():
        if value is not None and not (isinstance(key, str) and key in skipped):
            step = step_of(key)
            _add(rest, pickle, f"{label}{step}", (*at, step), value)


def _sort_base(rest: OtherFileState, pickle: Extent, at: Path, base: Any) -> None:
    """Add what the base optimizer keeps that is not a tensor: hyperparameters, whole counters."""
    states: Iterator[tuple[Path, Any]] = iter(())
    if isinstance(base, dict):
        _sort(rest, pickle, "optimizer.", at, base, {"state"})
        state = base.get("state")
        if isinstance(state, dict):
            states = (((*at, "state", step_of(k)), v) for k, v in state.items())
    elif isinstance(base, list):
        states = (((*at, number), v) for number, v in enumerate(base))
    for path, state in states:
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, TensorRef) and value is not None:
                step = step_of(key)
                label = f"optimizer.state.{path[-1]}.{step}"
                _add(rest, pickle, label, (*path, step), value)


def _sort_objects(rest: OtherFileState, pickle: Extent, optimizer: Mapping[Any, Any]) -> None:
    """Add what an unpartitioned optimizer keeps; where tensors are among it, each on its own."""
    for key, value in optimizer.items():
        at: Path = ("optimizer", step_of(key))
        found = list(leaves(value, at))
        mixed = any(isinstance(leaf, TensorRef) for _, leaf in found)
        for path, leaf in found if mixed else [(at, value)]:
            if leaf is not None and not isinstance(leaf, TensorRef):
                _add(rest, pickle, ".".join(map(str, path)), path, leaf)


def _add(rest: OtherFileState, pickle: Extent, label: str, at: Path, tree: Any) -> None:
    """Add one value as an object, its tensors on their own."""
    for path, value in leaves(tree):
        name = ".".join([label, *map(str, path)])
        if isinstance(value, TensorRef):
            rest.tensors[name] = value
            continue
        full = rest.prefix + label
        rest.objects.setdefault(full, ObjectInfo(full, pickle, rest.rank, at))
        if len(rest.names) < MAX_NAMES:
            rest.names.append(rest.prefix + name)
        role = role_of(name, optimizer=name.startswith("optimizer."))
        if role is not None and is_counter(value):
            rest.counters.append(Scalar(rest.path, name, float(value), StepRole(role)))
