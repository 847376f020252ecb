"""`metadata.pkl`: what each rank holds of every tensor, as plain data; its pickle is not run.

Versions 1.0 and 2.0 of torch_checkpointing 0.1.1: `distributed_metadata.py`, `dtensor_metadata.py`,
`default_metadata.py`. 2.0 goes by item; 1.0 has one mapping of paths that begin with the item.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError, NewerWriterError
from ftckpt.formats.pickles.unpickle import BUILTINS, load
from ftckpt.formats.torch_files.dtensor import How, Patch, Placement
from ftckpt.own_files import is_own, own_path
from ftckpt.storage.source import Source

from .names import METADATA, ItemFile, default_name

_MOST = 1 << 30  # bytes; 100,000 ranks and a million tensors are fewer
_MOST_RANKS = 1_000_000
_MOST_AXES = 64  # torch itself allows no more
_MESH = frozenset({"device_type", "mesh_shape", "mesh_data", "mesh_dim_names"})
_PLACEMENTS = {"Shard": How.SHARD, "StridedShard": How.STRIDED, "Replicate": How.REPLICATE}


class MeshSpec(NamedTuple):
    """A mesh: sizes and names of its axes, and the place of each global rank in it."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    places: Mapping[int, int]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank; None where it stands outside."""
        at = self.places.get(rank)
        if at is None:
            return None
        found = []
        for size in reversed(self.sizes):
            found.append(at % size)
            at //= size
        return tuple(reversed(found))


class Sharding(NamedTuple):
    """How some ranks hold a tensor.

    Attributes:
        ranks: which.
        shape: global shape.
        dtype: of its elements.
        mesh: of a DTensor; None for one that lists its boxes.
        placements: one a mesh axis.
        boxes: of a tensor that lists them: places in the whole, with where they begin in the file.
    """

    ranks: frozenset[int]
    shape: tuple[int, ...]
    dtype: DType
    mesh: MeshSpec | None
    placements: tuple[Placement, ...] = ()
    boxes: tuple[Patch, ...] = ()


@dataclass
class RecordedItem:
    """One item: the sharding of its tensors by dotted path, and where each rank's file lies."""

    tensors: dict[str, list[Sharding]] = field(default_factory=dict)
    files: dict[int, ItemFile] = field(default_factory=dict)


class Metadata(NamedTuple):
    """What `metadata.pkl` records."""

    world_size: int
    items: Mapping[str, RecordedItem]


def read_metadata(source: Source) -> Metadata:
    """Read and check `metadata.pkl`.

    Raises:
        CorruptError: it cannot be parsed, or contradicts itself.
        NewerWriterError: a version or a record of another form than is known.
        UnsafeError: its pickle calls something, or a path in it leaves the checkpoint.
    """
    size = source.size(METADATA)
    if size > _MOST:
        raise CorruptError(f"{METADATA} is too long for what it is", kind="bad-metadata",
                           file=METADATA)  # fmt: skip
    return _Parser().metadata(load(source.read(METADATA), file=METADATA, table=BUILTINS).value)


class _Parser:
    """Parses records; what many tensors share is parsed once."""

    def __init__(self) -> None:
        self._meshes: dict[int, MeshSpec] = {}
        self._ranks: dict[tuple[int, ...], frozenset[int]] = {}
        self._paths: dict[str, tuple[str, int]] = {}
        self._world = 0

    def metadata(self, tree: Any) -> Metadata:
        tree = _dict(tree, METADATA)
        version = tree.get("version", "1.0")
        if version not in ("1.0", "2.0"):
            raise NewerWriterError.of(
                METADATA, expected="version 1.0 or 2.0", found=version, file=METADATA
            )
        world = tree.get("world_size")
        if type(world) is not int:
            _unknown("the world size", "a number", world)
        if not 0 < world <= _MOST_RANKS:
            _wrong(f"records a world of {world} ranks")
        self._world = world
        records = _dict(tree.get("metadata"), "metadata")
        items: dict[str, RecordedItem] = {}
        if version == "2.0":
            for name, record in records.items():
                record = _dict(record, name)
                item = items.setdefault(_text(name, "an item"), RecordedItem())
                for path, groups in _dict(record.get("nested_path_to_metadata"), name).items():
                    self._tensor(item, _path(path), groups)
                self._files(name, item, record.get("rank_to_layout_info"))
        else:
            for path, groups in records.items():
                own, *inner = _path(path) or _unknown("a path", "an item and more", path)
                self._tensor(items.setdefault(str(own), RecordedItem()), tuple(inner), groups)
            layouts = _dict(tree.get("rank_to_layout_info_mappings"), "the layouts")
            for name, item in items.items():
                by_rank = {rank: _dict(one, "a layout").get(name) for rank, one in layouts.items()}
                self._files(name, item, by_rank)
        return Metadata(world, items)

    def _tensor(self, item: RecordedItem, path: tuple[str | int, ...], groups: Any) -> None:
        name = ".".join(map(str, path))
        if type(groups) not in (list, tuple):
            _unknown(f"the groups of {name}", "a list", groups)
        if name in item.tensors:
            _wrong(f"records {name} twice")
        found = [self._sharding(name, _dict(one, name)) for one in groups]
        # A load looks for each tensor in the file of one rank that the metadata name.
        if not found or not all(one.ranks for one in found):
            _wrong(f"names no rank that holds {name}")
        held = frozenset[int]().union(*(one.ranks for one in found)) if len(found) > 1 else ()
        if len(found) > 1 and len(held) < sum(len(one.ranks) for one in found):
            _wrong(f"says twice how a rank holds {name}")
        item.tensors[name] = found

    def _sharding(self, name: str, record: Mapping[Any, Any]) -> Sharding:
        packed = _dict(record.get("sharding_metadata"), name)
        data, kind = _dict(packed.get("data"), name), packed.get("type")
        said = data.get("dtype")
        dtype = DTYPES.get(said.removeprefix("torch.")) if isinstance(said, str) else None
        if dtype is None:
            _unknown(f"the type of {name}", "a type of torch", said)
        shape = _axes(data.get("global_shape"), f"the shape of {name}")
        ranks = self._all(record.get("ranks"), name)
        if kind == "DTensorShardingMetadata":
            # A load fails without it, although it says nothing of the file.
            if len(_axes(data.get("stride"), f"the stride of {name}")) != len(shape):
                _wrong(f"has a stride of another number of axes than {name}")
            mesh = self._mesh(data.get("mesh_spec"), name)
            cuts = data.get("placements")
            if type(cuts) not in (list, tuple):
                _unknown(f"the placements of {name}", "a list", cuts)
            placements = tuple(_placement(_dict(one, name), name) for one in cuts or ())
            if len(placements) != len(mesh.sizes):
                _wrong(f"has {len(placements)} placements of {name} on a mesh of"
                       f" {len(mesh.sizes)} axes")  # fmt: skip
            return Sharding(ranks, shape, dtype, mesh, placements)
        if kind == "default_tensor_v1":
            return Sharding(ranks, shape, dtype, None, (), tuple(_boxes(data, shape, name)))
        return _unknown(
            f"the sharding of {name}", "DTensorShardingMetadata or default_tensor_v1", kind
        )

    def _mesh(self, record: Any, name: str) -> MeshSpec:
        known = self._meshes.get(id(record))
        if known is not None:
            return known
        spec, what = _dict(record, f"the mesh of {name}"), f"the mesh of {name}"
        if unknown := sorted(str(key) for key in spec.keys() - _MESH):
            _unknown(what, ", ".join(sorted(_MESH)), unknown[0])
        _text(spec.get("device_type"), f"the device of {what}")
        sizes = _axes(spec.get("mesh_shape"), what)
        ranks = _numbers(spec.get("mesh_data"), what)
        names = spec.get("mesh_dim_names")
        if names is None:
            names = ("",) * len(sizes)
        elif type(names) not in (list, tuple) or any(type(one) is not str for one in names):
            _unknown(f"the axes of {what}", "names", names)
        if len(ranks) != prod(sizes) or len(set(ranks)) != len(ranks) or len(names) != len(sizes):
            _wrong(f"has a mesh of {list(sizes)} with {len(ranks)} ranks, for {name}")
        if max(ranks, default=0) >= self._world:
            _wrong(f"has rank {max(ranks)} in a mesh, and a world of {self._world}")
        found = MeshSpec(sizes, tuple(names), {r: n for n, r in enumerate(ranks)})
        self._meshes[id(record)] = found
        return found

    def _all(self, ranks: Any, name: str) -> frozenset[int]:
        numbers = _numbers(ranks, f"the ranks of {name}")
        known = self._ranks.get(numbers)
        if known is None:  # all tensors of a mesh have the same, each as a list of its own
            known = self._ranks[numbers] = frozenset(numbers)
            if len(known) != len(numbers):
                _wrong(f"names a rank of {name} twice")
            if max(known, default=0) >= self._world:
                _wrong(f"has {name} on rank {max(known)}, and a world of {self._world}")
        return known

    def _by_rank(self, layouts: Mapping[Any, Any], name: str) -> dict[int, Any]:
        """Return what is recorded of each rank; a load refuses an item that lacks one."""
        found: dict[int, Any] = {}
        for key, one in layouts.items():
            rank = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,7}", key) else key
            if type(rank) is not int:
                _unknown(f"a rank in the layouts of {name}", "a number", key)
            found[rank] = one
        if len(found) != self._world or not all(0 <= rank < self._world for rank in found):
            _wrong(f"has the layouts of {len(found)} ranks of {name}, and a world of {self._world}")
        return found

    def _files(self, name: str, item: RecordedItem, layouts: Any) -> None:
        layouts = self._by_rank(_dict(layouts, f"the layouts of {name}"), name)
        sets = {id(one.ranks): one.ranks for groups in item.tensors.values() for one in groups}
        holders = frozenset[int]().union(*sets.values())
        for rank, layout in sorted(layouts.items()):
            if layout is None:
                path, kind = default_name(name, rank), "TorchSerialization"
            else:
                layout = _dict(layout, f"the layout of {name}")
                written = _dict(layout.get("serialization_format"), f"the layout of {name}")
                path = own_path(layout.get("file_path"), "", named_by=METADATA)
                kind = _text(written.get("type"), f"the layout of {name}")
                if is_own(path) or path == METADATA:
                    _wrong(f"names {path} as the file of {name} of rank {rank}")
            if layout is None and rank not in holders:
                continue
            other, whose = self._paths.setdefault(path, (name, rank))
            if (other, whose) != (name, rank):
                _wrong(f"names {path} as the file of {name} of rank {rank}, and of {other} of"
                       f" rank {whose}")  # fmt: skip
            if rank in holders:
                item.files[rank] = ItemFile(path, name, rank, kind)


def _boxes(data: Mapping[Any, Any], shape: tuple[int, ...], name: str) -> Iterator[Patch]:
    lists = [data.get(key) for key in ("global_offsets", "local_offsets", "local_sizes")]
    if any(type(one) not in (list, tuple) for one in lists):
        _unknown(f"the boxes of {name}", "lists", lists)
    if len({len(one) for one in lists if one is not None}) > 1:
        _wrong(f"has other numbers of offsets and sizes of {name}")
    for row in zip(*(one or () for one in lists), strict=True):
        begin, local, sizes = (_axes(one, f"a box of {name}") for one in row)
        inside = len(begin) == len(local) == len(sizes) == len(shape)
        if not inside or any(b + s > n for b, s, n in zip(begin, sizes, shape, strict=True)):
            _wrong(f"has a box of {name} at {list(begin)} of {list(sizes)} outside of it")
        yield Patch(Box(begin, sizes), local)


def _placement(record: Mapping[Any, Any], name: str) -> Placement:
    how = _PLACEMENTS.get(str(record.get("type")))
    if how is None:
        _unknown(f"a placement of {name}", ", ".join(_PLACEMENTS), record.get("type"))
    if how is How.REPLICATE:
        return Placement(how)
    dim, factor = record.get("dim"), record.get("split_factor") if how is How.STRIDED else 1
    if type(dim) is not int or type(factor) is not int:
        _unknown(f"a placement of {name}", "numbers", (dim, factor))
    return Placement(how, dim, factor)


def _path(text: Any) -> tuple[str | int, ...]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        found = None
    if type(found) is not list or any(type(one) not in (str, int) for one in found):
        _unknown("a path", "a list in JSON", text)
    return tuple(found)


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) not in (list, tuple) or not set(map(type, value)) <= {int}:
        _unknown(what, "numbers", value)
    if value and not 0 <= min(value) <= max(value) < 1 << 62:
        _wrong(f"has a number in {what} that none can be")
    return tuple(value)


def _axes(value: Any, what: str) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and len(value) > _MOST_AXES:
        _wrong(f"has {len(value)} axes in {what}")
    return _numbers(value, what)


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        _unknown(what, "a mapping", value)
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        _unknown(what, "a name", value)
    return value


def _unknown(what: str, expected: str, found: object) -> NoReturn:
    raise NewerWriterError.of(f"{what} in {METADATA}", expected=expected, found=found,
                              file=METADATA)  # fmt: skip


def _wrong(what: str) -> NoReturn:
    raise CorruptError(f"{METADATA} {what}", kind="bad-metadata", file=METADATA)
