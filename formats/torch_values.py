"""What a `torch.save` pickle is made of, as inert records: storages, tensors, subclasses.

torch pickles a tensor as a call of a rebuild function on a storage that lies elsewhere in the file.
Here each such function is a stand-in that checks its arguments and returns a record.

Sources: `torch/_utils.py` and `torch/_tensor.py` (rebuild functions and their arguments, torch 1.0
to 2.13), `torch/storage.py` (storage classes), `torch/serialization.py` (persistent ids).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Extent
from ftckpt.dtypes import DType
from ftckpt.errors import CorruptError, UnsafeError

from .inert import Inert, Sealed, refuse, sealed

# torch itself allows 64 dimensions.
_MAX_DIMENSIONS = 64


class StorageType(NamedTuple):
    """A storage class: what its elements are."""

    dtype: DType
    untyped: bool


class StorageRef(NamedTuple):
    """A storage as one persistent id names it.

    Attributes:
        key: name of its record, unique in the stream.
        dtype: element type; bytes for an untyped storage.
        numel: elements of `dtype`.
        untyped: whether the storage class is the untyped one.
        location: device at the time of saving (`cuda:3`); says nothing about the bytes.
        first: element of the record where this storage begins (old storage views).
    """

    key: str
    dtype: DType
    numel: int
    untyped: bool = False
    location: str = ""
    first: int = 0


class StoredStorage(NamedTuple):
    """Where the bytes of one storage are.

    Attributes:
        extent: the record; meaningless where `inline` is set.
        dtype: element type that the persistent id gives.
        numel: elements of `dtype`.
        crc32: as recorded, None where not.
        inline: the bytes themselves, where they lie inside the pickle.
    """

    extent: Extent
    dtype: DType
    numel: int
    crc32: int | None = None
    inline: bytes | None = None


class TensorRef(NamedTuple):
    """A strided view of a storage. Two with one key share memory: tied weights, views.

    Attributes:
        key: of the storage, in `TorchStream.storages`.
        storage_offset: in elements of `dtype`.
        shape: sizes.
        strides: in elements.
        dtype: element type.
        requires_grad: as saved.
        conj: the values are the conjugates of the bytes.
        neg: the values are the negatives of the bytes.
        location: device at the time of saving.
        parameter: whether it was a Parameter.
    """

    key: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    location: str = ""
    parameter: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether its elements lie side by side in C order."""
        return is_dense(self.shape, self.strides)

    def span(self, storages: Mapping[str, StoredStorage]) -> Extent:
        """Return the bytes from its first element to its last, gaps of the strides included.

        Raises:
            KeyError: `storages` is of another stream.
            ValueError: the storage lies inside the pickle and has no extent.
        """
        extent, *_, inline = storages[self.key]
        if inline is not None:
            raise ValueError(f"storage {self.key!r} has no bytes of its own in the file")
        size = self.dtype.itemsize
        length = reach(self.shape, self.strides) * size
        return Extent(extent.file, extent.offset + self.storage_offset * size, length)


class Composite(metaclass=Sealed):
    """A tensor that is no strided view of one storage.

    Attributes:
        how: `sparse`, `quantized`, `nested`, `meta`, `wrapper`.
        parts: names as in torch's own constructors -> TensorRef or plain value.
    """

    __slots__ = ("how", "parts")

    def __init__(self, how: str, parts: Mapping[str, Any]) -> None:
        self.how = how
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        refuse("changes a tensor after it was built")

    def __repr__(self) -> str:
        return f"<{self.how} tensor>"


class SubclassRef(metaclass=Sealed):
    """A tensor subclass, or a tensor with attributes: DTensor, ShardedTensor, a user's own.

    Attributes:
        type_name: qualified name of its class.
        base: what its rebuild function gave: TensorRef, or Composite `wrapper` with `dtype`,
            `shape` and `strides` of a tensor that has no storage of its own.
        state: its attributes, as pickled.
    """

    __slots__ = ("base", "state", "type_name")
    type_name: str
    base: Any
    state: Any

    def __setstate__(self, state: Any) -> None:
        refuse("changes a tensor subclass after it was built")

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether `strides` are those of C order; dimensions of one element do not count."""
    expected = 1
    if 0 in shape:
        return True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last one, both included; 0 for none."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def wrong_arguments(function: str) -> NoReturn:
    """Refuse a call of `function` that torch cannot have pickled.

    Raises:
        UnsafeError: always (`unsafe-pickle`).
    """
    raise UnsafeError(
        f"a pickle calls {function} with arguments that torch never writes", kind="unsafe-pickle"
    )


def _sizes(values: Any, function: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMENSIONS:
        wrong_arguments(function)
    for value in values:
        if type(value) is not int or value < 0:
            wrong_arguments(function)
    return tuple(values)


def _tensor(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    metadata: Any,
    dtype: DType | None,
    function: str,
) -> TensorRef:
    if type(storage) is not StorageRef or type(storage_offset) is not int or storage_offset < 0:
        wrong_arguments(function)
    shape, strides = _sizes(size, function), _sizes(stride, function)
    if len(shape) != len(strides):
        wrong_arguments(function)
    key, stored, numel, _, location, first = storage
    if dtype is None:
        dtype = stored
    elif dtype is not stored:
        itemsize = dtype.itemsize
        numel = numel * stored.itemsize // itemsize
        first = first * stored.itemsize // itemsize
    needed = reach(shape, strides)
    if needed and storage_offset + needed > numel:
        raise CorruptError(
            f"a tensor of shape {list(shape)[:8]} reaches element {storage_offset + needed} of a"
            f" storage of {numel}",
            kind="size-mismatch",
        )
    conj = neg = False
    if metadata:
        if not isinstance(metadata, dict):
            wrong_arguments(function)
        conj, neg = metadata.get("conj") is True, metadata.get("neg") is True
    return TensorRef(
        key,
        first + storage_offset,
        shape,
        strides,
        dtype,
        requires_grad is True,
        conj,
        neg,
        location,
    )


def _rebuild_tensor(storage: Any, storage_offset: Any, size: Any, stride: Any) -> TensorRef:
    return _tensor(storage, storage_offset, size, stride, False, None, None, "_rebuild_tensor")


def _rebuild_tensor_v2(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRef:
    return _tensor(
        storage, storage_offset, size, stride, requires_grad, metadata, None, "_rebuild_tensor_v2"
    )


def _rebuild_tensor_v3(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef:
    if type(dtype) is not DType or not dtype.itemsize:
        wrong_arguments("_rebuild_tensor_v3")
    return _tensor(
        storage, storage_offset, size, stride, requires_grad, metadata, dtype, "_rebuild_tensor_v3"
    )


def _is_tensor(value: Any) -> bool:
    return type(value) in (TensorRef, Composite, SubclassRef) or isinstance(value, Inert)


def _rebuild_parameter(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> Any:
    if type(data) is TensorRef:
        return data._replace(requires_grad=requires_grad is True, parameter=True)
    if not _is_tensor(data):
        wrong_arguments("_rebuild_parameter")
    return data


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Composite:
    names: tuple[str, ...] = ("indices", "values", "shape", "coalesced")
    if layout != "torch.sparse_coo":
        names = ("compressed_indices", "plain_indices", "values", "shape")
    if type(layout) is not str or type(data) is not tuple or not 3 <= len(data) <= 4:
        wrong_arguments("_rebuild_sparse_tensor")
    return Composite("sparse", {"layout": layout, **dict(zip(names, data, strict=False))})


def _rebuild_qtensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    params: Any,
    grad: Any = False,
    hooks: Any = None,
) -> Composite:
    name = "_rebuild_qtensor"
    values = _tensor(storage, offset, size, stride, grad, None, None, name)
    if type(params) is not tuple or not params:
        wrong_arguments(name)
    scheme = getattr(params[0], "qualname", "") if _is_class(params[0]) else ""
    rest = dict(zip(("scale", "zero_point", "axis"), params[1:], strict=False))
    return Composite("quantized", {"scheme": scheme, "values": values, **rest})


def _rebuild_meta_tensor(
    dtype: Any, size: Any, stride: Any, requires_grad: Any = False
) -> Composite:
    name = "_rebuild_meta_tensor_no_storage"
    if type(dtype) is not DType:
        wrong_arguments(name)
    shape, strides = _sizes(size, name), _sizes(stride, name)
    return Composite("meta", {"dtype": dtype, "shape": shape, "strides": strides})


def _rebuild_nested_tensor(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Composite:
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}
    return Composite("nested", parts)


def _rebuild_device_tensor(data: Any, *args: Any) -> Any:
    if not _is_tensor(data):
        wrong_arguments("_rebuild_device_tensor")
    return data


def _rebuild_wrapper_subclass(
    cls: Any,
    dtype: Any,
    size: Any,
    stride: Any,
    storage_offset: Any = 0,
    layout: Any = None,
    device: Any = None,
    requires_grad: Any = False,
) -> Composite:
    name = "_rebuild_wrapper_subclass"
    if type(dtype) is not DType or not _is_class(cls):
        wrong_arguments(name)
    shape, strides = _sizes(size, name), _sizes(stride, name)
    parts = {"dtype": dtype, "shape": shape, "strides": strides, "class": cls.qualname}
    return Composite("wrapper", parts)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Inert)


_PLAIN = frozenset(("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"))


def _rebuild_from_type_v2(func: Any, new_type: Any, args: Any, state: Any = None) -> Any:
    name = "_rebuild_from_type_v2"
    known = isinstance(func, type) and func in _REBUILDERS
    if type(args) is not tuple or not _is_class(new_type) or not (known or _is_class(func)):
        wrong_arguments(name)
    base = func(*args)  # a record class: refuses what must not be called
    if new_type.qualname in _PLAIN:
        return base  # a tensor with Python attributes, which hold no weights
    found = SubclassRef()
    found.type_name, found.base, found.state = new_type.qualname, base, state
    return found


def _get_layout(name: Any) -> str:
    if type(name) is not str:
        wrong_arguments("_get_layout")
    return name


BUILDERS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "torch._utils._rebuild_sparse_csr_tensor": _rebuild_sparse_tensor,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
    "torch._utils._rebuild_nested_tensor": _rebuild_nested_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _rebuild_device_tensor,
    "torch._utils._rebuild_xla_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._tensor._rebuild_from_type": _rebuild_from_type_v2,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type_v2,
    "torch.serialization._get_layout": _get_layout,
}
_REBUILDERS = frozenset(
    sealed(build) for name, build in BUILDERS.items() if "_rebuild_from_type" not in name
)
