"""Copies and repairs to and from object stores: the order of what is put, kills, races."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import (
    CorruptError,
    ExistsError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX
from ftckpt.replication.existing_destination import staging_at
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.s3.store import S3Store
from ftckpt.storage.s3.upload import S3Upload
from ftckpt.transfer.places import around
from tests.replication.replicas import (
    INSIDE,
    STORES,
    VICTIM,
    KilledError,
    contents,
    copied,
    flip,
    killed,
    opened,
    repaired,
    require_good,
)

_numbers = itertools.count()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest) -> str:
    """An empty prefix."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return f"memory://replicas-{next(_numbers)}"


def _held(url: str) -> dict[str, bytes]:
    store = open_store(url, STORES)
    return {entry.path: store.read(entry.path) for entry in store.walk("")}


def _put(url: str, files: dict[str, bytes]) -> None:
    store = open_store(url, STORES)
    for path, data in files.items():
        store.put(path, data)


def test_there_and_back(source: Path, place: str, tmp_path: Path) -> None:
    report = copied(source, f"{place}/")
    assert (report.url, report.evidence) == (f"{place}/step-2", "manifest")
    assert _held(report.url) == contents(source)
    require_good(report.url)
    assert copied(source, report.url).already_there
    copied(report.url, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    copied(report.url, f"{place}/again")
    assert _held(f"{place}/again") == contents(source)


def test_data_first_then_the_marker_then_the_manifest(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    url = f"memory://order-{next(_numbers)}"
    create, upload = MemoryStore.create, MemoryStore.upload

    def created(self: MemoryStore, path: str, data: bytes) -> None:
        order.append(path)
        create(self, path, data)

    def uploaded(self: MemoryStore, path: str, size: int) -> Any:
        order.append(path)
        return upload(self, path, size)

    monkeypatch.setattr(MemoryStore, "create", created)
    monkeypatch.setattr(MemoryStore, "upload", uploaded)
    copied(source, url)
    assert order == [f"{FOLDER}/transfer.json", "__0_0.distcp", VICTIM, ".metadata", MANIFEST]


def _points(place: str) -> range:
    """Return at which changes to kill: all in memory, some on a service that takes its time."""
    return range(1, 100, 8 if place.startswith("s3://") else 1)


# Everything by which a store is changed.
CHANGES: dict[type[Any], tuple[str, ...]] = {
    MemoryStore: ("put", "create", "upload", "delete"),
    S3Store: ("put", "create", "delete"),
    S3Upload: ("write", "finish", "close"),
}


def test_killed_at_every_change_it_is_incomplete_or_whole(
    source: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = 0
    for point in _points(place):
        url = f"{place}/out-{point}"
        with killed(monkeypatch, point, CHANGES) as done:
            try:
                copied(source, url, jobs=1)
            except KilledError:
                finished = False
            else:
                finished = True
            changes = done()
        if finished:
            break
        try:
            opened(url)
        except (NotFoundError, IncompleteError):
            pass
        else:
            require_good(url)
        copied(source, url)
        require_good(url)
        assert _held(url) == contents(source)
    assert changes > 8


def test_a_killed_mending_goes_on(
    source: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = dict(contents(source))
    data = bytearray(damaged[VICTIM])
    data[INSIDE] ^= 1
    _put(f"{place}/damaged", damaged | {VICTIM: bytes(data)})
    before = _held(f"{place}/damaged")
    with pytest.raises(UsageError, match="object store"):
        repaired(f"{place}/damaged", source)
    points = 0
    for point in _points(place):
        url = f"{place}/mended-{point}"
        with killed(monkeypatch, point, CHANGES):
            try:
                report = repaired(f"{place}/damaged", source, to=url, jobs=1)
                break
            except KilledError:
                points = point
        repaired(f"{place}/damaged", source, to=url)
        assert _held(url) == contents(source)
    assert points > 5
    assert report.fetched == len(report.blocks) * report.blocks[0].length
    assert _held(f"{place}/damaged") == before


def test_one_object_is_shown_when_it_is_whole(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _single(tmp_path)
    names = ["model.safetensors", f"model.safetensors{SUFFIX}"]
    for point in range(1, 20, 2):
        url = f"{place}/{point}/model.safetensors"
        with killed(monkeypatch, point, CHANGES):
            try:
                copied(path, url, jobs=1)
                break
            except KilledError:
                pass
        copied(path, f"{place}/{point}/")
        require_good(url)
        assert sorted(_held(f"{place}/{point}")) == names
    assert point > 2
    assert copied(path, url).already_there
    copied(url, tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ExistsError):
        copied(path, url)
    store = open_store(f"{place}/claimed", STORES)
    store.put(names[1], _held(f"{place}/{point}")[names[1]])
    with pytest.raises(RefusedError, match="describes other bytes"):
        copied(path, f"{place}/claimed/")
    assert sorted(_held(f"{place}/claimed")) == names[1:]


def _single(tmp_path: Path) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": np.arange(5000, dtype=np.float32)}, path)
    return path


def test_one_file_does_not_take_the_name_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    source = opened(_single(tmp_path)).source
    with pytest.raises(UsageError, match="is a bucket"):
        staging_at(source, "s3://bucket", STORES)
    assert os.listdir() == []
    assert around("s3://bucket/model.pt") == "s3://bucket/"
    assert around("s3://bucket/run/model.pt") == "s3://bucket/run/"
    assert [around(path) for path in ("/model.pt", "run/model.pt", "model.pt")] == ["/", "run/", ""]


def test_what_stands_there_is_kept(source: Path, place: str) -> None:
    _put(place, {VICTIM: b"precious"})
    with pytest.raises(ExistsError):
        copied(source, place)
    assert _held(place) == {VICTIM: b"precious"}


def test_two_at_once_show_one_whole_checkpoint(
    source: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.transfer.staging.remote import RemoteStaging

    real: Callable[..., None] = RemoteStaging.publish
    inner: list[object] = []

    def publish(*args: Any) -> None:
        if not inner:
            inner.append(None)
            inner.append(copied(source, f"{place}/out"))
        real(*args)

    monkeypatch.setattr(RemoteStaging, "publish", publish)
    copied(source, f"{place}/out")
    require_good(f"{place}/out")
    assert _held(f"{place}/out") == contents(source)


def test_a_service_that_ignores_conditions(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: MemoryStore, path: str, data: bytes) -> None:
        self.put(path, data)

    monkeypatch.setattr(MemoryStore, "create", create)
    url = f"memory://ignorant-{next(_numbers)}"
    copied(source, url)
    require_good(url)
    assert copied(source, url).already_there
    (source / MANIFEST).unlink()
    flip(source / ".metadata", 100)
    with pytest.raises((ExistsError, CorruptError)):
        copied(source, url)
    require_good(url)
