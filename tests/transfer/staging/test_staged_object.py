"""One object as the result of a transfer: proven before it is seen, resumed after a kill."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt import convert
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.own_files import SUFFIX
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.s3 import copy as s3copy
from ftckpt.storage.s3.store import S3Store
from ftckpt.storage.s3.upload import S3Upload
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.narrowing import Only, only
from ftckpt.transfer.run import TransferReport
from ftckpt.transfer.staging import object as object_staging
from ftckpt.transfer.staging import remote
from ftckpt.transfer.staging.remote import StagedObject
from tests.campaign import examples
from tests.commands.golden import RUN
from tests.replication.replicas import STORES, KilledError, killed, require_good
from tests.servers.faults import Fault, fault_proxy
from tests.servers.s3 import BUCKET, S3Service

NAMES = ["one.pt", f"one.pt{SUFFIX}"]
CHANGES: dict[type[Any], tuple[str, ...]] = {
    MemoryStore: ("put", "create", "upload", "delete", "duplicate"),
    S3Store: ("put", "create", "delete", "duplicate"),
    S3Upload: ("write", "finish", "close"),
}
_numbers = itertools.count()


@pytest.fixture(
    params=[
        "memory",
        pytest.param("swift", marks=pytest.mark.s3),
        pytest.param("radosgw", marks=pytest.mark.s3),
        "moto",
        "rclone",
    ]
)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix of a store."""
    number = next(_numbers)
    if request.param == "memory":
        return f"memory://objects-{number}"
    service: S3Service = request.getfixturevalue(request.param)
    service.enter(monkeypatch)
    return f"s3://{BUCKET}/objects-{number}"


def _convert(to: str | Path, step: str = "step-2", *, restart: bool = False) -> TransferReport:
    source, there = str(RUN / step), str(to)
    if there.endswith(".safetensors"):
        return convert(
            source, there, "safetensors", derive=_weights, jobs=2, restart=restart, stores=STORES
        )
    return convert(source, there, "torchsave", jobs=2, restart=restart, stores=STORES)


def _weights(content: Content) -> Content:
    return only(content, Only.MODEL)


def _held(place: str) -> list[str]:
    try:
        return [entry.path for entry in open_store(place, STORES).walk("")]
    except NotFoundError:
        return []


@pytest.mark.parametrize("name", ["one.pt", "one.safetensors"])
def test_it_is_the_file_that_a_disk_would_hold(place: str, name: str, tmp_path: Path) -> None:
    names = [name, f"{name}{SUFFIX}"]
    _convert(tmp_path / name)
    report = _convert(f"{place}/{name}")
    assert report.proof is not None
    assert report.proof.tensors
    assert _held(place) == names
    assert open_store(place, STORES).read(name) == (tmp_path / name).read_bytes()
    require_good(f"{place}/{name}")
    with pytest.raises(ExistsError):
        _convert(f"{place}/{name}", restart=True)
    assert _held(place) == names


@pytest.mark.parametrize("place", ["memory", "moto"], indirect=True)
def test_killed_at_every_change_it_is_absent_or_whole(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    already = []
    step = 1 if place.startswith("memory") else examples(2, 1)
    for point in itertools.count(1, step):
        url = f"{place}/{point}/one.pt"
        with killed(monkeypatch, point, CHANGES):
            try:
                _convert(url)
                break
            except KilledError:
                shown = "one.pt" in _held(f"{place}/{point}")
        if shown:
            require_good(url)
        report = _convert(url)
        assert report.already_there is shown
        already.append(shown)
        assert _held(f"{place}/{point}") == NAMES
        require_good(url)
    assert len(already) * step > 5
    assert (
        already.count(True) * step == 2
    )  # killed when it stood there, before each act of sweeping up


@pytest.mark.parametrize("place", ["memory", "moto"], indirect=True)
def test_what_fails_its_proof_is_not_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagedObject.source

    def source(self: StagedObject, commit: dict[str, bytes]) -> Source:
        store = open_store(f"{place}/.one.pt.ftckpt-staging", STORES)
        data = bytearray(store.read("one.pt"))
        data[len(data) // 2] ^= 1
        store.put("one.pt", bytes(data))
        return real(self, commit)

    with monkeypatch.context() as patch:
        patch.setattr(StagedObject, "source", source)
        with pytest.raises(CorruptError):
            _convert(f"{place}/one.pt")
    assert not set(NAMES) & set(_held(place))
    _convert(f"{place}/one.pt")
    assert _held(place) == NAMES


@pytest.mark.parametrize("place", ["memory", "moto", "rclone"], indirect=True)
def test_only_what_was_proven_is_shown(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = object_staging.claim

    def claim(store: Store, name: str, manifest: bytes) -> None:
        real(store, name, manifest)
        staged = open_store(f"{place}/.one.pt.ftckpt-staging", STORES)
        staged.put("one.pt", staged.read("one.pt")[::-1])

    with monkeypatch.context() as patch:
        patch.setattr(remote, "claim", claim)
        with pytest.raises(IncompleteError, match="was replaced"):
            _convert(f"{place}/one.pt")
    assert "one.pt" not in _held(place)
    _convert(f"{place}/one.pt")
    assert _held(place) == NAMES
    require_good(f"{place}/one.pt")


@pytest.mark.parametrize("refused", ["one.pt", ".ftckpt/"])
def test_what_could_not_be_swept_up_is_swept_up_by_the_next_run(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"memory://objects-{next(_numbers)}"
    real = MemoryStore.delete

    def delete(self: MemoryStore, paths: Sequence[str]) -> dict[str, FtckptError | None]:
        bad = {p: DeniedError("not that one") for p in paths if p.startswith(refused)}
        return {**real(self, [p for p in paths if p not in bad]), **bad}

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "delete", delete)
        assert _convert(f"{place}/one.pt").proof is not None
    require_good(f"{place}/one.pt")
    staged = set(_held(place)) - set(NAMES)
    assert any(path.startswith(f".one.pt.ftckpt-staging/{refused}") for path in staged)
    assert _convert(f"{place}/one.pt").already_there
    assert _held(place) == NAMES


@pytest.mark.parametrize("place", ["memory", "moto"], indirect=True)
def test_what_others_have_there_is_kept(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(place, STORES)
    for name in NAMES:
        store.put(name, b"precious")
        with pytest.raises(ExistsError):
            _convert(f"{place}/one.pt")
        assert _held(place) == [name]
        store.delete([name])
    with monkeypatch.context() as patch:
        patch.setattr(StagedObject, "publish", _killed)
        with pytest.raises(KilledError):
            _convert(f"{place}/one.pt", "step-1")
    with pytest.raises(RefusedError, match="another transfer"):
        _convert(f"{place}/one.pt")
    _convert(f"{place}/one.pt", restart=True)
    assert _held(place) == NAMES


def test_of_two_that_were_killed_the_first_to_claim_the_name_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"memory://objects-{next(_numbers)}"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "duplicate", _killed)
        with pytest.raises(KilledError):
            _convert(f"{place}/one.pt", "step-1")
    with pytest.raises(ExistsError, match=r"one\.pt\.ftckpt\.json") as caught:
        _convert(f"{place}/one.pt", restart=True)
    assert "run that one again" in caught.value.hint
    assert _convert(f"{place}/one.pt", "step-1").taken_over
    assert _held(place) == NAMES


def test_what_the_refusal_of_a_lone_manifest_says_is_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"memory://objects-{next(_numbers)}"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "duplicate", _killed)
        with pytest.raises(KilledError):
            _convert(f"{place}/one.pt", "step-1")
    with pytest.raises(ExistsError) as caught:
        _convert(f"{place}/one.pt")
    assert "remove the manifest and give --restart" in caught.value.hint
    open_store(place, STORES).delete([f"one.pt{SUFFIX}"])
    _convert(f"{place}/one.pt", restart=True)
    assert _held(place) == NAMES


@pytest.mark.parametrize("longer", [b"", b"!"])
def test_what_others_wrote_under_the_name_is_not_taken_for_what_was_proven(
    longer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"memory://objects-{next(_numbers)}"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "duplicate", _killed)
        with pytest.raises(KilledError):
            _convert(f"{place}/one.pt")
    store = open_store(place, STORES)
    staged = store.read(".one.pt.ftckpt-staging/one.pt")
    store.put("one.pt", staged[::-1] + longer)
    for _ in range(2):
        with pytest.raises(ExistsError):
            _convert(f"{place}/one.pt")
    assert store.read(".one.pt.ftckpt-staging/one.pt") == staged
    store.delete(["one.pt"])
    assert _convert(f"{place}/one.pt").taken_over
    assert _held(place) == NAMES
    require_good(f"{place}/one.pt")


def _killed(*args: Any, **named: Any) -> None:
    raise KilledError


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/"])
def test_it_does_not_take_the_name_of_a_bucket(url: str) -> None:
    with pytest.raises(UsageError, match="is a bucket"):
        _convert(url)


def test_a_slash_at_the_end_names_the_same_object() -> None:
    place = f"memory://objects-{next(_numbers)}"
    _convert(f"{place}/one.pt/")
    assert _held(place) == NAMES


@pytest.mark.parametrize("name", [pytest.param("swift", marks=pytest.mark.s3), "moto", "rclone"])
def test_a_large_object_is_copied_in_parts(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: S3Service = request.getfixturevalue(name)
    service.enter(monkeypatch)
    monkeypatch.setattr(s3copy, "_LARGEST", 5 << 20)
    monkeypatch.setattr(s3copy, "_PART", 5 << 20)
    data = bytes(range(251)) * 50_000
    store = open_store(f"s3://{BUCKET}/parts", STORES)
    store.put("source", data)
    if name == "rclone":
        with pytest.raises(UnsupportedError, match="copies no part"):
            store.duplicate(store.stat("source"), "copy")
        assert store.delete(["source"]) == {"source": None}
        return
    store.duplicate(store.stat("source"), "copy")
    assert store.read("copy") == data
    assert store.unfinished() == []


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        pytest.param("swift", 5 << 20, marks=pytest.mark.s3),
        pytest.param("swift", 1 << 30, marks=pytest.mark.s3),
        ("moto", 5 << 20),
    ],
)
def test_no_copy_is_of_two_objects(
    name: str, largest: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: S3Service = request.getfixturevalue(name)
    service.enter(monkeypatch)
    monkeypatch.setattr(s3copy, "_LARGEST", largest)
    monkeypatch.setattr(s3copy, "_PART", 5 << 20)
    place = f"s3://{BUCKET}/replaced"
    direct = open_store(place, STORES)
    direct.put("source", bytes(12 << 20))
    with fault_proxy(service.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(place, STORES)
        replaced = partial(direct.put, "source", b"1" * (12 << 20))
        proxy.faults = [Fault("^PUT .*/copy", then=replaced)]
        with pytest.raises(IncompleteError, match="source was replaced while"):
            store.duplicate(store.stat("source"), "copy")
    assert service.get("replaced/copy") is None
    assert direct.unfinished() == []
    direct.delete(["source"])
