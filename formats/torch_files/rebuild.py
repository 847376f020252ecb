"""Stand-ins of the functions that a `torch.save` pickle calls to build its tensors.

torch pickles a tensor as a call of a rebuild function on a storage that lies elsewhere in the file.
Here each such function checks its arguments and returns a record.

Sources: `torch/_utils.py` and `torch/_tensor.py` (rebuild functions and their arguments, torch 1.0
to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.formats.pickles.inert import Inert, sealed

from .values import Composite, StorageRef, SubclassRef, TensorRef, reach

# torch itself allows 64 dimensions.
_MAX_DIMENSIONS = 64


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


def _rebuild_parameter_with_state(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> Any:
    """Keep the attributes of a parameter where tensors are among them (bitsandbytes' Params4bit).

    Others (which axis is cut over tensor-parallel ranks) say nothing that is not known otherwise.
    """
    parameter = _rebuild_parameter(data, requires_grad)
    if type(parameter) is not TensorRef or not _holds_tensor(state):
        return parameter
    found = SubclassRef()
    found.type_name, found.base, found.state = "torch.nn.parameter.Parameter", parameter, state
    return found


def _holds_tensor(state: Any) -> bool:
    """Whether a tensor lies anywhere in a value; each container is looked at once."""
    todo, seen = [state], set[int]()
    while todo:
        value = todo.pop()
        if _is_tensor(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)) and type(value) is not TensorRef:
            todo += value
        elif isinstance(value, Inert):
            todo += [value.args, value.keywords, value.state, value.items]
    return False


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
    # Its device is not kept: a loader that has none such would fail, and storages say `cpu` too.
    parts = {
        "dtype": dtype, "shape": shape, "strides": strides, "class": cls.qualname,
        "storage_offset": storage_offset, "layout": layout, "requires_grad": requires_grad,
    }  # fmt: skip
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
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
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
