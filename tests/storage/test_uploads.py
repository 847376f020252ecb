"""Large writes that are given up, fail, or whose answers are lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import UnavailableError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.local import pagecache
from ftckpt.storage.local import write_in_place as localwrite
from ftckpt.storage.local.pagecache import in_memory
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.s3.write import differs
from tests.servers.faults import Fault, fault_proxy
from tests.servers.s3 import BUCKET, S3Service


def test_bytes_of_an_upload_that_was_given_up_go_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = LocalStore(str(tmp_path)).upload("ours", 4)
    real = os.pwrite

    def pwrite(number: int, *more: Any) -> int:
        # A worker came as far as this when the upload is given up and the next file is opened.
        monkeypatch.setattr(os, "pwrite", real)
        upload.close()
        with open(tmp_path / "theirs", "wb"):
            return real(number, *more)

    monkeypatch.setattr(os, "pwrite", pwrite)
    upload.write(0, memoryview(b"ours"))
    assert (tmp_path / "theirs").read_bytes() == b""
    with pytest.raises(UnavailableError, match="was given up"):
        upload.write(0, memoryview(b"more"))


def test_descriptors_are_closed_when_all_have_let_go(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        upload = LocalStore(str(tmp_path)).upload(f"file{number}", 4)
        upload.write(0, memoryview(b"data"))
        upload.finish() if number else upload.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_could_not_be_flushed_is_not_there_for_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = LocalStore(str(tmp_path)).upload("ours", 4)
    upload.write(0, memoryview(b"ours"))

    def fsync(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UnavailableError, match="cannot write"):
        upload.finish()
    assert os.listdir(tmp_path) == []


def test_many_small_writes_where_pages_are_folios_and_one_where_threads_would_meet(
    tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom((1 << 20) + 5)
    real, seen = os.pwrite, []

    def pwrite(number: int, view: memoryview, at: int) -> int:
        seen.append((at, len(view)))
        return real(number, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    written = {}
    for memory, folder in ((False, tmp_path), (True, tmpfs)):
        seen.clear()
        monkeypatch.setattr(localwrite, "in_memory", lambda _, memory=memory: memory)
        upload = LocalStore(str(folder)).upload("ours", 3 + len(data))
        upload.write(3, memoryview(data))
        upload.finish()
        assert (folder / "ours").read_bytes() == bytes(3) + data
        written[memory] = list(seen)
    assert written[True] == [(3, len(data))]
    assert [at % (256 << 10) for at, _ in written[False]] == [3, 0, 0, 0, 0]


def test_where_a_file_has_no_other_place_than_memory(tmpfs: Path) -> None:
    with open(tmpfs / "file", "w") as file, open("/proc/self/status") as other:
        assert in_memory(file.fileno())
        assert not in_memory(other.fileno())


def test_a_system_with_another_structure_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert pagecache._fstatfs.__wrapped__() is None


@pytest.mark.s3
def test_an_upload_whose_end_was_not_answered_is_whole(
    swift: S3Service, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(swift.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url, StoreOptions(retry_seconds=20))
        size = (64 << 20) + 5
        upload = store.upload("large", size)
        lost = Fault("^POST .*uploadId", cut="lose")
        proxy.faults = [Fault("^PUT .*partNumber=2", status=503), lost]
        upload.write(0, memoryview(bytes(64 << 20)))
        upload.write(64 << 20, memoryview(b"tail."))
        upload.finish()
        upload.close()
        assert [fault.times for fault in proxy.faults] == [0, 0]
        assert store.read("large", 64 << 20, 5) == b"tail."


@pytest.mark.s3
def test_an_upload_that_is_given_up_is_aborted(
    swift: S3Service, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(swift.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url, StoreOptions(retry_seconds=1))
        upload = store.upload("large", 65 << 20)
        proxy.faults = [Fault("^PUT .*partNumber=1", 1000, status=403, code="AccessDenied")]
        with pytest.raises(Exception, match="AccessDenied"):
            upload.write(0, memoryview(bytes(64 << 20)))
        upload.close()
        assert proxy.seen("^POST .*[?]uploads") == proxy.seen("^DELETE .*uploadId") == 2
        assert store.unfinished() == []


SIZE = 9 << 20
DATA = bytes(range(256)) * (SIZE // 256)


@pytest.mark.s3
@pytest.mark.parametrize("name", ["swift", "radosgw"])
def test_a_part_that_was_damaged_on_the_way_is_sent_again(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: S3Service = request.getfixturevalue(name)
    service.enter(monkeypatch)
    with fault_proxy(service.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        upload = open_store(f"s3://{BUCKET}/damaged").upload("part", SIZE)
        # The first is the damaged one by which the service shows that it looks.
        proxy.faults = [Fault("^PUT .*part\\?"), Fault("^PUT .*part\\?", sent=SIZE // 2)]
        upload.write(0, memoryview(DATA))
        assert service.get("damaged/part") is None
        upload.finish()
        upload.close()
        assert [fault.times for fault in proxy.faults] == [0, 0]
        assert proxy.seen("^PUT .*part\\?") == 3
        assert not any("content-md5" in head.lower() for head in proxy.heads)
    assert service.get("damaged/part") == DATA


def test_no_part_waits_for_a_leave_that_nobody_may_give(
    moto: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.enter(monkeypatch)
    with fault_proxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        upload = open_store(f"s3://{BUCKET}/leave").upload("part", SIZE)
        upload.write(0, memoryview(DATA))
        upload.close()
        assert proxy.seen("^PUT .*part\\?") == 2
        assert not any("100-continue" in head.lower() for head in proxy.heads)


def test_a_part_of_which_no_more_is_taken_is_sent_again(
    moto: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.enter(monkeypatch)
    data = DATA * 4
    with fault_proxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(f"s3://{BUCKET}/stalled", StoreOptions(timeout=1))
        upload = store.upload("part", len(data))
        # The first is the damaged one by which the service shows whether it looks.
        proxy.faults = [Fault("^PUT .*part\\?"), Fault("^PUT .*part\\?", held=True)]
        upload.write(0, memoryview(data))
        assert proxy.held == 0
        upload.finish()
        upload.close()
        # More where the machine is busy, and the service takes longer than the timeout to answer.
        assert proxy.seen("^PUT .*part\\?") >= 3
    assert moto.get("stalled/part") == data


@pytest.mark.parametrize("act", ["put", "create"])
def test_an_object_of_which_no_more_is_taken_is_sent_again(
    act: str, moto: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.enter(monkeypatch)
    data = DATA * 4
    with fault_proxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(f"s3://{BUCKET}/stalled-{act}", StoreOptions(timeout=1))
        proxy.faults = [Fault("^PUT .*/whole", held=True)]
        getattr(store, act)("whole", data)
        assert proxy.held == 0
        # More where the machine is busy, and the service takes longer than the timeout to answer.
        assert proxy.seen("^PUT .*/whole") >= 2
    assert moto.get(f"stalled-{act}/whole") == data


def test_an_etag_of_a_rule_that_is_not_known_shows_nothing() -> None:
    stored = {"ETag": '"0123456789abcdef0123456789abcdef"'}
    assert differs(stored, "f" * 32)
    assert not differs(stored, f"{'f' * 32}-2")
    assert not differs(stored, "")


def test_damage_that_a_service_takes_is_found_by_what_it_has_stored(
    moto: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.enter(monkeypatch)
    with fault_proxy(moto.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        upload = open_store(f"s3://{BUCKET}/damaged").upload("part", SIZE)
        proxy.faults = [Fault("^PUT .*part\\?"), Fault("^PUT .*part\\?", sent=SIZE // 2)]
        upload.write(0, memoryview(DATA))
        with pytest.raises(UnavailableError, match="does not hold what was written"):
            upload.finish()
        upload.close()
        assert [fault.times for fault in proxy.faults] == [0, 0]


def test_a_lookalike_stores_parts_as_they_are(
    rclone: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    rclone.enter(monkeypatch)
    upload = open_store(f"s3://{BUCKET}/whole").upload("part", SIZE)
    upload.write(0, memoryview(DATA))
    upload.finish()
    upload.close()
    assert rclone.get("whole/part") == DATA


@pytest.mark.s3
def test_what_comes_after_the_end_begins_no_upload(swift: S3Service, s3_url: str) -> None:
    store = open_store(s3_url)
    upload = store.upload("late", SIZE)
    upload.close()
    with pytest.raises(UnavailableError, match="was given up"):
        upload.write(0, memoryview(DATA))
    assert store.unfinished() == []
