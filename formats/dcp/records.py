"""Inert stand-ins for the torch classes in a `.metadata` pickle.

Written by torch 1.12 to 2.13; the module paths moved twice. The stand-ins are slotted and take
their state apart at once: a checkpoint of 100,000 tensors holds a million of these objects, and the
unpickler's memo keeps every state dict alive to the end.

Source of the layout: torch/distributed/checkpoint/{metadata,filesystem,planner}.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError
from ftckpt.formats.pickles import unpickle
from ftckpt.formats.pickles.keys import limited
from ftckpt.formats.pickles.unpickle import Sealed, inert

# torch's own limits: 64-bit sizes, and a maximum number of dimensions.
MAX_INT = 1 << 63
_MAX_DIMENSIONS = 64

Offsets = tuple[int, ...]


class _Shapes(dict[Offsets, Offsets]):
    """Every size and offset once: looked up by value, checked at the first use.

    A look-up hashes, and hashing a nested tuple can take forever: `_shape` looks up only flat ones.
    """

    def __missing__(self, value: Any) -> Offsets:
        if not is_shape(value):
            raise CorruptError("the metadata holds a size or an offset that no tensor can have",
                               kind="bad-metadata")  # fmt: skip
        self[value] = value
        return value  # type: ignore[no-any-return]


SHAPES = _Shapes()


def _shape(value: Any) -> Offsets:
    """Return the one copy of a size or an offset; see `_Shapes`."""
    if type(value) is tuple:
        try:
            sum(value)  # a nested tuple is not a number
        except TypeError:
            return SHAPES.__missing__(None)
    return SHAPES[value]


class _Size(metaclass=Sealed):
    """`torch.Size`: the tuple of its call; there are a few for each tensor."""

    __slots__ = ()

    def __new__(cls, values: Any = ()) -> Any:
        if type(values) is tuple and len(values) <= _MAX_DIMENSIONS:
            try:
                sum(values)  # a nested tuple is not a number
                return values
            except TypeError:
                pass
        return limited(tuple(values))


class StoredItem(metaclass=Sealed):
    """`_StorageInfo`: a torch.save stream lies at `[offset, offset + length)` of `path`.

    Attributes:
        path: relative to the checkpoint, checked to lie inside it.
        transforms: to undo before the stream can be read.
    """

    __slots__ = ("length", "offset", "path", "transforms")
    path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["relative_path"]
        self.offset = state["offset"]
        self.length = state["length"]
        # A plain `()` without transforms: the common case must not cost an object.
        self.transforms = state.get("transform_descriptors") or ()
        state.clear()


class Chunk(metaclass=Sealed):
    """`ChunkStorageMetadata`: a dense row-major box of the global tensor.

    Attributes:
        offsets: of its first element.
        sizes: of the box.
        item: place of its bytes; None if the metadata has none.
    """

    __slots__ = ("item", "offsets", "sizes")
    offsets: Offsets
    sizes: Offsets
    item: StoredItem | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets = _shape(state["offsets"])
        self.sizes = _shape(state["sizes"])
        self.item = None
        state.clear()


class TensorEntry(metaclass=Sealed):
    """`TensorStorageMetadata`: global size, element type and chunks."""

    __slots__ = ("chunks", "dtype", "size")
    size: Offsets
    dtype: DType
    chunks: Sequence[Chunk]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size = _shape(state["size"])
        self.chunks = state["chunks"]
        self.dtype = state["properties"].dtype
        state.clear()


class BytesEntry(metaclass=Sealed):
    """`BytesStorageMetadata`: an object that is not a tensor; it has no state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None: ...


class Properties(metaclass=Sealed):
    """`TensorProperties`: a five-tuple (since 2.0) of which only the dtype matters."""

    __slots__ = ("dtype",)
    dtype: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.dtype = state["dtype"]
            return
        self.dtype, layout, requires_grad, memory_format, pinned = state
        if type(layout) is not str or type(requires_grad) is not bool or type(pinned) is not bool:
            raise _contradiction("the properties of a tensor")
        if type(memory_format) is not int:
            raise _contradiction("the memory format of a tensor")


class Index(metaclass=Sealed):
    """`MetadataIndex`: identity is (fqn, offset); `index` is only a hint into `chunks`."""

    __slots__ = ("fqn", "hint", "offset")
    fqn: Any
    offset: Any
    hint: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fqn = state["fqn"]
        offset = state.get("offset")
        self.offset = None if offset is None else _shape(offset)
        self.hint = state.get("index")
        if len(state) > ("offset" in state) + ("index" in state) + 1:
            raise _contradiction("the members of an index")
        state.clear()


class Fields(metaclass=Sealed):
    """`Metadata` and `StorageMeta`: known members and whatever a dialect adds."""

    __slots__ = ("state",)
    state: dict[str, Any]

    def __init__(self) -> None:
        self.state = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def _contradiction(what: str) -> CorruptError:
    return CorruptError(f"{what} are not what torch writes", kind="bad-metadata")


_LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc",
                 "jagged", "_mkldnn")
)  # fmt: skip


def _layout(name: Any) -> str:
    if type(name) is not str or name not in _LAYOUTS:
        raise _contradiction("the layouts of tensors")
    return name


def _memory_format(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= 2:
        raise _contradiction("the memory formats of tensors")
    return number


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
            ("Metadata", Fields),
            ("StorageMeta", Fields),
            ("TensorStorageMetadata", TensorEntry),
            ("BytesStorageMetadata", BytesEntry),
            ("ChunkStorageMetadata", Chunk),
            ("MetadataIndex", Index),
            ("TensorProperties", Properties),
            ("_MEM_FORMAT_ENCODING", _memory_format),
            ("MEM_FORMAT_ENCODING", _memory_format),
        )
    },
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": Fields,
    f"{_SHARDED}.TensorProperties": Properties,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _memory_format,
    "torch.distributed.checkpoint.filesystem._StorageInfo": StoredItem,
    f"{_OLD}.filesystem._StorageInfo": StoredItem,
    "torch.Size": _Size,
    "torch.serialization._get_layout": _layout,
    **{name: inert(name) for name in _QUIET},
}


def is_shape(value: Any) -> bool:
    """Return whether `value` is a tuple of sizes that a tensor can have."""
    return (
        type(value) is tuple
        and len(value) <= _MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < MAX_INT for n in value)
    )
