"""Change the type of elements: the one arithmetic of a transfer, and torch's own.

A cast rounds to nearest, ties to even, as `torch.Tensor.to` does; it is torch that does it, so that
the result is what training code would have made, NaNs included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.dtypes import DType
from ftckpt.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CASTABLE = frozenset(("float", "int", "uint", "bool"))


def require_cast(source: DType, target: DType) -> None:
    """Refuse a cast that means nothing (quantised, packed, complex to real).

    Raises:
        UnsupportedError: the two types and why.
    """
    if source == target:
        return
    for dtype in (source, target):
        if dtype.family not in _CASTABLE or dtype.itemsize == 0:
            raise UnsupportedError(f"elements of {dtype.name} cannot be cast")


def cast(array: Array, source: DType, target: DType) -> Array:
    """Return the elements of `array` in another type.

    Args:
        array: raw items of `source` (see `ftckpt.assembly.raw_dtype`), any shape, dense.
        source: what they are.
        target: what they become.

    Returns:
        Raw items of `target`, of the same shape.

    Raises:
        UnsupportedError: see `require_cast`.
    """
    require_cast(source, target)
    import numpy as np
    import torch

    from ftckpt.assembly import raw_dtype

    shape = array.shape
    items = torch.from_numpy(array.reshape(-1).view(np.uint8)).view(getattr(torch, source.name))
    done = items.to(getattr(torch, target.name))
    raw: Array = done.view(torch.uint8).numpy().view(raw_dtype(target.itemsize))
    return raw.reshape(shape)
