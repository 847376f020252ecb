"""What a file of DeepSpeed's keeps besides weights, masters and moments, by its path in the tree.

What only says how the files are cut is not state and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.formats.deepspeed.autoep import AUTOEP
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import (
    BASES,
    INFO,
    LAYOUT_OF_MODEL,
    LAYOUT_OF_OPTIMIZER,
    MASTERS,
    MODULE,
    OPTIMIZER,
)
from ftckpt.formats.pickles.walk import Path, step_of
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef

GROUPS = "param_groups"


class PartitionRank(NamedTuple):
    """Model-parallel rank and partition; a file that every partition reads has partition 0."""

    mp: int
    dp: int


class StateField(NamedTuple):
    """One value: its name without a rank, the path of what holds it, its key there."""

    label: str
    at: Path
    key: Any
    value: Any


def state_fields(role: FileRole, tree: Mapping[str, Any]) -> Iterator[StateField]:
    """Yield the state in the tree of a model's or an optimizer's file."""
    if role is FileRole.MODEL:
        yield from _fields("", (), tree, {*LAYOUT_OF_MODEL, MODULE, "optimizer"})
        module = tree[MODULE] or {}
        tensors = {name for name, value in module.items() if isinstance(value, TensorRef)}
        yield from _fields("module.", (MODULE,), module, tensors)  # a module's extra state
        return
    if role is FileRole.EXPERT_OPTIMIZER:
        yield from _fields("", (), tree, {"optimizer"})
        return
    at, inner = optimizer_at(tree)
    if at:
        yield from _fields("optimizer.", (), tree, {OPTIMIZER})
    yield from _fields("optimizer.", at, inner, {*LAYOUT_OF_OPTIMIZER, *MASTERS, *BASES})
    for key in BASES:
        base = inner.get(key)
        if isinstance(base, dict):
            yield from _fields("optimizer.", (*at, key), base, {"state"})


def optimizer_at(tree: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]]:
    """Return where an optimizer's state stands in its file; a universal one has it at the top."""
    inner = tree.get(OPTIMIZER)
    if isinstance(inner, dict) and any(key in inner for key in MASTERS):
        return (OPTIMIZER,), inner
    return (), tree


def _fields(
    label: str, at: Path, tree: Mapping[Any, Any], skipped: Collection[str]
) -> Iterator[StateField]:
    for key, value in tree.items():
        if not (isinstance(key, str) and key in skipped):
            yield StateField(f"{label}{step_of(key)}", at, key, value)


@dataclass
class FileState:
    """The state of one file, read from a source or to be written.

    Attributes:
        path: of the file.
        place: whose state it is.
        storages: of the tensors inside.
        fields: path in the file's tree -> value.
        at: where the optimizer's state stands in the tree.
        layout: what a model's file says of how the files are cut.
        repeats_layers: whether `universal_checkpoint_info` has the layers of AutoEP once more; they
            are kept in `layout` alone.
        labels: path -> name of the object, without its rank.
        names: path -> name of the source's object.
        inside: path -> keys of the source's own tensors that lie there.
        private: paths of what one file is enough for.
    """

    path: str
    place: PartitionRank
    storages: Mapping[str, StoredStorage]
    fields: dict[Path, Any] = field(default_factory=dict)
    at: Path = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    repeats_layers: bool = False
    labels: dict[Path, str] = field(default_factory=dict)
    names: dict[Path, str] = field(default_factory=dict)
    inside: dict[Path, list[str]] = field(default_factory=dict)
    private: set[Path] = field(default_factory=set)

    @classmethod
    def read(cls, file: DeepSpeedFile, checkpoint: DeepSpeedCheckpoint) -> FileState:
        """Read a file.

        Raises:
            CorruptError, UnsafeError: it is not what it was when it was opened.
        """
        tree = checkpoint.tree(file.path)
        storages = checkpoint.streams[file.path].storages
        made = cls(file.path, PartitionRank(file.mp, file.dp or 0), storages)
        for label, at, key, value in state_fields(file.role, tree):
            if isinstance(key, (str, int)):
                made.fields[*at, key] = value
                made.labels[*at, key] = label
        if file.role is FileRole.MODEL:
            made.layout = {key: tree[key] for key in tree if key in LAYOUT_OF_MODEL}
            info = tree.get(INFO)
            made.repeats_layers = isinstance(info, dict) and bool(info.get(AUTOEP))
            if made.repeats_layers:
                made.fields[INFO,] = {key: v for key, v in info.items() if key != AUTOEP}
        else:
            made.at, _ = optimizer_at(tree)
        return made

    def forget(self, path: Path) -> None:
        """Leave a field out, as if it had not been there."""
        for held in (self.fields, self.labels, self.names, self.inside):
            held.pop(path, None)

    def below(self, *at: str | int) -> dict[Any, Any]:
        """Return the fields that stand directly at a path, by key."""
        return {path[-1]: value for path, value in self.fields.items() if path[:-1] == at}

    @property
    def outer(self) -> dict[Any, Any]:
        """What an optimizer's file holds beside the optimizer's state."""
        return self.below() if self.at else {}

    @property
    def inner(self) -> dict[Any, Any]:
        """What the optimizer's state holds beside partitions and the base optimizer."""
        return {key: value for key, value in self.below(*self.at).items() if key != GROUPS}

    @property
    def base(self) -> dict[Any, Any]:
        """What the base optimizer's state holds beside the states: its parameter groups."""
        found = {k: v for k, v in self.below(*self.at).items() if k == GROUPS}
        for key in BASES:
            found |= self.below(*self.at, key)
        return found
