"""State that ZeRO does not cut, dealt out to the files of another grid of ranks.

Every file repeats some of it: the scheduler, the configuration, the loss scale, the client's own
keys. A rank that the source has too gets what that rank saved. A rank that is new gets what the
source's files hold alike, and nothing of what differs (a random stream). What differs and belonged
to a rank that is no more has no place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import TensorInfo
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.transfer.content import Content, Wanted
from ftckpt.transfer.layout import Literal, Segment, Stored

from .deepspeed_checkpoint import DeepSpeedCheckpoint
from .deepspeed_files import DeepSpeedFile, Role
from .deepspeed_states import (
    BASES,
    LAYOUT_OF_MODEL,
    LAYOUT_OF_OPTIMIZER,
    MASTERS,
    MODULE,
    OPTIMIZER,
)
from .inert_tree import Path
from .torch_tree import Carried, pickled
from .torch_values import StoredStorage, TensorRef

# Tensors in other state are random states: small. More than this is not read to be compared.
_COMPARED = 16 << 20
_GROUPS = "param_groups"
_OWN = "extra:rank"


class Place(NamedTuple):
    """Model-parallel rank and partition; a file that every partition reads has partition 0."""

    mp: int
    dp: int


class State:
    """The other state of one file.

    Attributes:
        fields: path in the file's tree -> value, as the source has it.
        labels: path -> name of the object, without its rank.
        storages: of the tensors inside.
        at: where the optimizer's state stands in the tree.
        layout: what a model's file says of how the files are cut.
    """

    def __init__(self, file: DeepSpeedFile, tree: Any, storages: Mapping[str, StoredStorage]):
        self.path, self.place = file.path, Place(file.mp, file.dp or 0)
        self.storages = storages
        self.fields: dict[Path, Any] = {}
        self.labels: dict[Path, str] = {}
        self.at: Path = ()
        self.layout: dict[str, Any] = {}
        if file.role is Role.MODEL:
            self.layout = {key: tree[key] for key in tree if key in LAYOUT_OF_MODEL}
            self._take((), "", tree, {*LAYOUT_OF_MODEL, MODULE, "optimizer"})
            module = tree[MODULE] or {}
            tensors = {name for name, value in module.items() if isinstance(value, TensorRef)}
            self._take((MODULE,), "module.", module, tensors)
            return
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


class Share(NamedTuple):
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
        return {key: value for key, value in self.below(*self.at).items() if key != _GROUPS}

    @property
    def base(self) -> dict[Any, Any]:
        """What the base optimizer's state holds beside the states: its parameter groups."""
        found = {k: v for k, v in self.below(*self.at).items() if k == _GROUPS}
        for key in BASES:
            found |= self.below(*self.at, key)
        return found


class RestOfRole:
    """The other state of all files of one role.

    Attributes:
        unplaced: names of objects and keys of tensors that no rank can have.
        notes: which ranks lack what.
        tensors: those inside, under the names that the result's ranks give them.
        same: names of objects that mean the same in the result.
    """

    def __init__(self, content: Content, files: Sequence[DeepSpeedFile], role: Role) -> None:
        """Read the files, one after the other.

        Raises:
            CorruptError, UnsafeError: a file is not what it was when it was opened.
        """
        checkpoint = content.checkpoint
        assert isinstance(checkpoint, DeepSpeedCheckpoint)
        self._content, self._checkpoint, self._role = content, checkpoint, role
        self.unplaced: list[str] = []
        self.notes: list[Finding] = []
        self.tensors: list[Wanted] = []
        self.same: set[str] = set()
        self._states: dict[Place, State] = {}
        self._dealt: set[Place] = set()
        for file in files:
            storages = checkpoint.streams[file.path].storages
            state = State(file, checkpoint.tree(file.path), storages)
            self._states[state.place] = state
        self._names: dict[tuple[str, Path], str] = {
            (info.extent.file, tuple(info.field)): name for name, info in checkpoint.objects.items()
        }
        self._inside: dict[tuple[str, str], list[str]] = {}
        own: dict[str, list[TensorInfo]] = {}
        for info in checkpoint.tensors.values():
            if info.component.startswith(_OWN):
                own.setdefault(info.pieces[0].extent.file, []).append(info)
        for state in self._states.values():
            self._index(state, own.get(state.path, ()))
        for state in self._states.values():
            self._leave_out(state)

    def _index(self, state: State, own: Sequence[TensorInfo]) -> None:
        """Find which of a file's own tensors lie in which field."""
        for info in own:
            fits = [label for label in state.labels.values() if _below(info.name, label)]
            if fits:
                self._inside.setdefault((state.path, max(fits, key=len)), []).append(info.key)

    def _leave_out(self, state: State) -> None:
        """Forget fields of which something was dropped."""
        for path, label in state.labels.items():
            name = self._names.get((state.path, path))
            keys = self._inside.get((state.path, label), [])
            dropped = name is not None and name not in self._content.objects
            if dropped or any(key not in self._content.tensors for key in keys):
                del state.fields[path]
                self.unplaced += (key for key in keys if key in self._content.tensors)
                if not dropped and name is not None:
                    self.unplaced.append(name)

    def deal(self, place: Place, rank: int, *, first: bool) -> Share:
        """Return what the file of one place of the result holds.

        Args:
            place: which.
            rank: its global rank in the result.
            first: whether it is the first file of the role, whose names have no rank.
        """
        state = self._states.get(place)
        self._dealt.add(place)
        if state is not None:
            self._keep(state, rank, first=first)
            return Share(state.fields, state.storages, state.at, state.layout)
        states = list(self._states.values())
        others = [s for s in states if s.place.mp == place.mp] or states
        if not others:
            return Share({}, {})
        alike = {path for path in others[0].fields if self._alike(path, others)}
        for path in others[0].fields.keys() - alike:
            what = f"{others[0].labels[path]} was of each rank alone: rank {rank} has none"
            self.notes.append(finding("note", what, rank=rank))
        fields = {path: value for path, value in others[0].fields.items() if path in alike}
        return Share(fields, others[0].storages, others[0].at, others[0].layout)

    def _keep(self, state: State, rank: int, *, first: bool) -> None:
        prefix = "" if first else f"rank_{rank}."
        for path in state.fields:
            label = state.labels[path]
            name = self._names.get((state.path, path))
            if name == prefix + label:
                self.same.add(name)
            for key in self._inside.get((state.path, label), ()):
                wanted = self._content.tensors[key]
                self.tensors.append(wanted._replace(component=f"extra:rank{rank}"))

    def strays(self, keys: Sequence[str]) -> set[str]:
        """Return those of some tensors' keys that lie in no field of these files."""
        inside = {key for held in self._inside.values() for key in held}
        return set(keys) - inside

    def settle(self) -> None:
        """Say what has no place, after everything was dealt."""
        for place, state in self._states.items():
            if place in self._dealt:
                continue
            near = {place.mp} & {dealt.mp for dealt in self._dealt}
            others = [s for s in self._states.values() if not near or s.place.mp in near]
            for path, label in state.labels.items():
                if path not in state.fields or self._alike(path, others):
                    continue
                name = self._names.get((state.path, path))
                self.unplaced += [] if name is None else [name]
                self.unplaced += self._inside.get((state.path, label), ())

    def _alike(self, path: Path, states: Sequence[State]) -> bool:
        """Say whether all files hold the same at a path, the tensors inside included."""
        if any(path not in state.fields for state in states):
            return False
        return len({self._bytes(state, path) for state in states}) == 1

    def _bytes(self, state: State, path: Path) -> bytes:
        try:
            text, storages = pickled(Carried(state.fields[path], state.storages))
        except UnsupportedError as error:
            error.file = state.path
            raise
        if sum(storage.nbytes for storage in storages) > _COMPARED:
            return f"{state.path}: not compared".encode()
        return text + b"".join(self._data(s) for storage in storages for s in storage.segments)

    def _data(self, segment: Segment) -> bytes:
        if isinstance(segment, Literal):
            return segment.data
        assert isinstance(segment, Stored)
        return self._checkpoint.source.read(*segment.extent)


def _below(name: str, label: str) -> bool:
    return name == label or name.startswith(f"{label}.")


def unplaced(content: Content, rests: Sequence[RestOfRole]) -> list[str]:
    """Return the names of objects and the keys of tensors that no file of the result has."""
    own = [key for key, wanted in content.tensors.items() if _is_own(wanted)]
    strays = set(own).intersection(*(rest.strays(own) for rest in rests))
    return sorted(strays.union(*(rest.unplaced for rest in rests)))


def stored(content: Content, rests: Sequence[RestOfRole], *, renumbered: bool) -> Content:
    """Return what the files hold, under the names that the result's ranks give it.

    Args:
        content: what was to be written.
        rests: the other state.
        renumbered: whether parameter groups have other numbers than in the source.
    """
    kept = [wanted for wanted in content.tensors.values() if not _is_own(wanted)]
    found = content.with_tensors([*kept, *(wanted for rest in rests for wanted in rest.tensors)])
    same = {name for rest in rests for name in rest.same}
    if renumbered:
        same = {name for name in same if not name.endswith(f"optimizer.{_GROUPS}")}
    objects = {name: info for name, info in found.objects.items() if name in same}
    return replace(found, objects=objects)


def _is_own(wanted: Wanted) -> bool:
    return wanted.component.startswith(_OWN)
