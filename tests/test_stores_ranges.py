"""Plans of ranged reads: every byte that was asked for, in few requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Extent
from ftckpt.stores.ranges import plan_runs, split_parts

extents = st.lists(
    st.builds(Extent, st.sampled_from("ab"), st.integers(0, 300), st.integers(0, 60)), max_size=30
)


@given(extents, st.integers(0, 50), st.integers(1, 200))
def test_runs_answer_every_extent_once(asked: list[Extent], gap: int, limit: int) -> None:
    runs = plan_runs(asked, gap, limit)
    answers = sorted(want.asked for run in runs for want in run.wants)
    assert answers == [i for i, e in enumerate(asked) if e.length]
    for run in runs:
        for want in run.wants:
            extent = asked[want.asked]
            assert run.file == extent.file
            assert run.offset + want.start == extent.offset
            assert want.length == extent.length
            assert want.start + want.length <= run.length


@given(extents, st.integers(0, 50), st.integers(1, 200))
def test_runs_waste_no_more_than_gaps_and_keep_the_limit(
    asked: list[Extent], gap: int, limit: int
) -> None:
    for run in plan_runs(asked, gap, limit):
        spans = sorted((w.start, w.start + w.length) for w in run.wants)
        reach = 0
        for start, end in spans:
            assert start <= reach + gap
            reach = max(reach, end)
        assert reach == run.length
        assert run.length <= limit or any(w == (0, run.length) for w in ((0, e) for _, e in spans))


def test_near_extents_are_one_request_and_far_ones_are_not() -> None:
    near = [Extent("f", 0, 10), Extent("f", 100, 10)]
    assert [(r.offset, r.length) for r in plan_runs(near, gap=90)] == [(0, 110)]
    assert [(r.offset, r.length) for r in plan_runs(near, gap=89)] == [(0, 10), (100, 10)]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_parts_tile_the_range(offset: int, length: int, part: int) -> None:
    parts = split_parts(offset, length, part)
    assert sum(n for _, n in parts) == length
    assert all(0 < n <= part for _, n in parts)
    assert [o for o, _ in parts] == list(range(offset, offset + length, part))
