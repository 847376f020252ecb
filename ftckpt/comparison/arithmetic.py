"""Measure how far two runs of elements differ, in sums and extremes that add up.

Sums and extremes are of the elements that are finite on both sides; the others are counted.

Decode an element's bits: its value in wide arithmetic, and its rank among all values.

Values are float64, in which every element of up to four bytes is exact; elements of eight bytes
become long doubles, so that no square overflows and no integer is rounded where the processor has
them (80 bits on x86). A complex number is two elements of its part's type.

Distances in units in the last place count representable numbers between two: bits with a sign are
put in order (sign and magnitude), so that -0.0 and 0.0 are the same place and the smallest numbers
on both sides of zero are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import UsageError
from ftckpt.workers.buffers import buffer

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


# Elements worked on at once: two arrays of wide values stay in the processor's cache.
_RUN = 32 << 10
# BLAS gives a longer product to threads of its own, which wait for each other longer than it takes.
_DOT = 8 << 10
_OURS_SLOT, _THEIRS_SLOT = 6, 7


class Tolerance(NamedTuple):
    """Which differences are none: `|ours - theirs| <= atol + rtol * |theirs|`, as `numpy.isclose`.

    Infinities and NaN are close to the same bits alone.
    """

    rtol: float = 0.0
    atol: float = 0.0


def tolerance_of(rtol: float | None, atol: float | None) -> Tolerance | None:
    """Return what is close; None where neither was given, so that bits are compared.

    Raises:
        UsageError: no number.
    """
    if rtol is None and atol is None:
        return None
    given = Tolerance(rtol or 0.0, atol or 0.0)
    if not all(value < float("inf") for value in given):
        raise UsageError("--rtol and --atol are finite numbers")
    return given


@dataclass(slots=True)
class Tally:
    """What two runs of elements have in common and what not.

    Attributes:
        elements: how many were looked at.
        changed: how many have other bits; of two types, other values.
        beyond: how many differ by more than the tolerance.
        max_abs: largest absolute difference; exact for integers.
        max_ulp: largest distance in units in the last place; None for types without values.
        change: sum of the squared differences.
        ours, theirs: sums of the squares.
        product: sum of the products.
        nan_ours, nan_theirs: elements that are NaN, or have a part that is.
        inf_ours, inf_theirs: elements that are infinite and not NaN.
    """

    elements: int = 0
    changed: int = 0
    beyond: int = 0
    max_abs: float = 0
    max_ulp: int | None = 0
    change: Any = 0.0
    ours: Any = 0.0
    theirs: Any = 0.0
    product: Any = 0.0
    nan_ours: int = 0
    nan_theirs: int = 0
    inf_ours: int = 0
    inf_theirs: int = 0

    def add(self, other: Tally) -> None:
        """Add what was found in other elements."""
        for name in (
            "elements", "changed", "beyond", "change", "ours", "theirs", "product",
            "nan_ours", "nan_theirs", "inf_ours", "inf_theirs",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs = max(self.max_abs, other.max_abs)
        both = self.max_ulp is not None and other.max_ulp is not None
        self.max_ulp = max(self.max_ulp or 0, other.max_ulp or 0) if both else None

    @property
    def relative(self) -> float | None:
        """L2 norm of the change over that of ours; infinite from zero, None where nothing is."""
        if not self.change:
            return 0.0 if self.elements else None
        return float((self.change / self.ours) ** 0.5) if self.ours else float("inf")

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None where one is zero."""
        if not self.ours or not self.theirs:
            return None
        cosine = float(self.product / (self.ours**0.5 * self.theirs**0.5))
        return max(-1.0, min(1.0, cosine))


def measure(
    ours: tuple[DType, Any], theirs: tuple[DType, Any], count: int, tolerance: Tolerance | None
) -> Tally:
    """Compare two runs of elements.

    Args:
        ours: their type, and their bytes: dense, little-endian.
        theirs: the same; another type is compared by value.
        count: of elements.
        tolerance: what is still close; None counts nothing as beyond.
    """
    total = Tally()
    if not has_values(ours[0]):
        changed = _changed_bits(ours[0], ours[1], theirs[1], count)
        return Tally(count, changed, beyond=changed, max_ulp=None)
    sides = [(dtype, bits_of(dtype, data)) for dtype, data in (ours, theirs)]
    parts = sides[0][1].size // count if count else 1
    for start in range(0, count * parts, _RUN):
        run = [(dtype, bits[start : start + _RUN]) for dtype, bits in sides]
        total.add(_measure(run[0], run[1], parts, tolerance))
    return total


def unchanged(dtype: DType, data: Any, count: int) -> Tally:
    """Return the tally of elements that are equal on both sides."""
    if not has_values(dtype):
        return Tally(count, max_ulp=None)
    total = Tally()
    bits = bits_of(dtype, data)
    parts = bits.size // count if count else 1
    for start in range(0, bits.size, _RUN):
        total.add(_unchanged(dtype, bits[start : start + _RUN], parts))
    return total


def _measure(
    ours: tuple[DType, Array], theirs: tuple[DType, Array], parts: int, tolerance: Tolerance | None
) -> Tally:
    import numpy as np

    same_type = ours[0] == theirs[0]
    kind = max(wide_type(ours[0]), wide_type(theirs[0]))
    one, two = _scratch(kind, ours[1].size)
    with np.errstate(all="ignore"):
        values(*ours, out=one)
        values(*theirs, out=two)
        other = ours[1] != theirs[1] if same_type else one != two
        tally = Tally(other.size // parts, _elements(other, parts))
        if not tally.changed:
            equal = _sums_of_equals(one, parts)
            equal.max_ulp = 0 if same_type else None
            return equal
        bits = (ours[1], theirs[1])
        tally.ours, tally.theirs = _dot(one, one), _dot(two, two)
        if not np.isfinite(tally.ours + tally.theirs):
            finite = _count_special(tally, one, two, parts)
            if tolerance is not None:
                lost = other.reshape(-1, parts)[~finite]
                tally.beyond += int(np.count_nonzero(lost.any(axis=1)))
            keep = np.repeat(finite, parts)
            one, two = one[keep], two[keep]
            bits = (bits[0][keep], bits[1][keep])
            tally.ours, tally.theirs = _dot(one, one), _dot(two, two)
        tally.product = _dot(one, two)
        tally.max_ulp = farthest(ours[0], *bits) if same_type else None
        apart = np.subtract(two, one, out=one)
        tally.change = _dot(apart, apart)
        far = apart if parts == 1 else np.hypot(apart[::2], apart[1::2])
        if far.size:
            tally.max_abs = float(max(far.max(), -far.min()))
        if part_of(ours[0]).family != "float" and same_type:
            tally.max_abs = tally.max_ulp or 0  # integers: exact, however large
        if tolerance is not None:
            size = np.abs(two if parts == 1 else np.hypot(two[::2], two[1::2]))
            limit = tolerance.atol + tolerance.rtol * size
            tally.beyond += int(np.count_nonzero(np.abs(far) > limit))
    return tally


def _unchanged(dtype: DType, bits: Array, parts: int) -> Tally:
    import numpy as np

    one, _ = _scratch(wide_type(dtype), bits.size)
    with np.errstate(all="ignore"):
        values(dtype, bits, out=one)
        return _sums_of_equals(one, parts)


def _sums_of_equals(one: Array, parts: int) -> Tally:
    import numpy as np

    tally = Tally(one.size // parts)
    total = _dot(one, one)
    if not np.isfinite(total):
        one = one[np.repeat(_count_special(tally, one, one, parts), parts)]
        total = _dot(one, one)
    tally.ours = tally.theirs = tally.product = total
    return tally


def _scratch(kind: np.dtype[Any], count: int) -> tuple[Array, Array]:
    """Return two arrays that this thread uses again and again."""
    import numpy as np

    nbytes = count * kind.itemsize
    one, two = (np.frombuffer(buffer(nbytes, slot), kind) for slot in (_OURS_SLOT, _THEIRS_SLOT))
    return one, two


def _count_special(tally: Tally, one: Array, two: Array, parts: int) -> Array:
    """Count what is not finite; return which elements are finite on both sides."""
    import numpy as np

    finite = np.ones(one.size // parts, bool)
    for side, wide in (("ours", one), ("theirs", two)):
        rows = wide.reshape(-1, parts)
        nan = np.isnan(rows).any(axis=1)
        inf = np.isinf(rows).any(axis=1) & ~nan
        setattr(tally, f"nan_{side}", int(np.count_nonzero(nan)))
        setattr(tally, f"inf_{side}", int(np.count_nonzero(inf)))
        finite &= ~(nan | inf)
    return finite


def _dot(one: Array, two: Array) -> Any:
    """Return the sum of the products, in blocks that BLAS does alone.

    Of values that are finite it is finite: their squares are far from the largest wide number.
    """
    import numpy as np

    if one.dtype != np.float64:  # BLAS has no long doubles
        return np.dot(one, two)
    whole = one.size - one.size % _DOT
    total = np.dot(one[whole:], two[whole:])
    if whole:
        rows = one[:whole].reshape(-1, 1, _DOT), two[:whole].reshape(-1, _DOT, 1)
        total += np.matmul(*rows).sum()
    return total


def _elements(flags: Array, parts: int) -> int:
    """Count the elements of which any part is flagged."""
    import numpy as np

    return int(np.count_nonzero(flags if parts == 1 else flags.reshape(-1, parts).any(axis=1)))


def _changed_bits(dtype: DType, ours: Any, theirs: Any, count: int) -> int:
    """Count elements with other bits, of a type that has no values for us."""
    import numpy as np

    apart = np.frombuffer(ours, np.uint8) ^ np.frombuffer(theirs, np.uint8)
    if dtype.itemsize:
        return int(np.count_nonzero(apart.reshape(-1, dtype.itemsize).any(axis=1)))
    bits = np.unpackbits(apart, bitorder="little")[: count * dtype.bits]
    return int(np.count_nonzero(bits.reshape(-1, dtype.bits).any(axis=1)))
