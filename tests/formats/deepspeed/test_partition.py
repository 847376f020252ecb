"""How ZeRO cuts and how slices are put together: against the same done with whole arrays."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Piece
from ftckpt.checkpoint.coverage import check_coverage
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import Extent
from ftckpt.formats.deepspeed.geometry import ParameterPart, ranges
from ftckpt.formats.deepspeed.slices import SliceCut, place
from ftckpt.formats.deepspeed.zero.partition import FlatGroup, SlicedGroup, partition_size

shapes_ = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6).map(
    lambda shapes: {f"p{n}": shape for n, shape in enumerate(shapes)}
)


def test_the_worked_examples() -> None:
    group = FlatGroup({"a": (10,)}, 4)
    assert (group.size, [group.held(rank) for rank in range(4)]) == (4, [4, 4, 2, 0])
    assert [list(group.runs(r)) for r in range(4)] == [
        [("a", 0, 4, 0)], [("a", 4, 8, 0)], [("a", 8, 10, 0)], [],
    ]  # fmt: skip
    assert partition_size(12, 3) == 4
    sliced = SlicedGroup({"a": (10,), "b": (2,)}, 4)
    assert sliced.total == 4
    assert [list(sliced.runs(r, 0, 4)) for r in range(4)] == [
        [("a", 0, 3, 0), ("b", 0, 1, 3)],
        [("a", 3, 6, 0), ("b", 1, 2, 3)],
        [("a", 6, 9, 0)],
        [("a", 9, 10, 0)],
    ]


@given(shapes_, st.integers(1, 5), st.data())
def test_partitions_of_a_group(shapes: Any, ranks: int, data: st.DataObject) -> None:
    gaps = data.draw(
        st.one_of(
            st.just(()),
            st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)),
        )
    )
    values, flat, at = {}, [], 1
    for number, (name, shape) in enumerate(shapes.items()):
        values[name] = np.arange(at, at + prod(shape))
        at += prod(shape)
        flat += [*values[name], *([-1] * gaps[number] if gaps else [])]
    flat += [-2] * (-len(flat) % (2 * ranks))
    parts = np.array(flat).reshape(ranks, -1)
    group = FlatGroup(shapes, ranks, gaps)
    assert group.size == parts.shape[1]
    found = {name: np.zeros(prod(shape), int) for name, shape in shapes.items()}
    for rank in range(ranks):
        assert group.held(rank) == int((parts[rank] != -2).sum())
        for name, start, stop, inside in group.runs(rank):
            found[name][start:stop] += parts[rank][inside : inside + stop - start]
    for name, expected in values.items():
        assert (found[name] == expected).all()


@given(shapes_, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=3))
def test_slices_of_stage_3(shapes: Any, ranks: int, borders: list[int]) -> None:
    values, rows, at = {}, [], 1
    for name, shape in shapes.items():
        values[name] = np.arange(at, at + prod(shape))
        at += prod(shape)
        padded = np.concatenate([values[name], np.full(-prod(shape) % ranks, -2)])
        rows.append(padded.reshape(ranks, -1))
    parts = np.concatenate(rows, axis=1)
    group = SlicedGroup(shapes, ranks)
    assert group.total == parts.shape[1]
    ends = sorted({0, group.total, *(b for b in borders if b < group.total)})
    found = {name: np.zeros(prod(shape), int) for name, shape in shapes.items()}
    names = []
    for begin, end in pairwise(ends):
        names += group.names(begin, end)
        for rank in range(ranks):
            own = parts[rank][begin:end]  # one sub-group's own tensor
            for name, start, stop, inside in group.runs(rank, begin, end):
                found[name][start:stop] += own[inside : inside + stop - start]
    for name, expected in values.items():
        assert (found[name] == expected).all()
    held = [name for name, shape in shapes.items() if prod(shape)]
    assert [name for name in names if prod(shapes[name])] == held


@st.composite
def sliced(draw: st.DrawFn) -> tuple[Any, SliceCut, list[Any]]:
    """A whole array, how it is cut, and each rank's part, made by numpy."""
    ranks = draw(st.integers(2, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    blocks = draw(st.integers(1, 3))
    widths = tuple(
        tuple(draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
        for _ in range(blocks)
    )
    shape[axis] = sum(map(sum, widths))
    whole = np.arange(1, prod(shape) + 1).reshape(shape)
    parts: list[list[Any]] = [[] for _ in range(ranks)]
    at = 0
    for block in widths:
        for rank, width in enumerate(block):
            parts[rank].append(np.take(whole, range(at, at + width), axis))
            at += width
    return whole, SliceCut(axis, widths), [np.concatenate(part, axis) for part in parts]


@given(sliced())
def test_slices_are_put_together_and_ranges_of_them_too(
    case: tuple[Any, SliceCut, list[Any]],
) -> None:
    whole, cut, parts = case
    shape, slabs = place("p", cut, [part.shape for part in parts])
    assert shape == whole.shape
    found = np.zeros_like(whole)
    pieces = []
    for rank, part in enumerate(parts):
        for slab in slabs[rank]:
            found[window(slab.box)] = part[window(slab.local)]
        mine = ParameterPart(rank, part.shape, slabs[rank], (0,) * len(slabs[rank]))
        half = part.size // 3  # a run ends anywhere
        for start, stop in ((0, half), (half, part.size)):
            try:
                places = list(ranges(mine, start, stop)) if start < stop else []
            except UnsupportedError:
                assert cut.axis is not None
                assert prod(part.shape[: cut.axis]) != 1
                return
            for box, flat, at, numel, _ in places:
                low, high = flat or (0, box.volume)
                held = whole[window(box)].reshape(-1)[low:high]
                assert (held == part.reshape(-1)[start + at : start + at + numel]).all()
                pieces.append(Piece(box, Extent("f", 0, 0), flat))
    assert (found == whole).all()
    assert list(check_coverage(shape, pieces)) == []


def window(box: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


@pytest.mark.parametrize(
    ("cut", "shapes"),
    [
        (SliceCut(), [(2, 3), (3, 3)]),
        (SliceCut(1), [(2,), (2,)]),
        (SliceCut(0), [(2, 3), (2, 4)]),
        (SliceCut(0, blocks=(1, 1)), [(3, 2), (3, 2)]),
        (SliceCut(0, ((1, 1), (1, 2))), [(2, 2), (2, 2)]),
        (SliceCut(0, ((1, 1, 1),)), [(1, 2), (1, 2)]),
    ],
)
def test_parts_that_do_not_fit_are_corrupt(cut: SliceCut, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(CorruptError, match="p ") as caught:
        place("p", cut, shapes)
    assert caught.value.kind == "shape-mismatch"


def test_gate_and_up_are_divided_apart() -> None:
    shape, slabs = place("p", SliceCut(0, blocks=(1, 1)), [(4, 3), (4, 3)])
    assert shape == (8, 3)
    assert [[s.box.offsets[0] for s in mine] for mine in slabs] == [[0, 4], [2, 6]]
