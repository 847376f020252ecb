"""A prefix of an object store: whose it is, and what a stale or missing answer may not lead to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from ftckpt.errors import ExistsError, NotFoundError, RefusedError, UnsafeError
from ftckpt.own_files import MANIFEST, TRANSFER
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.store import Entry
from ftckpt.transfer.layout import Literal, OutputFile
from ftckpt.transfer.staging.remote import RemoteStaging
from ftckpt.transfer.write.blocks import BlockMade

FILE = OutputFile("data", [Literal(b"a few bytes")])
CONTENT = b"{}"


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore("memory://staging")
    yield made
    made.delete([entry.path for entry in made.walk("")])


def _begun(store: MemoryStore, plan: str = "one", *, restart: bool = False) -> RemoteStaging:
    staging = RemoteStaging(store)
    assert not staging.begin(plan, {FILE.path: FILE.size}, restart=restart)
    return staging


def _built(store: MemoryStore, plan: str = "one", **more: Any) -> RemoteStaging:
    staging = _begun(store, plan, **more)
    _write(staging, plan)
    return staging


def _write(staging: RemoteStaging, text: str) -> None:
    data = (text * FILE.size).encode()[: FILE.size]
    upload = staging.open(FILE).upload
    assert upload is not None
    upload.write(0, memoryview(data))
    upload.finish()
    staging.finished(FILE, [BlockMade(FILE.path, 0, xxhash.xxh3_128_digest(data), ())])


def test_an_empty_listing_is_no_evidence_of_an_empty_place(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("data", b"precious")

    def walk(path: str = "") -> list[Entry]:
        raise NotFoundError("nothing lies below it")

    with monkeypatch.context() as patch:
        patch.setattr(store, "walk", walk)
        with pytest.raises(ExistsError):
            _begun(store)
    assert [entry.path for entry in store.walk("")] == ["data"]


def test_two_transfers_at_once_do_not_show_a_mixture(store: MemoryStore) -> None:
    first = _built(store)
    second = _begun(store, "two", restart=True)
    with pytest.raises(RefusedError, match="another transfer has written"):
        first.publish({}, CONTENT)
    _write(second, "two")
    _write(first, "one")  # it goes on, because nobody told it
    with pytest.raises(RefusedError, match="another transfer has written"):
        second.publish({}, CONTENT)
    assert MANIFEST not in {entry.path for entry in store.walk("")}
    again = _built(store, "two")  # what the other wrote over is not taken over
    again.publish({}, CONTENT)
    assert store.read("data") == b"twotwotwotw"
    assert {entry.path for entry in store.walk("")} == {"data", MANIFEST}


def test_a_finished_file_is_taken_over_by_its_version(store: MemoryStore) -> None:
    _built(store).close()
    taken = _begun(store).open(FILE)
    assert taken.upload is None
    assert set(taken.earlier) == {0}
    store.put("data", b"other bytes")
    assert _begun(store).open(FILE).upload is not None


def test_restart_builds_anew_what_this_transfer_has_built(store: MemoryStore) -> None:
    _built(store).close()
    assert _begun(store, restart=True).open(FILE).upload is not None
    assert {entry.path for entry in store.walk("")} == {TRANSFER}


def test_without_versions_nothing_is_taken_over(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, stat = store.walk, store.stat
    monkeypatch.setattr(store, "walk", lambda p="": [e._replace(etag=None) for e in walk(p)])
    monkeypatch.setattr(store, "stat", lambda p: stat(p)._replace(etag=None))
    _built(store).close()
    assert _begun(store).open(FILE).upload is not None


def test_of_two_runs_of_one_transfer_the_second_finds_it_done(store: MemoryStore) -> None:
    from ftckpt.checkpoint import Topology
    from ftckpt.manifest import Manifest

    manifest = Manifest(format="dcp", step=1, topology=Topology(), files=()).dump()
    first, second = _begun(store), _begun(store)
    _write(first, "one")
    _write(second, "one")
    first.publish({}, manifest)
    second.publish({}, manifest)
    assert {entry.path for entry in store.walk("")} == {"data", MANIFEST}
    assert TRANSFER not in {entry.path for entry in store.walk("")}


def test_a_run_that_another_one_overtakes_writes_nothing(store: MemoryStore) -> None:
    """It has listed what the other one sweeps away: else it would write over a checkpoint."""
    one = _built(store)
    two = _begun(store)
    one.source({})
    one.publish({}, CONTENT)
    with pytest.raises(RefusedError, match="has ended meanwhile"):
        two.open(FILE)


@pytest.mark.parametrize("planted", ["../step-400/.metadata", "/x", ".ftckpt/pins/a/b.json", 7])
def test_a_planted_marker_that_names_anything_else_removes_nothing(
    store: MemoryStore, planted: object
) -> None:
    _built(store).close()
    store.put(".ftckpt/pins/a/b.json", b"{}")
    marker = b'{"schema": 1, "transfer": "other"}\n'
    store.put(TRANSFER, marker + json.dumps({"files": ["data", planted]}).encode() + b"\n")
    before = {entry.path for entry in store.walk("")}
    with pytest.raises(UnsafeError):
        _begun(store, restart=True)
    assert {entry.path for entry in store.walk("")} == before
