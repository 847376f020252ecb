"""Dropping and reclaiming on real services: killed at each request, refused, lied to, raced."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import open_target
from ftckpt.errors import (
    DeniedError,
    ExitCode,
    FtckptError,
    RefusedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.formats.catalog import FORMATS
from ftckpt.retention.apply.outcome import Applied, Purged, Undeleted
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.run import apply
from ftckpt.retention.locks import remote as remote_lock
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.classify import marker_of
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.s3.client import S3Client
from ftckpt.storage.s3.store import S3Store
from ftckpt.storage.store import Store
from tests.builders.checkpoints import save_dcp
from tests.builders.small_format import MARKER, Small
from tests.retention.remote_roots import KEEP_2, newest, place_of, save
from tests.servers.faults import Fault, FaultProxy, fault_proxy
from tests.servers.places import QUICK
from tests.servers.s3 import BUCKET, S3Service, upload_tree

pytestmark = pytest.mark.s3

_numbers = itertools.count()
DAY = 86400.0
ALWAYS = 1 << 30
STEPS = range(1, 5)
KEEP_1 = Policy(keep_last=1, min_survivors=1)


@cache
def _raw(endpoint: str, bucket: str) -> Store:
    return open_store(f"s3://{bucket}", QUICK)


class Root:
    """A root on a service, and what may be done to it by a clock of ours."""

    def __init__(self, url: str, *, endpoint: str = "", formats: Sequence[Format] = ()) -> None:
        self.url = url
        self.bucket, _, self.prefix = url.removeprefix("s3://").partition("/")
        self.store = open_store(url, QUICK._replace(endpoint=endpoint))
        self.formats = formats or (Small(),)
        self.now = time.time() + 60

    def plan(self, policy: Policy = KEEP_2) -> Any:
        return prepare(place_of(self.store), self.formats, policy, self.now).plan

    def apply(self, policy: Policy = KEEP_2, **more: Any) -> Applied:
        return self.carry_out(self.plan(policy), **more)

    def carry_out(self, plan: Any, **more: Any) -> Applied:
        place = place_of(self.store)
        return apply(plan, place, self.formats, actor="alice", now=lambda: self.now, **more)

    def undelete(self, *names: str) -> Undeleted:
        place = place_of(self.store)
        return undelete(place, self.formats, names, actor="alice", now=lambda: self.now)

    def purge(self) -> Purged:
        place = place_of(self.store)
        return purge(place, self.formats, actor="cron", now=lambda: self.now)

    def content(self) -> dict[str, bytes]:
        """Return everything that is not ftckpt's own."""
        return {k: data for k, data in self._keys().items() if not k.startswith(".ftckpt/")}

    def trash(self) -> list[str]:
        return [k.rpartition("/")[2] for k in self._keys() if k.startswith(".ftckpt/trash/")]

    def _keys(self) -> dict[str, bytes]:
        store = _raw(os.environ["AWS_ENDPOINT_URL"], self.bucket)
        skip = len(self.prefix) + 1
        return {e.path[skip:]: store.read(e.path) for e in store.walk(self.prefix)}

    def later(self, endpoint: str = "") -> Root:
        """Return the same root for another process, two days on."""
        other = Root(self.url, endpoint=endpoint, formats=tuple(self.formats))
        other.now = self.now + 2 * DAY
        return other


def filled(url: str, steps: Any = STEPS) -> Root:
    root = Root(url)
    for step in steps:
        save(root.store, f"step-{step}", step)
    return root


@pytest.fixture
def root(s3_url: str) -> Root:
    return filled(s3_url)


@pytest.fixture
def proxy(swift: S3Service) -> Iterator[FaultProxy]:
    with fault_proxy(swift.endpoint) as running:
        yield running


class TestRealFormats:
    def test_a_dcp_checkpoint_and_one_file(self, tmp_path: Path, s3_url: str) -> None:
        import torch

        for step in (1, 2, 3):
            save_dcp(tmp_path / f"step-{step}", step=step)
        torch.save({"model": torch.zeros(4), "step": 0}, tmp_path / "step-0.pt")
        upload_tree(tmp_path, s3_url)
        root = Root(s3_url, formats=FORMATS)
        before = root.content()
        done = root.apply()
        assert done.code is ExitCode.OK
        assert [d.entry.name for d in done.dropped] == ["step-0.pt", "step-1"]
        assert before.keys() - root.content().keys() == {"step-1/.metadata"}
        with pytest.raises(FtckptError) as torn:
            open_target(f"{s3_url}/step-1", FORMATS, StoreOptions()).open()
        assert torn.value.exit_code is ExitCode.NOT_FOUND
        target = open_target(s3_url, FORMATS, StoreOptions())
        assert target.root is not None
        assert [c.candidate.path for c in target.root.children()] == ["step-3", "step-2"]
        assert root.undelete("step-1").code is ExitCode.OK
        assert root.content() == before
        assert open_target(f"{s3_url}/step-1", FORMATS, StoreOptions()).open().step == 1
        later = root.later()
        assert later.purge().code is ExitCode.OK
        assert {key.split("/")[0] for key in root.content()} == {"step-1", "step-2", "step-3"}

    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            ("dcp", "run/.metadata"),
            ("index", "run/model.safetensors.index.json"),
            ("single", None),
        ],
    )
    def test_what_commits_a_format(self, tmp_path: Path, state: str, expected: str | None) -> None:
        place = tmp_path / "run"
        if state == "dcp":
            save_dcp(place)
        else:
            _save_hugging_face(place, shards=2 if state == "index" else 1)
        target = open_target(str(place), FORMATS, StoreOptions())
        store = open_store(str(tmp_path))
        assert target.part is not None
        part = target.part._replace(entry=target.part.entry._replace(path="run"))
        marker = marker_of(store, part, store.walk("run"))
        assert (marker and marker.path) == expected


def _save_hugging_face(place: Path, shards: int) -> None:
    import json

    import torch
    from safetensors.torch import save_file

    place.mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}')
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.zeros(3)}, place / name)
    if shards > 1:
        weights = {f"w{number}": name for number, name in enumerate(names)}
        index = {"metadata": {"total_size": 24}, "weight_map": weights}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))


class Killed(BaseException):
    """A process was killed."""


_CHANGES = frozenset({"put_object", "delete_objects", "delete_object"})


_CALL, _ONCE = S3Client.call, S3Client.once


def kill_points(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Root],
    work: Callable[[Root], Any],
    every: int,
) -> Iterator[Root]:
    """Let nothing arrive after the k-th request that changes anything, for every so many a k."""
    for point in range(0, 200, every):
        root = make()
        left = point

        def count(operation: str) -> None:
            nonlocal left
            if left < 0 or operation in _CHANGES:
                left -= 1
            if left < 0:
                raise Killed

        async def counted_call(self: S3Client, operation: str, **more: Any) -> Any:
            count(operation)
            return await _CALL(self, operation, **more)

        async def counted_once(self: S3Client, operation: str, parameters: Any) -> Any:
            count(operation)
            return await _ONCE(self, operation, parameters)

        with monkeypatch.context() as patch:
            patch.setattr(S3Client, "call", counted_call)
            patch.setattr(S3Client, "once", counted_once)
            try:
                work(root)
            except Killed:
                pass
            else:
                return
        _end_leases(root)
        yield root
    raise AssertionError("it was not done after 200 changes")


def _end_leases(root: Root) -> None:
    """Make the lease of one that was killed as old as it will be in ten minutes."""
    store = _raw(os.environ["AWS_ENDPOINT_URL"], root.bucket)
    for entry in store.walk(root.prefix):
        if re.search(r"/lock/\d+\.json$", entry.path):
            store.put(entry.path, b'{"holder": "killed", "seconds": 1e-9}')


class TestKilled:
    """The dropping and reclaiming of one checkpoint, stopped before each of its requests."""

    def test_at_each_request(
        self, moto: S3Service, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> None:
        every = 1 if request.config.getoption("--campaign") == "full" else 8
        moto.enter(monkeypatch)
        monkeypatch.setattr(remote_lock, "_ROUNDING", -5.0)  # it is not waited for
        points = 0

        def make() -> Root:
            return filled(f"s3://{BUCKET}/killed-{next(_numbers)}", (1, 2))

        def work(root: Root) -> None:
            assert root.apply(KEEP_1, purge_now=True).code is ExitCode.OK

        for root in kill_points(monkeypatch, make, work, every):
            points += 1
            again = Root(root.url)
            assert newest(again.store) == "step-2"
            standing = root.content()
            gone = {f"step-1/{name}" for name in (MARKER, "data", "deep/data")} - standing.keys()
            assert len(standing) + len(gone) == 6
            work(again)
            assert root.later().purge().code is ExitCode.OK
            work(Root(root.url))  # a drop that was killed before its marker went is one no more
            assert {key.split("/")[0] for key in root.content()} == {"step-2"}
            assert root.trash() == []
        assert points * every > 12


class TestFaults:
    def test_once_is_nothing(self, root: Root, proxy: FaultProxy) -> None:
        proxy.faults = [
            Fault("^GET .*list-type=2", status=503),
            Fault("^PUT .*/trash/", cut="lose"),
            Fault("^PUT .*/trash/", status=500),
            Fault("^POST .*delete", status=503),
            Fault("^HEAD", status=500, code=""),
        ]
        through = Root(root.url, endpoint=proxy.endpoint)
        assert through.apply().code is ExitCode.OK
        assert len(root.trash()) == 2
        proxy.faults = [Fault("^POST .*delete", cut="lose"), Fault("^HEAD", cut="lose")]
        assert root.later(proxy.endpoint).purge().code is ExitCode.OK
        assert root.trash() == []

    def test_without_permission_to_delete_nothing_is_begun(
        self, root: Root, proxy: FaultProxy
    ) -> None:
        before = root.content()
        proxy.faults = [Fault("^(POST|DELETE)", ALWAYS, status=403, code="AccessDenied")]
        with pytest.raises(DeniedError):
            Root(root.url, endpoint=proxy.endpoint).apply()
        assert root.content() == before
        assert root.trash() == []

    def test_keys_that_are_refused_one_by_one(
        self, root: Root, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root.apply()
        call = S3Client.call

        async def refusing(self: S3Client, operation: str, **asked: Any) -> dict[str, Any]:
            keys = [o["Key"] for o in asked.get("Delete", {}).get("Objects", ())]
            if not any(key.endswith("step-1/data") for key in keys):
                return await call(self, operation, **asked)
            marker, *data = sorted(keys, key=lambda key: not key.endswith(MARKER))
            codes = ("AccessDenied", "InternalError")
            errors = [{"Key": k, "Code": c} for k, c in zip(data, codes, strict=True)]
            return {"Deleted": [{"Key": marker}], "Errors": errors}

        with monkeypatch.context() as patch:
            patch.setattr(S3Client, "call", refusing)
            done = root.later().purge()
        assert done.code is ExitCode.PARTIAL
        assert [t.name for t in done.erased] == ["step-2"]
        (error,) = done.failed.values()
        assert isinstance(error, DeniedError)
        assert "(and 1 more)" in error.message
        left = {k for k in root.content() if k.startswith("step-1")}
        assert left == {"step-1/data", "step-1/deep/data"}
        assert root.later().purge().code is ExitCode.OK
        assert root.trash() == []

    def test_what_fails_for_good_says_so_and_loses_nothing(
        self, root: Root, proxy: FaultProxy
    ) -> None:
        before = root.content()
        plan = root.plan()
        proxy.faults = [Fault("^PUT .*/trash/", ALWAYS, status=503)]
        done = Root(root.url, endpoint=proxy.endpoint).carry_out(plan)
        assert done.code is ExitCode.UNAVAILABLE
        assert root.content() == before
        assert newest(root.store) == "step-4"

    @pytest.mark.parametrize("hidden", ["step-4", "step-1/deep"])
    def test_a_listing_that_is_behind(
        self, root: Root, monkeypatch: pytest.MonkeyPatch, hidden: str
    ) -> None:
        """One of a kept checkpoint stops it; one of what is to go looks like its removal."""
        before = root.content()
        plan = root.plan()
        listing = S3Store._list

        async def short(self: S3Store, path: str, *, deep: bool) -> Any:
            found = await listing(self, path, deep=deep)
            return [e for e in found if not e.path.startswith(hidden)]

        with monkeypatch.context() as patch:
            patch.setattr(S3Store, "_list", short)
            if hidden == "step-4":
                with pytest.raises((RefusedError, UnavailableError)):
                    root.carry_out(plan)
            else:
                assert root.carry_out(plan).absent == ("step-1",)
        touched = set() if hidden == "step-4" else {f"step-2/{MARKER}"}
        assert before.keys() - root.content().keys() == touched

    def test_an_empty_listing(self, root: Root, proxy: FaultProxy) -> None:
        before = root.content()
        plan = root.plan()
        empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        proxy.faults = [Fault("^GET .*list-type=2", ALWAYS, whole=empty)]
        with pytest.raises(FtckptError):
            Root(root.url, endpoint=proxy.endpoint).carry_out(plan)
        assert root.content() == before

    def test_a_service_that_ignores_conditions(
        self, rclone: S3Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rclone.enter(monkeypatch)
        root = filled(f"s3://{BUCKET}/gc-{next(_numbers)}")
        before = root.content()
        plan = root.plan()  # reading takes no lock
        with pytest.raises(UnsupportedError):
            root.carry_out(plan)
        assert root.content() == before
        assert root.trash() == []


class RaceTests:
    """Two gcs that carry out one plan at the same moment."""

    @pytest.fixture
    def service(self) -> S3Service:
        raise NotImplementedError

    def test_two_at_once(self, service: S3Service, monkeypatch: pytest.MonkeyPatch) -> None:
        service.enter(monkeypatch)
        root = filled(f"s3://{BUCKET}/race-{next(_numbers)}")
        plan = root.plan()
        before = root.content()
        barrier = threading.Barrier(2)
        codes: list[ExitCode] = []

        def run() -> None:
            other = Root(root.url)
            barrier.wait()
            try:
                codes.append(other.carry_out(plan).code)
            except FtckptError as error:
                codes.append(error.exit_code)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert set(codes) <= {ExitCode.OK, ExitCode.REFUSED, ExitCode.PARTIAL}
        gone = before.keys() - root.content().keys()
        assert gone <= {f"step-{n}/{MARKER}" for n in (1, 2)}
        again = Root(root.url)
        assert again.apply().code is ExitCode.OK
        assert sorted({name.partition("~")[2] for name in root.trash()}) == ["step-1", "step-2"]


class TestRaceOnSwift(RaceTests):
    @pytest.fixture
    def service(self, swift: S3Service) -> S3Service:
        return swift


class TestRaceOnCeph(RaceTests):
    @pytest.fixture
    def service(self, radosgw: S3Service) -> S3Service:
        return radosgw


def versioned(service: S3Service) -> str:
    """Return a place in a new bucket that keeps versions."""
    bucket = f"gc-versions-{next(_numbers)}"
    service.client.create_bucket(Bucket=bucket)
    service.client.put_bucket_versioning(
        Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    return f"s3://{bucket}/run"


class TestVersions:
    """A bucket that keeps versions: what is reclaimed is gone in every version."""

    def test_dropped_undone_dropped_and_reclaimed(
        self, moto: S3Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moto.enter(monkeypatch)
        root = filled(versioned(moto), (1, 1, 2, 3))  # of the first, two versions of each key
        before = root.content()
        assert root.apply().code is ExitCode.OK
        assert root.undelete("step-1").code is ExitCode.OK
        assert root.content() == before
        assert root.apply().code is ExitCode.OK
        assert root.later().purge().code is ExitCode.OK
        assert root.content() == {k: v for k, v in before.items() if not k.startswith("step-1/")}
        left = moto.client.list_object_versions(Bucket=root.url.split("/")[2], Prefix="run/step-1/")
        assert left.get("Versions", []) == []
        assert {m["Key"] for m in left.get("DeleteMarkers", [])} <= {f"run/step-1/{MARKER}"}

    def test_ceph_ignores_conditions_there(
        self, radosgw: S3Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Release 16 holds a condition in a plain bucket, and not in one that keeps versions.
        radosgw.enter(monkeypatch)
        root = filled(versioned(radosgw))
        before = root.content()
        try:
            done = root.apply()
        except UnsupportedError:
            assert root.content() == before
            assert root.trash() == []
        else:
            assert done.code is ExitCode.OK
