"""Change the type of elements: the one arithmetic of a transfer, and torch's own.

A cast rounds to nearest, ties to even, as `torch.Tensor.to` does; it is torch that does it, so that
the result is what training code would have made, NaNs included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Changes(NamedTuple):
    """What casts did to values.

    Attributes:
        values: that were cast.
        changed: of them, those that are another number in the new type: rounded, or beyond it.
        infinite: of them, those that were finite and are no longer.
    """

    values: int = 0
    changed: int = 0
    infinite: int = 0

    def plus(self, other: Changes) -> Changes:
        """Return both together."""
        return Changes(*(a + b for a, b in zip(self, other, strict=True)))


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
        array: raw items of `source` (see `ftckpt.checkpoint.read_tensor.raw_dtype`), any shape,
        dense.
        source: what they are.
        target: what they become.

    Returns:
        Raw items of `target`, of the same shape.

    Raises:
        UnsupportedError: see `require_cast`.
    """
    require_cast(source, target)
    import torch

    from ftckpt.checkpoint.read_tensor import raw_dtype

    shape = array.shape
    items = _items(array, source)
    done = items.to(getattr(torch, target.name))
    raw: Array = done.view(torch.uint8).numpy().view(raw_dtype(target.itemsize))
    return raw.reshape(shape)


def changes(before: Array, source: DType, after: Array, target: DType) -> Changes:
    """Return what a cast did to values.

    Args:
        before: raw items of `source`.
        source: what they are.
        after: what `cast` made of them.
        target: what these are.
    """
    import torch

    was, now = _items(before, source), _items(after, target)
    # Every type that can be cast is a part of one of these two, but for the largest integers.
    wide = torch.float64 if source.family == target.family == "float" else None
    if wide is not None:
        was, now = was.to(wide), now.to(wide)
    differ = (now != was) & ~(torch.isnan(now) & torch.isnan(was))
    infinite = torch.isinf(now) & torch.isfinite(was)
    return Changes(was.numel(), int(differ.sum()), int(infinite.sum()))


def _items(array: Array, dtype: DType) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(getattr(torch, dtype.name))
