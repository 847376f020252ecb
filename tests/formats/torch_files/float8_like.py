"""Stand-ins for Transformer Engine's tensors, which need a GPU: they pickle in the same way.

By the source of transformer_engine/pytorch/tensor/*_tensor.py: with `old`, by the class's method;
else by a function. `installed` puts the modules where a pickle looks for them.
"""

from __future__ import annotations

import copyreg
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

_LIBRARY = "transformer_engine_torch"
PLACE = "transformer_engine.pytorch.tensor"


class DType:
    """The library's enumeration, as pybind11 pickles one: an object of a number."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def __setstate__(self, code: int) -> None:
        self.code = code

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), self.code  # type: ignore[attr-defined]


class Quantised(torch.Tensor):
    """Elements in few bits and their scales, shown as another type; `parts` are its arguments."""

    old = False
    made_by: Any

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        dtype = next(part for part in parts if isinstance(part, torch.dtype))
        shape = next(part for part in parts if isinstance(part, torch.Size))
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.parts = parts
        return made

    def __init__(self, *parts: Any) -> None: ...

    @classmethod
    def _make_in_reduce_ex(cls, *args: Any) -> Any:
        return cls(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind: Any = type(self)
        return (kind._make_in_reduce_ex if self.old else kind.made_by), kind_parts(self)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:  # DCP asks
            return False
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def kind_parts(value: Any) -> tuple[Any, ...]:
    """Return the arguments that a tensor was made of."""
    parts: tuple[Any, ...] = value.parts
    return parts


def installed(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: str,
              *, old: bool) -> Any:  # fmt: skip
    """Put a class and its function in their places, for a test; return the class."""
    place = f"{PLACE}.{module}"
    for one in (*(place.rsplit(".", n)[0] for n in (3, 2, 1)), place, _LIBRARY):
        monkeypatch.setitem(sys.modules, one, ModuleType(one))
        above, _, last = one.rpartition(".")
        if above:
            setattr(sys.modules[above], last, sys.modules[one])
    kind: Any = type(name, (Quantised,), {"__module__": place, "old": old})

    def make(*args: Any) -> Any:
        return kind(*args)

    make.__module__, make.__name__, make.__qualname__ = place, function, function
    kind.made_by = staticmethod(make)
    setattr(sys.modules[place], name, kind)
    setattr(sys.modules[place], function, make)
    monkeypatch.setattr(DType, "__module__", _LIBRARY)
    setattr(sys.modules[_LIBRARY], "DType", DType)  # noqa: B010
    return kind
