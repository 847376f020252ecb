"""Change the type of elements: the one arithmetic of a transfer, by numpy.

A cast rounds to nearest, ties to even, as `torch.Tensor.to` does: every number becomes the bits
that torch makes of it. A NaN keeps its sign and the upper bits of its payload, and is quiet; how
torch 2.13 spells one depends on the processor and on how the elements lie in memory, so that two
casts of the same elements would differ.

numpy knows no 8-bit floats: torch casts those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_RUN = 64 << 10  # elements at once, so that what is between two steps stays in the cache


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
        MissingPackageError: one is an 8-bit float, and torch is not installed.
    """
    require_cast(source, target)
    import numpy as np

    items = array.reshape(-1)
    done = np.empty(items.size, raw_dtype(target.itemsize))
    with np.errstate(all="ignore"):
        for start in range(0, items.size, _RUN):
            run = items[start : start + _RUN]
            done[start : start + _RUN] = _cast(run, source, target)
    return done.reshape(array.shape)


def changes(before: Array, source: DType, after: Array, target: DType) -> Changes:
    """Return what a cast did to values.

    Args:
        before: raw items of `source`.
        source: what they are.
        after: what `cast` made of them.
        target: what these are.
    """
    import numpy as np

    found = Changes()
    befores, afters = before.reshape(-1), after.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, befores.size, _RUN):
            was = _values(befores[start : start + _RUN], source)
            now = _values(afters[start : start + _RUN], target)
            differ = (now != was) & ~((now != now) & (was != was))
            changed = int(np.count_nonzero(differ))
            # What did not change is as finite as it was.
            lost = int(np.count_nonzero(np.isinf(now) & np.isfinite(was))) if changed else 0
            found = found.plus(Changes(was.size, changed, lost))
    return found


def _cast(items: Array, source: DType, target: DType) -> Array:
    """Return a run of raw items in another type, as raw items."""
    import numpy as np

    raw = raw_dtype(target.itemsize)
    if not (_is_plain(source) and _is_plain(target)):
        return _cast_by_torch(items, source, target)
    found = _values(items, source)
    if target.name in ("bfloat16", "float16"):  # by float32, as torch does
        from ftckpt.checkpoint.rounding import to_bfloat16, to_float16

        singles = found.astype(np.float32, copy=False)
        return to_bfloat16(singles) if target.name == "bfloat16" else to_float16(singles)
    if found.dtype.kind == "f" and target.family in ("int", "uint"):
        found = found.astype(np.int64)
    return found.astype(target.numpy).view(raw)


def _is_plain(dtype: DType) -> bool:
    """Say whether numpy reads a type, with our help."""
    return bool(dtype.numpy) or dtype.name == "bfloat16"


def _values(items: Array, dtype: DType) -> Array:
    """Return raw items as numbers of numpy, each exact."""
    import numpy as np

    if dtype.name == "bfloat16":
        from ftckpt.checkpoint.rounding import from_bfloat16

        return from_bfloat16(items)
    if dtype.numpy:
        found = items.view(dtype.numpy)
        return found.astype(np.float32) if dtype.name == "float16" else found
    return _cast_by_torch(items, dtype, DTYPES["float32"]).view(np.float32)


def _cast_by_torch(items: Array, source: DType, target: DType) -> Array:
    from ftckpt.packages import needing

    with needing(f"a cast of {source.name} to {target.name}"):
        import torch
    done = _tensor(items, source).to(getattr(torch, target.name))
    raw: Array = done.view(torch.uint8).numpy().view(raw_dtype(target.itemsize))
    return raw


def _tensor(items: Array, dtype: DType) -> Any:
    import numpy as np
    import torch

    raw = np.ascontiguousarray(items).view(np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype.name))
