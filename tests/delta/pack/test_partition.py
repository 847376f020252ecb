"""Which blocks go into which file, and what is known of a file that was finished."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftckpt.delta.pack.build
from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta.codec.choose_encoding import BLOCK, Form, Reference
from ftckpt.delta.index import StoredBlock
from ftckpt.delta.index.part_record import ElementSums, PartRecord
from ftckpt.delta.pack.build import divide
from ftckpt.delta.pack.pair import pair

SIZES = st.sampled_from([0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 40 * BLOCK])


@given(st.lists(st.tuples(SIZES, st.sampled_from(list(Kind)), st.integers(0, 3)), max_size=12))
def test_every_block_lies_in_one_file(drawn: list[tuple[int, Kind, int]]) -> None:
    infos: dict[str, TensorInfo] = {}
    for numel, kind, name in drawn:
        component = "model" if kind in (Kind.PARAM, Kind.BUFFER) else "optimizer"
        info = TensorInfo(component, f"w{name}", kind, (numel,), DTYPES["float32"], ())
        infos.setdefault(info.key, info)
    pairs = pair(infos.values(), {})
    parts = divide(pairs)
    found = [place for part in parts for place in part.blocks]
    assert sorted(found) == [(n, b) for n, one in enumerate(pairs) for b in range(one.blocks)]
    assert sum(part.nbytes for part in parts) == sum(info.nbytes for info in infos.values())
    least = ftckpt.delta.pack.build.LEAST
    most = max(least, sum(part.nbytes for part in parts) // 64)
    assert all(len(part) == 1 or part.nbytes <= most for part in parts)
    assert len({part.path for part in parts}) == len(parts)
    # What predicts a tensor comes before it, block by block, where all are of one shape.
    order = {place: at for at, place in enumerate(found)}
    for number, one in enumerate(pairs):
        for helper in one.helpers.values():
            for block in range(one.blocks):
                assert order[helper, block] < order[number, block]


STORED = StoredBlock(0, 5, 9, Reference.BASE, Form.DIFFERENCE, b"12345678", bytes(range(16)))


def test_a_receipt_says_what_it_was_told() -> None:
    receipt = PartRecord("plans", 77)
    receipt.add(3, STORED, ElementSums(1, 2, 3), ElementSums(4, 1 << 63, 6))
    read = PartRecord.parse(receipt.dump(), "plans", 1)
    assert read == receipt
    assert list(read.blocks) == [STORED]
    assert PartRecord.parse(receipt.dump(), "others", 1) is None
    assert PartRecord.parse(receipt.dump(), "plans", 2) is None


@pytest.mark.parametrize(
    "change",
    [{"rows": "!"}, {"rows": 3}, {"size": "x"}, {"sums": [[1]]}, {"sums": 5}, {"plans": None}],
)
def test_a_receipt_that_is_not_understood_counts_for_nothing(change: dict[str, Any]) -> None:
    receipt = PartRecord("plans", 77)
    receipt.add(3, STORED, ElementSums(), ElementSums())
    said = json.loads(receipt.dump()) | change
    assert PartRecord.parse(json.dumps(said), "plans", 1) is None
    assert PartRecord.parse("[" + receipt.dump(), "plans", 1) is None
