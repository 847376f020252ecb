"""Moves are found, clipped, cut and read together; every element keeps its two places."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.transfer.read.copies_plan import ElementMove, StoredBox, meeting, readings
from tests.builders.raw_checkpoint import cut

_DTYPE = DTYPES["float32"]
_SIZE = _DTYPE.itemsize


def _places(move: ElementMove) -> dict[int, int]:
    """Return the byte offset of every element of a move, by its index in the shard."""
    found = {}
    for index in product(*map(range, move.sizes)):
        at = move.start + sum(i * s for i, s in zip(index, move.steps, strict=True))
        found[at] = move.offset + sum(i * s for i, s in zip(index, move.strides, strict=True))
    return found


@st.composite
def met(draw: st.DrawFn) -> tuple[StoredBox, Box, int, tuple[int, ...], dict[int, int]]:
    """Draw a place that holds a box of a tensor, a box that is wanted, and the elements of both."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    held_box, box = (draw(st.sampled_from(cut(draw, shape))) for _ in range(2))
    order = draw(st.permutations(range(len(shape))))
    dense = dense_strides([held_box.sizes[axis] for axis in order])
    wide = draw(st.sampled_from([1, 3]))  # what is stored may be a part of something wider
    strides = tuple(_SIZE * wide * dense[order.index(axis)] for axis in range(len(shape)))
    held = StoredBox(held_box, "f", draw(st.integers(0, 50)) * _SIZE, strides)
    # The box that is wanted is a part of a shard, behind whose rows others may lie.
    steps = dense_strides([n + draw(st.integers(0, 2)) for n in box.sizes])
    start = draw(st.integers(0, 9))
    expected = {}
    shared = intersection(held_box, box)
    for index in product(*map(range, shared.sizes)) if shared is not None else ():
        place = [o + i for o, i in zip(shared.offsets, index, strict=True)] if shared else []
        at = start + sum((p - b) * s for p, b, s in zip(place, box.offsets, steps, strict=True))
        inside = zip(place, held_box.offsets, strides, strict=True)
        expected[at] = held.origin + sum((p - h) * s for p, h, s in inside)
    return held, box, start, steps, expected


@settings(deadline=None)
@given(met())
def test_elements_that_a_place_holds_of_a_box_are_found(
    drawn: tuple[StoredBox, Box, int, tuple[int, ...], dict[int, int]],
) -> None:
    held, box, start, steps, expected = drawn
    move = meeting(held, box, start, steps, _DTYPE)
    if move is None:
        assert not expected
        return
    assert _places(move) == expected
    _require_true(move)
    assert 1 not in move.sizes


@settings(deadline=None)
@given(met(), st.data())
def test_a_range_keeps_its_elements_and_loses_the_others(
    drawn: tuple[StoredBox, Box, int, tuple[int, ...], dict[int, int]], data: st.DataObject
) -> None:
    move = meeting(*drawn[:4], _DTYPE)
    if move is None:
        return
    start = data.draw(st.integers(0, move.stop + 1))
    stop = data.draw(st.integers(start, move.stop + 1))
    expected = {at: offset for at, offset in drawn[4].items() if start <= at < stop}
    found: dict[int, int] = {}
    parts = move.within(start, stop)
    assert len(parts) <= max(1, 2 * len(move.sizes) - 1)
    for part in parts:
        _require_true(part)
        found |= _places(part)
    assert found == expected
    assert sum(prod(part.sizes) for part in parts) == len(expected), "nothing comes twice"


@settings(deadline=None)
@given(met(), st.data(), st.integers(_SIZE, 120), st.integers(0, 40))
def test_what_is_read_holds_what_is_taken_from_it(
    drawn: tuple[StoredBox, Box, int, tuple[int, ...], dict[int, int]],
    data: st.DataObject,
    most: int,
    gap: int,
) -> None:
    move = meeting(*drawn[:4], _DTYPE)
    if move is None:
        return
    start = data.draw(st.integers(0, move.stop))
    stop = data.draw(st.integers(start, move.stop))
    found: dict[int, int] = {}
    taken = 0
    for reading in readings([move], start, stop, most=most, gap=gap):
        assert reading.held is move.held
        assert 0 < reading.nbytes <= most
        first = min(part.offset for part in reading.moves)
        end = max(part.offset + part.span for part in reading.moves)
        assert (reading.offset, reading.nbytes) == (first, end - first)
        for part in reading.moves:
            _require_true(part)
            found |= _places(part)
            taken += prod(part.sizes)
    assert found == {at: offset for at, offset in drawn[4].items() if start <= at < stop}
    assert taken == len(found), "nothing comes twice"


def test_parts_of_rows_are_read_with_the_rows_between_them() -> None:
    held = StoredBox(Box((0, 0), (8, 5)), "f", 0, (20, 4))
    move = meeting(held, Box((0, 0), (8, 9)), 0, (9, 1), _DTYPE)
    assert move is not None
    (reading,) = readings([move], 2, 30, most=1000, gap=0)
    assert (reading.offset, reading.nbytes, len(reading.moves)) == (8, 64, 3)


def _require_true(move: ElementMove) -> None:
    places = _places(move)
    assert (min(places), max(places) + 1) == (move.start, move.stop)
    assert max(places.values()) + _SIZE - move.offset == move.span
    assert min(places.values()) == move.offset
    one_by_one = all(
        offset == move.offset + (at - move.start) * _SIZE for at, offset in places.items()
    )
    assert move.is_run == (one_by_one and len(places) == move.stop - move.start)
