"""Round weights to codes and scales, as the reference of each method does, bit for bit.

FP8 in blocks is transformers' `Fp8Quantize` (`integrations/finegrained_fp8.py`): a float32 scale a
block, so that the largest value becomes 448; each value is multiplied, clamped and rounded to
nearest even. transformers leaves a weight alone that blocks do not divide; here the last blocks may
be partly used, as in DeepSeek's own files. MXFP4 is Triton's `downcast_to_mxfp_torch` in its
default mode, which transformers calls: the scale is the power of two at or above a sixth of the
largest value, and values are rounded to nearest even.

An FP8 block whose values are all smaller than `_LEAST` would have a subnormal scale and an infinite
factor: its codes are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .arithmetic import e2m1, e4m3, e8m0

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FP8_BLOCK = 128  # rows and columns that share a scale
MX_BLOCK = 32  # values that do
# The largest difference that rounding makes, as a part of the largest value of a block: half a step
# of E4M3 below 448, and of E2M1 at 5 where 5 is the largest.
FP8_MOST, MX_MOST = 16 / 448, 1 / 5
_E4M3_MAX = 448.0
_LEAST = 2.0**-117
_TOGETHER = 256  # columns that are rounded together, so that they stay in the cache
_SIGN, _SIZE = 0x80000000, 0x7FFFFFFF


class CodesAndScales(NamedTuple):
    """Codes and scales, and how far what they stand for is from the values.

    Attributes:
        codes: bytes.
        scales: float32 of FP8, bytes of MXFP4; NaN or 255 where a value is not finite.
        largest: difference, as a part of the largest value of its block, of all blocks that have a
            value of `_LEAST` or more; 0 where it was not asked for.
    """

    codes: Array
    scales: Array
    largest: float


def fp8_scales(values: Array) -> tuple[Array, Array, Array]:
    """Return the scale of each block of a line of blocks, its factor, and its largest size.

    Args:
        values: float32[rows, columns], at most `FP8_BLOCK` rows.
    """
    import numpy as np

    columns = np.maximum(values.max(axis=0), -values.min(axis=0))
    largest = np.maximum.reduceat(columns, np.arange(0, values.shape[1], FP8_BLOCK))
    good = ~(largest < np.float32(_LEAST))  # of what is not finite too
    # torch divides a number by a tensor so: by its reciprocal, which rounds twice.
    factors = np.float32(1) / np.where(good, largest, np.float32(1)) * np.float32(_E4M3_MAX)
    factors = np.where(good, factors, np.float32(1))
    return np.float32(1) / factors, factors, largest


def fp8_line(values: Array, *, measure: bool = True) -> CodesAndScales:
    """Return a line of blocks as FP8.

    Args:
        values: as in `fp8_scales`.
        measure: whether the difference is asked for.
    """
    import numpy as np

    scales, factors, largest = fp8_scales(values)
    codes = np.empty(values.shape, np.uint8)
    worst = 0.0
    for first in range(0, values.shape[1], _TOGETHER):
        part = values[:, first : first + _TOGETHER]
        blocks = slice(first // FP8_BLOCK, (first + _TOGETHER) // FP8_BLOCK)
        wide = np.repeat(factors[blocks], FP8_BLOCK)[: part.shape[1]]
        made = codes[:, first : first + _TOGETHER] = e4m3_codes(part * wide)
        if not measure:
            continue
        off = e4m3()[made]
        off *= np.repeat(scales[blocks], FP8_BLOCK)[: part.shape[1]]
        off -= part
        columns = np.maximum(off.max(axis=0), -off.min(axis=0))
        most = np.maximum.reduceat(columns, np.arange(0, part.shape[1], FP8_BLOCK))
        worst = max(worst, _worst(most, largest[blocks]))
    return CodesAndScales(codes, scales, worst)


def mx_group(values: Array, *, measure: bool = True) -> CodesAndScales:
    """Return a group of rows as MXFP4, a scale a column, two codes a byte, the first the low half.

    Args:
        values: float32[`MX_BLOCK`, columns].
        measure: whether the difference is asked for.
    """
    import numpy as np

    largest = np.maximum(values.max(axis=0), -values.min(axis=0))
    bits = (largest / np.float32(6)).view(np.uint32)
    bits = (bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
    scales = (bits >> 23).astype(np.uint8)
    scales[~np.isfinite(largest)] = 255
    factors = np.where(bits == 0, np.float32(0), np.float32(1) / bits.view(np.float32))
    codes = e2m1_codes(values * factors)
    packed = codes[0::2] | (codes[1::2] << 4)
    if not measure:
        return CodesAndScales(packed, scales, 0.0)
    off = e2m1()[codes]
    off *= e8m0()[scales]
    off -= values
    return CodesAndScales(
        packed, scales, _worst(np.maximum(off.max(axis=0), -off.min(axis=0)), largest)
    )


def _worst(most: Array, largest: Array) -> float:
    """Return the largest difference of blocks, as a part of the largest value of each."""
    counted = largest >= _LEAST
    return float((most[counted] / largest[counted]).max(initial=0.0))


def e4m3_codes(values: Array) -> Array:
    """Return float32 values as bytes of float8_e4m3fn: clamped, rounded to nearest even."""
    # Below the smallest normal number steps are 2^-9, those of float32 at 2^14.
    return _codes(values, _E4M3_MAX, 20, 120 << 3, 2.0**-6, 2.0**14)


def e2m1_codes(values: Array) -> Array:
    """Return float32 values as numbers below 16 of E2M1: clamped, rounded to nearest even."""
    return _codes(values, 6.0, 22, 126 << 1, 1.0, 2.0**22)


def _codes(
    values: Array, most: float, dropped: int, bias: int, normal: float, magic: float
) -> Array:
    """Return values as codes of a float of few bits; of NaN, any.

    Args:
        values: float32.
        most: the largest value of that type.
        dropped: bits of the mantissa that it has not.
        bias: the difference of both biases, in its bits.
        normal: its smallest normal number.
        magic: a number at which float32 has the steps that it has below `normal`.
    """
    import numpy as np

    def bits_of(number: float) -> Any:
        return np.float32(number).view(np.uint32)

    bits = values.view(np.uint32)
    size = bits & np.uint32(_SIZE)
    np.minimum(size, bits_of(most), out=size)
    small = (size.view(np.float32) + np.float32(magic)).view(np.uint32)
    small -= bits_of(magic)
    codes = size >> dropped
    codes &= 1
    codes += size
    codes += np.uint32((1 << (dropped - 1)) - 1)
    codes >>= dropped
    codes -= np.uint32(bias)
    np.copyto(codes, small, where=size < bits_of(normal))
    codes |= (bits & np.uint32(_SIGN)) >> (28 if dropped == 22 else 24)
    found: Array = codes.astype(np.uint8)
    return found
