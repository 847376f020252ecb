"""Whether a failure is one of a source that changed while it was read."""

from __future__ import annotations

import pytest

from ftckpt.errors import IncompleteError, NotFoundError
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.transfer.request.example import blamed


def test_what_a_stale_listing_still_shows_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("memory://changes/step-1")
    store.put("a", b"1")
    source = Source.directory(store)
    listing = store.walk()
    store.delete(["a"])
    monkeypatch.setattr(store, "walk", lambda path="": listing)
    assert source.changed(["a"]) == []
    message = "a changed while it was being read"
    with pytest.raises(IncompleteError, match=message), blamed(source, ["a"]):
        source.read("a")


def test_what_was_never_there_did_not_change() -> None:
    store = MemoryStore("memory://changes/step-2")
    store.put("a", b"1")
    source = Source.directory(store)
    with pytest.raises(NotFoundError), blamed(source, ["a", "b"]):
        store.read("b")
