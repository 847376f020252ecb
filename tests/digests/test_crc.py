"""CRC-32: the fast one is the right one, and parts combine to the whole."""

from __future__ import annotations

import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.digests.crc import checksum, combine


@given(st.binary(max_size=2000), st.integers(0, 2**32 - 1))
def test_the_fast_sum_is_zlibs(data: bytes, value: int) -> None:
    crc32 = checksum()
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(memoryview(bytearray(data)), value) == zlib.crc32(data, value)


def test_without_isal_zlib_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    assert checksum() is zlib.crc32


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_parts_combine(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1, 1 << 16, (64 << 20) + 13])
def test_long_parts_combine(length: int) -> None:
    tail = bytes(length)
    assert combine(zlib.crc32(b"head"), zlib.crc32(tail), length) == zlib.crc32(b"head" + tail)


def test_lengths_beyond_four_gigabytes_combine_step_by_step() -> None:
    part = zlib.crc32(bytes(1 << 20))
    whole, length = part, 1 << 20
    while length < 1 << 40:
        whole, length = combine(whole, whole, length), 2 * length
    byte = zlib.crc32(b"\0")
    assert combine(whole, byte, 1) == combine(part, combine_tail(length), length - (1 << 20) + 1)


def combine_tail(length: int) -> int:
    """Return the CRC of `length - 2**20 + 1` zero bytes, put together from powers of two."""
    value, left, size = 0, length - (1 << 20) + 1, 1
    power = zlib.crc32(b"\0")
    while left:
        if left & 1:
            value = combine(value, power, size)
        power, size, left = combine(power, power, size), 2 * size, left >> 1
    return value
