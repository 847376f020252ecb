"""One listing over several places, and copies that are not one file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ftckpt.extents import Extent
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.several_places import GatheredStore
from ftckpt.storage.store import EntryKind

_numbers = itertools.count()


def _places(*contents: dict[str, bytes]) -> list[MemoryStore]:
    stores = []
    for files in contents:
        store = MemoryStore(f"memory://gathered-{next(_numbers)}")
        for path, data in files.items():
            store.put(path, data)
        stores.append(store)
    return stores


def test_each_file_is_listed_once_and_read_where_it_is() -> None:
    a, b = _places({"s/x": b"xx", "s/both": b"12"}, {"s/y": b"yyy", "s/both": b"12"})
    store = GatheredStore([a, b])
    assert [(e.path, e.size, e.copies) for e in store.walk("s")] == [
        ("s/both", 2, 1),
        ("s/x", 2, 0),
        ("s/y", 3, 0),
    ]
    assert [(e.path, e.kind) for e in store.children()] == [("s", EntryKind.DIRECTORY)]
    assert store.stat("s").kind is EntryKind.DIRECTORY
    wanted = [Extent("s/y", 1, 2), Extent("s/both", 0, 2), Extent("s/x", 0, 1)]
    assert store.read_many(wanted) == [b"yy", b"12", b"x"]
    assert GatheredStore([a, b]).read("s/y", 0, 3) == b"yyy"  # without a listing
    assert store.places_of("s/both") == (a.url, b.url)
    assert store.describe("s/y") == b.describe("s/y")
    for path in ("t", "s/z"):
        with pytest.raises(NotFoundError):
            store.stat(path)
    with pytest.raises(NotFoundError):
        store.walk("t")
    with pytest.raises(NotFoundError):
        store.children("t")


def test_nothing_is_written() -> None:
    a, b = _places({"x": b"1"}, {"y": b"2"})
    store = GatheredStore([a, b])
    with pytest.raises(UnsupportedError, match="together with other places"):
        store.put("x", b"3")
    assert isinstance(store.delete(["x"])["x"], UnsupportedError)
    assert a.read("x") == b"1"


def test_copies_of_other_sizes() -> None:
    a, b = _places({"x": b"1", "d": b""}, {"x": b"12", "d/y": b""})
    store = GatheredStore([a, b])
    told = {e.path: e.differs for e in store.walk()}
    assert told["x"] == f"1 bytes in {a.url} and 2 bytes in {b.url}"
    for _ in range(2):
        with pytest.raises(CorruptError, match="the copies of x differ") as raised:
            store.open("x")
        assert raised.value.kind == "copies-differ"
    assert "a directory in" in {e.path: e.differs for e in store.children()}["d"]


def test_copies_of_other_bytes() -> None:
    a, b, c = _places({"x": b"12345"}, {"x": b"12345"}, {"x": b"12x45"})
    store = GatheredStore([a, b, c])
    with store.open("x") as reader:
        assert reader.read(0, 2) == b"12"
        view = memoryview(bytearray(3))
        with pytest.raises(CorruptError, match=f"byte 2 in {a.url} and in {c.url}") as raised:
            reader.readinto(2, view)
    assert (raised.value.file, raised.value.offset) == ("x", 2)
    with pytest.raises(CorruptError):
        store.read_many([Extent("x", 0, 5)])


def test_ftckpts_own_folder_may_differ() -> None:
    a, b = _places({".ftckpt/log": b"1", "x": b""}, {".ftckpt/log": b"22", "y": b""})
    store = GatheredStore([a, b])
    assert [(e.path, e.differs) for e in store.walk()] == [
        (".ftckpt/log", ""),
        ("x", ""),
        ("y", ""),
    ]
    assert store.read(".ftckpt/log") == b"1"


def test_a_place_without_the_checkpoint() -> None:
    a, b = _places({"s1/x": b"", "s2/x": b"", "s2/deep/z": b""}, {"s2/y": b""})
    store = GatheredStore([a, b])
    assert [e.path for e in store.walk("s2/deep")] == ["s2/deep/z"]
    with pytest.raises(IncompleteError, match=f"s1 is in {a.url} and not in {b.url}") as raised:
        store.walk("s1")
    assert raised.value.kind == "absent-place"


def test_places_that_are_one(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    a = open_store(str(tmp_path / "a"))
    with pytest.raises(UsageError, match="same place"):
        GatheredStore([a, open_store(str(tmp_path / "link"))])
    with pytest.raises(UsageError, match="one lies in the other"):
        GatheredStore([open_store(str(tmp_path / "a" / "b")), a])
