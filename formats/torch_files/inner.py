"""The tensors inside a tensor subclass, and what each of them is.

torchao keeps elements in codes with scales beside them; so do bitsandbytes and Transformer Engine.
Which tensor holds the elements, their classes say by its name.

Source: `tensor_data_names` in torchao 0.18 `quantization/quantize_/workflows/`, `tensor_attrs` in
`optim/subclass_*.py`; NF4Tensor's `SLOTS` in torchao 0.14 `dtypes/nf4tensor.py`; `QuantState` in
bitsandbytes 0.50 `functional.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.pickles.walk import leaves

from .values import Composite, SubclassRef, TensorRef

# What holds a tensor's elements, whatever their type.
_ELEMENTS = frozenset(
    ("qdata", "codes", "int_data", "float8_data", "packed_weight", "quantized_data", "tensor",
     "_data", "_rowwise_data")
)  # fmt: skip
# What helps to read them.
_HELPERS = frozenset((
    "scale", "scales", "scale_and_zero", "zero_point", "zero", "qmap", "act_pre_scale",
    "per_tensor_scale", "act_per_tensor_scale", "act_quant_scale", "act_quant_zero_point", "g_idx",
    "quantized_scalers", "quantization_factor", "scaler_mean", "nf4", "absmax", "nested_absmax",
    "quant_map", "nested_quant_map", "_scale_inv",
    "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv", "_amax_rowwise",
    "_amax_columnwise",
))  # fmt: skip


def inner_kind(part: str, usual: Kind) -> Kind:
    """Return what a tensor inside a weight's subclass is: elements are a parameter, scales are not.

    Args:
        part: its name in the subclass.
        usual: what it is if no class is known that has such a name.
    """
    if part in _ELEMENTS:
        return Kind.PARAM
    return Kind.BUFFER if part in _HELPERS else usual


def inner_tensors(value: SubclassRef) -> Iterator[tuple[str, TensorRef]]:
    """Yield (suffix, view) of the tensors inside: `.qdata`, `.scale`.

    The suffix of the tensor that a subclass itself is, is empty.
    """
    if type(value.base) is TensorRef:
        yield "", value.base
    for path, inner in leaves(value.state):
        if type(inner) is TensorRef:
            yield "".join(f".{step}" for step in path), inner


def outer_view(value: SubclassRef) -> tuple[tuple[int, ...], DType] | None:
    """Return the shape and the type that a subclass shows; None where its record has none."""
    if type(value.base) is TensorRef:
        return value.base.shape, value.base.dtype
    if type(value.base) is not Composite:
        return None
    shape, dtype = (value.base.parts.get(part) for part in ("shape", "dtype"))
    return (shape, dtype) if type(shape) is tuple and isinstance(dtype, DType) else None
