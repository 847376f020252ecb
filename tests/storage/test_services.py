"""Other services that speak S3: Ceph, a lookalike that ignores half of it, archive tiers."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import pytest

from ftckpt.checkpoint import Extent
from ftckpt.errors import (
    DeniedError,
    ExistsError,
    RefusedError,
    TruncatedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.own_files import is_leftover
from ftckpt.storage.s3.store import S3Store
from tests.conformance.stores import Place, StoreTests
from tests.servers.places import QUICK, key_of, place_on
from tests.servers.s3 import BUCKET, S3Service

pytestmark = pytest.mark.s3

_numbers = itertools.count()


def new_url() -> str:
    return f"s3://{BUCKET}/place-{next(_numbers)}"


class TestRadosGateway(StoreTests):
    @pytest.fixture
    def place(self, radosgw: S3Service, monkeypatch: pytest.MonkeyPatch) -> Place:
        radosgw.enter(monkeypatch)
        return place_on(radosgw, new_url())


class TestLookalike:
    """rclone answers like S3 and is not: what it ignores is noticed, never trusted."""

    @pytest.fixture
    def place(self, rclone: S3Service, monkeypatch: pytest.MonkeyPatch) -> Place:
        rclone.enter(monkeypatch)
        return place_on(rclone, new_url())

    def test_ignored_condition_is_noticed(self, place: Place) -> None:
        place.store.create("c", b"one")
        assert place.store.traits.conditional_put is False
        with pytest.raises(ExistsError):
            place.store.create("c", b"two")
        assert place.raw_get("c") == b"one"
        assert not any(is_leftover(e.path) for e in place.store.walk())

    def test_range_answered_with_200_is_right(self, place: Place) -> None:
        data = bytes(range(256)) * 100
        place.raw_put("r", data)
        with place.store.open("r") as reader:
            assert reader.read(1000, 300) == data[1000:1300]
            with pytest.raises(TruncatedError):
                reader.read(len(data) - 5, 10)
        assert place.store.read_many([Extent("r", 7, 9)]) == [data[7:16]]

    def test_no_uploads_are_no_failure(self, place: Place) -> None:
        place.raw_put("x", b"1")
        assert place.store.unfinished() == []

    def test_writing_and_deleting(self, place: Place) -> None:
        place.store.put("d/x", b"1")
        assert place.raw_get("d/x") == b"1"
        assert place.store.delete(["d/x"]) == {"d/x": None}
        assert place.raw_get("d/x") is None


class TestArchive:
    @pytest.fixture
    def place(self, moto: S3Service, monkeypatch: pytest.MonkeyPatch) -> Place:
        moto.enter(monkeypatch)
        return place_on(moto, new_url())

    @pytest.mark.parametrize("tier", ["GLACIER", "DEEP_ARCHIVE"])
    @pytest.mark.parametrize("listed", [True, False])
    def test_archived_object_is_there_and_not_readable(
        self, place: Place, moto: S3Service, tier: str, listed: bool
    ) -> None:
        key = key_of(place.store.url, "cold")
        moto.client.put_object(Bucket=BUCKET, Key=key, Body=b"123", StorageClass=tier)
        if listed:
            assert [(e.size, e.archived) for e in place.store.walk()] == [(3, True)]
        with pytest.raises(UnsupportedError) as caught:
            place.store.read_many([Extent("cold", 0, 1)])
        assert caught.value.kind == "archived-object"
        with pytest.raises(UnsupportedError) as caught:
            place.store.open("cold")
        assert caught.value.kind == "archived-object"
        with pytest.raises(UnsupportedError):
            place.store.read("cold")
        assert place.store.stat("cold").archived

    def test_restored_object_is_readable(self, place: Place, moto: S3Service) -> None:
        key = key_of(place.store.url, "warm/x")
        moto.client.put_object(Bucket=BUCKET, Key=key, Body=b"123", StorageClass="GLACIER")
        moto.client.restore_object(Bucket=BUCKET, Key=key, RestoreRequest={"Days": 1})
        assert not place.store.stat("warm/x").archived
        assert place.store.read("warm/x") == b"123"

    def test_instant_archive_tier_is_readable(self, place: Place, moto: S3Service) -> None:
        key = key_of(place.store.url, "instant/x")
        moto.client.put_object(Bucket=BUCKET, Key=key, Body=b"123", StorageClass="GLACIER_IR")
        assert not place.store.stat("instant/x").archived
        assert [e.archived for e in place.store.walk()] == [False]
        assert place.store.read("instant/x") == b"123"


class TestDelete:
    @pytest.fixture
    def store(self, moto: S3Service, monkeypatch: pytest.MonkeyPatch) -> S3Store:
        moto.enter(monkeypatch)
        return S3Store(new_url(), QUICK)

    def test_a_thousand_a_request(self, store: S3Store) -> None:
        names = [f"n{i}" for i in range(1001)]
        assert set(store.delete(names).values()) == {None}
        assert store.usage().requests == 2

    def test_refusal_of_one_key_is_that_keys_own(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def key(name: str) -> str:
            return store.at(name).key

        async def answer(operation: str, **_: object) -> dict[str, object]:
            assert operation == "delete_objects"
            refusals = {"held": "AccessDenied", "gone": "NoSuchKey", "broken": "InternalError"}
            return {
                "Deleted": [{"Key": key("ok")}],
                "Errors": [{"Key": key(n), "Code": c} for n, c in refusals.items()],
            }

        monkeypatch.setattr(store.client, "call", answer)
        result = store.delete(["ok", "held", "gone", "broken", "silent"])
        assert (result["ok"], result["gone"]) == (None, None)
        assert isinstance(result["held"], DeniedError)
        assert isinstance(result["broken"], UnavailableError)
        assert isinstance(result["silent"], UnavailableError)  # no answer is no success

    def test_a_service_that_deletes_by_etag_is_left_to_it(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Amazon's own has done so since 2025; no server here does.
        call = store.client.call
        asked: list[str] = []

        async def conditional(operation: str, **parameters: Any) -> dict[str, Any]:
            asked.append(operation)
            if operation != "delete_objects":
                return await call(operation, **parameters)
            answer: dict[str, Any] = {"Deleted": [], "Errors": []}
            for item in parameters["Delete"]["Objects"]:
                at = {"Bucket": BUCKET, "Key": item["Key"]}
                etag = await call("head_object", url="", file="", doing="", **at)
                if item.get("ETag", etag["ETag"]) != etag["ETag"]:
                    answer["Errors"].append({"Key": item["Key"], "Code": "PreconditionFailed"})
                    continue
                await call("delete_object", url="", file="", doing="", **at)
                answer["Deleted"].append({"Key": item["Key"]})
            return answer

        for name in ("x", "y"):
            store.put(name, b"1")
        listed = store.walk()
        store.put("y", b"2")
        monkeypatch.setattr(store.client, "call", conditional)
        gone, replaced = store.erase(listed)
        assert gone is None
        assert isinstance(replaced, RefusedError)
        assert [e.path for e in store.walk()] == ["y"]
        asked.clear()
        assert store.erase(store.walk()) == [None]
        assert asked == ["list_objects_v2", "delete_objects"]  # nothing is looked up before

    def test_service_without_bulk_delete(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = store.client.call

        async def refuse(operation: str, **parameters: object) -> object:
            if operation == "delete_objects":
                raise UnsupportedError("MethodNotAllowed")
            return await call(operation, **parameters)  # type: ignore[arg-type]

        store.put("x", b"1")
        monkeypatch.setattr(store.client, "call", refuse)
        assert store.delete(["x", "y"]) == {"x": None, "y": None}


class VersionTests:
    """A bucket that keeps versions: deleting hides, erasing a version frees it."""

    @pytest.fixture
    def service(self) -> S3Service:
        raise NotImplementedError

    @pytest.fixture
    def store(self, service: S3Service, monkeypatch: pytest.MonkeyPatch) -> S3Store:
        bucket = f"versions-{next(_numbers)}"
        service.enter(monkeypatch)
        service.client.create_bucket(Bucket=bucket)
        service.client.put_bucket_versioning(
            Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
        )
        return S3Store(f"s3://{bucket}/run", QUICK)

    def test_history_is_of_these_files_alone(self, store: S3Store) -> None:
        for path in ("step-1/a", "step-1/a", "step-1/b", "step-10/a"):
            store.put(path, path.encode())
        store.delete(["step-1/b"])
        store.put("step-1/b", b"again")
        found = store.history(store.walk("step-1"))
        assert sorted((e.path, e.size) for e in found) == [
            ("step-1/a", 8), ("step-1/a", 8), ("step-1/b", 0), ("step-1/b", 5), ("step-1/b", 8)
        ]  # fmt: skip
        assert len({e.version for e in found}) == 5

    def test_erasing_all_versions_leaves_nothing(self, store: S3Store, service: S3Service) -> None:
        for data in (b"1", b"2", b"3"):
            store.put("step-1/a", data)
        store.put("step-2/a", b"other")
        history = store.history(store.walk("step-1"))
        assert store.delete(["step-1/a"]) == {"step-1/a": None}
        assert store.erase(history) == [None] * 3
        left = service.client.list_object_versions(Bucket=store.url.split("/")[2], Prefix="run/")
        assert [v["Key"] for v in left["Versions"]] == ["run/step-2/a"]
        assert [m["Key"] for m in left["DeleteMarkers"]] == ["run/step-1/a"]
        assert store.erase(history) == [None] * 3  # gone already

    def test_a_version_is_erased_whatever_the_key_shows(self, store: S3Store) -> None:
        store.put("step-1/a", b"old")
        history = store.history(store.walk("step-1"))
        store.put("step-1/a", b"new")
        assert store.erase(history) == [None]
        assert store.read("step-1/a") == b"new"


class TestUploads:
    """Uploads are listed by pages as keys are, and a page that cannot be followed is an error."""

    @pytest.fixture
    def store(self, moto: S3Service, monkeypatch: pytest.MonkeyPatch) -> S3Store:
        moto.enter(monkeypatch)
        return S3Store(new_url(), QUICK)

    def test_pages_are_followed(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[object] = []

        async def answer(operation: str, **parameters: object) -> dict[str, object]:
            asked.append((operation, parameters.get("KeyMarker"), parameters.get("UploadIdMarker")))
            number = len(asked)
            item = {
                "Key": store.at(f"d/{number}").key,
                "UploadId": "u",
                "Initiated": datetime.now(),
            }
            more = {"IsTruncated": True, "NextKeyMarker": "k", "NextUploadIdMarker": f"u{number}"}
            return {"Uploads": [item], **(more if number < 3 else {})}

        monkeypatch.setattr(store.client, "call", answer)
        assert [u.path for u in store.unfinished("d")] == ["d/1", "d/2", "d/3"]
        listing = "list_multipart_uploads"
        assert asked == [(listing, None, None), (listing, "k", "u1"), (listing, "k", "u2")]

    def test_no_way_on_is_an_error(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        async def stuck(operation: str, **parameters: object) -> dict[str, object]:
            return {"IsTruncated": True, "NextKeyMarker": "k"}

        monkeypatch.setattr(store.client, "call", stuck)
        with pytest.raises(UnavailableError, match="listed in part"):
            store.unfinished("d")


class TestVersionsOfMoto(VersionTests):
    @pytest.fixture
    def service(self, moto: S3Service) -> S3Service:
        return moto


class TestVersionsOfRadosGateway(VersionTests):
    @pytest.fixture
    def service(self, radosgw: S3Service) -> S3Service:
        return radosgw
