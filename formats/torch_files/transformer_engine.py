"""Transformer Engine's tensors in a pickle: elements in 8 or 4 bits, their scales, what they show.

Each class pickles itself as a call with the tensors inside as arguments:

    getattr(Float8Tensor, "_make_in_reduce_ex")(data, fp8_dtype, scale_inv, dtype, shape)
    _make_float8_tensor_in_reduce_ex(data, fp8_dtype, scale_inv, dtype, shape)

the second since its pull request 2974. Early releases leave the shape out, which is that of the
elements. Neither is called: the arguments become a `SubclassRef`, and the same call is written.

Source: transformer_engine/pytorch/float8_tensor.py (1.x), tensor/*_tensor.py (1.12 to 2.x).
"""

from __future__ import annotations

from typing import Any

from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.pickles.inert import inert, sealed
from ftckpt.formats.pickles.nodes import Call, Global

from .values import Composite, SubclassRef, TensorRef

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
METHOD = "_make_in_reduce_ex"
# The code of the type of the elements: a number of an enumeration of the library's.
_CODES = ("transformer_engine_torch.DType", "transformer_engine_extensions.DType")
HOW = "transformer_engine"


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
            wrong_arguments(METHOD)
        found = SubclassRef()
        found.type_name = type_name
        found.base = Composite(HOW, {"dtype": dtype, "shape": shape, "by": by, "args": args})
        found.state = held
        return found

    return sealed(build)


_SIZE, _GETATTR = Global("torch", "Size"), Global("__builtin__", "getattr")
_TENSORS = ("data", "scale_inv", "amax_rowwise", "amax_columnwise")
CLASSES = {name: inert(name) for name in _CODES}
FUNCTIONS: dict[str, type] = {}
METHODS: dict[type, type] = {}
for _name, (_modules, _function, _fields) in _KINDS.items():
    for _module in _modules:
        _place = f"{_PACKAGE}.{_module}"
        _class = CLASSES[f"{_place}.{_name}"] = inert(f"{_place}.{_name}")
        METHODS[_class] = _builder(f"{_place}.{_name}", _fields, "")
        _by = f"{_place}.{_function}"
        FUNCTIONS[_by] = _builder(f"{_place}.{_name}", _fields, _by)


def call_of(value: SubclassRef) -> Call:
    """Return the call that makes it again, as it was read."""
    parts = value.base.parts
    shape = parts["shape"]
    args = tuple(Call(_SIZE, ((*shape,),)) if one is shape else one for one in parts["args"])
    if parts["by"]:
        return Call(_global(parts["by"]), args)
    return Call(Call(_GETATTR, (_global(value.type_name), METHOD)), args)


def _global(qualname: str) -> Global:
    module, _, name = qualname.rpartition(".")
    return Global(module, name)
