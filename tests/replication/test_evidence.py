"""CRC-32s of records that lie anywhere: a changed byte is noticed exactly where one covers it."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.replication.trusted_manifest import RecordEvidence
from ftckpt.transfer.write.blocks import BlockMade, CrcLedger, RunningSums
from tests.replication.conftest import SMALL

SIZE = 5 * SMALL + 123


def _made(evidence: RecordEvidence, data: bytes, number: int) -> BlockMade:
    """Sum one block up as it is when it is carried, in chunks."""
    sums = RunningSums(CrcLedger(evidence.ranges("f")), zlib.crc32)
    end = min(SIZE, (number + 1) * SMALL)
    for start in range(number * SMALL, end, 1000):
        sums.take(start, memoryview(data)[start : min(start + 1000, end)])
    return BlockMade("f", number, b"", sums.finished())


@given(
    edges=st.lists(st.integers(0, SIZE), min_size=2, max_size=12, unique=True),
    used=st.lists(st.booleans(), min_size=12, max_size=12),
    at=st.integers(0, SIZE - 1),
)
def test_doubts_are_where_a_record_is_damaged(edges: list[int], used: list[bool], at: int) -> None:
    whole = bytes(i * 7 % 251 for i in range(SIZE))
    spans = zip(sorted(edges), sorted(edges)[1:], used, strict=False)
    crcs = {(a, b): zlib.crc32(whole[a:b]) for a, b, use in spans if use}
    evidence = RecordEvidence({"f": crcs}, None)
    damaged = bytearray(whole)
    damaged[at] ^= 16
    count = -(-SIZE // SMALL)
    good = {n: _made(evidence, whole, n) for n in range(count)}
    bad = {n: _made(evidence, bytes(damaged), n) for n in range(count)}
    assert evidence.doubts("f", good) == []
    assert evidence.covered == sum(b - a for a, b in crcs)
    doubts = evidence.doubts("f", bad)
    hit = [(a, b) for a, b in crcs if a <= at < b]
    assert bool(doubts) == bool(hit)
    assert all(at // SMALL in doubts for _ in hit)
    for a, b in hit:
        if a // SMALL == (b - 1) // SMALL:  # known from its block alone
            assert evidence.doubts("f", {at // SMALL: bad[at // SMALL]}) == [at // SMALL]
