"""The tensors inside a tensor subclass, and what each of them is.

torchao keeps elements in codes with scales beside them; so do bitsandbytes and Transformer Engine.
Which tensor holds the elements, their classes say by its name.

Transformer Engine's classes pickle themselves as a call with the tensors inside as arguments:

    getattr(Float8Tensor, "_make_in_reduce_ex")(data, fp8_dtype, scale_inv, dtype, shape)
    _make_float8_tensor_in_reduce_ex(data, fp8_dtype, scale_inv, dtype, shape)

the second since its pull request 2974. Early releases leave the shape out, which is that of the
elements. Neither is called: the arguments become a `SubclassRef`, and the same call is written.

Source: `tensor_data_names` in torchao 0.18 `quantization/quantize_/workflows/`, `tensor_attrs` in
`optim/subclass_*.py`; NF4Tensor's `SLOTS` in torchao 0.14 `dtypes/nf4tensor.py`; `QuantState` in
bitsandbytes 0.50 `functional.py`; transformer_engine/pytorch/float8_tensor.py (1.x) and
tensor/*_tensor.py (1.12 to 2.x).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Kind, Piece
from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.pickles.inert import inert, sealed

from .values import Composite, SubclassRef, TensorRef

if TYPE_CHECKING:
    from ftckpt.formats.pickles.write import Call

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
# Classes that hold their tensor as it is, and how they call it.
_THEMSELVES = {"torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "._tensor"}


class InnerPart(NamedTuple):
    """A tensor inside, of the whole or of one shard.

    Attributes:
        suffix: what follows the tensor's name in the record.
        shape: sizes.
        dtype: element type.
        pieces: where its elements are.
        shown: what follows the name for a reader (see `shown_suffix`).
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: Sequence[Piece]
    shown: str


def shown_suffix(type_name: str, suffix: str) -> str:
    """Return what follows a tensor's name in the name of a tensor inside.

    That is nothing where the class only says how the tensor inside is multiplied: it is the weight,
    as the module has it.
    """
    return "" if suffix == _THEMSELVES.get(type_name) else suffix


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
    from ftckpt.formats.pickles.walk import leaves

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


# --- Transformer Engine -------------------------------------------------------------------------

_PACKAGE = "transformer_engine.pytorch"
_TWO_WAYS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
# The modules of a class, the function that makes it in newer releases, and the arguments. A shape
# that stands first is left out by early releases; newer ones may have more arguments at the end.
_KINDS = {
    "Float8Tensor": (
        ("tensor.float8_tensor", "float8_tensor"), "_make_float8_tensor_in_reduce_ex",
        ("_data", "_fp8_dtype", "_scale_inv", "dtype", "shape"),
    ),
    "MXFP8Tensor": (
        ("tensor.mxfp8_tensor",), "_make_mxfp8_tensor_in_reduce_ex",
        (*_TWO_WAYS, "_fp8_dtype", "dtype", "shape", "_quantizer"),
    ),
    "Float8BlockwiseQTensor": (
        ("tensor.float8_blockwise_tensor",), "_make_float8_blockwise_tensor_in_reduce_ex",
        ("shape", *_TWO_WAYS, "_fp8_dtype", "dtype", "_quantizer", "_is_2D_scaled"),
    ),
    "NVFP4Tensor": (
        ("tensor.nvfp4_tensor",), "_make_nvfp4_tensor_in_reduce_ex",
        ("shape", *_TWO_WAYS, "_amax_rowwise", "_amax_columnwise", "_fp4_dtype", "dtype",
         "_quantizer"),
    ),
}  # fmt: skip
ENGINE_METHOD = "_make_in_reduce_ex"
# The code of the type of the elements: a number of an enumeration of the library's.
_CODES = ("transformer_engine_torch.DType", "transformer_engine_extensions.DType")
ENGINE = "transformer_engine"


def _builder(type_name: str, fields: tuple[str, ...], by: str) -> type:
    """Return what takes the call apart.

    Args:
        type_name: of the class.
        fields: the arguments.
        by: the function that is called; "" for the method of the class.
    """

    def build(*args: Any) -> SubclassRef:
        from .rebuild import wrong_arguments

        shapeless = fields[0] == "shape" and bool(args) and type(args[0]) is not tuple
        names = fields[1:] if shapeless else fields
        held: dict[str, Any] = dict(zip(names, args, strict=False))
        held |= {f"argument{n}": args[n] for n in range(len(names), len(args))}
        elements = held.get("_data", held.get("_rowwise_data"))
        dtype = held.pop("dtype", None)
        shape = held.pop("shape", getattr(elements, "shape", None))
        sizes = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
        tensors = [held[name] for name in fields if name in held and name.endswith(_TENSORS)]
        sound = all(value is None or type(value) is TensorRef for value in tensors)
        if type(dtype) is not DType or not sizes or not sound or not any(tensors):
            wrong_arguments(ENGINE_METHOD)
        found = SubclassRef()
        found.type_name = type_name
        found.base = Composite(ENGINE, {"dtype": dtype, "shape": shape, "by": by, "args": args})
        found.state = held
        return found

    return sealed(build)


_TENSORS = ("data", "scale_inv", "amax_rowwise", "amax_columnwise")
ENGINE_CLASSES = {name: inert(name) for name in _CODES}
ENGINE_FUNCTIONS: dict[str, type] = {}
ENGINE_METHODS: dict[type, type] = {}
for _name, (_modules, _function, _fields) in _KINDS.items():
    for _module in _modules:
        _place = f"{_PACKAGE}.{_module}"
        _class = ENGINE_CLASSES[f"{_place}.{_name}"] = inert(f"{_place}.{_name}")
        ENGINE_METHODS[_class] = _builder(f"{_place}.{_name}", _fields, "")
        _by = f"{_place}.{_function}"
        ENGINE_FUNCTIONS[_by] = _builder(f"{_place}.{_name}", _fields, _by)


def engine_call(value: SubclassRef) -> Call:
    """Return the call that makes it again, as it was read."""
    from ftckpt.formats.pickles.write import Call, Global

    def name(qualname: str) -> Global:
        module, _, last = qualname.rpartition(".")
        return Global(module, last)

    parts = value.base.parts
    shape, size = parts["shape"], name("torch.Size")
    args = tuple(Call(size, ((*shape,),)) if one is shape else one for one in parts["args"])
    if parts["by"]:
        return Call(name(parts["by"]), args)
    method = Call(name("__builtin__.getattr"), (name(value.type_name), ENGINE_METHOD))
    return Call(method, args)
