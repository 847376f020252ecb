"""Blocks that were read a short while ago are not read again, and are what they were."""

from __future__ import annotations

import threading

import numpy as np

from ftckpt.delta.codec.predict import DeltaSide
from ftckpt.delta.pack.tensor_bytes import RecentBlocks


def test_what_is_read_again_soon_is_read_once() -> None:
    asked: list[tuple[str, int]] = []

    def fill(key: str, offset: int, view: memoryview) -> None:
        asked.append((key, offset))
        view[:] = bytes([len(key) + offset]) * len(view)

    recent = RecentBlocks()
    first = recent.read(fill, DeltaSide.BASE, "a", 0, 5)
    for key in "bcdefgh":
        recent.read(fill, DeltaSide.BASE, key, 1, 9)
    assert recent.read(fill, DeltaSide.BASE, "a", 0, 5) == first == b"\1" * 5
    assert len(asked) == 8
    # The other side, another place and another length are others.
    assert recent.read(fill, DeltaSide.TARGET, "a", 0, 5) == b"\1" * 5
    assert recent.read(fill, DeltaSide.BASE, "a", 3, 5) == b"\4" * 5
    assert recent.read(fill, DeltaSide.BASE, "a", 0, 4) == b"\1" * 4
    assert len(asked) == 11


def test_seven_reads_leave_the_first_alone_whatever_their_sizes() -> None:
    rng = np.random.default_rng(0)
    data = {str(n): rng.bytes(int(rng.integers(0, 5000))) for n in range(20)}

    def fill(key: str, offset: int, view: memoryview) -> None:
        view[:] = data[key][offset : offset + len(view)]

    recent = RecentBlocks()
    for _ in range(300):
        keys = [str(n) for n in rng.integers(0, 20, 7)]
        views = [recent.read(fill, DeltaSide.BASE, key, 0, len(data[key])) for key in keys]
        assert [bytes(view) for view in views] == [data[key] for key in keys]


def test_a_read_that_fails_leaves_nothing_to_be_taken_for_it() -> None:
    def broken(key: str, offset: int, view: memoryview) -> None:
        view[:1] = b"x"
        raise OSError

    def fill(key: str, offset: int, view: memoryview) -> None:
        view[:] = b"yy"

    recent = RecentBlocks()
    for _ in range(2):
        try:
            recent.read(broken, DeltaSide.BASE, "a", 0, 2)
        except OSError:
            continue
        raise AssertionError
    assert bytes(recent.read(fill, DeltaSide.BASE, "a", 0, 2)) == b"yy"


def test_threads_have_their_own() -> None:
    recent, read = RecentBlocks(), []

    def fill(key: str, offset: int, view: memoryview) -> None:
        read.append(threading.get_ident())

    for _ in range(2):
        thread = threading.Thread(target=recent.read, args=(fill, DeltaSide.BASE, "a", 0, 2))
        thread.start()
        thread.join()
    assert len(read) == 2
