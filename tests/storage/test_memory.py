"""The store in memory."""

from __future__ import annotations

import itertools

import pytest

from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from tests.conformance.stores import Place, StoreTests

_numbers = itertools.count()


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def place(self) -> Place:
        store = MemoryStore(f"memory://suite-{next(_numbers)}/below")
        objects = store._space.objects

        def put(path: str, data: bytes) -> None:
            store._store(f"below/{path}", data)

        def get(path: str) -> bytes | None:
            found = objects.get(f"below/{path}")
            return found.data if found else None

        return Place(store, put, get)


def test_one_name_is_one_store() -> None:
    open_store("memory://shared").put("a/b", b"1")
    assert open_store("memory://shared/a").read("b") == b"1"
    assert open_store("Memory://shared/a").read("b") == b"1"
