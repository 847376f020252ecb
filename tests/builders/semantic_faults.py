"""Faults of meaning, made from a checkpoint's own files: each file stays well-formed.

A fault is a name, a case, and the files that it changes (None: the file is gone). What changes
inside a file gets right lengths and checksums, so that only what files say of one another tells.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.stream import TorchStream, parse_stream
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.layout import Checksums, Literal, Zeros
from tests.builders import second_save

CASES = 2  # of each fault, at different kinds of places
_FIELDS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_key_value_heads",
    "global_step", "max_steps", "r", "shape", "chunks",
)  # fmt: skip
_NUMBERS = re.compile(
    r"(?:step|global_steps?|iteration|last_epoch|_step_count|rank|world_size|num_processes"
    r"|dp_world_size|mp_world_size|tensor_model_parallel_size|numel|start|params\.\d+)$"
)
_ARCHIVES = frozenset((".pt", ".pth", ".bin", ".pkl", ".ckpt"))

Changes = Mapping[str, bytes | None]
_Build = Callable[[], tuple[Mapping[str, Any], list[tuple[int, int | None]]]]


class Fault(NamedTuple):
    """A fault.

    Attributes:
        what: its name.
        case: where it is.
        changes: makes the content by file.
    """

    what: str
    case: str
    changes: Callable[[], Changes]


def _ready(what: str, case: str, changes: Changes) -> Fault:
    return Fault(what, case, lambda: changes)


def faults_of(place: Path, *, saves: bool = True) -> Iterator[Fault]:
    """Yield every fault of a checkpoint, at most `CASES` cases of each.

    Those of another save are `saves`: to know which there are, all files are made.
    """
    files = {p.relative_to(place).as_posix(): p for p in sorted(place.rglob("*")) if p.is_file()}
    content = {name: path.read_bytes() for name, path in files.items()}
    few = _Few()
    for make in (_files, _ranks, _json):
        for fault in make(content):
            if few.takes(fault.what, fault.case):
                yield few.took(fault)
    for fault in _saves(place, content) if saves else ():
        if few.takes(fault.what, fault.case):
            yield few.took(fault)
    for inside in (_headers, _trees, _indexes):
        for fault in inside(content, few):
            yield few.took(fault)


class _Few:
    """The cases of each fault that were made: few, and of different kinds of places."""

    def __init__(self) -> None:
        self._made: dict[str, list[str]] = defaultdict(list)

    def takes(self, what: str, case: str) -> bool:
        """Say whether a case is to be made."""
        return len(self._made[what]) < CASES and _role(case) not in self._made[what]

    def took(self, fault: Fault) -> Fault:
        """Count a case."""
        self._made[fault.what].append(_role(fault.case))
        return fault


def _role(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _alike(content: Mapping[str, bytes]) -> list[list[str]]:
    """Return the files whose names differ in numbers alone."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in content:
        groups[_role(name)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _files(content: Mapping[str, bytes]) -> Iterator[Fault]:
    names = list(content)
    for name in names:
        yield _ready("file lost", name, {name: None})
    for first, second, *_ in _alike(content):
        if content[first] != content[second]:
            swapped = {first: content[second], second: content[first]}
            yield _ready("files swapped", first, swapped)
            yield _ready("file copied over its neighbour", first, {second: content[first]})
    for name, data in content.items():
        yield _ready("file cut in the middle", name, {name: data[: len(data) // 2]})
        if data.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                last = archive.infolist()[-1].header_offset
            yield _ready("file cut before its last record", name, {name: data[:last]})
        yield _ready("file longer by a page of zeros", name, {name: data + bytes(4096)})
    half = names[len(names) // 2 :]
    yield _ready("copy stopped", f"after {len(names) - len(half)} files", dict.fromkeys(half))


def _ranks(content: Mapping[str, bytes]) -> Iterator[Fault]:
    """Yield faults of the highest number in names that differ in it."""
    for names in _alike(content):
        numbers = [re.findall(r"\d+", name) for name in names]
        for at in range(len(numbers[0])):
            top = max(int(each[at]) for each in numbers)
            mine = [n for n, each in zip(names, numbers, strict=True) if int(each[at]) == top]
            more = {_numbered(name, at, top + 1): content[name] for name in mine}
            if len(mine) < len(names):
                case = f"{mine[0]}, number {at}"
                yield _ready("rank added", case, more)
                yield _ready("rank renamed", case, {**dict.fromkeys(mine), **more})
                yield _ready("rank lost", case, dict.fromkeys(mine))


def _numbered(name: str, at: int, number: int) -> str:
    found = list(re.finditer(r"\d+", name))[at]
    return name[: found.start()] + str(number).zfill(len(found[0])) + name[found.end() :]


def _saves(place: Path, content: Mapping[str, bytes]) -> Iterator[Fault]:
    for path, later in second_save.later_files(place).items():
        name = path.relative_to(place).as_posix()
        if later.counters and later.data != content[name]:
            yield _ready("file of a later step", name, {name: later.data})
    with mock.patch.object(second_save, "COUNTERS", frozenset()):
        others = second_save.later_files(place)
    for path, other in others.items():
        name = path.relative_to(place).as_posix()
        if not name.endswith(".json") and other.data != content[name]:
            yield _ready("file of another job at the same step", name, {name: other.data})


def _json(content: Mapping[str, bytes]) -> Iterator[Fault]:
    for name, data in content.items():
        if not name.endswith((".json", ".zarray")):
            continue
        tree = json.loads(data)
        for field in _FIELDS:
            value = tree.get(field) if isinstance(tree, dict) else None
            if isinstance(value, list) and value:
                value, more = value[0], value[1:]
                changed: Any = [value + 1, *more] if isinstance(value, int) else value
            elif type(value) is int:
                changed = value + 1
            else:
                continue
            new = json.dumps({**tree, field: changed}).encode()
            yield _ready(f"{field} in JSON", name, {name: new})
        index = tree.get("weight_map") if isinstance(tree, dict) else None
        if isinstance(index, dict):
            first, *rest = index
            moved = next((file for file in index.values() if file != index[first]), None)
            for what, entries in (
                ("index entry removed", {key: index[key] for key in rest}),
                ("index entry moved", {**index, first: moved} if moved else {}),
            ):
                if entries:
                    new = json.dumps({**tree, "weight_map": entries}).encode()
                    yield _ready(what, name, {name: new})


def _headers(content: Mapping[str, bytes], few: _Few) -> Iterator[Fault]:
    """Yield faults of safetensors headers."""
    for name, data in content.items():
        if not name.endswith(".safetensors"):
            continue
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        for key in entries:
            for what, build in _of_header(key, entries).items():
                if few.takes(what, f"{name} {key}"):
                    rest = {k: v for k, v in header.items() if k not in entries}
                    changes = partial(_changed_header, name, rest, body, build)
                    yield Fault(what, f"{name} {key}", changes)


def _changed_header(name: str, rest: Mapping[str, Any], body: bytes, build: _Build) -> Changes:
    changed, kept = build()
    return {name: _packed({**rest, **changed}, b"".join(body[a:b] for a, b in kept))}


def _of_header(key: str, entries: Mapping[str, Any]) -> dict[str, _Build]:
    """Return how each fault of a tensor changes the entries, and which bytes are kept."""
    entry = entries[key]
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    whole: list[tuple[int, int | None]] = [(0, None)]
    rest = {k: v for k, v in entries.items() if k != key}
    found: dict[str, _Build] = {
        "tensor renamed": lambda: ({**rest, f"{key}x": entry}, whole),
        "tensor removed": lambda: (
            {
                k: {**v, "data_offsets": [n - (end - begin) for n in v["data_offsets"]]}
                if v["data_offsets"][0] >= end
                else v
                for k, v in rest.items()
            },
            [(0, begin), (end, None)],
        ),
    }
    if len(shape) == 2 and shape[0] != shape[1]:
        turned = {key: {**entry, "shape": shape[::-1]}}
        found["shape transposed in a header"] = lambda: ({**entries, **turned}, whole)
    other = {"F32": "I32", "BF16": "F16"}.get(entry["dtype"])
    if other:
        typed = {key: {**entry, "dtype": other}}
        found["type changed in a header"] = lambda: ({**entries, **typed}, whole)
    twin = next((k for k, v in rest.items() if v["shape"] == shape), None)
    if twin:
        crossed = {key: entries[twin], twin: entry}
        found["two tensors swapped"] = lambda: ({**entries, **crossed}, whole)
    return found


def _packed(header: Mapping[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _trees(content: Mapping[str, bytes], few: _Few) -> Iterator[Fault]:
    """Yield faults inside archives of torch.save."""
    for name, raw in content.items():
        if Path(name).suffix in _ARCHIVES and raw.startswith(b"PK"):
            yield from _tree(name, raw, few)


class _Node(NamedTuple):
    """A value of a tree, and what puts another in its place; `drop` returns what undoes it."""

    path: str
    value: Any
    put: Callable[[Any], None]
    holder: Any = None
    key: Any = None


def _nodes(tree: Any, path: str = "") -> Iterator[_Node]:
    if isinstance(tree, (Inert, SubclassRef)):
        yield from _nodes(tree.state, path)
    elif isinstance(tree, Composite):
        yield from _nodes(tree.parts, path)
    elif isinstance(tree, (dict, list)):
        for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            here = f"{path}.{key}".lstrip(".")
            yield _Node(here, value, lambda new, k=key: tree.__setitem__(k, new), tree, key)  # type: ignore[misc]
            yield from _nodes(value, here)


def _tree(name: str, raw: bytes, few: _Few) -> Iterator[Fault]:
    stream = parse_stream(lambda at, n: raw[at : at + n], len(raw), file=name)
    nodes = list(_nodes(stream.tree))

    tensors = [n for n in nodes if isinstance(n.value, TensorRef)]
    for node in nodes:
        for what, puts in _of_tree(node, tensors).items():
            case = f"{name} {node.path}"
            if not few.takes(what, case):
                continue
            yield Fault(what, case, partial(_put, name, raw, stream, puts))
        if isinstance(node.value, TensorRef) and isinstance(node.holder, dict):
            case = f"{name} {node.path}"
            if few.takes("tensor removed", case):
                yield Fault("tensor removed", case, partial(_dropped, name, raw, stream, node))


def _put(name: str, raw: bytes, stream: TorchStream, puts: Sequence[tuple[_Node, Any]]) -> Changes:
    for one, new in puts:
        one.put(new)
    try:
        return {name: _saved(raw, stream)}
    finally:
        for one, _ in puts:
            one.put(one.value)


def _dropped(name: str, raw: bytes, stream: TorchStream, node: _Node) -> Changes:
    kept = dict(node.holder)
    del node.holder[node.key]
    try:
        return {name: _saved(raw, stream)}
    finally:
        node.holder.clear()
        node.holder.update(kept)


def _of_tree(node: _Node, tensors: Sequence[_Node]) -> dict[str, list[tuple[_Node, Any]]]:
    """Return what each fault puts in the place of which values."""
    value = node.value
    if type(value) is int and _NUMBERS.search(node.path):
        leaf = _role(node.path.rpartition(".")[2])
        return {f"number changed: {leaf}": [(node, value + 1)]}
    if isinstance(value, list) and len(value) > 1 and node.key == "params":
        return {"parameters of a group permuted": [(node, value[::-1])]}
    if not isinstance(value, TensorRef):
        return {}
    found: dict[str, list[tuple[_Node, Any]]] = {}
    if value.shape and value.shape[0] > 1 and value.dense:
        shorter = value._replace(shape=(value.shape[0] - 1, *value.shape[1:]))
        found["tensor shorter by a row"] = [(node, shorter)]
    if len(value.shape) == 2 and value.shape[0] != value.shape[1]:
        turned = value._replace(shape=value.shape[::-1], strides=value.strides[::-1])
        found["tensor transposed"] = [(node, turned)]
    for twin in tensors if value.numel > 1 else ():
        other = twin.value
        if other.shape == value.shape and other.key != value.key and other.dtype == value.dtype:
            found["two tensors swapped"] = [(node, other), (twin, value)]
            break
    return found


def _saved(raw: bytes, stream: TorchStream) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        folder = archive.namelist()[0].partition("/")[0]
    storages = {
        key: one
        if one.inline is not None
        else one._replace(inline=raw[one.extent.offset : one.extent.end])
        for key, one in stream.storages.items()
    }
    made = bytearray()
    for segment in save(CopiedTree(stream.tree, storages), folder=folder):
        if isinstance(segment, Literal):
            made += segment.data
        elif isinstance(segment, Zeros):
            made += bytes(segment.nbytes)
        else:
            assert isinstance(segment, Checksums)
            made += segment.build([zlib.crc32(made[a:b]) for a, b in segment.ranges])
    return bytes(made)


def _indexes(content: Mapping[str, bytes], few: _Few) -> Iterator[Fault]:
    """Yield faults of DCP's metadata, written by torch's own classes."""
    for name, data in content.items():
        if name.rpartition("/")[2] == ".metadata":
            yield from _index(name, data, few)


def _index(name: str, data: bytes, few: _Few) -> Iterator[Fault]:
    whole = pickle.loads(data)
    for key in whole.state_dict_metadata:
        for what, members in _of_index(key, whole):
            if few.takes(f"metadata: {what}", f"{name} {key}"):
                changes = partial(_changed_index, name, whole, members)
                yield Fault(f"metadata: {what}", f"{name} {key}", changes)


def _changed_index(name: str, whole: Any, members: Mapping[str, Any]) -> Changes:
    return {name: pickle.dumps(replace(whole, **members))}


def _of_index(key: str, whole: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each fault of an entry, and the members of the metadata that it changes."""
    entries, places, paths = whole.state_dict_metadata, whole.storage_data, whole.planner_data
    entry = entries[key]
    mine = [index for index in places if index.fqn == key]
    rest = {k: v for k, v in entries.items() if k != key}
    others = {index: where for index, where in places.items() if index.fqn != key}
    if not mine:
        return
    where = places[mine[0]]
    yield "entry removed", {"state_dict_metadata": rest, "storage_data": others}
    moved = {replace(index, fqn=f"{key}x"): places[index] for index in mine}
    named = {
        "state_dict_metadata": {**rest, f"{key}x": entry},
        "storage_data": {**others, **moved},
    }
    yield "entry renamed", named
    if paths:
        kept = {k: v for k, v in paths.items() if k != key}
        path = {f"{key}x": (*paths[key][:-1], f"{paths[key][-1]}x")}
        yield "entry renamed, its path too", {**named, "planner_data": kept | path}
    later = replace(where, offset=where.offset + 8)
    shorter = replace(where, length=where.length - 8)
    yield "offset", {"storage_data": {**places, mine[0]: later}}
    yield "length", {"storage_data": {**places, mine[0]: shorter}}
    if len(mine) > 1 and places[mine[1]].length == where.length:
        crossed = {mine[0]: places[mine[1]], mine[1]: where}
        yield "places of two chunks swapped", {"storage_data": {**places, **crossed}}
    if hasattr(entry, "chunks") and entry.size:
        yield from _of_tensor(key, whole)


def _of_tensor(key: str, whole: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    entries, places = whole.state_dict_metadata, whole.storage_data
    entry = entries[key]
    rows, *columns = entry.size
    chunk = entry.chunks[-1]
    fewer = replace(chunk, sizes=torch.Size((max(0, chunk.sizes[0] - 1), *chunk.sizes[1:])))
    size = torch.Size((rows - 1, *columns))
    other = torch.int32 if entry.properties.dtype is torch.float32 else torch.float16
    for what, new in (
        ("size", replace(entry, size=size)),
        ("size and chunk", replace(entry, size=size, chunks=[*entry.chunks[:-1], fewer])),
        ("type", replace(entry, properties=replace(entry.properties, dtype=other))),
    ):
        yield what, {"state_dict_metadata": {**entries, key: new}}
    twin = next((k for k, v in entries.items() if k != key and _like(v, entry)), None)
    if twin:
        names = {key: twin, twin: key}
        crossed = {replace(i, fqn=names.get(i.fqn, i.fqn)): at for i, at in places.items()}
        yield "two tensors swapped", {"storage_data": crossed}


def _like(one: Any, other: Any) -> bool:
    return (
        hasattr(one, "chunks")
        and one.size == other.size
        and one.properties.dtype == other.properties.dtype
        and [c.sizes for c in one.chunks] == [c.sizes for c in other.chunks]
    )
