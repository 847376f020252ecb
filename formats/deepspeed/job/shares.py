"""The other state of one file of DeepSpeed's, by its path in the file's tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import (
    BASES,
    LAYOUT_OF_MODEL,
    LAYOUT_OF_OPTIMIZER,
    MASTERS,
    MODULE,
    OPTIMIZER,
)
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef

GROUPS = "param_groups"


class PartitionRank(NamedTuple):
    """Model-parallel rank and partition; a file that every partition reads has partition 0."""

    mp: int
    dp: int


class FileState:
    """The other state of one file.

    Attributes:
        path: of the file.
        place: whose state it is.
        fields: path in the file's tree -> value, as the source has it.
        labels: path -> name of the object, without its rank.
        names: path -> name of the source's object.
        inside: path -> keys of the source's own tensors that lie there.
        private: paths of what one file is enough for.
        storages: of the tensors inside.
        at: where the optimizer's state stands in the tree.
        layout: what a model's file says of how the files are cut.
    """

    def __init__(
        self, path: str, place: PartitionRank, storages: Mapping[str, StoredStorage]
    ) -> None:
        self.path, self.place, self.storages = path, place, storages
        self.fields: dict[Path, Any] = {}
        self.labels: dict[Path, str] = {}
        self.names: dict[Path, str] = {}
        self.inside: dict[Path, list[str]] = {}
        self.private: set[Path] = set()
        self.at: Path = ()
        self.layout: dict[str, Any] = {}

    @classmethod
    def of(cls, file: DeepSpeedFile, checkpoint: DeepSpeedCheckpoint) -> FileState:
        """Read a file.

        Raises:
            CorruptError, UnsafeError: it is not what it was when it was opened.
        """
        tree = checkpoint.tree(file.path)
        storages = checkpoint.streams[file.path].storages
        made = cls(file.path, PartitionRank(file.mp, file.dp or 0), storages)
        if file.role is FileRole.MODEL:
            made._take_model(tree)
        else:
            made._take_optimizer(tree)
        return made

    def _take_model(self, tree: Mapping[str, Any]) -> None:
        self.layout = {key: tree[key] for key in tree if key in LAYOUT_OF_MODEL}
        self._take((), "", tree, {*LAYOUT_OF_MODEL, MODULE, "optimizer"})
        module = tree[MODULE] or {}
        tensors = {name for name, value in module.items() if isinstance(value, TensorRef)}
        self._take((MODULE,), "module.", module, tensors)

    def _take_optimizer(self, tree: Mapping[str, Any]) -> None:
        inner: Any = tree.get(OPTIMIZER)
        if isinstance(inner, dict) and any(key in inner for key in MASTERS):
            self._take((), "optimizer.", tree, {OPTIMIZER})
            self.at = (OPTIMIZER,)
        else:
            inner = tree  # a universal checkpoint has no file of partitions around it
        self._take(self.at, "optimizer.", inner, {*LAYOUT_OF_OPTIMIZER, *MASTERS, *BASES})
        for key in BASES:
            base = inner.get(key)
            if isinstance(base, dict):
                self._take((*self.at, key), "optimizer.", base, {"state"})

    def _take(self, at: Path, label: str, tree: Mapping[Any, Any], layout: set[str]) -> None:
        for key, value in tree.items():
            if isinstance(key, (str, int)) and key not in layout:
                self.fields[*at, key] = value
                self.labels[*at, key] = f"{label}{key}"

    def forget(self, path: Path) -> None:
        """Leave a field out, as if it had not been there."""
        for held in (self.fields, self.labels, self.names, self.inside):
            held.pop(path, None)


class FileShare(NamedTuple):
    """What one file of the result holds of the other state.

    Attributes:
        fields: path -> value, a part of the source file's tree.
        storages: of that file.
        at: where the optimizer's state stands in that tree.
        layout: what that file, one of the model's, says of how the files are cut.
    """

    fields: Mapping[Path, Any]
    storages: Mapping[str, StoredStorage]
    at: Path = ()
    layout: Mapping[str, Any] = {}

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


class Dealer(Protocol):
    """Deals out the other state of one role to the files of a result."""

    def deal(self, place: PartitionRank, rank: int, *, first: bool) -> FileShare:
        """Return what the file of one place of the result holds.

        Args:
            place: which.
            rank: its global rank in the result.
            first: whether it is the first file of the role, whose names have no rank.
        """

    def settle(self) -> None:
        """Say what has no place, after everything was dealt."""
