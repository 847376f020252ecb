"""Placements into boxes, held against torch's own arithmetic and against what FSDP2 really cuts."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.torch_files.dtensor import How, LocalShard, Placement, choose_rule, local_of
from tests.campaign import examples

SHARD, STRIDED, REPLICATE, PARTIAL = How.SHARD, How.STRIDED, How.REPLICATE, How.PARTIAL


def of_torch(placement: Placement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if placement.how is SHARD:
        return Shard(placement.dim)
    if placement.how is STRIDED:
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Replicate() if placement.how is REPLICATE else Partial()


def elements(local: LocalShard) -> list[tuple[int, ...]]:
    """Global index of every element of the local tensor, in the local tensor's C order."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box, start in local.patches:
        for steps in product(*map(range, box.sizes)):
            here = tuple(s + o for s, o in zip(start, steps, strict=True))
            assert here not in found, "two patches hold one local element"
            found[here] = tuple(b + o for b, o in zip(box.offsets, steps, strict=True))
    assert sorted(found) == list(product(*map(range, local.shape)))
    return [found[here] for here in sorted(found)]


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements = []
    for _ in mesh:
        how = draw(st.sampled_from((SHARD, STRIDED, REPLICATE)))
        dim = draw(st.integers(0, len(shape) - 1)) if how is not REPLICATE else 0
        factor = draw(st.integers(1, 5)) if how is STRIDED else 1
        placements.append(Placement(how, dim, factor))
    return shape, mesh, tuple(placements)


@given(layouts())
@settings(max_examples=examples(50, 600), deadline=None)
def test_nominal_shards_are_what_torch_computes(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, mesh, placements = layout
    held: dict[tuple[int, ...], int] = {}
    for coordinate in product(*map(range, mesh)):
        local = local_of(shape, mesh, placements, coordinate, nominal=True)
        size, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), [of_torch(p) for p in placements]
        )
        assert local.shape == tuple(size)
        mine = elements(local)
        if mine:
            assert mine[0] == tuple(offset)
        for index in mine:
            held[index] = held.get(index, 0) + 1
    replicas = prod(parts for parts, p in zip(mesh, placements, strict=True) if p.how is REPLICATE)
    assert held == dict.fromkeys(product(*map(range, shape)), replicas)


@given(layouts())
@settings(max_examples=examples(50, 600), deadline=None)
def test_physical_shards_tile_the_tensor_with_one_box_a_rank(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    held: dict[tuple[int, ...], int] = {}
    for coordinate in product(*map(range, mesh)):
        local = local_of(shape, mesh, placements, coordinate)
        assert len(local.patches) == 1
        for index in elements(local):
            held[index] = held.get(index, 0) + 1
    replicas = prod(parts for parts, p in zip(mesh, placements, strict=True) if p.how is REPLICATE)
    assert held == dict.fromkeys(product(*map(range, shape)), replicas)


@pytest.mark.parametrize(("dp", "tp"), list(product(range(1, 5), range(1, 5))))
def test_the_rules_never_agree_on_shapes_and_differ_in_place(dp: int, tp: int) -> None:
    """`choose_rule` decides by shapes, so equal shapes must mean equal elements."""
    placements = (Placement(STRIDED, 0, tp), Placement(SHARD, 0))
    for rows in range(14):
        both = [
            [local_of((rows,), (dp, tp), placements, c, nominal=n) for n in (False, True)]
            for c in product(range(dp), range(tp))
        ]
        if all(a.shape == b.shape for a, b in both):
            assert all(elements(a) == elements(b) for a, b in both)


def test_uneven_fsdp_over_tp_is_told_apart_by_the_stored_shapes() -> None:
    # 9 rows: TP gives 5 and 4, FSDP over 4 then gives 2 2 1 0 and 1 1 1 1.
    placements = (Placement(STRIDED, 0, 2), Placement(SHARD, 0))
    coordinates = list(product(range(4), range(2)))
    for nominal in (False, True):
        stored = [
            (c, local_of((9,), (4, 2), placements, c, nominal=nominal).shape) for c in coordinates
        ]
        assert choose_rule((9,), (4, 2), placements, stored) is nominal
    assert [local_of((9,), (4, 2), placements, (d, 0)).shape for d in range(4)] == [
        (2,), (2,), (1,), (0,)
    ]  # fmt: skip
    assert choose_rule((9,), (4, 2), placements, [((0, 0), (7,))]) is None


def test_a_free_split_factor_leaves_only_the_nominal_rule() -> None:
    placements = (Placement(STRIDED, 0, 3),)
    local = local_of((12,), (2,), placements, (0,), nominal=True)
    assert [p.box for p in local.patches] == [
        Box((0,), (2,)), Box((4,), (2,)), Box((8,), (2,))
    ]  # fmt: skip
    assert [p.start for p in local.patches] == [(0,), (2,), (4,)]
    assert choose_rule((12,), (2,), placements, [((0,), (6,))]) is True


def test_the_order_of_a_two_dimensional_mesh() -> None:
    placements = (Placement(STRIDED, 0, 2), Placement(SHARD, 0))
    boxes = [
        local_of((16, 3), (2, 2), placements, c).patches[0].box.offsets[0]
        for c in product(range(2), range(2))
    ]
    assert boxes == [0, 8, 4, 12]


def test_an_empty_shard_begins_where_its_dimension_ends() -> None:
    local = local_of((3, 16), (4,), (Placement(SHARD, 0),), (3,))
    assert local == LocalShard((0, 16), (local.patches[0],))
    assert local.patches[0].box == Box((3, 0), (0, 16))


@pytest.mark.parametrize(
    ("mesh", "placements", "coordinate"),
    [
        ((2, 2), (Placement(SHARD, 0),), (0, 0)),
        ((2,), (Placement(SHARD, 0),), (0, 0)),
        ((2,), (Placement(SHARD, 0),), (2,)),
        ((2,), (Placement(SHARD, 2),), (0,)),
        ((2,), (Placement(SHARD, -1),), (0,)),
        ((2,), (Placement(STRIDED, 0, 0),), (0,)),
        ((2,), (Placement(STRIDED, 0, 10**18),), (0,)),
        ((0,), (Placement(SHARD, 0),), (0,)),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    mesh: tuple[int, ...], placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> None:
    with pytest.raises(CorruptError) as caught:
        local_of((8, 8), mesh, placements, coordinate)
    assert caught.value.kind == "bad-metadata"


def test_partial_sums_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        local_of((8,), (2,), (Placement(PARTIAL),), (0,))
    assert caught.value.kind == "partial-tensor"


def test_a_shard_in_countless_boxes_is_refused() -> None:
    placements = (Placement(STRIDED, 0, 200), Placement(STRIDED, 1, 200))
    with pytest.raises(UnsupportedError):
        local_of((100000, 100000), (2, 2), placements, (0, 0), nominal=True)
