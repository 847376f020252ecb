"""Lay out a step as Orbax saves it: trees of zarr 2 arrays as plain files, without OCDBT.

    DST/default/params.layers.0.kernel/.zarray, 0.0, 1.0, …
    DST/default/_METADATA, ftckpt.objects/
    DST/_CHECKPOINT_METADATA, commit_success.txt

Every Orbax since 2024 reads zarr 2 without OCDBT, and chunks are stored as they are, so any of them
can be made on its own. A CheckpointManager restores `DST` by its number, `StandardCheckpointer` and
`PyTreeCheckpointer` restore `DST/default`.

A source that Orbax saved keeps its items, its trees with their empty nodes, and its items of JSON.
Any other becomes `{"params": …, "opt_state": [{"mu": …, "nu": …}], …}` with dictionaries for the
dots of its names, and whatever has no such place lies below `ftckpt` (see `states`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.extents import Box
from ftckpt.formats.safetensors.write_records import lay_out_objects
from ftckpt.formats.state.paths import carried_inside, with_aliases
from ftckpt.transfer.content import Content, ShardBox, TargetTensor
from ftckpt.transfer.layout import Elements, Layout, LayoutRequest, Literal, OutputFile, Stored

from .checkpoint import OrbaxCheckpoint
from .names import CHECKPOINT_METADATA, COMMIT, METADATA, SHARDING, STRINGS
from .states import HOME, parameter_and_leaf, roles_of
from .tree import read_json
from .zarr import WRITTEN_TYPES

Path = tuple[str, ...]
_ITEM = "default"
_CHUNK = 64 << 20  # bytes of a chunk, about: a reader of a part reads whole chunks
_MOST_NAME = 255  # bytes of a directory's name
_TREE = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_JSON = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_SUCCESS = b"Checkpoint commit was successful to this path.\n"
_DICT, _SEQUENCE = 2, 1  # Orbax's numbers of key types
_MOMENTS = {
    Kind.EXP_AVG: "mu", Kind.EXP_AVG_SQ: "nu", Kind.MASTER: "master_params",
}  # fmt: skip


class OrbaxWriter:
    """The writer of the format `orbax` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "orbax"
    single = False
    supported_options = ()

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` as one step.

        Raises:
            UnsupportedError: a tensor of a type that zarr lacks, or a name that no directory can
                have.
        """
        content = with_aliases(content)
        step = _Step(content)
        step.add_tensors()
        step.add_objects()
        return step.result()


@dataclass
class _Item:
    """A tree that is written.

    Attributes:
        nodes: what `_METADATA` says of each leaf and empty node, by label.
        strings: by dotted path.
        meshes: what the source's `_sharding` says of arrays that are written.
    """

    nodes: dict[str, Any] = field(default_factory=dict)
    strings: dict[str, Any] = field(default_factory=dict)
    meshes: dict[str, Any] = field(default_factory=dict)


class _Step:
    """The files of a step while they grow."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._files: list[OutputFile] = []
        self._items: dict[str, _Item] = {}
        self._handlers: dict[str, str] = {}
        self._commit: list[OutputFile] = []
        self._unplaced: list[str] = []
        self._objects = dict(content.objects)
        self._source = content.checkpoint.as_stored
        self._saved = {}  # of the source: by item and dotted path, what its _METADATA says
        if isinstance(self._source, OrbaxCheckpoint):
            self._saved = {top: _nodes(self._source, top) for top in self._source.trees}

    def add_tensors(self) -> None:
        """Place every array in its tree."""
        inside = carried_inside(self._content)
        tensors = {k: one for k, one in self._content.tensors.items() if k not in inside}
        paths = _paths(tensors, self._recorded(tensors))
        for key, (item, path) in paths.items():
            self._array(key, item, path)
        for key in tensors.keys() - paths.keys():
            self._unplaced.append(key)

    def _recorded(self, tensors: Mapping[str, TargetTensor]) -> dict[str, tuple[str, Path]]:
        """Return item and path of the tensors that the source, an Orbax step, had under a path."""
        if not isinstance(self._source, OrbaxCheckpoint):
            return {}
        return {key: self._source.paths[key] for key in tensors if key in self._source.paths}

    def _array(self, key: str, item: str, path: Path) -> None:
        wanted = self._content.tensors[key]
        name = ".".join(path)
        dtype = WRITTEN_TYPES.get(wanted.dtype.name)
        if dtype is None:
            raise UnsupportedError(
                f"{key} is of the type {wanted.dtype.name}, which zarr does not have", tensor=key
            )
        if "/" in name or "\0" in name or len(name.encode()) > _MOST_NAME:
            raise UnsupportedError(
                f"the name of {key} cannot be that of a directory of Orbax",
                hint="give it another one with --rename",
                tensor=key,
            )
        chunk = _chunk_shape(wanted)
        about = {
            "chunks": chunk, "compressor": None, "dimension_separator": ".", "dtype": dtype,
            "fill_value": None, "filters": None, "order": "C", "shape": list(wanted.shape),
            "zarr_format": 2,
        }  # fmt: skip
        folder = f"{item}/{name}" if item else name
        self._files.append(_json(f"{folder}/.zarray", about))
        for cell, box in _chunks(wanted.shape, chunk):
            local = Box((0,) * len(chunk), box.sizes)
            shard = self._content.shard(chunk, wanted.dtype, [ShardBox(local, key, box)])
            self._files.append(OutputFile(f"{folder}/{cell}", [Elements.all(shard)]))
        tree = self._items.setdefault(item, _Item())
        label, node = self._saved.get(item, {}).get(name, (str(path), None))
        if node is None:
            node = {"key_metadata": _keys(path), "value_metadata": {"value_type": "np.ndarray"}}
        value = {"skip_deserialize": False, **node["value_metadata"], "write_shape": chunk}
        tree.nodes[label] = node | {"value_metadata": value}

    def add_objects(self) -> None:
        """Place non-tensor state: what Orbax has a place for there, all else in a folder."""
        if isinstance(self._source, OrbaxCheckpoint):
            for name in list(self._objects):
                self._own_object(self._source, name)
            for item, tree in self._items.items():
                self._frame(self._source, item, tree)
        home = next((item for item in self._items if item in ("", _ITEM)), "")
        home = home or next(iter(self._items), _ITEM)
        self._items.setdefault(home, _Item())
        left = replace(self._content, objects=self._objects)
        laid = lay_out_objects(left, self._step(left))
        below = f"{home}/" if home else ""
        self._files += [replace(one, path=below + one.path) for one in laid.files]
        self._commit += [replace(one, path=below + one.path) for one in laid.commit]
        self._unplaced += laid.unplaced

    def _step(self, left: Content) -> int | None:
        """Return the step where nothing else in the result would show it."""
        if isinstance(self._source, OrbaxCheckpoint) and not left.objects:
            return None
        return left.checkpoint.known_step

    def _own_object(self, source: OrbaxCheckpoint, name: str) -> None:
        """Place an object that an Orbax step held as an item of JSON or as a string."""
        info = self._objects[name]
        if name in source.strings:
            item, path = source.strings[name]
            tree = self._items.setdefault(item, _Item())
            tree.strings[".".join(path)] = source.load_object(name)
            label, node = self._saved[item][".".join(path)]
            tree.nodes[label] = node
        elif name in source.json_items:
            self._files.append(OutputFile(info.extent.file, [Stored(info.extent)]))
            self._handlers[name] = _JSON
        else:
            return
        del self._objects[name]

    def _frame(self, source: OrbaxCheckpoint, item: str, tree: _Item) -> None:
        """Keep the empty nodes of a tree, and the meshes of its arrays."""
        written = {".".join(_path_of(node)) for node in tree.nodes.values()}
        for label, node in self._saved.get(item, {}).values():
            own, empty = _path_of(node), node["value_metadata"].get("skip_deserialize") is True
            above = {own[:n] for n in range(len(own) + 1)}
            held = any(tuple(_path_of(one)) in above for one in tree.nodes.values())
            if empty and not held:
                tree.nodes[label] = node
        folder = f"{item}/" if item else ""
        if f"{folder}{SHARDING}" in source.source.entries:
            from base64 import b64encode

            names = {b64encode(one.encode()).decode() for one in written}
            said = read_json(source.source, f"{folder}{SHARDING}")
            if isinstance(said, dict):
                tree.meshes = {name: one for name, one in said.items() if name in names}

    def result(self) -> Layout:
        """Return the layout; the marker of the step is its last file."""
        for item, tree in self._items.items():
            folder = f"{item}/" if item else ""
            if tree.strings:
                self._commit.append(_json(f"{folder}{STRINGS}", tree.strings))
            if tree.meshes:
                self._commit.append(_json(f"{folder}{SHARDING}", tree.meshes))
            if item:  # then a step without its own marker is known to be unfinished
                self._commit.append(OutputFile(f"{folder}{COMMIT}", [Literal(_SUCCESS)]))
            self._commit.append(
                _json(f"{folder}{METADATA}", {
                    "tree_metadata": tree.nodes, "use_ocdbt": False, "use_zarr3": False,
                    "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
                })
            )  # fmt: skip
        handlers: Any = {item: _TREE for item in self._items if item} | self._handlers
        if "" in self._items:
            handlers = _TREE
        self._commit += [
            _json(CHECKPOINT_METADATA, {
                "item_handlers": handlers, "metrics": {}, "performance_metrics": {},
                # Not the clock: the same content gives the same bytes, by which a run is resumed.
                "init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0, "custom_metadata": {},
            }),
            OutputFile(COMMIT, [Literal(_SUCCESS)]),
        ]  # fmt: skip
        return Layout(files=self._files, commit=self._commit, unplaced=self._unplaced)


def _json(path: str, value: object) -> OutputFile:
    return OutputFile(path, [Literal(json.dumps(value).encode())])


def _keys(path: Path) -> list[dict[str, Any]]:
    """Return the keys of a path; `opt_state` is a sequence, as optax's chains are."""
    first = 1 if path[:2] == ("opt_state", "0") else -1
    return [
        {"key": one, "key_type": _SEQUENCE if n == first else _DICT} for n, one in enumerate(path)
    ]


def _path_of(node: Mapping[str, Any]) -> Path:
    return tuple(str(one["key"]) for one in node["key_metadata"])


def _nodes(source: OrbaxCheckpoint, item: str) -> dict[str, tuple[str, Any]]:
    """Return what the source's `_METADATA` says of each node, with its label, by dotted path."""
    said = read_json(source.source, f"{item}/{METADATA}" if item else METADATA)
    return {
        ".".join(_path_of(node)): (label, node) for label, node in said["tree_metadata"].items()
    }


# --- chunks -------------------------------------------------------------------------------------


def _chunk_shape(wanted: TargetTensor) -> list[int]:
    """Return the shape of a chunk: even parts of the first axes, of about `_CHUNK` bytes."""
    chunk = [max(1, size) for size in wanted.shape]
    for axis, size in enumerate(chunk):
        row = wanted.dtype.nbytes(_volume(chunk[axis + 1 :]))
        rows = max(1, _CHUNK // max(1, row))
        if rows >= size:
            break
        parts = -(-size // rows)
        chunk[axis] = -(-size // parts)
        if rows > 1:
            break
    return chunk


def _volume(sizes: list[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _chunks(shape: tuple[int, ...], chunk: list[int]) -> Iterator[tuple[str, Box]]:
    """Yield the key of each chunk, and its part of the array."""
    from itertools import product

    counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    for at in product(*map(range, counts)):
        offsets = tuple(a * c for a, c in zip(at, chunk, strict=True))
        sizes = (min(c, n - o) for c, n, o in zip(chunk, shape, offsets, strict=True))
        yield ".".join(map(str, at)) or "0", Box(offsets, tuple(sizes))


# --- places -------------------------------------------------------------------------------------


def _paths(
    tensors: Mapping[str, TargetTensor], recorded: Mapping[str, tuple[str, Path]]
) -> dict[str, tuple[str, Path]]:
    """Return item and path of every tensor that a reader finds again under its key.

    A tensor whose usual place would be read as something else goes below `ftckpt`.
    """
    items = {item for item, _ in recorded.values()}
    home = next(iter(items)) if len(items) == 1 else _ITEM
    parameters = {one.name for one in tensors.values() if one.component == "model"}
    found = {
        key: recorded.get(key) or (home, _usual(one, parameters)) for key, one in tensors.items()
    }
    for attempt in range(3):
        wrong = [*_clashing(found)] or [
            key for key, back in _read_back(tensors, found).items() if back != key
        ]
        if not wrong:
            return found
        for key in wrong:
            one = tensors[key]
            if attempt == 0 and one.component == "model" and key not in recorded:
                found[key] = (home, ("params", one.name))
            elif attempt < 2:
                found[key] = (home, _home(one, whole=attempt > 0))
            else:
                found.pop(key)
    return found


def _read_back(
    tensors: Mapping[str, TargetTensor], found: Mapping[str, tuple[str, Path]]
) -> dict[str, str]:
    from ftckpt.checkpoint import tensor_key

    roles = roles_of({place: tensors[key].shape for key, place in found.items()})
    return {
        key: tensor_key(roles[place].component, roles[place].kind, roles[place].name)
        for key, place in found.items()
    }


def _clashing(found: Mapping[str, tuple[str, Path]]) -> Iterator[str]:
    """Yield the keys whose place lies inside another's, or is another's."""
    places = {(item, path) for item, path in found.values()}
    seen: set[tuple[str, str]] = set()
    for key, (item, path) in found.items():
        inside = any((item, path[:n]) in places for n in range(1, len(path)))
        if inside or (item, ".".join(path)) in seen:
            yield key
        seen.add((item, ".".join(path)))


def _usual(one: TargetTensor, parameters: set[str]) -> Path:
    words = tuple(one.name.split("."))
    if "" in words:
        return _home(one, whole=True)
    if one.component == "model":
        return ("params", *words)
    if one.component == "ema":
        return ("ema_params", *words)
    if one.component == "extra:state":  # the reader's name for any other leaf
        return words
    if one.component == "optimizer":
        if one.kind in _MOMENTS:
            return ("opt_state", "0", _MOMENTS[one.kind], *words)
        if words[0] == "opt_state":
            return words
        parameter, leaf = parameter_and_leaf(one.name, parameters)
        if parameter:
            return ("opt_state", "0", leaf, *parameter.split("."))
    return _home(one)


def _home(one: TargetTensor, *, whole: bool = False) -> Path:
    """Return a place that says what a tensor is, and means nothing to JAX."""
    words = (one.name,) if whole else tuple(one.name.split("."))
    return (HOME, one.component, str(one.kind), *words)
