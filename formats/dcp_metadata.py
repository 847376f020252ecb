"""The `.metadata` pickle of torch.distributed.checkpoint, as inert records.

Written by torch 1.12 to 2.13 as one pickle of one `Metadata` object; the module paths moved twice.
The stand-ins are slotted and take their state apart at once: a checkpoint of 100,000 tensors holds
a million of these objects, and the unpickler's memo keeps every state dict alive to the end.

Source of the layout: torch/distributed/checkpoint/{metadata,filesystem,planner}.py.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.source import safe_name

from . import unpickle
from .unpickle import Sealed, inert


class StoredItem(NamedTuple):
    """Where one item lies: a torch.save stream at `[offset, offset + length)` of `path`."""

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class Chunk(metaclass=Sealed):
    """`ChunkStorageMetadata`: a dense row-major box of the global tensor."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets = state["offsets"]
        self.sizes = state["sizes"]
        state.clear()


class TensorEntry(metaclass=Sealed):
    """`TensorStorageMetadata`: global size, element type and chunks."""

    __slots__ = ("chunks", "dtype", "size")
    size: Any
    dtype: Any
    chunks: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size = state["size"]
        self.chunks = state["chunks"]
        self.dtype = state["properties"].dtype
        state.clear()


class BytesEntry(metaclass=Sealed):
    """`BytesStorageMetadata`: an object that is no tensor; it has no state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None: ...


class _Properties(metaclass=Sealed):
    """`TensorProperties`: a five-tuple (since 2.0) of which only the dtype matters."""

    __slots__ = ("dtype",)
    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


class _Index(metaclass=Sealed):
    """`MetadataIndex`: identity is (fqn, offset); `index` is only a hint into `chunks`."""

    __slots__ = ("fqn", "offset")
    fqn: Any
    offset: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fqn = state["fqn"]
        self.offset = state.get("offset")
        state.clear()


class _Stored(metaclass=Sealed):
    """`_StorageInfo`."""

    __slots__ = ("length", "offset", "path", "transforms")
    path: Any
    offset: Any
    length: Any
    transforms: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["relative_path"]
        self.offset = state["offset"]
        self.length = state["length"]
        self.transforms = state.get("transform_descriptors")
        state.clear()


class _Fields(metaclass=Sealed):
    """`Metadata` and `StorageMeta`: known members and whatever a dialect adds."""

    __slots__ = ("state",)
    state: dict[str, Any]

    def __init__(self) -> None:
        self.state = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def _identity(value: Any) -> Any:
    return value


_M = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_QUIET = (
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)

TABLE: Mapping[str, Any] = {
    **unpickle.BUILTINS,
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **{
        f"{module}.{name}": stand_in
        for module in (_M, f"{_OLD}.metadata")
        for name, stand_in in (
            ("Metadata", _Fields),
            ("StorageMeta", _Fields),
            ("TensorStorageMetadata", TensorEntry),
            ("BytesStorageMetadata", BytesEntry),
            ("ChunkStorageMetadata", Chunk),
            ("MetadataIndex", _Index),
            ("TensorProperties", _Properties),
            ("_MEM_FORMAT_ENCODING", _identity),
            ("MEM_FORMAT_ENCODING", _identity),
        )
    },
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": _Fields,
    f"{_SHARDED}.TensorProperties": _Properties,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _identity,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Stored,
    f"{_OLD}.filesystem._StorageInfo": _Stored,
    "torch.Size": tuple,
    "torch.serialization._get_layout": _identity,
    **{name: inert(name) for name in _QUIET},
}


@dataclass(slots=True)
class DcpMetadata:
    """What the metadata says, checked for types and unsafe names, not for sense.

    Attributes:
        tensors: stored name -> entry.
        objects: stored names of byte items.
        paths: stored name -> path of dict keys (str) and list indices (int) in the state_dict.
        storage: (stored name, chunk offsets or None) -> item.
        save_id: uuid of the save, where recorded (torch >= 2.4).
        version: `Metadata.version`, where recorded (torch >= 2.9).
        extras: members that plain torch does not write (a dialect's).
        opaque: names outside the table.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    storage: dict[tuple[str, tuple[int, ...] | None], StoredItem] = field(default_factory=dict)
    save_id: str = ""
    version: str = ""
    extras: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()


def parse_metadata(stream: io.BufferedIOBase, size: int, file: str) -> DcpMetadata:
    """Parse one metadata pickle.

    Args:
        stream: positioned at its first byte; buffered.
        size: length of the file in bytes.
        file: its name, for messages.

    Raises:
        UnsafeError, CorruptError: see `ftckpt.formats.unpickle.load`; also a path that leaves the
            checkpoint (`unsafe-path`), or members of the wrong type (`bad-metadata`).
    """
    loaded = unpickle.load_stream(stream, size, file=file, table=TABLE)
    top = loaded.value
    if not isinstance(top, _Fields):
        raise CorruptError(f"{file} is a pickle, but not of checkpoint metadata",
                           kind="bad-metadata", file=file)  # fmt: skip
    state = top.state
    try:
        meta = DcpMetadata(opaque=loaded.opaque)
        with unpickle.no_gc():
            _take_entries(meta, state["state_dict_metadata"], file)
            _take_paths(meta, state.get("planner_data"))
            _take_storage(meta, state.get("storage_data"), file)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            f"{file} contradicts the layout of checkpoint metadata ({error})",
            kind="bad-metadata",
            file=file,
        ) from None
    storage_meta = state.get("storage_meta")
    if isinstance(storage_meta, _Fields):
        meta.save_id = str(storage_meta.state.get("save_id") or "")
    meta.version = str(state.get("version") or "")
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    meta.extras = tuple(sorted(k for k in state if isinstance(k, str) and k not in known))
    return meta


def merge(parts: Mapping[str, DcpMetadata]) -> DcpMetadata:
    """Join the metadata of a save without collectives: a union by (name, offsets).

    Every rank's file has global sizes but only that rank's chunks; replicas stand in every rank's
    data, of which the first in order is kept.

    Raises:
        CorruptError: two ranks give one tensor different sizes or types (`bad-metadata`).
    """
    whole = DcpMetadata()
    for file, part in parts.items():
        for name, entry in part.tensors.items():
            seen = whole.tensors.get(name)
            if seen is None:
                whole.tensors[name] = entry
                continue
            if seen.size != entry.size or seen.dtype != entry.dtype:
                raise CorruptError(f"{file} gives {name} another shape or type than other ranks",
                                   kind="bad-metadata", file=file, tensor=name)  # fmt: skip
            boxes = {chunk.offsets for chunk in seen.chunks}
            seen.chunks.extend(c for c in entry.chunks if c.offsets not in boxes)
        whole.objects.update(part.objects)
        whole.paths.update(part.paths)
        for key, item in part.storage.items():
            whole.storage.setdefault(key, item)
        whole.save_id = whole.save_id or part.save_id
        whole.version = whole.version or part.version
        whole.opaque += tuple(n for n in part.opaque if n not in whole.opaque)
    return whole


def _take_entries(meta: DcpMetadata, entries: Any, file: str) -> None:
    for name, entry in entries.items():
        if type(name) is not str:
            raise TypeError(f"a tensor's name is a {type(name).__name__}")
        if type(entry) is TensorEntry:
            if not isinstance(entry.dtype, DType):
                raise CorruptError(f"{file} gives {name} no element type",
                                   kind="bad-metadata", file=file, tensor=name)  # fmt: skip
            if not is_shape(entry.size) or type(entry.chunks) is not list:
                raise TypeError(f"{name} has no size or no chunks")
            meta.tensors[name] = entry
        elif type(entry) is BytesEntry:
            meta.objects[name] = None
        else:
            raise TypeError(f"{name} is neither tensor nor bytes")


def _take_paths(meta: DcpMetadata, paths: Any) -> None:
    for name, path in (paths or {}).items():
        # A newer Megatron dialect hides plans under a reserved key: not a path, not needed.
        if type(name) is str and type(path) is tuple:
            meta.paths[name] = path


def _take_storage(meta: DcpMetadata, storage: Any, file: str) -> None:
    safe: dict[str, str] = {}
    for index, stored in (storage or {}).items():
        if type(index) is not _Index or type(stored) is not _Stored:
            raise TypeError("storage_data holds something else than item locations")
        path = safe.get(stored.path) if type(stored.path) is str else None
        if path is None:
            path = safe[stored.path] = safe_name(stored.path, named_by=file)
        if type(stored.offset) is not int or type(stored.length) is not int:
            raise TypeError(f"the place of {index.fqn} is not a number")
        if stored.offset < 0 or stored.length < 0:
            raise TypeError(f"the place of {index.fqn} is negative")
        transforms = tuple(stored.transforms) if stored.transforms else ()
        key = (index.fqn, index.offset)
        if key in meta.storage:
            raise UnsafeError(f"{file} gives two places for one piece of {index.fqn}",
                              kind="bad-metadata", file=file, tensor=str(index.fqn))  # fmt: skip
        meta.storage[key] = StoredItem(path, stored.offset, stored.length, transforms)


def is_shape(value: Any) -> bool:
    """Return whether `value` is a tuple of non-negative ints."""
    return type(value) is tuple and all(type(n) is int and n >= 0 for n in value)
