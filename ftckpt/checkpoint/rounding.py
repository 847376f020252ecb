"""Float32 to the 16-bit floats and back: to nearest, ties to even (IEEE 754-2019, 4.3.1).

A NaN stays one: its sign and the upper bits of its payload stay, and it is quiet, as x86's own
VCVTPS2PH and VCVTNEPS2BF16 do. numpy's float16 does so on some processors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def to_bfloat16(values: Array) -> Array:
    """Return the bits of float32 values as bfloat16, unsigned 16-bit words of the same shape."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # of a NaN this may run over; it is put right below
    rounded >>= 16
    return _with_nans(values, rounded.astype(np.uint16), (bits, 16, 0x7F, 0x7FC0))


def to_float16(values: Array) -> Array:
    """Return the bits of float32 values as float16, unsigned 16-bit words of the same shape.

    What rounds to 65520 or more becomes infinite.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        words = values.astype(np.float16).view(np.uint16)
    return _with_nans(values, words, (values.view(np.uint32), 13, 0x03FF, 0x7E00))


def from_bfloat16(words: Array) -> Array:
    """Return bfloat16's words as float32 values, exact, of the same shape."""
    import numpy as np

    bits = words.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _with_nans(values: Array, words: Array, rule: tuple[Array, int, int, int]) -> Array:
    """Spell every NaN: its bits shifted and masked, its sign, and what makes it a quiet one."""
    import numpy as np

    nan = np.isnan(values)
    if nan.any():
        bits, shift, mask, quiet = rule
        held = bits[nan]
        words[nan] = ((held >> shift) & mask) | ((held >> 16) & 0x8000) | quiet
    return words
