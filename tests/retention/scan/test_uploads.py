"""Uploads that nobody finished: reported, and aborted where they are ours and old."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from ftckpt.discovery.resolve import locate
from ftckpt.discovery.roots import Root
from ftckpt.errors import DeniedError, UnavailableError
from ftckpt.retention.apply.purge import purge
from ftckpt.retention.scan.leftovers import (
    abort_own,
    dead_uploads,
    is_sent_to,
    old_uploads,
    own_uploads,
    upload_notes,
)
from ftckpt.storage import open_store
from ftckpt.storage.s3.store import S3Store
from ftckpt.transfer.staging.remote import RemoteStaging
from tests.retention.carrying import FORMATS
from tests.retention.remote_roots import planned, save
from tests.servers.places import QUICK
from tests.servers.s3 import BUCKET, S3Service

pytestmark = pytest.mark.s3

_numbers = itertools.count()
DAY = 86400.0


@pytest.fixture
def root(swift: S3Service, s3_url: str) -> Root:
    store = open_store(s3_url, QUICK)
    for step in (1, 2):
        save(store, f"step-{step}", step)
    staging = RemoteStaging(open_store(f"{s3_url}/step-3", QUICK))
    staging.begin("a plan", {"weights/shard-1": 1 << 30}, restart=False)
    prefix = s3_url.removeprefix(f"s3://{BUCKET}/")
    for key in ("step-3/weights/shard-1", "step-3/weights/other", "theirs/file"):
        swift.client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    return planned(store).roots[""]


def paths(found: Any) -> list[str]:
    return [upload.path for upload in found]


def test_only_old_ones_and_ours_are_aborted(root: Root) -> None:
    now = time.time()
    assert old_uploads(root, now) == []
    assert list(upload_notes(root, now)) == []
    assert list(abort_own(root, now)) == []
    later = now + 2 * DAY
    old = old_uploads(root, later)
    assert paths(old) == ["step-3/weights/other", "step-3/weights/shard-1", "theirs/file"]
    assert paths(own_uploads(root.store, old)) == ["step-3/weights/shard-1"]
    (note,) = upload_notes(root, later)
    assert "3 uploads that nobody has finished for a day" in note
    assert "1 of ftckpt's own" in note
    (done,) = abort_own(root, later)
    assert done.endswith("step-3/weights/shard-1 was aborted")
    assert paths(old_uploads(root, later)) == ["step-3/weights/other", "theirs/file"]


def test_a_purge_aborts_them_where_nothing_else_is_to_be_freed(root: Root) -> None:
    later = time.time() + 2 * DAY
    place = locate(root.store.url, QUICK)
    assert purge(place, FORMATS, actor="me", now=lambda: later).notes == (
        f"an upload to {root.store.url}/step-3/weights/shard-1 was aborted",
    )
    assert paths(old_uploads(root, later)) == ["step-3/weights/other", "theirs/file"]


def test_those_of_a_transfer_that_gets_on_stay(root: Root) -> None:
    """Parts of one take days for a file, and other files of it grow meanwhile."""
    later = time.time() + 2 * DAY
    (own,) = dead_uploads(root, later)
    real = S3Store.walk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            S3Store, "walk", lambda s, p: [e._replace(mtime=later - 60) for e in real(s, p)]
        )
        assert dead_uploads(root, later) == []
        assert list(abort_own(root, later)) == []
    assert dead_uploads(root, later) == [own]


def test_one_that_gets_parts_stays(root: Root) -> None:
    later = time.time() + 2 * DAY
    (own,) = dead_uploads(root, later)
    store = root.store
    assert isinstance(store, S3Store)
    assert store.last_sent(own) is None
    at = store.at(own.path)
    store.client.run(
        store.client.call(
            "upload_part", url=at.url, file=at.path, doing="write", Bucket=at.bucket, Key=at.key,
            UploadId=own.id, PartNumber=1, Body=b"part",
        )
    )  # fmt: skip
    sent = store.last_sent(own)
    assert sent is not None
    assert abs(sent - time.time()) < 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Store, "last_sent", lambda s, upload: later - 60)
        assert dead_uploads(root, later) == []
        assert is_sent_to(store, "step-3", later)
    assert dead_uploads(root, later) == [own]
    assert not is_sent_to(store, "step-3", later)


def test_they_are_in_the_notes_of_a_plan(root: Root) -> None:
    later = time.time() + 2 * DAY
    (note,) = planned(root.store, now=later).plan.notes
    assert "uploads that nobody has finished" in note


@pytest.mark.parametrize("text", [b"", b"{}\n{}\n", b'{}\n{"files": 3}\n', b"{}\n[[[["])
def test_by_a_damaged_marker_nothing_is_ours(root: Root, text: bytes) -> None:
    root.store.put("step-3/.ftckpt/transfer.json", text)
    assert own_uploads(root.store, old_uploads(root, time.time() + 2 * DAY)) == []


def test_a_plan_does_not_depend_on_them(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(store: S3Store, path: str = "") -> Any:
        raise DeniedError("no permission to list uploads")

    later = time.time() + 2 * DAY
    with monkeypatch.context() as patch:
        patch.setattr(S3Store, "unfinished", denied)
        assert planned(root.store, now=later).plan.notes == ()
        assert list(abort_own(root, later)) == []
    monkeypatch.setattr(S3Store, "abort", lambda store, own: [UnavailableError("down")] * len(own))
    (said,) = abort_own(root, later)
    assert said.endswith("stays: down")
