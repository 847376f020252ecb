"""`doctor` on buckets: real servers, and a mock for the settings that these do not have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ftckpt.capabilities import Check, State, examine
from ftckpt.capabilities import bucket as doctoring
from ftckpt.errors import DeniedError, NotFoundError
from ftckpt.storage.options import StoreOptions
from tests.servers.s3 import BUCKET, S3Service

pytestmark = pytest.mark.s3
_numbers = itertools.count()


def place(url: str) -> dict[str, Check]:
    """Return the lines about a place."""
    stores = StoreOptions(retry_seconds=5)
    return {one.name: one for one in examine(url, stores=stores) if one.area == "place"}


def keys(service: S3Service, bucket: str = BUCKET) -> set[str]:
    page = service.client.list_objects_v2(Bucket=bucket)
    return {item["Key"] for item in page.get("Contents", ())}


@pytest.fixture
def bucket(moto: S3Service, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """A client and an empty bucket of the mock, which has every setting."""
    moto.enter(monkeypatch)
    name = f"doctored-{next(_numbers)}"
    moto.client.create_bucket(Bucket=name)
    return moto.client, name


def test_a_real_service_has_no_problem_and_keeps_nothing(swift: S3Service, s3_url: str) -> None:
    prefix = s3_url.removeprefix(f"s3://{BUCKET}/")
    swift.put(f"{prefix}/step-1/x", b"data")
    before = keys(swift)
    found = place(s3_url)
    assert [one for one in found.values() if one.state is State.PROBLEM and one.name not in
            ("conditional writes", "conditional deletes")] == []  # fmt: skip
    for name in ("listing", "reading", "writing", "deleting", "multipart uploads", "clock"):
        assert found[name].state is State.OK, found[name]
    assert keys(swift) == before
    assert not swift.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_a_service_that_ignores_conditions_is_told(
    rclone: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    rclone.enter(monkeypatch)
    before = keys(rclone)
    found = place(f"s3://{BUCKET}/run")
    assert found["conditional writes"].state is State.PROBLEM
    assert found["conditional writes"].found == "ignored by the service"
    # It answers with the listing of the bucket, in which no rule and no lock stands.
    assert found["lifecycle rules"].state is State.UNKNOWN
    assert found["object lock"].state is State.UNKNOWN
    assert keys(rclone) == before


def test_a_rule_that_deletes_checkpoints_is_a_problem(bucket: tuple[Any, str]) -> None:
    client, name = bucket
    on, day = {"Status": "Enabled"}, {"Expiration": {"Days": 1}}
    rules: list[dict[str, Any]] = [
        {"ID": "sweep", **on, "Filter": {"Prefix": "run"}, "Expiration": {"Days": 30}},
        {"ID": "logs", **on, "Filter": {"Prefix": "logs/"}, **day},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, **day},
        {
            "ID": "tagged", "Status": "Enabled",
            "Filter": {"Tag": {"Key": "scratch", "Value": "1"}}, "Expiration": {"Days": 1},
        },
        {
            "ID": "cold", "Status": "Enabled", "Filter": {"Prefix": "run7/old/"},
            "Transitions": [{"Days": 9, "StorageClass": "GLACIER"}],
        },
        {
            "ID": "parts", "Status": "Enabled", "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
        },
    ]  # fmt: skip
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": rules})
    found = place(f"s3://{name}/run7")
    assert found["lifecycle rule sweep"][2:4] == (
        State.PROBLEM, "deletes keys that begin with run after 30 days",
    )  # fmt: skip
    assert found["lifecycle rule cold"].state is State.PROBLEM
    assert found["unfinished uploads"].state is State.OK
    assert not {"lifecycle rule logs", "lifecycle rule off", "lifecycle rule tagged"} & set(found)
    assert "lifecycle rules" not in found
    other = place(f"s3://{name}/elsewhere")
    assert other["lifecycle rules"].state is State.OK


def test_no_rule_at_all(bucket: tuple[Any, str]) -> None:
    found = place(f"s3://{bucket[1]}/run7")
    assert found["lifecycle rules"].found == "none deletes here"
    assert found["unfinished uploads"].state is State.NOTE
    assert found["versions"].found == "none"
    assert found["object lock"].state is State.OK
    assert found["content"].found == "empty"


def test_a_bucket_with_versions_keeps_none_of_ours(bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    client.put_object(Bucket=name, Key="run7/step-1/x", Body=b"data")
    for url in (f"s3://{name}/run7", f"s3://{name}"):
        assert place(url)["versions"].state is State.NOTE
    versions = client.list_object_versions(Bucket=name)
    assert [item["Key"] for item in versions["Versions"]] == ["run7/step-1/x"]
    assert not versions.get("DeleteMarkers")


def test_a_locked_bucket_is_not_written_to(
    moto: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto.enter(monkeypatch)
    moto.client.create_bucket(Bucket="doctored-lock", ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}}
    moto.client.put_object_lock_configuration(
        Bucket="doctored-lock",
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
    )
    found = place("s3://doctored-lock/run7")
    assert found["object lock"].found == "COMPLIANCE, 30 days"
    assert found["writing"].found == "not tried"
    assert not moto.client.list_object_versions(Bucket="doctored-lock").get("Versions")


def test_what_a_killed_run_left_goes_with_the_next(
    bucket: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, name = bucket
    for key in ("run/.ftckpt-tmp-doctor-1", "run/.ftckpt-tmp-probe-2", "run/step-1"):
        client.put_object(Bucket=name, Key=key, Body=b"")
    client.put_object(Bucket=name, Key="run/.ftckpt-tmp-doctor-data", Body=b"not ours")
    place(f"s3://{name}/run")  # just written: perhaps by a run that is at work
    held = {item["Key"] for item in client.list_objects_v2(Bucket=name)["Contents"]}
    assert "run/.ftckpt-tmp-doctor-1" in held
    monkeypatch.setattr(doctoring, "_OLD", -1.0)
    place(f"s3://{name}/run")
    held = {item["Key"] for item in client.list_objects_v2(Bucket=name)["Contents"]}
    assert held == {"run/.ftckpt-tmp-doctor-data", "run/step-1"}


def test_what_cannot_be_listed_ends_it(swift: S3Service, monkeypatch: pytest.MonkeyPatch) -> None:
    swift.enter(monkeypatch)
    with pytest.raises(NotFoundError):
        place("s3://no-such-bucket-at-all/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DeniedError):
        place(f"s3://{BUCKET}/run")


def test_another_store_is_tried_by_its_own_calls() -> None:
    from ftckpt.capabilities.bucket import examine_other
    from ftckpt.storage import open_store

    store = open_store("memory://doctored")
    store.put("step-1/x", b"data")
    found = {one.name: one for one in examine_other(store)}
    assert found["writing"].state is State.OK
    assert [entry.path for entry in store.walk()] == ["step-1/x"]
