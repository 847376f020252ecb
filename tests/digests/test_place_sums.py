"""Sums of bytes by place: one sum however a tensor is cut, another for what lies elsewhere."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.digests import place_sums
from ftckpt.digests.place_sums import PlaceSum, has_rows, sum_in_box
from ftckpt.extents import Box

SHAPES = [((), 4), ((9,), 8), ((5, 70, 4), 2), ((3, 5, 67), 4), ((2, 50_000), 4), ((700, 3, 2), 1)]


def _bytes(count: int) -> bytes:
    return bytes((i * i * 31 + i * 7 + (i >> 8)) & 255 for i in range(count))


def _box(data: bytes, shape: tuple[int, ...], itemsize: int, box: Box) -> bytes:
    import numpy as np

    whole = np.frombuffer(data, np.uint8).reshape(*shape, itemsize)
    where = (slice(o, o + s) for o, s in zip(*box, strict=True))
    return whole[tuple(where)].tobytes()


@pytest.mark.parametrize(("shape", "itemsize"), SHAPES)
@given(st.data())
def test_a_sum_does_not_depend_on_the_cut(
    shape: tuple[int, ...], itemsize: int, data: st.DataObject
) -> None:
    content = _bytes(prod(shape) * itemsize)
    whole = sum_in_box(shape, itemsize, Box.whole(shape), 0, memoryview(content))
    assert whole.nbytes == len(content)
    boxes = [Box.whole(shape)]
    for axis, size in enumerate(shape):
        at = data.draw(st.integers(0, size))
        cut = []
        for box in boxes:
            for start, stop in ((0, at), (at, size)):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[axis], sizes[axis] = start, stop - start
                cut.append(Box(tuple(offsets), tuple(sizes)))
        if all(has_rows(shape, itemsize, box) for box in cut):
            boxes = [box for box in cut if box.volume]
    total = PlaceSum()
    for box in data.draw(st.permutations(boxes)):
        part = _box(content, shape, itemsize, box)
        middle = data.draw(st.integers(0, len(part)))  # it may cut an element
        for start, stop in ((middle, len(part)), (0, middle)):
            if start < stop:
                view = memoryview(part)[start:stop]
                total = total.plus(sum_in_box(shape, itemsize, box, start, view))
    assert total == whole


def test_a_cut_through_a_very_short_axis_is_said() -> None:
    assert not has_rows((700, 3, 2), 1, Box((0, 0, 0), (700, 3, 1)))
    assert has_rows((700, 3, 2), 1, Box((5, 0, 0), (9, 3, 2)))
    assert has_rows((700, 300), 1, Box((0, 7), (700, 9)))


@pytest.mark.parametrize(("shape", "itemsize"), [one for one in SHAPES if one[0]])
@given(st.data())
def test_what_lies_elsewhere_has_another_sum(
    shape: tuple[int, ...], itemsize: int, data: st.DataObject
) -> None:
    content = bytearray(_bytes(prod(shape) * itemsize))
    box = Box.whole(shape)
    whole = sum_in_box(shape, itemsize, box, 0, memoryview(bytes(content)))
    count = prod(shape)
    one, two = (data.draw(st.integers(0, count - 1)) * itemsize for _ in range(2))
    before = bytes(content)
    kind = data.draw(st.sampled_from(["swap", "signs", "zero", "shift"]))
    if kind == "swap":
        first, second = content[one : one + itemsize], content[two : two + itemsize]
        content[one : one + itemsize], content[two : two + itemsize] = second, first
    elif kind == "signs":  # the highest bits of two words cancel modulo 2^64
        content[one + itemsize - 1] ^= 0x80
        content[two + itemsize - 1] ^= 0x80
    elif kind == "zero":
        content[one : one + itemsize] = bytes(itemsize)
    else:
        content = content[itemsize:] + content[:itemsize]
    found = sum_in_box(shape, itemsize, box, 0, memoryview(bytes(content)))
    assert (found == whole) == (bytes(content) == before)


def test_zeros_add_nothing() -> None:
    nothing = sum_in_box((4, 900), 2, Box.whole((4, 900)), 0, memoryview(bytes(7200)))
    assert nothing == PlaceSum(7200, 0, 0)


def test_steps_and_blocks_of_keys_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, content = (3, 40_000), memoryview(_bytes(480_000))
    whole = sum_in_box(shape, 4, Box.whole(shape), 0, content)
    monkeypatch.setattr(place_sums, "_STEP", 8192)
    assert sum_in_box(shape, 4, Box.whole(shape), 0, content) == whole
