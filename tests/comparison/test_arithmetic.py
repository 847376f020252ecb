"""The arithmetic of a comparison against plain, slow arithmetic over the same bits."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.comparison.arithmetic import Tally, Tolerance, measure, part_of, unchanged
from tests.campaign import examples

FLOATS = {  # bits of exponent and mantissa
    "float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7),
    "float8_e5m2": (5, 2),
}  # fmt: skip
TYPES = [
    *FLOATS, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex32", "complex64", "complex128",
]  # fmt: skip


def number(dtype: DType, bits: int) -> float | int:
    """Return the value of one element by the definition of its type."""
    import torch

    name, width = dtype.name, dtype.bits
    if dtype.family == "int":
        return bits - (1 << width) if bits >> (width - 1) else bits
    if dtype.family in ("uint", "bool"):
        return bits
    if name in FLOATS:
        exponent_bits, mantissa_bits = FLOATS[name]
        exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = bits & ((1 << mantissa_bits) - 1)
        sign = -1.0 if bits >> (width - 1) else 1.0
        if exponent == (1 << exponent_bits) - 1:
            return math.nan if mantissa else sign * math.inf
        lead = (1 << mantissa_bits) if exponent else 0
        power = max(exponent, 1) - ((1 << (exponent_bits - 1)) - 1) - mantissa_bits
        return sign * math.ldexp(lead + mantissa, power)
    raw = torch.tensor([bits], dtype=torch.uint8).view(getattr(torch, name))
    return float(raw.to(torch.float32))


def exactly(value: Any) -> Fraction:
    """Return a float, or numpy's long double, as what it is."""
    return Fraction(*value.as_integer_ratio())


def place(dtype: DType, bits: int) -> int:
    """Return where an element stands in the order of its type."""
    if dtype.family != "float" or dtype.name == "float8_e8m0fnu":
        return int(number(dtype, bits)) if dtype.family == "int" else bits
    magnitude = bits & ((1 << (dtype.bits - 1)) - 1)
    return -magnitude if bits >> (dtype.bits - 1) else magnitude


@st.composite
def sides(draw: st.DrawFn, dtype: DType) -> tuple[list[int], list[int]]:
    """Draw the bits of the parts of two runs of elements, mostly alike."""
    part = part_of(dtype)
    top = 1 << (part.bits - 1)
    special = [0, 1, top, top + 1, top - 1, 2 * top - 1]
    if part.name in FLOATS:  # infinities, NaN of two payloads, the largest and the subnormal ones
        exponent, mantissa = FLOATS[part.name]
        inf = ((1 << exponent) - 1) << mantissa
        special += [inf, inf | top, inf + 1, inf | top | 1, inf - 1, (1 << mantissa) - 1]
    count = draw(st.integers(0, 6)) * (dtype.bits // part.bits)
    one = st.one_of(st.sampled_from(special), st.integers(0, 2 * top - 1))
    ours = draw(st.lists(one, min_size=count, max_size=count))
    theirs = [draw(st.one_of(st.just(bits), one, st.just(bits ^ 1))) for bits in ours]
    return ours, theirs


def packed(dtype: DType, bits: list[int]) -> bytearray:
    size = part_of(dtype).itemsize
    return bytearray(b"".join(b.to_bytes(size, "little") for b in bits))


def counted(dtype: DType, ours: list[int], theirs: list[int], tolerance: Tolerance) -> Any:
    """Return what a tally must say, by plain loops over exact numbers."""
    part = part_of(dtype)
    parts = dtype.bits // part.bits
    pairs = [(number(part, a), number(part, b)) for a, b in zip(ours, theirs, strict=True)]
    elements = [range(i, i + parts) for i in range(0, len(pairs), parts)]
    finite = [e for e in elements if all(math.isfinite(n) for i in e for n in pairs[i])]
    exact = [[tuple(map(Fraction, pairs[i])) for i in e] for e in finite]
    change = [sum((b - a) ** 2 for a, b in e) for e in exact]
    changed = [e for e in elements if any(ours[i] != theirs[i] for i in e)]

    def far(e: range) -> bool:
        if e not in finite:
            return True
        a, b = map(Fraction, pairs[e[0]])
        return abs(a - b) > Fraction(tolerance.atol) + Fraction(tolerance.rtol) * abs(b)

    def special(side: int, test: Any) -> list[bool]:
        return [any(test(pairs[i][side]) for i in e) for e in elements]

    nan = [special(side, math.isnan) for side in (0, 1)]
    inf = [special(side, math.isinf) for side in (0, 1)]
    return {
        "elements": len(elements),
        "changed": len(changed),
        "beyond": sum(map(far, changed)),
        "max_ulp": max((abs(place(part, ours[i]) - place(part, theirs[i]))
                        for e in finite for i in e), default=0),
        "nan_ours": sum(nan[0]),
        "nan_theirs": sum(nan[1]),
        "inf_ours": sum(i and not n for i, n in zip(inf[0], nan[0], strict=True)),
        "inf_theirs": sum(i and not n for i, n in zip(inf[1], nan[1], strict=True)),
    }, {
        "change": sum(change),
        "ours": sum(a * a for e in exact for a, _ in e),
        "theirs": sum(b * b for e in exact for _, b in e),
        "product": sum(a * b for e in exact for a, b in e),
    }, max(change, default=0)  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=examples(25, 240), deadline=None)
@given(data=st.data())
def test_every_type_against_exact_numbers(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    ours, theirs = data.draw(sides(dtype))
    # Powers of two: no rounding moves an element across the bound, here or there.
    tolerance = Tolerance(data.draw(st.sampled_from([0.0, 0.5])), 0.0)
    count = len(ours) // (dtype.bits // part_of(dtype).bits)
    found = measure((dtype, packed(dtype, ours)), (dtype, packed(dtype, theirs)), count, tolerance)
    counts, sums, largest = counted(dtype, ours, theirs, tolerance)
    if part_of(dtype) != dtype:
        counts.pop("beyond")  # a modulus is rounded, and may be on the bound
    assert {key: getattr(found, key) for key in counts} == counts
    scale = max(sums["ours"], sums["theirs"])
    for key, exact in sums.items():
        assert abs(exactly(getattr(found, key)) - exact) <= scale * Fraction(1, 10**13), key
    if part_of(dtype).family != "float":
        assert found.max_abs == counts["max_ulp"]
    elif found.max_abs == math.inf:
        assert largest > Fraction(1.7e308) ** 2
    else:
        tiny, rounding = Fraction(5e-324), Fraction(1, 10**12)
        least, most = exactly(found.max_abs) - tiny, exactly(found.max_abs) + tiny
        least = least if least > 0 else Fraction(0)
        assert least**2 * (1 - rounding) <= largest <= most**2 * (1 + rounding)


def test_a_difference_just_beyond_the_tolerance_is_beyond() -> None:
    dtype, ours, theirs = DTYPES["uint64"], [2**63 - 1], [2**64 - 1]
    tolerance = Tolerance(0.5, 0.0)
    found = measure((dtype, packed(dtype, ours)), (dtype, packed(dtype, theirs)), 1, tolerance)
    assert found.beyond == counted(dtype, ours, theirs, tolerance)[0]["beyond"] == 1


@pytest.mark.parametrize("name", TYPES)
def test_long_runs_are_added_up(name: str) -> None:
    import numpy as np

    dtype, count = DTYPES[name], 100_003
    random = np.random.default_rng(3)
    ours = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    theirs = ours.copy()
    theirs[random.integers(0, theirs.size, 500)] ^= 1
    whole = measure((dtype, ours.data), (dtype, theirs.data), count, Tolerance())
    parts = Tally()
    for start in range(0, count, 999):
        cut = slice(start * dtype.itemsize, (start + 999) * dtype.itemsize)
        one, two = ours[cut], theirs[cut]
        parts.add(measure((dtype, one.data), (dtype, two.data), one.size // dtype.itemsize,
                          Tolerance()))  # fmt: skip
    exact = ("elements", "changed", "beyond", "max_abs", "max_ulp", "nan_ours", "inf_theirs")
    for key in exact:
        assert getattr(whole, key) == getattr(parts, key), key
    for key in ("ours", "theirs", "change"):
        sums = exactly(getattr(whole, key)), exactly(getattr(parts, key))
        assert abs(sums[0] - sums[1]) <= sums[1] * Fraction(1, 10**12), key
    changed = (ours != theirs).reshape(count, -1).any(axis=1)
    assert whole.changed == np.count_nonzero(changed)


@pytest.mark.parametrize("name", ["float32", "float16", "float64"])
@settings(max_examples=examples(25, 240), deadline=None)
@given(data=st.data(), rtol=st.floats(0, 2), atol=st.floats(0, 2))
def test_close_is_what_numpy_calls_close(
    name: str, data: st.DataObject, rtol: float, atol: float
) -> None:
    import numpy as np

    dtype = DTYPES[name]
    ours, theirs = data.draw(sides(dtype))
    found = measure(
        (dtype, packed(dtype, ours)), (dtype, packed(dtype, theirs)), len(ours),
        Tolerance(rtol, atol),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        a, b = (
            np.frombuffer(packed(dtype, side), dtype.numpy).astype(np.longdouble)
            for side in (ours, theirs)
        )
        close = np.isclose(a, b, rtol=rtol, atol=atol)
    same = np.array([x == y for x, y in zip(ours, theirs, strict=True)], bool)
    with np.errstate(all="ignore"):
        limit = atol + rtol * np.abs(b)
        on_the_bound = np.abs(np.abs(a - b) - limit) <= 1e-12 * np.abs(limit)
    sure = ~(close | same) & ~on_the_bound
    assert np.count_nonzero(sure) <= found.beyond
    assert found.beyond <= np.count_nonzero(sure | (on_the_bound & ~same))


@settings(max_examples=examples(25, 240), deadline=None)
@given(data=st.data(), name=st.sampled_from(TYPES))
def test_what_is_unchanged_counts_on_both_sides(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    ours, _ = data.draw(sides(dtype))
    found = unchanged(dtype, packed(dtype, ours), len(ours) * part_of(dtype).bits // dtype.bits)
    counts, sums, _ = counted(dtype, ours, ours, Tolerance())
    assert {key: getattr(found, key) for key in counts} == counts
    assert found.ours == found.theirs == found.product
    assert abs(exactly(found.ours) - sums["ours"]) <= sums["ours"] * Fraction(1, 10**13)
    assert found.change == 0


@pytest.mark.parametrize("name", ["qint8", "bits16", "float4_e2m1", "float6_e2m3", "float6_e3m2"])
@settings(max_examples=examples(20, 120), deadline=None)
@given(data=st.data())
def test_types_without_values_are_counted_by_bits(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    count = data.draw(st.integers(0, 20))
    one = st.lists(st.integers(0, (1 << dtype.bits) - 1), min_size=count, max_size=count)
    ours, theirs = data.draw(one), data.draw(one)

    def stream(values: list[int], padding: int) -> bytearray:
        whole = sum(value << (dtype.bits * i) for i, value in enumerate(values))
        used = dtype.bits * count
        size = dtype.nbytes(count)
        return bytearray((whole | (padding << used)).to_bytes(size + 1, "little")[:size])

    found = measure((dtype, stream(ours, 0)), (dtype, stream(theirs, 1)), count, None)
    changed = sum(a != b for a, b in zip(ours, theirs, strict=True))
    assert found == Tally(count, changed, beyond=changed, max_ulp=None)


@settings(max_examples=examples(40, 400), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-(2.0**99), 2.0**99, width=32), st.integers(-1000, 1000)),
        min_size=1,
        max_size=8,
    )
)
@example([(0.0, 1)])
def test_two_types_are_compared_by_value(pairs: list[tuple[float, int]]) -> None:
    import numpy as np

    floats = np.array([a for a, _ in pairs], "<f4")
    integers = np.array([b for _, b in pairs], "<i8")
    found = measure(
        (DTYPES["float32"], floats.tobytes()), (DTYPES["int64"], integers.tobytes()), len(pairs),
        Tolerance(0, 1),
    )  # fmt: skip
    apart = [abs(float(a) - int(b)) for a, b in zip(floats, integers, strict=True)]
    assert found.changed == sum(d != 0 for d in apart)
    assert found.beyond == sum(d > 1 for d in apart)
    assert found.max_ulp is None
    assert found.max_abs == pytest.approx(max(apart, default=0))


def test_norms_of_nothing_and_from_nothing() -> None:
    assert (Tally().relative, Tally().cosine) == (None, None)
    assert Tally(3, ours=4.0, theirs=4.0, product=4.0).relative == 0
    assert Tally(3, 1, change=1.0, theirs=1.0).relative == math.inf
    assert Tally(3, 1, change=1.0, theirs=1.0).cosine is None
    assert Tally(3, 1, change=1.0, ours=4.0, theirs=1.0, product=2.0).relative == 0.5
    assert Tally(3, 1, change=1.0, ours=4.0, theirs=1.0, product=2.0).cosine == 1
