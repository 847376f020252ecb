"""Stores that are only looked at."""

from __future__ import annotations

import pytest

from ftckpt.errors import NotFoundError, UnsupportedError
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.readonly import OverlayStore
from ftckpt.storage.store import EntryKind


def test_every_write_is_refused_and_reaches_nothing() -> None:
    below = MemoryStore("memory://read-only")
    below.put("a/kept", b"1")
    store = OverlayStore(below, {"a/added": b"22"})
    kept = store.stat("a/kept")
    for write in (
        lambda: store.put("a/kept", b"2"),
        lambda: store.create("a/new", b"2"),
        lambda: store.replace(kept, b"2"),
        lambda: store.upload("a/new", 1),
    ):
        with pytest.raises(UnsupportedError, match="only looked at"):
            write()
    refused = [*store.delete(["a/kept", "a/added"]).values(), *store.erase([kept])]
    assert [type(error) for error in refused] == [UnsupportedError] * 3
    assert [(e.path, below.read(e.path)) for e in below.walk()] == [("a/kept", b"1")]


def test_children_come_from_the_walk() -> None:
    below = MemoryStore("memory://read-only-listed")
    below.put("a/kept", b"1")
    store = OverlayStore(below, {"a/added/deep": b"22"})
    assert [(e.path, e.kind) for e in store.children("a")] == [
        ("a/added", EntryKind.DIRECTORY),
        ("a/kept", EntryKind.FILE),
    ]
    with pytest.raises(NotFoundError):
        store.children("b")
