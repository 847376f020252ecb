"""Inert stand-ins for the torch classes in a `.metadata` pickle.

Written by torch 1.12 to 2.15; the module paths moved twice. The stand-ins are slotted and take
their state apart at once: a checkpoint of 100,000 tensors holds a million of these objects, and the
unpickler's memo keeps every state dict alive to the end.

Source of the layout: torch/distributed/checkpoint/{metadata,filesystem,planner}.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError, FtckptError, NewerWriterError
from ftckpt.findings import listed
from ftckpt.formats.pickles import unpickle
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.formats.pickles.keys import limited
from ftckpt.formats.pickles.unpickle import Sealed, inert
from ftckpt.strict_json import shown

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
    elif type(value) is list:  # it cannot be looked up
        raise unknown("a size or an offset", "a tuple of numbers", value)
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


_PLACE = ("relative_path", "offset", "length")


class StoredItem(metaclass=Sealed):
    """`_StorageInfo`: a torch.save stream lies at `[offset, offset + length)` of `path`.

    Attributes:
        path: relative to the checkpoint, checked to lie inside it.
        transforms: to undo before the stream can be read.
    """

    __slots__ = ("length", "offset", "path", "transforms")
    __hash__ = None  # type: ignore[assignment]  # as torch's class
    path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            self.path = state["relative_path"]
            self.offset = state["offset"]
            self.length = state["length"]
        except (KeyError, TypeError):
            raise lacks("_StorageInfo", state, *_PLACE) from None
        # A plain `()` without transforms: the common case must not cost an object.
        self.transforms = state.get("transform_descriptors") or ()
        if len(state) > 3 + ("transform_descriptors" in state):
            raise lacks("_StorageInfo", state, *_PLACE, "transform_descriptors")
        state.clear()


class Chunk(metaclass=Sealed):
    """`ChunkStorageMetadata`: a dense row-major box of the global tensor.

    Attributes:
        offsets: of its first element.
        sizes: of the box.
        item: place of its bytes; None if the metadata has none.
    """

    __slots__ = ("item", "offsets", "sizes")
    __hash__ = None  # type: ignore[assignment]  # as torch's class
    offsets: Offsets
    sizes: Offsets
    item: StoredItem | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            self.offsets = _shape(state["offsets"])
            self.sizes = _shape(state["sizes"])
        except (KeyError, TypeError):
            raise lacks("ChunkStorageMetadata", state, "offsets", "sizes") from None
        if len(state) > 2:  # a member that is not known may say how its bytes lie
            raise lacks("ChunkStorageMetadata", state, "offsets", "sizes")
        self.item = None
        state.clear()


class TensorEntry(metaclass=Sealed):
    """`TensorStorageMetadata`: global size, element type and chunks."""

    __slots__ = ("chunks", "dtype", "size")
    __hash__ = None  # type: ignore[assignment]  # as torch's class
    size: Offsets
    dtype: DType
    chunks: Sequence[Chunk]

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            self.size = _shape(state["size"])
            self.chunks = state["chunks"]
            self.dtype = state["properties"].dtype
        except (KeyError, TypeError, AttributeError):
            raise lacks("TensorStorageMetadata", state, "size", "chunks", "properties") from None
        if len(state) > 3:
            raise lacks("TensorStorageMetadata", state, "size", "chunks", "properties")
        state.clear()


class BytesEntry(metaclass=Sealed):
    """`BytesStorageMetadata`: an object that is not a tensor; it has no state."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as torch's class

    def __setstate__(self, state: Any) -> None: ...


# What torch writes of a tensor, and when it began to: dtype, layout, requires_grad, memory_format
# and pin_memory since 2.0, strides since 2.15.
_PROPERTIES = 5
_AND_STRIDES = 6


class Properties(metaclass=Sealed):
    """`TensorProperties`: a tuple (since 2.0) of which only the dtype matters.

    The strides are those of the tensor in the job that saved it. They do not say how its bytes lie:
    each item is a torch.save stream with strides of its own, and a loader fills a tensor that it
    has made itself.
    """

    __slots__ = ("dtype",)
    __hash__ = None  # type: ignore[assignment]  # as torch's class
    dtype: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            if "dtype" not in state:
                raise lacks("TensorProperties", state, "dtype")
            self.dtype = state["dtype"]
            return
        if type(state) is not tuple or not _PROPERTIES <= len(state) <= _AND_STRIDES:
            raise unknown("the TensorProperties of a tensor", "5 or 6 values", state)
        self.dtype, layout, requires_grad, memory_format, pinned = state[:_PROPERTIES]
        if type(layout) is not str:
            raise unknown("the layout of a tensor", "its name", layout)
        if type(requires_grad) is not bool:
            raise unknown("requires_grad of a tensor", "a bool", requires_grad)
        if type(memory_format) is not int:
            raise unknown("the memory format of a tensor", "a number", memory_format)
        if type(pinned) is not bool:
            raise unknown("pin_memory of a tensor", "a bool", pinned)
        strides = state[_PROPERTIES] if len(state) == _AND_STRIDES else None
        if strides is not None and not (
            type(strides) is tuple and all(type(stride) is int for stride in strides)
        ):
            raise unknown("the strides of a tensor", "numbers or None", strides)


class Index(metaclass=Sealed):
    """`MetadataIndex`: identity is (fqn, offset); `index` is only a hint into `chunks`."""

    __slots__ = ("fqn", "hint", "offset")
    fqn: Any
    offset: Any
    hint: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            self.fqn = state["fqn"]
            offset = state.get("offset")
            self.offset = None if offset is None else _shape(offset)
            self.hint = state.get("index")
        except (KeyError, TypeError, AttributeError):
            raise lacks("MetadataIndex", state, "fqn") from None
        if len(state) > ("offset" in state) + ("index" in state) + 1:
            # A member that is not known may be part of the identity.
            raise lacks("MetadataIndex", state, "fqn", "offset", "index")
        state.clear()


class Fields(metaclass=Sealed):
    """`Metadata` and `StorageMeta`: known members and whatever a dialect adds."""

    __slots__ = ("state",)
    __hash__ = None  # type: ignore[assignment]  # as torch's class
    state: dict[str, Any]

    def __init__(self) -> None:
        self.state = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise lacks("Metadata", state, "state_dict_metadata")
        self.state = dict(state)


def unknown(what: str, expected: str, value: Any) -> FtckptError:
    """Return the error for a value of another type or class than is known there.

    No checksum covers the metadata: a name that is one bit from a known one is damage, any other
    is a newer writer's.
    """
    name = getattr(value, "qualname", "")
    near = one_bit_from(name, TABLE)
    if near:
        return CorruptError(
            f"{what} is {name}, one bit from {near}: the bit flipped", kind="bad-metadata"
        )
    return NewerWriterError.of(what, expected=expected, found=value)


def lacks(record: str, state: Any, *names: str) -> FtckptError:
    """Return the error for a record whose members are not `names`.

    A member whose name is one bit from a known one that is not there is damage (see `unknown`).
    """
    what, expected = f"the members of a {record}", ", ".join(names)
    if not isinstance(state, dict):
        return unknown(what, expected, state)
    there = [name for name in state if type(name) is str]
    for name in there:
        near = "" if name in names else one_bit_from(name, names)
        if near and near not in state:
            return CorruptError(
                f"a {record} has a member {shown(name)}, one bit from {near}: the bit flipped",
                kind="bad-metadata",
            )
    found = listed([shown(name) for name in there], 8) or "none"
    return NewerWriterError.of(what, expected=expected, found=found)


_LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc",
                 "jagged", "_mkldnn")
)  # fmt: skip


def _layout(name: Any) -> str:
    if type(name) is not str:  # torch's own function takes nothing else
        raise CorruptError("a layout of a tensor is called by no name", kind="bad-metadata")
    if name not in _LAYOUTS:
        near = one_bit_from(name, _LAYOUTS)
        if near:
            raise CorruptError(
                f"a layout {shown(name)} is one bit from {near}: the bit flipped",
                kind="bad-metadata",
            )
        raise NewerWriterError.of(
            "the layout of a tensor", expected=listed(sorted(_LAYOUTS), 8), found=shown(name)
        )
    return name


def _memory_format(number: Any) -> int:
    if type(number) is not int:
        raise CorruptError("a memory format of a tensor has no number", kind="bad-metadata")
    if not 0 <= number <= 2:
        raise NewerWriterError.of(
            "the memory format of a tensor", expected="0, 1 or 2", found=shown(number)
        )
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
