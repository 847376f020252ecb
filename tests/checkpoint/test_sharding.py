"""Cutting and joining: every element is owned once, and joining undoes cutting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.sharding import (
    GATED,
    REPLICATED,
    ROW,
    Split,
    even_rows,
    global_shape,
    part_shape,
    slabs,
)
from ftckpt.errors import UsageError
from ftckpt.extents import Box


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Split, int]:
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    blocks = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    parts = draw(st.integers(1, 4))
    shape[axis] = sum(blocks or (1,)) * parts * draw(st.integers(0, 2))
    return tuple(shape), Split(axis, blocks), parts


@settings(deadline=None)
@given(cuts())
def test_parts_tile_the_tensor_and_themselves(cut: tuple[tuple[int, ...], Split, int]) -> None:
    shape, split, parts = cut
    whole = np.arange(np.prod(shape)).reshape(shape)
    joined = np.full(shape, -1)
    for part in range(parts):
        own = np.full(part_shape(shape, split, parts), -1)
        for box, local in slabs(shape, split, parts, part):
            own[_slices(local)] = whole[_slices(box)]
        assert (own >= 0).all()
        assert global_shape(own.shape, split, parts) == shape
        for box, local in slabs(shape, split, parts, part):
            assert (joined[_slices(box)] == -1).all()
            joined[_slices(box)] = own[_slices(local)]
    assert (joined == whole).all()


def test_a_gated_layer_keeps_gates_before_ups() -> None:
    first, second = slabs((8,), GATED, 2, 1)
    assert (first.box, first.local) == (Box((2,), (2,)), Box((0,), (2,)))
    assert (second.box, second.local) == (Box((6,), (2,)), Box((2,), (2,)))


def test_equal_tensors_have_one_description_of_their_parts() -> None:
    assert slabs((8, 4), GATED, 2, 1) is slabs([8, 4], GATED, 2, 1)


def test_every_part_holds_all_of_what_is_replicated() -> None:
    assert {slabs((3, 5), REPLICATED, 4, r) for r in range(4)} == {slabs((3, 5), ROW, 1, 0)}
    assert part_shape((3, 5), REPLICATED, 4) == global_shape((3, 5), REPLICATED, 4) == (3, 5)


@pytest.mark.parametrize(
    ("shape", "split", "parts", "message"),
    [
        ((6,), Split(0), 4, "6 rows over 4"),
        ((8,), GATED, 8, "a sub-block of 4 rows over 8"),
        ((7,), GATED, 2, "proportion 1:1"),
        ((8,), ROW, 2, "has no axis 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    shape: tuple[int, ...], split: Split, parts: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        slabs(shape, split, parts, 0)
    with pytest.raises(UsageError, match=message):
        part_shape(shape, split, parts)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 9))
def test_chunked_rows_are_those_of_torch(length: int, parts: int) -> None:
    torch = pytest.importorskip("torch")
    sizes = [len(c) for c in torch.arange(length).chunk(parts)] if length else []
    found = [even_rows(length, parts, p) for p in range(parts)]
    assert [stop - start for start, stop in found if stop > start] == sizes
    assert [i for start, stop in found for i in range(start, stop)] == list(range(length))
