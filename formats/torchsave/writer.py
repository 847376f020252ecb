"""Lay out one file of torch.save that holds everything.

A source that has a nested state of its own keeps it: one or several torch.save files, and a
distributed checkpoint that recorded its key paths. Any other becomes what trainers save most:

    {"model": state_dict, "optimizer": {"state": …, "param_groups": […]}, <other state by name>}

and content of weights alone a bare state_dict. An optimizer that numbered its parameters keeps the
numbers; where the source has none, its state is under the parameters' names. Tensors that share
their values in the source share one storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.walk import Path, at, dotted, leaves
from ftckpt.formats.state.objects import StateObjects, numbered, of_all_ranks
from ftckpt.formats.state.paths import (
    IsList,
    NestedState,
    RecordedPaths,
    carried_inside,
    coded_in,
    owner_of,
    recorded_paths,
    tensor_paths,
    with_aliases,
    without_records,
)
from ftckpt.formats.state.stored_names import KNOWN, OPTIMIZERS
from ftckpt.formats.torch_files.values import SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor, pickled, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile

from .reader import TorchSaveCheckpoint

FILE = "checkpoint.pt"
# Where torch's optimizers have their groups; readers know an optimizer by them.
_GROUPS: Path = ("optimizer", "param_groups")


class TorchSaveWriter:
    """The writer of the format `torchsave` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "torchsave"
    single = True
    supported_options = ()

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` as one file.

        Raises:
            UnsupportedError: a tensor of a type that torch.save cannot write.
        """
        content = with_aliases(content)
        coded = coded_in(content)
        # By number, no reader would know the names of states that are in codes.
        shared = content if coded else of_all_ranks(content)
        nesting = _nesting(shared)
        paths = {one.name: one.path(nesting.tensors) for one in coded}
        for key in (key for one in coded for key in one.keys.values()):
            nesting.tensors.pop(key, None)
        for key in carried_inside(content):  # they stay inside the records, which are objects
            nesting.tensors.pop(key, None)
        state = NestedState()
        unplaced = [*nesting.lost, *_put_tensors(content, nesting, state)]
        for one in coded:
            if not state.put(paths[one.name], one.shard(Box.whole(one.tensor.shape))):
                unplaced.append(one.name)
        held = without_records(shared, coded)
        unplaced += _put_objects(held, nesting, state)
        for path in {path[:-3] for path in nesting.tensors.values() if path[-3:-2] == ("state",)}:
            # torch's optimizers always have groups (see `_GROUPS`).
            if path and path[0] in OPTIMIZERS and "param_groups" not in state.below(path):
                state.put((*path, "param_groups"), [])
        tree = state.settled(nesting.is_list, nesting.is_tuple)
        files = [OutputFile(FILE, save(tree, folder="checkpoint"))]
        changed = held.objects.keys() != content.objects.keys()
        return Layout(files=files, unplaced=unplaced, content=held if changed else None)


class _Nesting(NamedTuple):
    """How the state is nested.

    Attributes:
        tensors: key -> path.
        lost: keys that no path leads back to.
        objects: name -> path, for those that have one of their own.
        is_list: whether the container at a path is a list.
        is_tuple: whether it is a tuple; None where the source shows none.
    """

    tensors: dict[str, Path]
    lost: list[str]
    objects: Mapping[str, Path]
    is_list: IsList
    is_tuple: IsList | None = None


def _nesting(content: Content) -> _Nesting:
    checkpoint = content.checkpoint
    recorded = recorded_paths(checkpoint)
    if recorded.tensors and not recorded.flat and not recorded.homes.found:
        paths, lost = tensor_paths(content, recorded)
        paths |= _by_number(content, recorded)
        return _Nesting(paths, lost, recorded.objects, _lists_groups)
    if isinstance(checkpoint, TorchSaveCheckpoint):
        own = _own_paths(checkpoint)
        inside = _inside_records(content, checkpoint)
        if own.keys() | inside >= content.tensors.keys():
            trees = [stream.tree for stream in checkpoint.streams.values()]
            return _Nesting(
                {key: own[key] for key in content.tensors if key not in inside},
                [],
                {name: info.field for name, info in content.objects.items()},
                lambda path: any(_is(list, tree, path) for tree in trees),
                lambda path: any(_is(tuple, tree, path) for tree in trees),
            )
    bare = not content.objects and all(w.component == "model" for w in content.tensors.values())
    if bare and not any(w.name in KNOWN for w in content.tensors.values()):
        return _Nesting({key: (w.name,) for key, w in content.tensors.items()}, [], {}, _never)
    by_number = {key: ("optimizer", *path[path.index("state") :])
                 for key, path in _by_number(content, recorded, alone=True).items()}  # fmt: skip
    paths, lost = tensor_paths(content, RecordedPaths(numbered(content) | by_number, {}))
    objects = {n: _GROUPS for n in content.objects if n == dotted(_GROUPS)}
    # Below wrappers, lists were flattened by their indices.
    is_list = _lists_groups if recorded.homes.found else _never
    return _Nesting(paths, lost, objects | dict(recorded.nested_objects()), is_list)


def _by_number(
    content: Content, recorded: RecordedPaths, *, alone: bool = False
) -> dict[str, Path]:
    """Return key -> path, with whole numbers, of the states that a distributed source numbered.

    DCP's paths have texts for them, and an optimizer looks for its states by the numbers in
    `params` of its groups. Only where the source says the names too: else no reader of the file
    would name the states as the source does.

    Args:
        content: what is to be written.
        recorded: its source's paths.
        alone: whether two optimizers would collide.
    """
    kept = {key: recorded.tensors[key] for key in recorded.named if key in content.tensors}
    groups = {path[:-3]: n for n, path in recorded.objects.items() if path[-1:] == ("params",)}
    owners = {owner for owner, name in groups.items() if name in content.objects}
    found: dict[str, Path] = {}
    for key, path in kept.items() if len(owners) == 1 or not alone else ():
        start = next((n for n in range(len(path)) if path[:n] in owners), None)
        if start is not None:
            found[key] = (*path[: start + 1], int(path[start + 1]), *path[start + 2 :])
    return found


def _lists_groups(path: Path) -> bool:
    """Whether numbers below a path are places in a list; a state's are its parameters'."""
    return path[-1:] != ("state",)


def _own_paths(checkpoint: TorchSaveCheckpoint) -> dict[str, Path]:
    """Return key -> path of the tensors that are views of the source's trees."""
    paths: dict[tuple[str, str], Path] = {}
    for file, stream in checkpoint.streams.items():
        for path, value in leaves(stream.tree):
            if type(value) is TensorRef and path and not (value.conj or value.neg):
                paths[file, dotted(path)] = path
    found = {}
    for key, info in checkpoint.tensors.items():
        where = (info.pieces[0].extent.file, info.stored_name or info.name)
        if where in paths:
            found[key] = paths[where]
    return found


def _inside_records(content: Content, checkpoint: TorchSaveCheckpoint) -> set[str]:
    """Return the tensors that stay as they are inside tensor subclasses, which objects carry."""
    carried = {(info.extent.file, info.field) for info in content.objects.values()}
    records: set[tuple[str, str]] = set()
    for file, stream in checkpoint.streams.items():
        for path, value in leaves(stream.tree):
            above = ((file, path[:n]) for n in range(len(path) + 1))
            if type(value) is SubclassRef and any(place in carried for place in above):
                records.add((file, dotted(path)))
    found = set()
    for key, wanted in content.tensors.items() if records else ():
        info = checkpoint.tensors.get(key)
        if info is None or (wanted.dtype, wanted.shape) != (info.dtype, info.shape):
            continue
        words = (info.stored_name or info.name).split(".")
        above_ = (".".join(words[:n]) for n in range(len(words) - 1, 0, -1))
        if any((info.pieces[0].extent.file, name) in records for name in above_):
            found.add(key)
    return found


def _put_tensors(content: Content, nesting: _Nesting, state: NestedState) -> list[str]:
    made: dict[str, Tensor] = {}
    unplaced = []
    for key, path in nesting.tensors.items():
        owner = owner_of(content, key)
        tensor = made.get(owner) or made.setdefault(owner, Tensor.of(content.whole(owner)))
        if not state.put(path, tensor):
            unplaced.append(key)
    return unplaced


def _put_objects(content: Content, nesting: _Nesting, state: NestedState) -> list[str]:
    trees = StateObjects(content, recorded_paths(content.checkpoint).objects)
    unplaced = []
    for name in content.objects:
        try:
            parts = list(trees.nested(name, nesting.objects.get(name)))
            pickled([part.value for part in parts])  # all of an object or nothing
        except UnsupportedError:
            unplaced.append(name)
            continue
        placed = [_put(state, part.path, part.value) for part in parts]
        if not all(placed):
            unplaced.append(name)
    return unplaced


def _put(state: NestedState, path: Path, value: CopiedTree) -> bool:
    """Put an object; one that is a dict may share its place with tensors."""
    if isinstance(value.value, dict) and (state.below(path) or not path):
        members = value.value.items()
        placed = [_put(state, (*path, k), CopiedTree(v, value.storages)) for k, v in members]
        return all(placed)
    return bool(path) and state.put(path, value)


def _is(kind: type, tree: object, path: Path) -> bool:
    try:
        return type(at(tree, path)) is kind
    except KeyError:
        return False


def _never(path: Path) -> bool:
    return False
