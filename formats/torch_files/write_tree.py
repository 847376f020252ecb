"""Lay out what `torch.save` writes of a tree: tensors become views of storages, which are records.

A tree is plain inert data whose leaves may be `Tensor` (to be written from shards or carried over)
and `CopiedTree` (a part of a source's tree, whose tensors keep their storages byte for byte).
Tensors with one `Storage` share memory after loading: tied weights.

Sources: `torch/serialization.py` (`_save`), `torch/_tensor.py` (`_reduce_ex_internal`).

Write a DTensor as torch.save does: a local tensor, and the mesh and placement around it.

The mesh has one dimension, as FSDP2's has. The records are torch 2.13's; what belonged to the
process that wrote them (hashes, thread, process groups) is left as a fresh object has it.

Sources: torch 2.13 `distributed/device_mesh.py`, `_mesh_layout.py`, `tensor/_dtensor_spec.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

from ftckpt.checkpoint.dtypes import BY_STORAGE, DTYPES, DType
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.inert import sealed
from ftckpt.formats.pickles.write import Call, Global, Persistent, Scoped, dumps
from ftckpt.transfer.content import Shard
from ftckpt.transfer.layout import Elements, Literal, Segment, Stored, Zeros

from .inner import ENGINE, engine_call
from .table import TABLE
from .values import Composite, StorageRef, StorageType, StoredStorage, SubclassRef, TensorRef
from .write_zip import Ending, ZipRecord, lay_out


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes of one or more tensors; one record.

    Attributes:
        segments: the bytes, in order.
    """

    segments: Sequence[Segment]

    @property
    def nbytes(self) -> int:
        """Their number."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(eq=False, slots=True)
class Tensor:
    """A strided view of a storage.

    Attributes:
        storage: its bytes.
        dtype: of its elements.
        shape: sizes.
        strides: in elements.
        offset: its first element.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, shard: Shard) -> Tensor:
        """Return a shard as a tensor with a storage of its own."""
        storage = Storage((Elements.all(shard),))
        return cls(storage, shard.dtype, shard.shape, dense_strides(shard.shape))


class CopiedTree(NamedTuple):
    """A part of a source's tree, with the storages of its stream."""

    value: Any
    storages: Mapping[str, StoredStorage]


def save(tree: Any, *, folder: str = "archive", base: int = 0) -> list[Segment]:
    """Return the segments of what `torch.save(tree)` writes.

    Args:
        tree: see the module's docstring.
        folder: see `torch_archive.lay_out`.
        base: where it begins in its file.

    Raises:
        UnsupportedError: a value or a tensor type that torch.save cannot write, or we cannot.
    """
    pickle, storages = pickled(tree)
    records = [
        ZipRecord("data.pkl", (Literal(pickle),)),
        ZipRecord(".format_version", (Literal(b"1"),)),
        ZipRecord(".storage_alignment", (Literal(b"64"),)),
        ZipRecord("byteorder", (Literal(b"little"),)),
        *(ZipRecord(f"data/{key}", storage.segments) for key, storage in enumerate(storages)),
        ZipRecord("version", (Literal(b"3\n"),)),
    ]
    return lay_out(records, folder=folder, base=base)


def save_shard(shard: Shard, *, base: int = 0) -> list[Segment]:
    """Return the segments of what `torch.save` writes of one tensor.

    The same as `save(Tensor.of(shard))`, and much faster: shards of one form have one frame.
    """
    head, ending = _frame(shard.dtype, shard.shape)
    return [head] if ending is None else [head, Elements.all(shard), ending.at(base)]


@lru_cache(maxsize=4096)
def _frame(dtype: DType, shape: tuple[int, ...]) -> tuple[Literal, Ending | None]:
    """Return what stands before and behind the elements of a tensor in an archive of its own."""
    elements = Zeros(dtype.nbytes(prod(shape)))
    tensor = Tensor(Storage((elements,)), dtype, shape, dense_strides(shape))
    head, *rest = save(tensor)
    assert isinstance(head, Literal)
    ending = rest[-1] if rest else None
    assert ending is None or isinstance(ending, Ending)
    return head, ending


def pickled(tree: Any) -> tuple[bytes, list[Storage]]:
    """Return the pickle of a tree, and its storages in the order of their keys."""
    writer = _Writer()
    return dumps(tree, writer.replace), list(writer.storages)


class _Writer:
    """Numbers storages as they are met."""

    def __init__(self) -> None:
        self.storages: dict[Storage, int] = {}

    def replace(self, value: Any) -> Any:
        """Return what to write in place of a value of the tree."""
        if type(value) is Tensor:
            return self._tensor(value)
        if type(value) is CopiedTree:
            return Scoped(value.value, _Carrier(self, value.storages).replace)
        return names_of(value)

    def _tensor(self, tensor: Tensor) -> Call:
        kind = _typed(tensor.dtype)
        nbytes = tensor.storage.nbytes
        pid = self.storage(tensor.storage, kind or _UNTYPED,
                           nbytes // tensor.dtype.itemsize if kind else nbytes)  # fmt: skip
        # Tuples of their own: which sizes are one object depends on where they come from.
        sizes, strides = (*tensor.shape,), (*tensor.strides,)
        view = (pid, tensor.offset, sizes, strides, False, Call(_HOOKS))
        if kind is not None:
            return Call(_V2, view)
        return Call(_V3, (*view, Global("torch", tensor.dtype.name)))

    def storage(self, storage: Storage, kind: Global, numel: int) -> Persistent:
        """Return the reference to a storage, given a key when it is met first."""
        key = self.storages.setdefault(storage, len(self.storages))
        return Persistent(("storage", kind, str(key), "cpu", numel))


class _Carrier:
    """Writes the tensors of one source stream."""

    def __init__(self, writer: _Writer, storages: Mapping[str, StoredStorage]) -> None:
        self._writer = writer
        self._stored = storages
        self._made: dict[str, Storage] = {}

    def replace(self, value: Any) -> Any:
        """Return what to write in place of a value of the source's tree."""
        if type(value) is TensorRef:
            return self._tensor(value)
        if type(value) is StorageRef:
            kind = _UNTYPED if value.untyped else _typed(value.dtype) or _UNTYPED
            return self._writer.storage(self._storage(value.key), kind, value.numel)
        if type(value) is SubclassRef:
            return self._subclass(value)
        return self._writer.replace(value)

    def _subclass(self, value: SubclassRef) -> Call:
        """Return the call that makes a tensor subclass; its class is a name, as it was read."""
        base = value.base
        if type(base) is TensorRef:
            made = self._tensor(base)
            if value.type_name == _PARAMETER_NAME:
                return Call(_WITH_STATE, (*made.args, value.state))
            kind = _global(value.type_name)
            return Call(_FROM_TYPE, (made.function, kind, made.args, value.state))
        if type(base) is Composite and base.how == ENGINE:
            return engine_call(value)
        if type(base) is not Composite or base.how != "wrapper":
            raise UnsupportedError(f"a {value.type_name} cannot be written as torch.save writes it")
        parts, kind = base.parts, _global(value.type_name)
        layout = Call(_LAYOUT, (parts["layout"] or "torch.strided",))
        view = (parts["dtype"], (*parts["shape"],), (*parts["strides"],), parts["storage_offset"])
        args = (kind, *view, layout, Call(_DEVICE, ("cpu",)), parts["requires_grad"])
        return Call(_FROM_TYPE, (_WRAPPER, kind, args, value.state))

    def _tensor(self, ref: TensorRef) -> Any:
        view = Tensor(self._storage(ref.key), ref.dtype, ref.shape, ref.strides, ref.storage_offset)
        made = self._writer.replace(view)
        flags = {name: True for name in ("conj", "neg") if getattr(ref, name)}
        *args, _, hooks = made.args[:6]
        made.args = (*args, ref.requires_grad, hooks, *made.args[6:], *((flags,) if flags else ()))
        if ref.parameter:
            return Call(_PARAMETER, (made, ref.requires_grad, Call(_HOOKS)))
        return made

    def _storage(self, key: str) -> Storage:
        made = self._made.get(key)
        if made is None:
            stored = self._stored[key]
            inside = stored.inline
            segment = Stored(stored.extent) if inside is None else Literal(inside)
            made = self._made[key] = Storage((segment,))
        return made


def subclass_call(
    record: SubclassRef, shape: tuple[int, ...], parts: Mapping[str, Tensor], own: str
) -> Call:
    """Return the call that makes a tensor subclass of other tensors.

    Args:
        record: one of the same class, with the same settings.
        shape: that it is to show.
        parts: the tensors inside, by their names.
        own: where it keeps its shape once more, if it does.
    """
    base, kind = record.base.parts, _global(record.type_name)
    layout = Call(_LAYOUT, (base["layout"] or "torch.strided",))
    view = (base["dtype"], (*shape,), dense_strides(shape), 0, layout)
    args = (kind, *view, Call(_DEVICE, ("cpu",)), base["requires_grad"])
    state = {**record.state, **parts}
    if own in state:
        state[own] = Call(_SIZE, ((*shape,),))
    return Call(_FROM_TYPE, (_WRAPPER, kind, args, state))


def _global(qualname: str) -> Global:
    module, _, name = qualname.rpartition(".")
    return Global(module, name)


def names_of(value: Any) -> Global:
    """Return the name that stands for a value of the reader's table: a dtype, a function, a class.

    Raises:
        UnsupportedError: it is of no table.
    """
    if type(value) is DType:
        return Global("torch", value.name)
    if isinstance(value, type) or type(value) is StorageType:
        name = _names().get(value)
        if name is not None:
            return name
    what = value.__name__ if isinstance(value, type) else type(value).__name__
    raise UnsupportedError(f"a {what} cannot be written as torch.save writes it")


def _typed(dtype: DType) -> Global | None:
    """Return the storage class of a type; None where torch has none and stores plain bytes.

    Raises:
        UnsupportedError: torch has no such type, or its tensors need more than their elements.
    """
    if dtype.name in _UNTYPED_TYPES:
        return None
    for name in dtype.storages:
        if BY_STORAGE[name] is dtype and dtype.family != "opaque":
            return Global("torch", name)
    raise UnsupportedError(f"torch.save has no way to write a tensor of {dtype.name}")


_names_cache: dict[Any, Global] = {}


def _names() -> Mapping[Any, Global]:
    """Return the table turned round: what a name stands for -> the name."""
    if not _names_cache:
        for qualname, found in TABLE.items():
            value = sealed(found) if type(found) is FunctionType else found
            if isinstance(value, type) or type(value) is StorageType:
                module, _, name = qualname.rpartition(".")
                _names_cache.setdefault(value, Global(module, name))
    return _names_cache


_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_PARAMETER_NAME = "torch.nn.parameter.Parameter"
_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_LAYOUT = Global("torch.serialization", "_get_layout")
_DEVICE = Global("torch", "device")
_SIZE = Global("torch", "Size")
_HOOKS = Global("collections", "OrderedDict")
_UNTYPED = Global("torch.storage", "UntypedStorage")
# Types of torch without a storage class: `torch/_tensor.py` writes them as untyped bytes.
_UNTYPED_TYPES = frozenset((
    "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8",
    "bits2x4", "bits4x2",
))  # fmt: skip


class MeshForm(NamedTuple):
    """What a job calls its mesh.

    Attributes:
        device: type of its devices.
        name: of its only dimension.
    """

    device: str = "cuda"
    name: str = "fsdp"


class RankMesh:
    """The mesh of all ranks as one of them sees it: one a file, shared by all its DTensors."""

    def __init__(self, rank: int, world: int, form: MeshForm) -> None:
        self._mesh = _mesh(rank, world, form)
        self._specs: dict[tuple[tuple[int, ...], str, int | None], Call] = {}

    def dtensor(
        self, local: Tensor | Call, shape: tuple[int, ...], dtype: DType, axis: int | None
    ) -> Call:
        """Return a DTensor.

        Args:
            local: what this rank holds, or the call that makes it.
            shape: global shape.
            dtype: of its elements.
            axis: the axis that is divided over the ranks; None where each has all of it.
        """
        form = (shape, dtype.name, axis)
        spec = self._specs.get(form)
        if spec is None:  # tensors of one form have equal ones, which nothing changes
            spec = self._specs[form] = _spec(self._mesh, shape, dtype, axis)
        layout = Call(_LAYOUT, ("torch.strided",))
        device = Call(Global("torch", "device"), ("cpu",))
        built = (_CLASS, dtype, (*shape,), dense_strides(shape), 0, layout, device, False)
        state = {"_local_tensor": local, "_spec": spec}
        return Call(_FROM_TYPE, (_WRAPPER, _CLASS, built, (None, state)), once=True)


def _spec(mesh: Call, shape: tuple[int, ...], dtype: DType, axis: int | None) -> Call:
    placement = _made("tensor.placement_types", "Replicate", {})
    order: tuple[Call, ...] = ()
    if axis is not None:
        placement = _made("tensor.placement_types", "Shard", {"dim": axis})
        order = (_new("tensor._dtensor_spec", "ShardOrderEntry", (axis, (0,))),)
    size = Call(Global("torch", "Size"), ((*shape,),))
    meta = (size, dense_strides(shape), dtype)
    spec = {
        "mesh": mesh,
        "placements": (placement,),
        "tensor_meta": _new("tensor._dtensor_spec", "TensorMeta", meta),
        "shard_order": order,
        "use_strided_shard_as_shard_order": False,
        "_hash": None,
    }
    return _made("tensor._dtensor_spec", "DTensorSpec", spec)


def _mesh(rank: int, world: int, form: MeshForm) -> Call:
    # torch drops an axis of one rank, and compares meshes by what is left.
    flat = {"shape": (world,), "stride": (1,)} if world > 1 else {"shape": (), "stride": ()}
    axis = _made("_mesh_layout", "_FlatLayout", flat)
    ranks = b"".join(r.to_bytes(4, "little") for r in range(world))
    rank_map = Tensor(Storage((Literal(ranks),)), DTYPES["int32"], (world,), (1,))
    state = {
        "_device_type": form.device,
        "_layout": _made("_mesh_layout", "_MeshLayout", {"axes": (axis,)}),
        "_rank_map": rank_map,
        "_mesh_dim_names": (form.name,),
        "_root_mesh": None,
        "_flatten_rank_map": tuple(range(world)),
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": [],
        "_rank": rank,
        "_coordinate_on_dim": (rank,),
        "_hash": None,
    }
    return _made("device_mesh", "DeviceMesh", state)


_CLASS = Global("torch.distributed.tensor", "DTensor")


def _made(module: str, name: str, state: Any) -> Call:
    return Call(Global(f"torch.distributed.{module}", name), state=state, new=True)


def _new(module: str, name: str, args: tuple[Any, ...]) -> Call:
    return Call(Global(f"torch.distributed.{module}", name), args, new=True)
