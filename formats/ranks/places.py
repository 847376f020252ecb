"""Locate each tensor in the files of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.formats.pickles.walk import Path, at, dotted, leaves
from ftckpt.formats.state.nested import IsList
from ftckpt.formats.state.paths import RecordedPaths, recorded_paths, tensor_paths
from ftckpt.transfer.content import Content, TargetTensor

from .checkpoint import RanksCheckpoint
from .names import OF_ONE_RANK, Role


class RankPlace(NamedTuple):
    """A place: in which file of a rank, where in its tree, and whose it is; None is everyone's."""

    role: Role
    path: Path
    owner: int | None


class RankPlaces:
    """The places of the tensors of some content.

    Attributes:
        found: by key.
        unplaced: keys of tensors that the format has no place for.
    """

    def __init__(
        self, content: Content, *, whole: bool, inside: Mapping[str, str] | None = None
    ) -> None:
        """Find the places.

        Args:
            content: what is to be written.
            whole: whether a rank has one file, which holds other components too.
            inside: keys of tensors inside a subclass, and what follows its name. They have its
                place, and this at the end.
        """
        self._inside = inside or {}
        self.found: dict[str, RankPlace] = {}
        self.unplaced: list[str] = []
        self._checkpoint = content.checkpoint
        self._ranks = placed_as_in(content.checkpoint)
        self._trees: dict[str, tuple[Any, dict[str, Path]]] = {}
        others: list[TargetTensor] = []
        for key, wanted in content.tensors.items():
            place = self._own(wanted)
            if place is None:
                others.append(wanted)
            else:
                self.found[key] = place
        paths, lost = tensor_paths(content.with_tensors(others), RecordedPaths({}, {}))
        self.unplaced += lost
        recorded = recorded_paths(self._checkpoint).tensors if paths else {}
        self._lists: set[Path] = set()
        for key, path in paths.items():
            nested = recorded.get(key, path)
            alone = OF_ONE_RANK.fullmatch(content.tensors[key].component)
            if alone and dotted(nested) == dotted(path):
                # A store says how the state of one rank was nested, with numbers for lists alone.
                path = nested
                self._lists |= {path[1:n] for n, step in enumerate(path) if type(step) is int}
            place = _named(content.tensors[key], path, whole=whole)
            if place is None:
                self.unplaced.append(key)
            else:
                self.found[key] = place

    def tree(self, key: str) -> Any:
        """Return the tree of the source's file that holds a tensor; None where it is not known."""
        info = self._checkpoint.tensors.get(key)
        held = None if info is None or not info.pieces else self._trees.get(_file_of(info))
        return None if held is None else held[0]

    def is_list(self, role: Role) -> IsList:
        """Return what says which containers of a file are lists: those that were."""
        trees = [
            tree
            for file, (tree, _) in self._trees.items()
            if self._ranks is not None and self._ranks.role_of(file) is role
        ]

        def says(path: Path) -> bool:
            nested = role is Role.EXTRA and path in self._lists
            return nested or any(_is_list(tree, path) for tree in trees)

        return says

    def _own(self, wanted: TargetTensor) -> RankPlace | None:
        """Return where the source has a tensor, if it is a source of this format."""
        if self._ranks is None or len(wanted.copies) != 1:
            return None
        info = self._checkpoint.tensors[wanted.copies[0].key]
        if info.name != wanted.name or not info.pieces:
            return None
        suffix = self._inside.get(wanted.key, "")
        path = self._path(info, suffix)
        match = OF_ONE_RANK.fullmatch(wanted.component)
        if path is not None and suffix:
            path = (*path[:-1], f"{path[-1]}{suffix}")
        role = self._ranks.role_of(_file_of(info))
        return None if path is None else RankPlace(role, path, int(match[1]) if match else None)

    def _path(self, info: TensorInfo, suffix: str) -> Path | None:
        file = _file_of(info)
        if file not in self._trees:
            assert self._ranks is not None
            tree = self._ranks.tree_of(file)
            self._trees[file] = tree, {dotted(path): path for path, _ in leaves(tree)}
        # What is one rank's own stands under the rank's name, where another component had it.
        own = info.name.removeprefix(f"{info.component.removeprefix('extra:')}.")
        return self._trees[file][1].get((info.stored_name or own).removesuffix(suffix))


def _file_of(info: TensorInfo) -> str:
    return info.pieces[0].extent.file


def _named(wanted: TargetTensor, path: Path, *, whole: bool) -> RankPlace | None:
    """Return the place of a tensor by its path in a nested state."""
    match = OF_ONE_RANK.fullmatch(wanted.component)
    if match:
        return RankPlace(Role.EXTRA, path[1:], int(match[1]))
    roles = {"model": Role.MODEL, "optimizer": Role.OPTIMIZER}
    role = roles.get(wanted.component)
    if role is not None:
        return RankPlace(role, path[1:], None)
    return RankPlace(Role.EXTRA, path, None) if whole and wanted.component == "ema" else None


def placed_as_in(checkpoint: Checkpoint) -> RanksCheckpoint | None:
    """Return the source if what is written stands where it stood in its files; None for others."""
    if not isinstance(checkpoint, RanksCheckpoint):
        return None
    return checkpoint if type(checkpoint) is RanksCheckpoint or checkpoint.keeps_places else None


def _is_list(tree: Any, path: Path) -> bool:
    try:
        return type(at(tree, path)) is list
    except KeyError:
        return False
