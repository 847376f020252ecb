"""Decode an element's bits: its value in wide arithmetic, and its rank among all values.

Values are float64, in which every element of up to four bytes is exact; elements of eight bytes
become long doubles, so that no square overflows and no integer is rounded where the processor has
them (80 bits on x86). A complex number is two elements of its part's type.

Distances in units in the last place count representable numbers between two: bits with a sign are
put in order (sign and magnitude), so that -0.0 and 0.0 are the same place and the smallest numbers
on both sides of zero are neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint.dtypes import DTYPES, DType

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
# Exponent bits, mantissa bits and exponent bias; `c10/util/Float8_*.h`.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}
_EXPONENT_ONLY = "float8_e8m0fnu"


def part_of(dtype: DType) -> DType:
    """Return the type of a complex number's parts; of any other type itself."""
    return DTYPES[_PARTS.get(dtype.name, dtype.name)]


def has_values(dtype: DType) -> bool:
    """Say whether there is arithmetic for a type: not for raw bits, nor below a byte."""
    return bool(dtype.itemsize) and dtype.family != "opaque"


def wide_type(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that `values` of a type have."""
    import numpy as np

    return np.dtype(np.longdouble if part_of(dtype).itemsize == 8 else np.float64)


def bits_of(dtype: DType, data: Any) -> Array:
    """Return elements, or the parts of complex ones, as unsigned integers of their width.

    Args:
        dtype: of the elements; `has_values`.
        data: whole elements, dense and little-endian.
    """
    import numpy as np

    return np.frombuffer(data, np.dtype(f"<u{part_of(dtype).itemsize}"))


def values(dtype: DType, bits: Array, out: Array) -> None:
    """Put the values of `bits_of` into `out`, which is of `wide_type`.

    NaN and infinities stay what they are.
    """
    import numpy as np

    part = part_of(dtype)
    if part.name == "bfloat16":  # the upper half of a float32
        out[...] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif part.name in _FLOAT8 or part.name == _EXPONENT_ONLY:
        np.take(_table(part.name), bits, out=out, mode="clip")
    else:
        # A bool's byte counts as the number that it is: two that torch reads alike may differ.
        out[...] = bits if part.family in ("uint", "bool") else bits.view(part.numpy)


def farthest(dtype: DType, ours: Array, theirs: Array) -> int:
    """Return the largest distance of two elements in units in the last place; 0 for none.

    Args:
        dtype: of both.
        ours: `bits_of` finite elements.
        theirs: as many.
    """
    import numpy as np

    if not ours.size:
        return 0
    part = part_of(dtype)
    if part.family != "float" or part.name == _EXPONENT_ONLY:
        one, two = (ours.view(part.numpy), theirs.view(part.numpy)) if part.family == "int" else (
            ours, theirs)  # fmt: skip
        # The difference of two signed integers need not fit one, but does without the sign.
        above = np.maximum(one, two).view(ours.dtype) - np.minimum(one, two).view(ours.dtype)
        return int(above.max())
    signed = np.dtype(f"<i{part.itemsize}")
    across = np.flatnonzero((ours ^ theirs).view(signed) < 0)
    apart = (ours - theirs).view(signed)  # elements of one sign: their magnitudes' difference
    most = 0
    if across.size:
        magnitude = ours.dtype.type(np.iinfo(signed).max)
        both = (ours[across] & magnitude).astype(np.uint64) + (theirs[across] & magnitude)
        most = int(both.max())
        apart[across] = 0
    return max(most, int(apart.max()), -int(apart.min()))


@cache
def _table(name: str) -> Array:
    """Return the values of the 256 patterns of an 8-bit float."""
    import numpy as np

    code = np.arange(256)
    if name == _EXPONENT_ONLY:
        powers: Array = np.ldexp(1.0, code - 127)
        powers[0xFF] = np.nan
        return powers
    exponent_bits, mantissa_bits, bias = _FLOAT8[name]
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    lead = (exponent > 0) << mantissa_bits  # subnormal numbers have no leading one
    power = np.maximum(exponent, 1) - bias - mantissa_bits
    table: Array = np.ldexp((lead + mantissa).astype(np.float64), power)
    table[128:] *= -1
    if name.endswith("fnuz"):
        table[0x80] = np.nan
    elif name == "float8_e4m3fn":
        table[[0x7F, 0xFF]] = np.nan
    else:
        special = exponent == (1 << exponent_bits) - 1
        table[special] = np.where(
            mantissa[special] > 0, np.nan, np.copysign(np.inf, table[special])
        )
    return table
