"""Count NaN, infinities and negative numbers in raw elements.

Elements are handled as unsigned integers, so bfloat16 and float8 need no cast.
"""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import raw_dtype

# Bits of exponent and mantissa below the sign: an all-ones exponent is infinity (mantissa zero)
# or NaN. float8 of the fn and fnuz families have no infinity; their NaN patterns are listed.
_IEEE = {
    "float64": (0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
    "float32": (0x7F800000, 0x7FFFFFFF),
    "float16": (0x7C00, 0x7FFF),
    "bfloat16": (0x7F80, 0x7FFF),
    "float8_e5m2": (0x7C, 0x7F),
}
_NAN_ONLY = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
# A power of two: it has no sign and no zero.
_UNSIGNED = "float8_e8m0fnu"
_PARTS = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


class Count(NamedTuple):
    """Counts of special values in a block of elements."""

    nan: int
    inf: int
    negative: int
    nonzero: bool
    first: int


def count_values(dtype: DType, data: bytes) -> Count | None:
    """Count NaN, infinities and negative numbers in raw elements; None for types without them.

    Negative zero and NaN are not negative. `first` is the index of the first element that is NaN or
    infinite, or -1. Both parts of a complex number are counted. `data` holds whole elements.
    """
    import numpy as np

    name = _PARTS.get(dtype.name, dtype.name)
    if name in _IEEE:
        exponent, magnitude = _IEEE[name]
        size = {0x7F: 1, 0x7FFF: 2, 0x7FFFFFFF: 4}.get(magnitude, 8)
        bits = np.frombuffer(data, raw_dtype(size))
        plain = bits & bits.dtype.type(magnitude)
        infinite = bits.dtype.type(exponent)
        special = plain >= infinite
        signed = (bits != plain) & (plain != 0)
        if not special.any():
            return Count(0, 0, int(np.count_nonzero(signed)), bool(plain.any()), -1)
        inf = int(np.count_nonzero(plain == infinite))
        nan = int(np.count_nonzero(special)) - inf
        negative = int(np.count_nonzero(signed & (plain <= infinite)))
        parts = dtype.itemsize // size  # two in an element of a complex type
        return Count(nan, inf, negative, True, int(special.argmax()) // parts)
    if name in _NAN_ONLY:
        bits = np.frombuffer(data, np.uint8)
        special = np.isin(bits, np.array(_NAN_ONLY[name], np.uint8))
        nan = int(np.count_nonzero(special))
        first = int(special.argmax()) if nan else -1
        if name == _UNSIGNED:
            return Count(nan, 0, 0, bool(bits.size), first)
        negative = int(np.count_nonzero((bits > 0x80) & ~special))
        return Count(nan, 0, negative, nan > 0 or bool((bits & 0x7F).any()), first)
    return None
