"""CRC-32C (Castagnoli), reflected polynomial 0x82F63B78, as RFC 3720 describes it."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0x82F63B78
_LANES = 1 << 10
_LONG = 1 << 17  # from here on many bytes at a time are worth numpy


@cache
def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes."""
    if len(data) < _LONG:
        return _update(0xFFFFFFFF, data) ^ 0xFFFFFFFF
    return _of_lanes(memoryview(data)) ^ 0xFFFFFFFF


def _update(crc: int, data: bytes | memoryview) -> int:
    table = _table()
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc


def _of_lanes(data: memoryview) -> int:
    """Return the register after long data: of equal parts side by side, then joined."""
    import numpy as np

    each = len(data) // _LANES
    table = np.array(_table(), np.uint32)
    columns = np.frombuffer(data[: each * _LANES], np.uint8).reshape(_LANES, each)
    registers = np.zeros(_LANES, np.uint32)
    for column in range(each):
        registers = table[(registers ^ columns[:, column]) & 255] ^ registers >> 8
    # The register is linear: what zeros make of it is known from what they make of each bit.
    carried = _after_zeros(each)
    crc = 0xFFFFFFFF
    for register in registers.tolist():
        crc = _applied(carried, crc) ^ register
    return _update(crc, data[each * _LANES :])


def _after_zeros(count: int) -> list[int]:
    """Return what each bit of a register becomes after `count` bytes of zero, by squaring."""
    step = [_update(1 << bit, b"\0") for bit in range(32)]
    found = [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            found = [_applied(step, one) for one in found]
        step = [_applied(step, one) for one in step]
        count >>= 1
    return found


def _applied(columns: list[int], value: int) -> int:
    found = 0
    for bit in range(32):
        if value >> bit & 1:
            found ^= columns[bit]
    return found
