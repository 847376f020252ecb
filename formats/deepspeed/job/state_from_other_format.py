"""Build DeepSpeed's state around the weights from a source of another format.

A source that was made of a DeepSpeed checkpoint has it under the names that its reader gives
(`optimizer.loss_scaler`, `rank_1.seed`), and gets it back in the same places. Everything else is
the client's state.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.names import FileRole
from ftckpt.formats.deepspeed.states import (
    BASES,
    LAYOUT_OF_MODEL,
    LAYOUT_OF_OPTIMIZER,
    MASTERS,
    MODULE,
    OPTIMIZER,
)
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.state.objects import StateObjects
from ftckpt.formats.state.paths import NestedState, recorded_paths
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor, pickled
from ftckpt.transfer.content import Content, TargetTensor

from .rank_states import GROUPS, FileState, PartitionRank
from .read import GroupSettings, ParameterSettings, Settings, without_params

_RANK = re.compile(r"rank_(\d{1,7})(?:\.(.+))?")
_OWN = re.compile(r"extra:rank(\d{1,7})")
_OPTIMIZER = "optimizer"
_STATE = "state"
_GROUPS = f"{_OPTIMIZER}.{GROUPS}"
_RESERVED = LAYOUT_OF_MODEL | {MODULE, _OPTIMIZER}
_LAID_OUT = LAYOUT_OF_OPTIMIZER | {*MASTERS, *BASES, _STATE, OPTIMIZER}


class _Owner(NamedTuple):
    """Whose state it is; `rank` counts the ranks of the job that saved it."""

    role: FileRole
    rank: int


class OtherFormatState:
    """The other state of a foreign source.

    Attributes:
        content: the same, with tensors of further components named as the result's reader does.
        parameters: settings and numbers of the parameters.
        group_objects: names of the objects that hold settings.
        unplaced: names of objects and keys of tensors that have no place.
    """

    def __init__(self, content: Content, decided: Collection[str]) -> None:
        """Sort what there is.

        Args:
            content: what is to be written.
            decided: labels of what is not the source's to say.
        """
        self._decided = frozenset(decided) - {_GROUPS}
        self.parameters = ParameterSettings()
        self.unplaced: list[str] = []
        self._trees: dict[_Owner, NestedState] = defaultdict(NestedState)
        self._names: dict[_Owner, dict[Path, str]] = defaultdict(dict)
        self._inside: dict[_Owner, dict[Path, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._private: set[Path] = set()
        self._counts: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        self._flattened: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.group_objects: list[str] = []
        made = [self._placed(wanted, content) for wanted in content.tensors.values()]
        self.content = replace(content.with_tensors(made), aliases=content.aliases)
        recorded = recorded_paths(content.checkpoint)
        trees, paths = StateObjects(content, recorded.objects), recorded.nested_objects()
        for name in content.objects:
            self._put(name, trees, paths.get(name))
        for (_, key), group in self._flattened.items():
            if str(key).isdecimal():
                self._take_group(group, int(key))
            else:
                self.parameters.settings[str(key)] = group
        for leaf, found in self._counts.items():
            values = [value for _, value in found]
            if all(value == values[0] for value in values):
                self.parameters.alike[leaf] = values[0]
            else:
                self.unplaced += dict.fromkeys(name for name, _ in found)

    def states(self, role: FileRole) -> Iterator[FileState]:
        """Yield the state of each rank that has some of its own; what all have is rank 0's."""
        shared = self._state(_Owner(role, 0))
        yield shared
        for owner in sorted(self._trees):
            if owner.role is role and owner.rank:
                state = self._state(owner)
                for path, value in shared.fields.items():
                    if path not in state.fields and path not in shared.inside:
                        state.fields[path], state.labels[path] = value, shared.labels[path]
                yield state

    def _state(self, owner: _Owner) -> FileState:
        state = FileState(f"rank {owner.rank}", PartitionRank(0, owner.rank), {})
        prefix = "" if owner.role is FileRole.MODEL else f"{_OPTIMIZER}."
        for key, value in self._trees[owner].settled(lambda path: True).items():
            path = _place_of(key)
            state.fields[path], state.labels[path] = value, f"{prefix}{key}"
        state.names = {_place_of(*at): name for at, name in self._names[owner].items()}
        state.inside = {_place_of(*at): list(keys) for at, keys in self._inside[owner].items()}
        if owner.rank == 0 and owner.role is FileRole.MODEL:
            state.private = set(self._private)
        return state

    def _placed(self, wanted: TargetTensor, content: Content) -> TargetTensor:
        """Put a tensor that is not a model's into the state of its rank."""
        if wanted.component in ("model", _OPTIMIZER) or wanted.component.startswith("extra:tp"):
            return wanted
        path: Path
        if match := _OWN.fullmatch(wanted.component):
            owner, path = _owned((f"rank_{match[1]}", *wanted.name.split(".")))
            named = wanted
        else:
            component = wanted.component.removeprefix("extra:")
            name = wanted.key.removeprefix(f"{wanted.component}:")
            owner, path = _Owner(FileRole.MODEL, 0), (component, name)
            named = wanted._replace(
                component="extra:rank0", kind=Kind.OTHER, name=f"{component}.{name}"
            )
            self._private.add(path[:1])
        tensor = Tensor.of(content.whole(wanted.key))
        if _fits(owner, path) and self._trees[owner].put(path, tensor):
            self._inside[owner][path[:1]].append(named.key)
            return named
        self.unplaced.append(wanted.key)
        return wanted

    def _put(self, name: str, trees: StateObjects, path: Path | None) -> None:
        """Put an object in its place, as a whole or not at all."""
        try:
            parts = list(trees.nested(name, path))
            pickled([part.value for part in parts])
        except UnsupportedError:
            self.unplaced.append(name)
            return
        placed = [(*_owned(part.path), part.value) for part in parts]
        if not parts:  # all of it are tensors of the checkpoint
            return
        if all(_label(owner, path) in self._decided for owner, path, _ in placed):
            return
        optimizer = all(owner.role is FileRole.OPTIMIZER for owner, _, _ in placed)
        if optimizer and all(path[:1] == (GROUPS,) for _, path, _ in placed):
            self._take_groups(name, trees, placed)
        elif optimizer and all(_is_number(path, value) for _, path, value in placed):
            for _, (*_, leaf), value in placed:
                self._counts[str(leaf)].append((name, value.value))
        elif not all(_fits(o, p) and self._trees[o].put(p, value) for o, p, value in placed):
            self.unplaced.append(name)
        elif len(placed) == 1 and len(placed[0][1]) == 1:
            self._names[placed[0][0]][placed[0][1]] = name

    def _take_groups(
        self, name: str, trees: StateObjects, placed: Sequence[tuple[_Owner, Path, CopiedTree]]
    ) -> None:
        """Take settings: a list of groups, or one setting of one group or parameter."""
        self.group_objects.append(name)
        for owner, path, value in placed:
            if len(path) == 3:
                self._flattened[owner.rank, path[1]][str(path[2])] = _with_storages(
                    value.value, value
                )
            elif len(path) == 1 and isinstance(value.value, list):
                (leaf,) = trees.named(name)
                for number, group in enumerate(leaf.value.value):
                    self._take_group(
                        {k: _with_storages(v, value) for k, v in group.items()}, number
                    )
            else:
                self.unplaced.append(name)

    def _take_group(self, group: Settings, number: int) -> None:
        members = group.get("params")
        if isinstance(members, list) and members and all(type(m) is str for m in members):
            self.parameters.settings.update(dict.fromkeys(members, without_params(group)))
            self.parameters.places.update(dict.fromkeys(members, number))
        else:
            self.parameters.groups.append(GroupSettings(number, without_params(group)))


def _place_of(key: str | int) -> Path:
    """Return where a value stands in its file: a module keeps its extra state with its weights."""
    head, _, rest = str(key).partition(".")
    return (MODULE, rest) if head == MODULE and rest else (key,)


def _owned(path: Path) -> tuple[_Owner, Path]:
    """Return whose a value is by its path in the nested state, and its path in their file."""
    rank, steps = 0, path
    if match := _RANK.fullmatch(str(path[0])):
        rank = int(match[1])
        steps = (match[2], *path[1:]) if match[2] else path[1:]
    head, _, rest = str(steps[0]).partition(".") if steps else ("", "", "")
    if head != _OPTIMIZER:
        return _Owner(FileRole.MODEL, rank), steps
    steps = (rest, *steps[1:]) if rest else steps[1:]
    if steps and str(steps[0]).startswith(f"{_STATE}."):
        steps = (*str(steps[0]).split("."), *steps[1:])
    return _Owner(FileRole.OPTIMIZER, rank), steps


def _label(owner: _Owner, path: Path) -> str:
    return f"{_OPTIMIZER if owner.role is FileRole.OPTIMIZER else ''}.{path[0]}".lstrip(".")


def _fits(owner: _Owner, path: Path) -> bool:
    """Say whether a file has a place for what is not DeepSpeed's own there."""
    own = _RESERVED if owner.role is FileRole.MODEL else _LAID_OUT
    return bool(path) and path[0] not in own


def _is_number(path: Path, value: CopiedTree) -> bool:
    return path[:1] == (_STATE,) and len(path) == 3 and type(value.value) in (int, float)


def _with_storages(value: Any, around: CopiedTree) -> Any:
    """Return a setting, with the storages of the tensors in it where there are some."""
    if any(isinstance(leaf, TensorRef) for _, leaf in leaves(value)):
        return CopiedTree(value, around.storages)
    return value
