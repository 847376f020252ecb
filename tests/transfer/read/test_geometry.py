"""Boxes of a tensor, looked up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.coverage import intersection
from ftckpt.transfer.read.copies_plan import Boxes


@st.composite
def boxes(draw: st.DrawFn, axes: int) -> Box:
    return Box(
        tuple(draw(st.integers(0, 12)) for _ in range(axes)),
        tuple(draw(st.integers(1, 6)) for _ in range(axes)),
    )


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.lists(boxes(n), min_size=1), boxes(n))))
def test_no_box_that_is_met_is_overlooked(drawn: tuple[list[Box], Box]) -> None:
    held, wanted = drawn
    near = Boxes.of(held).near(wanted)
    assert len(set(near)) == len(near)
    assert {n for n, box in enumerate(held) if intersection(box, wanted)} <= set(near)


def test_slabs_are_found_without_looking_at_the_others() -> None:
    slabs = [Box((row, 0), (10, 7)) for row in range(0, 1000, 10)]
    assert Boxes.of(slabs).near(Box((205, 3), (10, 1))) == (20, 21)
    columns = [Box((0, column), (7, 10)) for column in range(0, 1000, 10)]
    assert Boxes.of(columns).near(Box((3, 205), (1, 5))) == (20,)
