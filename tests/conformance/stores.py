"""The promises that every implementation of a seam keeps, as tests that subclasses run.

A subclass supplies the implementation, and raw access that goes round it, so that a reader and a
writer cannot agree on one bug.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest

from ftckpt.checkpoint import Extent
from ftckpt.errors import (
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import is_leftover
from ftckpt.storage.store import Entry, EntryKind, Store


class Place(NamedTuple):
    """A store under test, empty at first, and access to its keys that goes round it."""

    store: Store
    raw_put: Callable[[str, bytes], None]
    raw_get: Callable[[str], bytes | None]


BLOB = bytes(range(256)) * 300


def shape(entries: list[Entry]) -> list[tuple[str, int, EntryKind]]:
    return [(e.path, e.size, e.kind) for e in entries]


FILE, DIRECTORY = EntryKind.FILE, EntryKind.DIRECTORY


class StoreTests:
    """What `ftckpt.storage.store` promises. A subclass supplies the fixture `place`."""

    conditional_put = True
    atomic_race = True
    """Whether exactly one of several racing `create` wins (Traits cannot know it of a service)."""
    hidden_uploads = True
    """Whether nothing is seen of an upload before it is finished, where it does not resume."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    def test_empty_place_is_never_an_empty_checkpoint(self, place: Place) -> None:
        for listing in (place.store.children, place.store.walk):
            # A directory that exists is empty; a prefix that nothing has is not there.
            with contextlib.suppress(NotFoundError):
                assert listing("") == []
            with pytest.raises(NotFoundError):
                listing("absent")
        with pytest.raises(NotFoundError):
            place.store.stat("absent")

    def test_walk_is_sorted_and_complete_at_any_depth(self, place: Place) -> None:
        for path in ("b", "a/x", "a/b/c", "a.b", "a-1", "z/.hidden"):
            place.raw_put(path, path.encode())
        expected = sorted(["b", "a/x", "a/b/c", "a.b", "a-1", "z/.hidden"])
        assert shape(place.store.walk()) == [(p, len(p), FILE) for p in expected]
        assert shape(place.store.walk("a")) == [("a/b/c", 5, FILE), ("a/x", 3, FILE)]
        assert [e.path for e in place.store.walk("a/b")] == ["a/b/c"]

    def test_children_are_one_level(self, place: Place) -> None:
        for path in ("b", "a/x", "a/b/c", "a.b"):
            place.raw_put(path, b"12")
        assert shape(place.store.children()) == [
            ("a", 0, DIRECTORY),
            ("a.b", 2, FILE),
            ("b", 2, FILE),
        ]
        assert shape(place.store.children("a")) == [("a/b", 0, DIRECTORY), ("a/x", 2, FILE)]
        assert list(place.store.names("a").items()) == [("b", DIRECTORY), ("x", FILE)]
        assert place.store.names("a", 3) == place.store.names("a")
        (one,) = place.store.names("a", 1).items()
        assert one in place.store.names("a").items()
        with pytest.raises(NotFoundError):
            place.store.names("absent")

    def test_a_name_that_starts_alike_is_not_below(self, place: Place) -> None:
        place.raw_put("step-10/x", b"1")
        place.raw_put("step-100/x", b"1")
        assert [e.path for e in place.store.walk("step-10")] == ["step-10/x"]
        assert [e.path for e in place.store.children("step-10")] == ["step-10/x"]
        with pytest.raises(NotFoundError):
            place.store.stat("step-1")

    def test_odd_names(self, place: Place) -> None:
        names = ["a b", "ä", "+", "100%", "a&b<c>", "'q\"", "#?;", "é"]
        for name in names:
            place.raw_put(f"d/{name}", name.encode())
        assert [e.path for e in place.store.walk()] == sorted(f"d/{n}" for n in names)
        for name in names:
            assert place.store.read(f"d/{name}") == name.encode()

    def test_many_names(self, place: Place) -> None:
        for i in range(30):
            place.raw_put(f"m/{i:04d}", b"")
        assert len(place.store.walk("m")) == 30
        assert set(place.store.delete([f"m/{i:04d}" for i in range(30)]).values()) == {None}
        assert place.raw_get("m/0007") is None

    def test_stat(self, place: Place) -> None:
        place.raw_put("a/x", BLOB)
        entry = place.store.stat("a/x")
        assert (entry.path, entry.size, entry.kind) == ("a/x", len(BLOB), FILE)
        assert not entry.archived
        assert entry == place.store.walk()[0]._replace(mtime=entry.mtime, etag=entry.etag)
        assert place.store.stat("a").kind is DIRECTORY
        with pytest.raises(NotFoundError):
            place.store.stat("a/x/y")

    def test_reads_are_exact(self, place: Place) -> None:
        place.raw_put("x", BLOB)
        assert place.store.read("x") == BLOB
        assert place.store.read("x", 1000) == BLOB[1000:]
        with place.store.open("x") as reader:
            for offset, length in ((0, 1), (0, len(BLOB)), (777, 50_000), (len(BLOB) - 1, 1)):
                assert reader.read(offset, length) == BLOB[offset : offset + length]
                view = memoryview(bytearray(length))
                reader.readinto(offset, view)
                assert view == BLOB[offset : offset + length]
            assert reader.read(5, 0) == b""
            assert reader.read(len(BLOB), 0) == b""

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, len(BLOB) + 1), (len(BLOB) - 1, 2), (len(BLOB), 1), (len(BLOB) + 10, 1), (1 << 62, 9)],
    )
    def test_a_short_read_is_an_error(self, place: Place, offset: int, length: int) -> None:
        place.raw_put("x", BLOB)
        with place.store.open("x") as reader:
            with pytest.raises(TruncatedError) as caught:
                reader.read(offset, length)
            assert (caught.value.file, caught.value.offset) == ("x", offset)
            with pytest.raises(TruncatedError):
                reader.readinto(offset, memoryview(bytearray(length)))
        with pytest.raises(TruncatedError):
            place.store.read_many([Extent("x", 0, 4), Extent("x", offset, length)])

    def test_an_absurd_length_reserves_no_memory(self, place: Place) -> None:
        place.raw_put("x", b"123")
        with place.store.open("x") as reader, pytest.raises(TruncatedError):
            reader.read(0, 1 << 50)
        with pytest.raises(TruncatedError):
            place.store.read_many([Extent("x", 0, 1 << 50)])

    def test_empty_object(self, place: Place) -> None:
        place.raw_put("e", b"")
        assert place.store.stat("e").size == 0
        assert place.store.read("e") == b""
        with place.store.open("e") as reader, pytest.raises(TruncatedError):
            reader.read(0, 1)

    def test_read_many_keeps_the_order(self, place: Place) -> None:
        place.raw_put("x", BLOB)
        place.raw_put("d/y", BLOB[::-1])
        extents = [
            Extent("x", 5000, 10),
            Extent("d/y", 0, 3),
            Extent("x", 0, 7),
            Extent("x", 5005, 20),
            Extent("x", 9, 0),
            Extent("d/y", len(BLOB) - 4, 4),
            Extent("x", 0, len(BLOB)),
        ]
        content = {"x": BLOB, "d/y": BLOB[::-1]}
        expected = [content[e.file][e.offset : e.end] for e in extents]
        assert place.store.read_many(extents) == expected
        assert place.store.read_many([]) == []

    def test_absent_object(self, place: Place) -> None:
        place.raw_put("x", b"1")
        with pytest.raises(NotFoundError):
            place.store.open("y")
        with pytest.raises(NotFoundError):
            place.store.read("y")
        with pytest.raises(NotFoundError):
            place.store.read_many([Extent("x", 0, 1), Extent("y", 0, 1)])

    def test_put_and_replace(self, place: Place) -> None:
        place.store.put("a/b/c", b"one")
        assert place.raw_get("a/b/c") == b"one"
        place.store.put("a/b/c", BLOB)
        assert place.raw_get("a/b/c") == BLOB
        assert shape(place.store.walk()) == [("a/b/c", len(BLOB), FILE)]
        place.store.put("a/b/c", b"")
        assert place.raw_get("a/b/c") == b""

    @pytest.mark.parametrize("size", [0, 7, (64 << 20) + 7])
    def test_upload_in_pieces(self, place: Place, size: int) -> None:
        data = (BLOB * (size // len(BLOB) + 1))[:size]
        upload = place.store.upload("big/object", size)
        step = upload.unit if upload.unit > 1 else 32 << 20
        for offset in range(0, size, step):
            upload.write(offset, memoryview(data)[offset : offset + step])
        if not place.store.traits.local and self.hidden_uploads:
            assert place.raw_get("big/object") is None
        upload.finish()
        upload.close()
        assert place.store.stat("big/object").size == size
        assert place.raw_get("big/object") == data

    @pytest.mark.parametrize("size", [0, 7, 64 << 20])
    def test_an_upload_may_end_before_what_was_announced(self, place: Place, size: int) -> None:
        data = (BLOB * (size // len(BLOB) + 1))[:size]
        upload = place.store.upload("big/object", (128 << 20) + 7)
        if size:
            upload.write(0, memoryview(data))
        upload.finish(size)
        upload.close()
        assert place.store.stat("big/object").size == size
        assert place.raw_get("big/object") == data

    def test_an_upload_that_is_given_up_leaves_nothing_whole(self, place: Place) -> None:
        size = (64 << 20) + 7
        upload = place.store.upload("big/object", size)
        upload.write(0, memoryview(bytes(upload.unit if upload.unit > 1 else 5)))
        upload.close()
        del upload
        found = place.raw_get("big/object")
        if place.store.traits.local:
            assert found is not None
            assert len(found) == size
        elif self.hidden_uploads:
            assert found is None

    def test_a_copy_is_whole(self, place: Place) -> None:
        data = bytes(range(256)) * 5000
        place.raw_put("d/source", data)
        if place.store.traits.local:
            with pytest.raises(UnsupportedError):
                place.store.duplicate(place.store.stat("d/source"), "copy")
            return
        source = place.store.stat("d/source")
        place.store.duplicate(source, "copy")
        place.store.duplicate(source, "copy")
        assert place.raw_get("copy") == place.raw_get("d/source") == data
        with pytest.raises(NotFoundError):
            place.store.duplicate(source._replace(path="absent"), "copy")
        place.raw_put("d/source", data[::-1] + b"1")  # some stores tell the size alone
        with pytest.raises(IncompleteError):
            place.store.duplicate(source, "copy")
        assert place.raw_get("copy") == data

    def test_create_never_replaces(self, place: Place) -> None:
        place.store.create("a/new", b"mine")
        assert place.raw_get("a/new") == b"mine"
        with pytest.raises(ExistsError):
            place.store.create("a/new", b"theirs")
        with pytest.raises(ExistsError):
            place.store.create("a/new", b"mine")
        place.raw_put("raw", b"raw")
        with pytest.raises(ExistsError):
            place.store.create("raw", b"raw")
        assert place.raw_get("a/new") == b"mine"
        assert place.store.traits.conditional_put is self.conditional_put
        assert not any(is_leftover(e.path) for e in place.store.walk())

    def test_racing_creates_have_one_winner(self, place: Place) -> None:
        place.store.create("warm", b"")  # the probe, if there is one, is behind us
        for key in ("k0", "k1", "k2"):
            won, failed = _race(place.store, key, 4)
            assert len(won) + len(failed) == 4
            assert all(isinstance(error, ExistsError) for error in failed)
            assert place.raw_get(key) in won
            if self.atomic_race:
                assert len(won) == 1

    def test_delete_answers_for_each_key(self, place: Place) -> None:
        place.raw_put("a/x", b"1")
        place.raw_put("a/y", b"2")
        answer = place.store.delete(["a/x", "never/was", "../climbs"])
        assert answer["a/x"] is None
        assert answer["never/was"] is None
        assert isinstance(answer["../climbs"], UnsafeError)
        assert place.raw_get("a/x") is None
        assert place.raw_get("a/y") == b"2"
        assert place.store.delete([]) == {}

    def test_erase_takes_what_was_listed_and_nothing_that_replaced_it(self, place: Place) -> None:
        for path in ("e/kept", "e/gone", "e/replaced", "e/x/deep"):
            place.raw_put(path, b"1")
        listed = {e.path: e for e in place.store.walk("e")}
        place.raw_put("e/replaced", b"another size")
        place.store.delete(["e/gone"])
        asked = [listed[path] for path in ("e/gone", "e/replaced", "e/x/deep")]
        gone, replaced, deep = place.store.erase(asked)
        assert (gone, deep) == (None, None)
        assert isinstance(replaced, RefusedError)
        assert [e.path for e in place.store.walk("e")] == ["e/kept", "e/replaced"]
        assert place.raw_get("e/replaced") == b"another size"
        assert place.store.erase([]) == []
        assert not any(is_leftover(e.path) for e in place.store.walk())

    def test_no_history_where_no_versions_are_kept(self, place: Place) -> None:
        place.raw_put("h/x", b"1")
        place.store.put("h/x", b"2")
        assert place.store.history(place.store.walk("h")) == []

    def test_an_upload_that_is_not_finished_can_be_found_and_forgotten(self, place: Place) -> None:
        size = (64 << 20) + 7
        upload = place.store.upload("u/big", size)
        upload.write(0, memoryview(bytes(upload.unit if upload.unit > 1 else 5)))
        begun = place.store.unfinished("u")
        assert {e.path for e in begun} <= {"u/big"}
        assert place.store.unfinished() == begun
        assert place.store.abort(begun) == [None] * len(begun)
        assert place.store.unfinished() == []
        upload.close()

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a/.."])
    def test_keys_cannot_climb(self, place: Place, path: str) -> None:
        with pytest.raises(UnsafeError):
            place.store.open(path)
        with pytest.raises(UnsafeError):
            place.store.put(path, b"")

    def test_threads_share_a_reader(self, place: Place) -> None:
        place.raw_put("x", BLOB)
        wrong: list[int] = []
        with place.store.open("x") as reader:

            def work(seed: int) -> None:
                for i in range(5):
                    offset = (seed * 7919 + i * 104_729) % (len(BLOB) - 500)
                    if reader.read(offset, 500) != BLOB[offset : offset + 500]:
                        wrong.append(offset)

            threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert wrong == []

    def test_urls(self, place: Place) -> None:
        assert place.store.describe() == place.store.url
        assert place.store.describe("a/b") == f"{place.store.url}/a/b"

    def test_travels_to_another_process_or_refuses(self, place: Place) -> None:
        place.raw_put("x", b"1")
        try:
            packed = pickle.dumps(place.store)
        except TypeError:
            assert place.store.url.startswith("memory://")
            return
        assert pickle.loads(packed).read("x") == b"1"

    def test_usage_counts_content(self, place: Place) -> None:
        place.raw_put("x", BLOB)
        before = place.store.usage()
        with place.store.open("x") as reader:
            reader.read(100, 5000)
        assert place.store.usage().bytes_read - before.bytes_read == 5000
        assert place.store.usage().requests >= before.requests

    def test_a_url_may_name_one_object(self, place: Place) -> None:
        place.raw_put("one.pt", BLOB)
        store = self.reopen(place, "one.pt")
        assert (store.stat("").size, store.stat("").kind) == (len(BLOB), FILE)
        with store.open("") as reader:
            assert reader.read(10, 10) == BLOB[10:20]
        assert store.read_many([Extent("", 3, 4)]) == [BLOB[3:7]]

    def reopen(self, place: Place, path: str) -> Store:
        """Return the store for the URL of one key."""
        from ftckpt.storage import open_store

        return open_store(place.store.describe(path))


def _race(store: Store, key: str, racers: int) -> tuple[list[bytes], list[FtckptError]]:
    """Create `key` from several threads at once; return what the winners wrote, and the errors."""
    barrier = threading.Barrier(racers)
    won: list[bytes] = []
    failed: list[FtckptError] = []

    def create(data: bytes) -> None:
        barrier.wait()
        try:
            store.create(key, data)
        except FtckptError as error:
            failed.append(error)
        else:
            won.append(data)

    threads = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return won, failed
