"""What a sample decides: which planes are worth coding, and which form gathers most."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta import DeltaEncoder, pair
from ftckpt.delta.codec.choose_encoding import (
    EFFORTS,
    TINY,
    EncodingPlan,
    Form,
    Reference,
    choose,
    sample_ranges,
)
from tests.delta.packing import State

FLOAT = DTYPES["float32"]
NOISE = frozenset({0, 1, 2})


def normal(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(30000).astype("f4").view("u4")


def chosen(values: Any, base: Any = None, effort: int = 2) -> EncodingPlan:
    return choose(FLOAT, values, base, [], EFFORTS[effort])


def test_a_float_is_turned_so_that_its_exponent_fills_a_byte() -> None:
    plan = chosen(normal())
    assert (plan.reference, plan.choice.form) == (Reference.NOTHING, Form.ROTATED)
    assert (plan.choice.planes.joined, plan.choice.planes.plain) == (2, NOISE)


def test_a_sign_that_is_always_the_same_is_not_coded_for_itself() -> None:
    # Turned, it would be one bit of the lowest byte, which would have to be coded for its sake.
    plan = chosen((normal().view("f4") ** 2).view("u4"))
    assert plan.choice.form is Form.PLANES
    assert (plan.choice.planes.joined, plan.choice.planes.plain) == (2, NOISE)


@pytest.mark.parametrize(("effort", "coded"), [(1, False), (2, True)])
def test_a_plane_that_saves_little_is_coded_where_ratio_counts(effort: int, coded: bool) -> None:
    rng = np.random.default_rng(1)
    values = normal()
    low = np.where(rng.random(values.size) < 0.09, 0, rng.integers(0, 256, values.size))
    plan = chosen((values & 0xFFFF00FF) | (low.astype("u4") << 8), None, effort)
    # The byte in the middle has 7.8 of 8 bits, turned and not.
    assert (plan.choice.planes.joined == 0) == coded


def test_the_base_is_taken_where_it_helps() -> None:
    values = normal()
    near = values + np.random.default_rng(2).integers(0, 90, values.size).astype("u4")
    assert chosen(near, values).reference is Reference.BASE
    assert chosen(values, normal(3)).reference is Reference.NOTHING
    few = values.copy()
    few[::50] += 3
    assert chosen(few, values).choice.form is Form.GAPS
    few[::3] += 3
    assert chosen(few, values).choice.form is Form.MASK
    assert chosen(values, values.copy()).bits == 0


@pytest.mark.parametrize("elements", [0, 1, 511, 4096, 100_000, 10_000_000])
def test_a_sample_lies_in_its_tensor(elements: int) -> None:
    ranges = sample_ranges(elements)
    assert all(0 <= start < stop <= elements for start, stop in ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    total = sum(stop - start for start, stop in ranges)
    assert total == elements if elements <= 511 else 0 < total <= 32768
    if elements > 4096:
        assert (ranges[0][0], ranges[-1][1]) == (0, elements)


def test_a_plane_of_differences_must_save_more_at_level_one() -> None:
    rng = np.random.default_rng(4)
    values = normal()
    # The second byte of a difference is below 181: 7.5 of 8 bits.
    low, middle = rng.integers(0, 256, values.size), rng.integers(0, 181, values.size)
    near = values + ((middle.astype("u4") << 8 | low.astype("u4")) >> 1)
    fast, small = (chosen(near, values, effort) for effort in (1, 2))
    assert fast.reference is small.reference is Reference.BASE
    assert 1 in fast.choice.planes.plain
    assert 1 not in small.choice.planes.plain


@pytest.mark.parametrize("changed", [False, True])
def test_a_tiny_tensor_is_not_read_for_a_choice(changed: bool) -> None:
    base, target = State(), State()
    values = normal()[: TINY // 4]
    base.add("bias", "float32", values.shape, values)
    target.add("bias", "float32", values.shape, (values + changed).astype("u4"))
    read: list[str] = []

    def fill(key: str, offset: int, view: memoryview) -> None:
        read.append(key)
        target.fill(key, offset, view)

    encoder = DeltaEncoder(pair(target.infos.values(), base.infos), fill, base.fill)
    plan = encoder.plan(0)
    assert read == []
    made = encoder.encode(0, 0, plan)
    wanted = (Reference.NOTHING, Form.PLAIN) if changed else (Reference.BASE, Form.EXACT)
    assert (made.reference, made.form) == wanted
