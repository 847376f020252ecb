"""Affine maps of DeepSpeed's AutoTP: what they say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.affine_maps import read_map
from ftckpt.formats.deepspeed.geometry import ParameterPart, ranges


def piece(shape: Any, source: Any, dest: Any, locations: Any, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": locations, **more}


def rank(shape: Any, *pieces: Any) -> dict[str, Any]:
    return {"shard_shape": shape, "pieces": list(pieces)}


# Rows 0 and 1 are divided, rows 2 and 3 are on both ranks.
SHARED = {
    "logical_shape": [4, 2],
    "ranks": {
        0: rank([3, 2], piece([1, 2], [0, [2, 1]], [0, [2, 1]], [0]),
                piece([2, 2], [4, [2, 1]], [2, [2, 1]], [0, 1])),
        1: rank([3, 2], piece([2, 2], [4, [2, 1]], [2, [2, 1]], [0, 1]),
                piece([1, 2], [2, [2, 1]], [0, [2, 1]], [1])),
    },
}  # fmt: skip


def test_blocks_that_several_ranks_hold_are_replicas() -> None:
    made = read_map(SHARED, "w")
    assert made.shape == (4, 2)
    assert [part.replicas for part in made.parts] == [(0, 0), (0, 1)]
    second = made.parts[1]
    part = ParameterPart(1, second.shape, second.slabs, second.replicas)
    found = [(r.box.offsets, r.flat, r.at, r.numel, r.replica) for r in ranges(part, 1, 5)]
    assert found == [((1, 0), (1, 2), 0, 1, 0), ((2, 0), (0, 3), 1, 3, 1)]


def one(*pieces: Any, shape: Any = (4, 2), own: Any = (4, 2)) -> dict[str, Any]:
    return {"logical_shape": shape, "ranks": {0: rank(own, *pieces)}}


WHOLE = [0, [2, 1]]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "a shape that is none"),
        ({}, "a shape that is none"),
        ({"logical_shape": [4, -2]}, "a shape that is none"),
        ({"logical_shape": [4, 2], "ranks": []}, "the ranks from 0"),
        ({"logical_shape": [4, 2], "ranks": {1: {}}}, "the ranks from 0"),
        ({"logical_shape": [4, 2], "ranks": {0: None}}, "a shape that is none"),
        (one(shape=[8]), "no pieces of rank 0"),
        (one(piece([4, 2], WHOLE, WHOLE, [0], scale=0.5)), "scales a piece"),
        (one(piece([4, 2], WHOLE, WHOLE, [1])), "on other ranks"),
        (one(piece([4, 2], WHOLE, WHOLE, [0, "1"])), "no numbers"),
        (one(piece([4, 2], WHOLE, None, [0])), "not a block"),
        (one(piece([4, 2], [-2, [2, 1]], WHOLE, [0])), "not a block"),
        (one(piece([4, 2], [0, [4, 1]], WHOLE, [0])), "not a block"),
        (one(piece([4, 2], [0, "21"], WHOLE, [0])), "not a block"),
        (one(piece([4, 2], [2, [2, 1]], WHOLE, [0])), "beyond the tensor"),
        (one(piece([4, 2], [1 << 60, [2, 1]], WHOLE, [0])), "beyond the tensor"),
        (one(piece([3, 2], WHOLE, WHOLE, [0])), "do not fill"),
        (one(piece([4, 2], WHOLE, WHOLE, [0]), piece([4, 2], WHOLE, WHOLE, [0])), "do not fill"),
        (one(piece([3, 1], WHOLE, WHOLE, [0])), "do not fill"),
    ],
)
def test_what_is_no_map_of_blocks_is_refused(record: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        read_map(record, "w")


def test_a_rank_may_hold_nothing() -> None:
    record = {"logical_shape": [4, 2], "ranks": {
        0: rank([4, 2], piece([4, 2], WHOLE, WHOLE, [0])), 1: rank([0, 2])}}  # fmt: skip
    assert read_map(record, "w").parts[1].slabs == ()
