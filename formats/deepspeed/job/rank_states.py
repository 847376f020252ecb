"""Assign state that ZeRO does not cut to the files of another grid of ranks.

Every file repeats some of it: the scheduler, the configuration, the loss scale, the client's own
keys. A rank that the source has too gets what that rank saved. A rank that is new gets what the
source's files hold alike, and nothing of what differs (a random stream). What differs and belonged
to a rank that has gone has no place.

What a file of DeepSpeed's keeps besides weights, masters and moments, by its path in the tree.

What only says how the files are cut is not state and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import TensorInfo
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
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
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Elements, Literal, Segment, Stored

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


# Tensors in other state are random states: small. More than this is not read to be compared.
_COMPARED = 16 << 20
# What the name of an object of another rank than the first begins with.
_RANK = re.compile(r"rank_\d+\.")
# How a component of one rank alone begins; its number follows.
RANK_COMPONENT = "extra:rank"


class OtherState:
    """State besides weights and partitions, as the files of a result hold it.

    It is complete when all files were laid out.

    Attributes:
        unplaced: names of objects and keys of tensors that no file of the result has.
        notes: what the user should know.
        tensors: those inside, under the names that the result's ranks give them.
        same: names of objects that mean the same in the result.
    """

    def __init__(self, content: Content) -> None:
        """Take the content that is to be written."""
        self._content = content
        self.unplaced: list[str] = []
        self.notes: list[Finding] = []
        self.tensors: list[TargetTensor] = []
        self.same: set[str] = set()

    def inside(self) -> Iterator[Sequence[str]]:
        """Yield the keys of the source's tensors that lie in it."""
        raise NotImplementedError


class RoleStates(OtherState):
    """The other state of all files of one role."""

    def __init__(self, content: Content, states: Iterable[FileState]) -> None:
        """Take the states of what is to be written, one of each file or rank."""
        super().__init__(content)
        self.states = {state.place: state for state in states}
        self._assigned: set[PartitionRank] = set()
        for state in self.states.values():
            self._leave_out(state)

    def _leave_out(self, state: FileState) -> None:
        """Forget fields of which something was dropped."""
        for path in state.labels:
            name, keys = state.names.get(path), state.inside.get(path, [])
            dropped = name is not None and name not in self._content.objects
            if dropped or any(key not in self._content.tensors for key in keys):
                del state.fields[path]
                self.unplaced += (key for key in keys if key in self._content.tensors)
                if not dropped and name is not None:
                    self.unplaced.append(name)

    def assign(self, place: PartitionRank, rank: int, *, first: bool) -> FileState:
        """Return what the file of one place of the result holds.

        Args:
            place: which.
            rank: its global rank in the result.
            first: whether it is the first file of the role, whose names have no rank.
        """
        state = self.states.get(place)
        self._assigned.add(place)
        if state is not None:
            self._keep(state, rank, first=first)
            return state
        states = list(self.states.values())
        others = [s for s in states if s.place.mp == place.mp] or states
        if not others:
            return FileState("", place, {})
        shared = others[0].fields.keys() - others[0].private
        equal = {path for path in shared if self._are_equal(path, others)}
        for path in shared - equal:
            what = f"{others[0].labels[path]} was of each rank alone: rank {rank} has none"
            self.notes.append(finding("note", what, rank=rank))
        fields = {path: value for path, value in others[0].fields.items() if path in equal}
        return replace(others[0], fields=fields)

    def _keep(self, state: FileState, rank: int, *, first: bool) -> None:
        prefix = "" if first else f"rank_{rank}."
        for path in state.fields:
            name = state.names.get(path)
            if name == prefix + state.labels[path]:
                self.same.add(name)
            for key in state.inside.get(path, ()):
                wanted = self._content.tensors[key]
                self.tensors.append(wanted._replace(component=f"{RANK_COMPONENT}{rank}"))

    def inside(self) -> Iterator[Sequence[str]]:
        """Yield the keys of the source's tensors that lie in fields of these files."""
        for state in self.states.values():
            yield from state.inside.values()

    def finish(self) -> None:
        """List what has no place, after every file got its state."""
        for place, state in self.states.items():
            if place in self._assigned:
                continue
            near = {place.mp} & {assigned.mp for assigned in self._assigned}
            others = [s for s in self.states.values() if not near or s.place.mp in near]
            for path in state.fields:
                if not self._are_equal(path, others):
                    self.unplaced += [state.names[path]] if path in state.names else []
                    self.unplaced += state.inside.get(path, ())

    def _are_equal(self, path: Path, states: Sequence[FileState]) -> bool:
        """Say whether all files hold the same at a path, the tensors inside included."""
        if any(path not in state.fields for state in states):
            return False
        return len({self._bytes(state, path) for state in states}) == 1

    def _bytes(self, state: FileState, path: Path) -> bytes:
        try:
            text, storages = pickled(CopiedTree(state.fields[path], state.storages))
        except UnsupportedError as error:
            error.file = state.path
            raise
        if sum(storage.nbytes for storage in storages) > _COMPARED:
            return f"{state.path}: not compared".encode()
        return text + b"".join(self._data(s) for storage in storages for s in storage.segments)

    def _data(self, segment: Segment) -> bytes:
        if isinstance(segment, Literal):
            return segment.data
        if isinstance(segment, Elements):
            keys = [fill.key for fill in segment.shard.fills]
            return b"".join(read_tensor(self._content.checkpoint, key) for key in keys)
        assert isinstance(segment, Stored)
        return self._content.checkpoint.source.read(*segment.extent)


def read_states(
    checkpoint: DeepSpeedCheckpoint, files: Iterable[DeepSpeedFile], ignored: Collection[str] = ()
) -> Iterator[FileState]:
    """Read the files of one role, one after the other.

    Args:
        checkpoint: of DeepSpeed.
        files: which.
        ignored: labels of what is not the source's to say.

    Raises:
        CorruptError, UnsafeError: a file is not what it was when it was opened.
    """
    names = {(i.extent.file, tuple(i.field)): name for name, i in checkpoint.objects.items()}
    own: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        if info.component.startswith(RANK_COMPONENT):
            own.setdefault(info.pieces[0].extent.file, []).append(info)
    for file in files:
        state = FileState.read(file, checkpoint)
        state.names = {p: names[file.path, p] for p in state.fields if (file.path, p) in names}
        for info in own.get(file.path, ()):
            _find_field(state, info)
        for path in [path for path, label in state.labels.items() if label in ignored]:
            state.forget(path)
        yield state


def _find_field(state: FileState, info: TensorInfo) -> None:
    """Note in which field of a file one of its own tensors lies."""
    fits = [p for p, label in state.labels.items() if f"{info.name}.".startswith(f"{label}.")]
    if fits:
        path = max(fits, key=lambda path: len(state.labels[path]))
        state.inside.setdefault(path, []).append(info.key)


def unplaced(content: Content, states: Iterable[OtherState]) -> list[str]:
    """Return the names of objects and the keys of tensors that no file of the result has."""
    strays = {key for key, wanted in content.tensors.items() if _is_of_rank(wanted)}
    found: set[str] = set()
    for state in states:
        strays.difference_update(*state.inside())
        found.update(state.unplaced)
    return sorted(strays | found)


def renamed_content(
    content: Content,
    states: Sequence[OtherState],
    *,
    renumbered: bool,
    rewritten: Collection[str] = (),
) -> Content:
    """Return what the files hold, under the names that the result's ranks give it.

    Args:
        content: what was to be written.
        states: the other state.
        renumbered: whether parameter groups have other numbers than in the source.
        rewritten: labels of objects of which a part says another layout now.
    """
    kept = [wanted for wanted in content.tensors.values() if not _is_of_rank(wanted)]
    found = content.with_tensors([*kept, *(wanted for s in states for wanted in s.tensors)])
    same = {name for state in states for name in state.same}
    if renumbered:
        same = {name for name in same if not name.endswith(f"optimizer.{GROUPS}")}
    same = {name for name in same if _RANK.sub("", name) not in rewritten}
    objects = {name: info for name, info in found.objects.items() if name in same}
    return replace(found, objects=objects)


def _is_of_rank(wanted: TargetTensor) -> bool:
    return wanted.component.startswith(RANK_COMPONENT)
