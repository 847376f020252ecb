"""What is read ahead: how often, how much of it is kept, and what becomes of damage."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import Self

import pytest

import ftckpt as api
from ftckpt.checkpoint import read_ahead
from ftckpt.checkpoint.read_ahead import read_again, reading_ahead
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.errors import FtckptError, TruncatedError, UnavailableError
from ftckpt.extents import Extent
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from ftckpt.storage import prefetch as ahead_of_use
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.prefetch import most_kept
from ftckpt.storage.prefetch.plan import Windows
from ftckpt.storage.prefetch.reads import Ahead
from ftckpt.storage.source import Source
from ftckpt.storage.store import Reader
from ftckpt.workers import Work, budget
from ftckpt.workers.limits import RateLimit
from tests.builders.checkpoints import save_dcp
from tests.builders.raw_checkpoint import RawCheckpoint

KIB = 1 << 10
GAP = 4 * KIB
PIECE = 300
FILES = ("a", "b")
DATA = {name: hashlib.shake_128(name.encode()).digest(400 * KIB) for name in FILES}
_numbers = itertools.count()


class Far(MemoryStore):
    """A store with a latency; it says what it was asked for, and fails where it is told to."""

    def __init__(self, *, parallel: int = 4) -> None:
        super().__init__(f"memory://far-{next(_numbers)}")
        self.traits = self.traits._replace(gap=GAP, parallel=parallel)
        self.asked: list[Extent] = []
        self.error: FtckptError | None = None
        self.fails = -1
        for name, data in DATA.items():
            self.put(name, data)

    def open(self, path: str) -> Reader:  # type: ignore[override]
        return _FarReader(self, path, super().open(path))

    def ask(self, extent: Extent) -> None:
        self.asked.append(extent)
        if self.error is not None and extent.offset <= self.fails < extent.end:
            raise self.error

    @property
    def nbytes(self) -> int:
        return sum(extent.length for extent in self.asked)


class _FarReader(Reader):
    def __init__(self, store: Far, path: str, reader: Reader) -> None:
        self._store, self._path, self._reader = store, path, reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    def read(self, offset: int, length: int) -> bytes:
        self._store.ask(Extent(self._path, offset, length))
        return self._reader.read(offset, length)

    def readinto(self, offset: int, view: memoryview) -> None:
        self._store.ask(Extent(self._path, offset, len(view)))
        self._reader.readinto(offset, view)


class Counted(RateLimit):
    """A limit that only counts."""

    def __init__(self) -> None:
        super().__init__(1e12)
        self.taken = 0

    def take(self, nbytes: int) -> None:
        self.taken += nbytes


def pieces(file: str, number: int, step: int = PIECE) -> list[Extent]:
    return [Extent(file, n * step, PIECE) for n in range(number)]


def opened(store: Far, extents: Sequence[Extent], bound: int = 1 << 20) -> Ahead:
    return Ahead(store, Windows(extents, GAP), bound)


def read(ahead: Ahead, extent: Extent) -> None:
    reader = ahead.open(extent.file)
    wanted = DATA[extent.file][extent.offset : extent.end]
    assert reader.read(extent.offset, extent.length) == wanted
    view = memoryview(bytearray(extent.length))
    reader.readinto(extent.offset, view)
    assert view == wanted


@pytest.fixture
def far() -> Far:
    return Far()


def test_many_pieces_are_one_read(far: Far) -> None:
    extents = pieces("a", 100)
    ahead = opened(far, extents)
    for extent in Random(1).sample(extents, 100):
        read(ahead, extent)
    assert far.asked == [Extent("a", 0, 100 * PIECE)]


def test_what_comes_next_is_read_before_it_is_asked_for() -> None:
    came = threading.Event()

    class Waits(Far):
        def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
            found = super().read_many(extents)
            came.set()
            return found

    far = Waits()
    extents = [Extent("a", n * 2 * GAP, PIECE) for n in range(8)]
    ahead = opened(far, extents)
    read(ahead, extents[0])
    assert came.wait(10)
    for extent in extents[1:5]:  # as many as the store takes at once
        read(ahead, extent)
    assert sorted(far.asked[:5]) == extents[:5]
    assert far.asked.count(extents[1]) == 1


def test_what_is_read_is_what_is_there_in_any_order_and_by_any_thread() -> None:
    far = Far()
    places = [n * 400 + n // 50 * 2 * GAP for n in range(400)]  # in eight windows a file
    extents = [Extent(file, at, PIECE) for at in places for file in FILES]
    bound = 100 * KIB
    ahead = opened(far, extents, bound)
    asked = extents * 2
    Random(2).shuffle(asked)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(read, ahead, extent) for extent in asked]:
            done.result()
    ahead.close()
    read(ahead, extents[5])  # who still holds a reader goes on without


def test_the_bound_holds() -> None:
    far = Far(parallel=1)
    extents = [Extent("a", n * 3 * GAP, GAP) for n in range(30)]
    ahead = opened(far, extents, 10 * GAP)
    for extent in extents:
        read(ahead, extent)
        assert ahead._nbytes <= 10 * GAP
        assert sum(one.length for one in ahead._kept.values()) <= ahead._nbytes
    ahead.forget()
    assert not ahead._kept


def test_what_is_read_in_another_order_costs_about_twice_at_most(far: Far) -> None:
    extents = pieces("a", 1000)
    ahead = Ahead(far, Windows(extents, GAP), 0)  # nothing but what is being read is ever kept
    window = ahead._windows.all[0]
    for extent in [extents[0], extents[500]] * 20:
        ahead.forget()
        read(ahead, extent)
    # Each time after as many reads as make up for it, and else just what was asked for.
    worth = window.length // GAP
    assert far.asked.count(Extent("a", 0, window.length)) <= 1 + 80 // worth


def test_damage_is_said_of_the_piece_that_has_it(far: Far) -> None:
    extents = pieces("a", 10)
    far.error = TruncatedError("the file ends", file="a")
    far.fails = 5 * PIECE + 1
    ahead = opened(far, extents)
    for extent in extents[:5]:
        read(ahead, extent)
    with pytest.raises(TruncatedError):
        read(ahead, extents[5])
    read(ahead, extents[6])
    assert far.asked.count(Extent("a", 0, 10 * PIECE)) == 1  # not tried again and again


def test_a_store_that_does_not_answer_is_said_at_once(far: Far) -> None:
    extents = pieces("a", 10)
    far.error, far.fails = UnavailableError("no answer", file="a"), 0
    ahead = opened(far, extents)
    with pytest.raises(UnavailableError):
        read(ahead, extents[5])
    assert far.asked == [Extent("a", 0, 10 * PIECE)]
    far.error = None
    read(ahead, extents[5])


def test_small_ranges_outside_are_kept_to_be_read_again(far: Far) -> None:
    ahead = opened(far, pieces("a", 2))
    reader = ahead.open("b")
    for _ in range(3):
        assert reader.read(100, 50) == DATA["b"][100:150]
    assert far.asked == [Extent("b", 100, 50)]
    ahead.forget()
    assert reader.read(100, 50) == DATA["b"][100:150]
    assert len(far.asked) == 2


@pytest.fixture
def source(far: Far) -> Source:
    return Source.directory(far)


def _checkpoint(source: Source) -> RawCheckpoint:
    return RawCheckpoint(source=source, tensors={}, objects={})


def test_reading_through_the_source(
    far: Far, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Counted()
    checkpoint = _checkpoint(source)
    extents = pieces("a", 50)
    assert source.limited(limiter) is limiter
    with reading_ahead(checkpoint, extents, limiter):
        assert source.limited(limiter) is None
        for extent in extents:
            assert source.read(*extent) == DATA["a"][extent.offset : extent.end]
        two = source.read_many(extents[:2])
        assert b"".join(two) == DATA["a"][: 2 * PIECE]
        assert limiter.taken == far.nbytes == 50 * PIECE
        with reading_ahead(checkpoint, extents, limiter):  # a proof reads again
            source.read(*extents[0])
        assert far.nbytes == 2 * 50 * PIECE
        source.read(*extents[0])
        far.asked.clear()
    source.read(*extents[0])
    assert far.asked == [extents[0]]


def test_what_looks_damaged_is_read_again(far: Far, source: Source) -> None:
    checkpoint = _checkpoint(source)
    with reading_ahead(checkpoint, pieces("a", 50)):
        source.read("a", 0, 10)
        source.read("a", 0, 10)
        assert len(far.asked) == 1
        read_again(checkpoint)
        source.read("a", 0, 10)
        assert len(far.asked) == 2


def test_small_files_are_read_whole(far: Far) -> None:
    far.put("small", b"0123456789" * 100)
    source = Source.directory(far)
    with reading_ahead(_checkpoint(source), [Extent("small", 500, 20), Extent("a", 0, 20)]):
        assert source.read("small", 500, 20) == b"0123456789" * 2
        assert source.read("small", 0, 10) == b"0123456789"
    assert [extent for extent in far.asked if extent.file == "small"] == [Extent("small", 0, 1000)]


def test_extents_beyond_the_listed_end_are_left_to_who_asks(far: Far, source: Source) -> None:
    end = len(DATA["a"])
    with reading_ahead(_checkpoint(source), [Extent("a", end - 100, 200), Extent("c", 0, 1)]):
        assert source.read("a", end - 50, 50) == DATA["a"][-50:]
    assert far.asked == [Extent("a", end - 50, 50)]


def test_local_files_are_read_as_ever(tmp_path: str) -> None:
    from ftckpt.storage import open_store

    store = open_store(str(tmp_path))
    store.put("a", b"abc")
    source = Source.directory(store)
    with reading_ahead(_checkpoint(source), [Extent("a", 0, 3)]):
        assert source.lookahead.current is None
    assert most_kept(store) == 0
    assert most_kept(Far()) > 0


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_threads_at_places_of_their_own_do_not_drop_each_others_windows(
    far: Far, source: Source, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(ahead_of_use, "budget", lambda: 16 * 64 * KIB)
    size = len(DATA["a"]) // 8
    parts = [[Extent("a", at + n, PIECE) for n in range(0, size - PIECE, PIECE)]
             for at in range(0, 8 * size, size)]  # fmt: skip
    extents = [extent for part in parts for extent in part]
    with reading_ahead(_checkpoint(source), extents, jobs=jobs):
        for first in range(0, len(parts), jobs):
            for each in zip(*parts[first : first + jobs], strict=True):
                for extent in each:
                    source.read(*extent)
    assert far.nbytes <= 1.1 * len(DATA["a"])


def test_whoever_reads_says_how_many_threads_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What earlier tests of this process hold or have bounded must not leave one thread alone; an
    # operation is bounded by its own `max_memory`.
    monkeypatch.setattr(budget, "_budget", 64 << 30)
    said: list[int] = []
    real = read_ahead._ahead_of

    def hearing(
        source: Source, extents: Iterable[Extent], bound: int, limiter: RateLimit | None, jobs: int
    ) -> AbstractContextManager[None]:
        said.append(jobs)
        return real(source, extents, bound, limiter, jobs)

    monkeypatch.setattr(read_ahead, "_ahead_of", hearing)
    step, copy = (str(save_dcp(tmp_path / name)) for name in ("step", "copy"))

    def heard(act: Callable[[], object]) -> list[int]:
        said.clear()
        act()
        return [jobs for jobs in said if jobs > 1]

    assert heard(lambda: api.verify(step, jobs=3, max_memory="64GiB")) == [3]
    out = f"{tmp_path}/out"
    # The check, the building, the sums of the result, and both sides of what has no sums.
    convert = partial(api.convert, to="safetensors", jobs=3, max_memory="64GiB")
    assert heard(lambda: convert(step, out)) == [3] * 5
    # Both sides, for tensors and for what is small.
    assert heard(lambda: api.diff(step, out, jobs=3, max_memory="64GiB")) == [3] * 4
    target, base = api.open_checkpoint(step), api.open_checkpoint(copy)
    packing = PackOptions(work=Work(threads=3), proof=False)
    pack = partial(pack_checkpoint, options=packing, store_options=StoreOptions())
    assert heard(lambda: pack(target, base, f"{tmp_path}/delta")) == [3] * 2
