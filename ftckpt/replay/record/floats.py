"""Floats in a record: their type and their bits in hexadecimal, never rounded decimals."""

from __future__ import annotations

import math
import struct

# Types whose bits are the upper half of a float32 or a type that `struct` knows.
_FORMATS = {"float64": ("<d", "<q"), "float32": ("<f", "<i"), "float16": ("<e", "<h")}


def written(value: float, dtype: str = "float64") -> str:
    """Return a float as in a record: `float32 0x1.8000000000000p+1`."""
    return f"{dtype} {float(value).hex()}"


def value_of(text: str) -> float | None:
    """Return the float of a record, also one in decimals; None for other text."""
    _, _, digits = text.rpartition(" ")
    for read in (float, float.fromhex):
        try:
            return read(digits)
        except (ValueError, OverflowError):
            continue
    return None


def ulps(first: str, second: str) -> int | None:
    """Return the distance of two floats of one type in representable numbers; None if unknown."""
    dtype, _, _ = first.rpartition(" ")
    if dtype != second.rpartition(" ")[0]:
        return None
    a, b = value_of(first), value_of(second)
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    if dtype == "bfloat16":
        return abs(_ordinal(a, "float32") - _ordinal(b, "float32")) >> 16
    return abs(_ordinal(a, dtype) - _ordinal(b, dtype)) if dtype in _FORMATS else None


def _ordinal(value: float, dtype: str) -> int:
    """Return the rank of a float among all floats of its type, by value."""
    real, whole = _FORMATS[dtype]
    bits = int(struct.unpack(whole, struct.pack(real, value))[0])
    return bits if bits >= 0 else -(bits & ((1 << (8 * struct.calcsize(whole) - 1)) - 1))
