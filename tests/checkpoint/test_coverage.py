"""Tilings: boxes that tile are accepted, every other is found wrong, and numpy agrees."""

from __future__ import annotations

import random
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Extent, Piece
from ftckpt.checkpoint.coverage import check_coverage, intersection

NOWHERE = Extent("f", 0, 0)


def piece(box: Box, flat: tuple[int, int] | None = None, replica: int = 0) -> Piece:
    return Piece(box, NOWHERE, flat=flat, replica=replica)


def kinds(shape: tuple[int, ...], pieces: list[Piece]) -> set[str]:
    return {gap.kind for gap in check_coverage(shape, pieces)}


@st.composite
def shapes(draw: st.DrawFn, least: int = 0) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(least, 7), max_size=4)))


@st.composite
def grids(draw: st.DrawFn, least: int = 0) -> tuple[tuple[int, ...], list[Box]]:
    """Cut each axis anywhere; empty slices are legal, torch writes them for late ranks."""
    shape = draw(shapes(least))
    axes = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        edges = [0, *cuts, size]
        axes.append(list(pairwise(edges)))
    boxes = [
        Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)) for spans in product(*axes)
    ]
    return shape, draw(st.permutations(boxes))


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Cut boxes in two again and again, each along its own axis: no common grid."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[axis]))
        for start, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += start
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


TILINGS = st.one_of(grids(), splits())


def slices(box: Box) -> tuple[Any, ...]:
    """Return the index of a box; the ellipsis keeps a 0-d array an array."""
    return (*(slice(o, o + s) for o, s in zip(*box, strict=True)), ...)


def counted(shape: tuple[int, ...], pieces: list[Piece]) -> np.ndarray[Any, Any]:
    """Count by brute force how many pieces hold each element."""
    count = np.zeros(shape, np.int64)
    for one in pieces:
        part = count[slices(one.box)]
        inside = np.zeros(one.box.sizes, np.int64).reshape(-1)
        inside[slice(*(one.flat or (0, one.box.volume)))] = 1
        part += inside.reshape(one.box.sizes)
    return count


@given(TILINGS)
def test_tilings_are_accepted(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = tiling
    assert kinds(shape, [piece(b) for b in boxes]) == set()


@given(TILINGS, st.randoms(use_true_random=False))
def test_a_box_that_is_missing_is_a_hole(
    tiling: tuple[tuple[int, ...], list[Box]], choose: random.Random
) -> None:
    shape, boxes = tiling
    full = [b for b in boxes if b.volume]
    if not full:
        return
    gone = choose.choice(full)
    rest = [piece(b) for b in boxes if b is not gone]
    found = list(check_coverage(shape, rest))
    assert [gap.kind for gap in found] == ["hole"]
    assert str(gone.volume) in found[0].message


@given(TILINGS, st.randoms(use_true_random=False))
def test_a_box_that_stands_twice_is_an_overlap(
    tiling: tuple[tuple[int, ...], list[Box]], choose: random.Random
) -> None:
    shape, boxes = tiling
    full = [b for b in boxes if b.volume]
    if full:
        assert "overlap" in kinds(shape, [piece(b) for b in [*boxes, choose.choice(full)]])


@given(TILINGS, st.randoms(use_true_random=False))
def test_a_replica_is_no_overlap(
    tiling: tuple[tuple[int, ...], list[Box]], choose: random.Random
) -> None:
    shape, boxes = tiling
    again = piece(choose.choice(boxes), replica=1)
    assert kinds(shape, [*(piece(b) for b in boxes), again]) == set()


@given(shapes(1), st.lists(st.tuples(st.randoms(use_true_random=False)), max_size=6))
def test_numpy_agrees_on_any_boxes(
    shape: tuple[int, ...], seeds: list[tuple[random.Random]]
) -> None:
    pieces = []
    for (choose,) in seeds:
        offsets = tuple(choose.randrange(n) for n in shape)
        sizes = tuple(choose.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))
        pieces.append(piece(Box(offsets, sizes)))
    count = counted(shape, pieces)
    found = kinds(shape, pieces)
    assert ("overlap" in found) == bool((count > 1).any())
    if "overlap" not in found:
        assert ("hole" in found) == bool((count == 0).any())


@given(shapes(1), st.data())
def test_numpy_agrees_on_flat_ranges(shape: tuple[int, ...], data: st.DataObject) -> None:
    volume = prod(shape)
    bound = st.integers(0, volume)
    ranges = data.draw(st.lists(st.tuples(bound, bound).map(lambda r: (min(r), max(r))),
                                min_size=1, max_size=5))  # fmt: skip
    pieces = [piece(Box.whole(shape), flat) for flat in ranges]
    count = counted(shape, pieces)
    found = kinds(shape, pieces)
    assert ("overlap" in found) == bool((count > 1).any())
    assert ("hole" in found) == bool((count == 0).any())


@given(TILINGS, st.data())
def test_flat_ranges_tile_their_boxes(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    pieces = []
    for box in boxes:
        at = data.draw(st.integers(0, box.volume))
        pieces += [piece(box, (at, box.volume)), piece(box, (0, at))]
    assert kinds(shape, pieces) == set()


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4,), Box((3,), (2,))),
        ((4,), Box((-1,), (2,))),
        ((4,), Box((0,), (-1,))),
        ((4,), Box((0, 0), (4, 1))),
        ((4,), Box((0,), (4, 1))),
        ((), Box((0,), (1,))),
    ],
)
def test_a_box_that_does_not_fit(shape: tuple[int, ...], box: Box) -> None:
    gaps = list(check_coverage(shape, [piece(box)]))
    assert (gaps[0].kind, gaps[0].piece) == ("out-of-bounds", 0)


@pytest.mark.parametrize("flat", [(-1, 4), (0, 5), (3, 2)])
def test_a_range_that_does_not_fit(flat: tuple[int, int]) -> None:
    assert "out-of-bounds" in kinds((4,), [piece(Box.whole((4,)), flat)])


def test_a_scalar() -> None:
    one = piece(Box((), ()))
    assert kinds((), [one]) == set()
    assert kinds((), []) == {"hole"}
    assert kinds((), [one, one]) == {"overlap"}


def test_a_tensor_without_elements_needs_no_piece() -> None:
    assert kinds((0, 5), []) == set()
    assert kinds((0, 5), [piece(Box((0, 0), (0, 5)))] * 3) == set()


def test_rows_that_are_missing_are_named() -> None:
    pieces = [piece(Box((0, 0), (3, 5))), piece(Box((6, 0), (2, 5)))]
    (gap,) = check_coverage((8, 5), pieces)
    assert "rows [3, 6) of axis 0" in gap.message


@pytest.mark.parametrize("wrong", ["none", "hole", "overlap"])
def test_ten_thousand_boxes(wrong: str) -> None:
    boxes = [Box((10 * i, 7 * j), (10, 7)) for i in range(100) for j in range(100)]
    if wrong == "hole":
        del boxes[5050]
    elif wrong == "overlap":
        boxes.append(Box((495, 350), (10, 7)))
    random.Random(0).shuffle(boxes)
    assert kinds((1000, 700), [piece(b) for b in boxes]) == {wrong} - {"none"}


@given(grids(1), grids(1))
def test_intersection_is_that_of_the_elements(
    one: tuple[tuple[int, ...], list[Box]], two: tuple[tuple[int, ...], list[Box]]
) -> None:
    for a, b in product(one[1][:4], two[1][:4]):
        if len(a.sizes) != len(b.sizes):
            continue
        held = [
            set(product(*(range(o, o + s) for o, s in zip(*box, strict=True)))) for box in (a, b)
        ]
        both = intersection(a, b)
        want = held[0] & held[1]
        got = set() if both is None else set(
            product(*(range(o, o + s) for o, s in zip(*both, strict=True))))  # fmt: skip
        assert got == want
