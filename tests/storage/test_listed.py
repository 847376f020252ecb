from __future__ import annotations

import itertools

import pytest

from ftckpt.errors import NotFoundError, UnsupportedError
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.readonly import ListedStore
from ftckpt.storage.store import EntryKind

_numbers = itertools.count()


@pytest.fixture
def below() -> MemoryStore:
    store = MemoryStore(f"memory://listed-{next(_numbers)}")
    for path in ("a/x", "a/deep/y", "a/deep/z", "b/x"):
        store.put(path, path.encode())
    return store


def test_names_are_those_of_one_listing(below: MemoryStore) -> None:
    listed = ListedStore(below, below.walk("a"))
    below.put("a/later", b"")
    assert [e.path for e in listed.walk("a/deep")] == ["a/deep/y", "a/deep/z"]
    assert listed.names("a") == {"deep": EntryKind.DIRECTORY, "x": EntryKind.FILE}
    assert listed.stat("a/deep").kind is EntryKind.DIRECTORY
    assert listed.stat("a/x") == below.stat("a/x")
    for path in ("b", "a/later", "a/dee"):
        with pytest.raises(NotFoundError):
            listed.stat(path)


def test_content_is_the_stores_own(below: MemoryStore) -> None:
    listed = ListedStore(below, below.walk("a"))
    assert listed.read("a/deep/y", 0, 8) == b"a/deep/y"
    with pytest.raises(UnsupportedError):
        listed.put("a/x", b"")
