"""Read non-tensor state for writing it elsewhere: as trees, with the tensors that lie inside.

An object of a torch.save file is a part of the file's tree, and tensors stand in it that are also
tensors of the checkpoint: those are left out here. Others lie deeper than any reader lists them
(in a tuple, in a pickled class); their storages are carried over byte for byte.

torch's optimizers number their parameters. Where the state is written under the parameters' names,
the numbers in `param_groups` become the same names, as torch's `get_optimizer_state_dict` does it.

The settings of an optimizer that every rank holds alike, for formats that keep one of them.

A file a rank holds an optimizer's groups in each of them. A format that keeps the state of the
whole job has them once, and torch looks for them there: `dcp.load` by `optimizer.param_groups`.
Groups that differ stay each rank's own, and so does all other state.

One object as a tree of its own, without the tensors that the checkpoint lists.

Those are written as tensors; the object is what is left, with the storages of the tensors that
nobody lists (an RNG state inside a tuple).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint, Extent, ObjectInfo
from ftckpt.errors import UnsafeError, UnsupportedError
from ftckpt.formats.pickles.walk import MAX_DEPTH, MAX_LEAVES, Path, at, dotted, leaves, step_of
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.storages import MAGIC
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content

from .paths import LEAVES, NestedState

_ZIP = b"PK\3\4"
# How a reader names a tensor of an optimizer's state: `optimizer.state.3.exp_avg`.
_OPTIMIZER = re.compile(r"(?:(?P<owner>.*?)\.)?state\.(?:(?P<id>\d+)\.(?P<leaf>.+))?")


@runtime_checkable
class NamesElsewhere(Protocol):
    """A checkpoint whose files hold tensors under other names than their `stored_name`."""

    @property
    def elsewhere(self) -> Set[tuple[str, str]]:
        """(file, name in it) of each."""


class Leaf(NamedTuple):
    """A part of the non-tensor state, and where it stands in the nested state."""

    path: Path
    value: CopiedTree


class StateObjects:
    """The non-tensor state of some content."""

    def __init__(self, content: Content, recorded: Mapping[str, Path]) -> None:
        """Take the objects of `content`; `recorded` has paths that the source recorded."""
        self._checkpoint = content.checkpoint
        self._infos = content.objects
        self._recorded = recorded
        self._listed, self._ids = listed_places(content.checkpoint)
        # What all ranks hold alike has no name of its own in the source: one of theirs is read.
        self._read_as: dict[str, str] = {}
        if self._infos.keys() - self._checkpoint.objects.keys():
            places = {(o.extent, o.field): n for n, o in self._checkpoint.objects.items()}
            self._read_as = {n: places[o.extent, o.field] for n, o in self._infos.items()}

    def by_name(self, name: str) -> bool:
        """Whether an object is the groups of an optimizer, and these name their parameters."""
        tree = self._load(name)
        groups = tree if isinstance(tree, list) else []
        members = [g["params"] for g in groups if isinstance(g, dict) and "params" in g]
        return any(type(one) is str for them in members if type(them) is list for one in them)

    def _load(self, name: str) -> Any:
        return self._checkpoint.load_object(self._read_as.get(name, name))

    def flattened(self, name: str) -> Iterator[Leaf]:
        """Yield one object as torch's distributed checkpoint flattens it: mappings and lists.

        Parameters have their names. A dict with keys that are no texts is one value: its keys would
        not come back.
        """
        return self._apart(name, _flat)

    def fields(self, name: str) -> Iterator[Leaf]:
        """Yield one object in its smallest parts, whatever the keys of its mappings are.

        Parameters have their names. For comparing: not every key could be written again.
        """
        return self._apart(name, _small)

    def named(self, name: str) -> Iterator[Leaf]:
        """Yield one object in one part, as `nested` does; parameters have their names."""
        return self._apart(name, _whole)

    def _apart(self, name: str, walk: _Walk) -> Iterator[Leaf]:
        info = self._infos[name]
        at, names = self._place(info), self._names(info)
        tree = self._load(name)
        roots: list[tuple[Path, Path, Any]] = [(at, (), tree)]
        if names and at[-1] == "state" and isinstance(tree, dict):
            steps = [(step_of(key), entry) for key, entry in tree.items()]
            roots = [((*at, names.get(str(s), str(s))), (s,), entry) for s, entry in steps]
        elif names:
            roots = [(at, (), _named(tree, names))]
        elif walk is _small and info.rank is not None and _steps(info)[-1:] == ("param_groups",):
            # One of each rank is compared with the one of all that another format keeps.
            roots = [(at, (), _named(tree, self._ids.get(dotted(_steps(info)[:-1]), {})))]
        return self._leaves(info, roots, walk)

    def nested(self, name: str, path: Path | None = None) -> Iterator[Leaf]:
        """Yield one object in one part, or leaf by leaf where tensors of their own lie in it.

        Args:
            name: of the object.
            path: where it is to stand; None where that follows from what it is.
        """
        info = self._infos[name]
        at = self._place(info) if path is None else path
        return self._leaves(info, [(at, (), self._load(name))], _whole)

    def _place(self, info: ObjectInfo) -> Path:
        """Return the path of an object in the nested state."""
        if info.name in self._recorded:
            return self._recorded[info.name]
        if is_common(info.name):
            return ()  # Megatron's common state is what others have at the top
        if self._names(info) is not None:
            return ("optimizer", _steps(info)[-1])
        return info.field if dotted(info.field) == info.name else (info.name,)

    def _names(self, info: ObjectInfo) -> Mapping[str, str] | None:
        """Return number -> parameter where the object is a part of an optimizer's state_dict."""
        steps = _steps(info)
        shared = info.rank is None and bool(steps) and info.name not in self._recorded
        # A file of each item has the optimizer's state at its top, and others have theirs there.
        if len(steps) == 1 and steps[0] not in _OF_OPTIMIZER and info.name == steps[0]:
            return None
        return self._ids.get(dotted(steps[:-1])) if shared else None

    def _leaves(
        self, info: ObjectInfo, roots: Iterable[tuple[Path, Path, Any]], walk: _Walk
    ) -> Iterator[Leaf]:
        storages = Storages(self._checkpoint, info)
        for root, inside, tree in roots:

            def listed(inner: Path, stands: Path = (*info.field, *inside)) -> bool:
                return (info.extent.file, dotted((*stands, *inner))) in self._listed

            for inner, value in walk(tree, listed):
                # What stands at the top of the state must have a name there.
                path = (*root, *inner) or (info.name,)
                yield Leaf(path, CopiedTree(value, storages))


def listed_places(
    checkpoint: Checkpoint,
) -> tuple[set[tuple[str, str]], dict[str, dict[str, str]]]:
    """Return where tensors stand in their files, and for each optimizer id -> parameter.

    An optimizer is known by the dotted path to it. Where two files disagree about its parameters,
    its numbers mean nothing.
    """
    listed = set(checkpoint.elsewhere) if isinstance(checkpoint, NamesElsewhere) else set()
    ids: dict[str, dict[str, str]] = {}
    odd: set[str] = set()
    for info in checkpoint.tensors.values():
        stored = info.stored_name or info.name
        listed.update((piece.extent.file, stored) for piece in info.pieces)
        match = _OPTIMIZER.match(stored)
        if match is None or info.component == "model":
            continue
        owner = match["owner"] or ""
        names = ids.setdefault(owner, {})
        if match["id"] is not None:
            name = info.name if info.kind in LEAVES else info.name.removesuffix(f".{match['leaf']}")
            if names.setdefault(match["id"], name) != name:
                odd.add(owner)
    return listed, {owner: {} if owner in odd else names for owner, names in ids.items()}


def numbered(content: Content) -> dict[str, Path]:
    """Return key -> path of an optimizer's tensors whose source numbered their parameters.

    Only where the groups that give the numbers their meaning are there too.
    """
    state = StateObjects(content, {})
    groups = {
        dotted(_steps(info)[:-1])
        for name, info in content.objects.items()
        if _steps(info)[-1:] == ("param_groups",) and info.rank is None and not state.by_name(name)
    }
    paths: dict[str, Path] = {}
    for key, wanted in content.tensors.items():
        copies = wanted.copies
        source = content.checkpoint.tensors[copies[0].key].stored_name if copies else ""
        match = _OPTIMIZER.match(source) if wanted.component == "optimizer" else None
        if match and match["id"] is not None and (match["owner"] or "") in groups:
            paths[key] = ("optimizer", "state", int(match["id"]), match["leaf"])
    return paths


def _steps(info: ObjectInfo) -> Path:
    """Return where an object stood in a tree; nothing where it is a file of its own.

    One that a delta holds has a record of its own, and says it by its name.
    """
    return info.field or (tuple(info.name.split(".")) if "." in info.name else ())


def _named(tree: Any, names: Mapping[str, str]) -> Any:
    """Return `param_groups` with names for numbers; anything else as it is."""
    groups = tree if isinstance(tree, list) else []
    numbers = [g["params"] for g in groups if isinstance(g, dict) and type(g.get("params")) is list]
    known = all(type(i) is int and str(i) in names for params in numbers for i in params)
    if not numbers or len(numbers) != len(groups) or not known:
        return tree
    return [{**g, "params": [names[str(i)] for i in g["params"]]} for g in groups]


# --- taking trees apart -------------------------------------------------------------------------

_Listed = Callable[[Path], bool]
_OF_OPTIMIZER = ("state", "param_groups")
_Walk = Callable[[Any, _Listed], Iterator[tuple[Path, Any]]]


def _whole(tree: Any, listed: _Listed) -> Iterator[tuple[Path, Any]]:
    kept = [(path, value) for path, value in leaves(tree) if not listed(path)]
    if len(kept) == sum(1 for _ in leaves(tree)):
        yield (), tree
    else:
        yield from kept


def _small(tree: Any, listed: _Listed) -> Iterator[tuple[Path, Any]]:
    return ((path, value) for path, value in leaves(tree) if not listed(path))


def _flat(tree: Any, listed: _Listed) -> Iterator[tuple[Path, Any]]:
    """Flatten as `torch/distributed/checkpoint/_traverse.py` does since torch 2.4."""
    todo: list[tuple[Path, Any]] = [((), tree)]
    for _ in range(MAX_LEAVES):
        if not todo:
            return
        path, value = todo.pop()
        if listed(path):
            continue
        texts = isinstance(value, dict) and bool(value) and all(type(k) is str for k in value)
        if texts and len(path) < MAX_DEPTH:
            todo += reversed([((*path, key), member) for key, member in value.items()])
        elif type(value) is list and len(path) < MAX_DEPTH and _holds_more(value):
            todo += reversed([((*path, i), member) for i, member in enumerate(value)])
        else:
            yield path, value
    raise UnsafeError("a pickle unfolds to far more state than a checkpoint has",
                      kind="unsafe-pickle")  # fmt: skip


def _holds_more(values: list[Any], depth: int = 0) -> bool:
    """Return whether torch looks inside a list: it holds a tensor, a mapping, or such a list."""
    for value in values:
        if isinstance(value, dict) or type(value) is TensorRef:
            return True
        if type(value) is list and depth < MAX_DEPTH and _holds_more(value, depth + 1):
            return True
    return False


# --- tensors inside -----------------------------------------------------------------------------


class Storages(Mapping[str, StoredStorage]):
    """The storages of the stream that an object is a part of, found when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, info: ObjectInfo) -> None:
        self._checkpoint, self._info = checkpoint, info
        self._found: Mapping[str, StoredStorage] | None = None

    def __getitem__(self, key: str) -> StoredStorage:
        if self._found is None:
            self._found = self._find()
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        raise TypeError("storages are looked up by key")

    def __len__(self) -> int:
        raise TypeError("storages are looked up by key")

    def _find(self) -> Mapping[str, StoredStorage]:
        from ftckpt.formats.torch_files.plain_pickle import begins_plain
        from ftckpt.formats.torch_files.stream import parse_stream

        source, extent = self._checkpoint.source, self._info.extent
        # An item of its own in a larger file, or a pickle inside the archive that the file is.
        for place in (extent, Extent(extent.file, 0, source.size(extent.file))):

            def read(at: int, length: int, base: int = place.offset) -> bytes:
                return source.read(extent.file, base + at, length)

            head = read(0, min(place.length, len(MAGIC)))
            # A pickle inside an archive is not one by itself.
            plain = place.offset == 0 and place.length == source.size(extent.file)
            if head.startswith((_ZIP, MAGIC)) or (plain and begins_plain(head)):
                return parse_stream(
                    read, place.length, file=place.file, base=place.offset, plain=plain
                ).storages
        raise UnsupportedError(
            f"{self._info.name} holds tensors inside a compressed record of {extent.file}",
            file=extent.file,
            tensor=self._info.name,
            offset=extent.offset,
            length=extent.length,
        )


@runtime_checkable
class HasGroups(Protocol):
    """A checkpoint whose ranks each hold an optimizer's groups.

    Attributes:
        groups_number_states: whether these name or number the parameters that the states are of, as
            torch's do: others say nothing to who reads the states of the whole job.
        shares_what_is_alike: whether other state that all ranks hold alike is the job's too: an
            item that a job saves under a name, and not what a rank keeps for itself.
    """

    groups_number_states: ClassVar[bool]
    shares_what_is_alike: ClassVar[bool]


_GROUPS = "param_groups"
_OWNED = re.compile(r"rank_(\d+)\.(.+)")


def of_all_ranks(content: Content) -> Content:
    """Return `content` with one object for groups that all ranks hold alike, in place of theirs.

    Tensors inside an object are not compared, and so they differ.
    """
    world = content.topology.world_size
    owned: Mapping[str, list[ObjectInfo]] = defaultdict(list)
    for name, info in content.objects.items():
        match = _OWNED.fullmatch(name) if info.field else None
        if match is not None and int(match[1]) == info.rank:
            owned[match[2]].append(info)
    checkpoint = content.checkpoint
    if not owned or not isinstance(checkpoint, HasGroups) or not checkpoint.groups_number_states:
        return content
    if not checkpoint.shares_what_is_alike:
        owned = {
            label: infos for label, infos in owned.items() if label.rpartition(".")[2] == _GROUPS
        }
    state = StateObjects(content, {})
    objects = dict(content.objects)
    for label, infos in owned.items():
        if len(infos) == world and label not in objects and _alike(state, infos):
            for info in infos:
                del objects[info.name]
            objects[label] = infos[0]._replace(name=label, rank=None)
    changed = objects.keys() != content.objects.keys()
    return replace(content, objects=objects) if changed else content


def _alike(state: StateObjects, infos: Sequence[ObjectInfo]) -> bool:
    first = None
    for info in infos:
        try:
            text, storages = pickled(list(map(list, state.nested(info.name, ("state",)))))
        except UnsupportedError:
            return False
        if storages or (first is not None and text != first):
            return False
        first = text
    return True


def objects_of(content: Content) -> StateObjects:
    """Return the objects of a content, each under its own name."""
    return StateObjects(content, {})


def object_tree(content: Content, objects: StateObjects, name: str) -> Any:
    """Return what `torch_tree.save` writes of one object.

    Args:
        content: of which it is.
        objects: `objects_of(content)`.
        name: of the object.
    """
    top = "object"
    state = NestedState()
    for leaf in objects.nested(name, (top,)):
        if leaf.path == (top,):
            return leaf.value
        state.put(leaf.path, leaf.value)
    whole = content.checkpoint.load_object(name)

    def is_list(path: Path) -> bool:
        return type(at(whole, path[1:])) is list

    return state.settled(is_list).get(top, {})
