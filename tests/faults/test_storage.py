"""Storage that fails, refuses, is full, or answers wrongly (rows F1 to F5, F11, F12, F14)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from ftckpt import open_checkpoint
from tests.faults.cli import here
from tests.faults.conftest import Answer
from tests.faults.place import ALWAYS, MANIFEST, VERBS, Place
from tests.servers.faults import Fault
from tests.servers.s3 import BUCKET

Install = Callable[[Answer], None]

READS = ("lstat", "stat", "open", "scandir", "preadv")
WRITES = ("open", "write", "fsync", "link")
READERS = ("verify", "inspect", "latest")


class Failing:
    """Reading calls below a directory that fail: number `at`, or all from there."""

    def __init__(self, below: str, at: int, error: int, *, lasting: bool = False) -> None:
        self.below, self.at, self.error, self.lasting = below, at, error, lasting
        self.calls = 0

    def __call__(self, name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name in READS and self._concerns(given[0]):
            self.calls += 1
            if self.calls == self.at or (self.lasting and self.calls > self.at):
                raise OSError(self.error, os.strerror(self.error))
        return call(*given)

    def _concerns(self, place: object) -> bool:
        return not isinstance(place, str) or place.startswith(self.below)


@pytest.mark.parametrize("verb", VERBS)
def test_f1_one_failure_of_any_call_is_survived(local: Place, verb: str, system: Install) -> None:
    failing = Failing(local.root, 0, errno.EIO)
    system(failing)
    assert here(*local.words(verb)).code == 0
    total = failing.calls
    assert total > 5
    for at in {*range(1, 12), *range(12, total, 11), total}:
        if verb == "seal":
            local.remove(f"step-2/{MANIFEST}")
        system(Failing(local.root, at, errno.EIO))
        done = here(*local.words(verb))
        # What a failed flush has lost is not known, so a write is not tried again in the dark.
        unflushed = verb == "seal" and done.code == 10 and "cannot write" in done.told
        assert done.code == 0 or unflushed, (at, done.stderr)
        if unflushed and MANIFEST not in local.names():
            local.write(f"step-2/{MANIFEST}", b"")


@pytest.mark.s3
@pytest.mark.parametrize("verb", VERBS)
def test_f1_one_failure_of_a_request_is_survived(s3: Place, verb: str) -> None:
    s3.flags = []
    faults = [
        Fault("list-type", status=503),
        Fault("^GET .*step-2", status=500, code="InternalError"),
        Fault("^GET .*step-2.*metadata", cut="reset", at=100),
        Fault("list-type", cut="lose"),
        Fault("^PUT .*step-2", status=503),
    ]
    s3.wire.faults = faults
    s3.run(verb, 0)
    # latest puts a verdict into the ledger, whose name has that of the checkpoint.
    puts = verb in ("seal", "latest")
    assert [f.times for f in faults] == [0, 0, 0, 0, int(not puts)]


@pytest.mark.parametrize("verb", VERBS)
def test_f2_failure_that_lasts(local: Place, verb: str, system: Install) -> None:
    counting = Failing(local.root, 0, 0)
    system(counting)
    assert here("verify" if verb == "seal" else verb, *local.words(verb)[1:]).code == 0
    points = (1, 3, counting.calls // 2, counting.calls)
    # What inspect shows of state that it could not read must not look like state that is absent.
    for at in range(1, counting.calls + 1) if verb == "inspect" else points:
        system(Failing(local.root, at, errno.EIO, lasting=True))
        before = local.state()
        done = here(*local.words(verb))
        # What latest does last is the ledger, which saves time and nothing else.
        late = verb == "latest" and at == counting.calls
        assert done.code == (0 if late else 10), (at, done.stderr)
        assert local.state() == before


@pytest.mark.s3
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("match", ["", "^GET .*step-2.*metadata", "^GET .*distcp"])
def test_f2_requests_that_fail_for_good(s3: Place, verb: str, match: str) -> None:
    before = s3.state()
    s3.wire.faults = [Fault(match, ALWAYS, status=503)]
    done = here(*s3.words(verb))
    assert done.code == 10, done.stderr
    s3.wire.faults = []
    assert s3.state() == before


@pytest.mark.s3
@pytest.mark.parametrize("verb", VERBS)
def test_f3_a_short_body(s3: Place, verb: str) -> None:
    s3.wire.faults = [Fault("^GET .*step-2.*(metadata|distcp)", ALWAYS, cut="close", at=90)]
    assert here(*s3.words(verb)).code == 10


@pytest.mark.parametrize("verb", VERBS)
def test_f3_a_short_read_is_gone_on_with(local: Place, verb: str, system: Install) -> None:
    cut = []

    def answer(name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == "preadv" and len(given[1][0]) > 7:
            cut.append(name)
            return call(given[0], [given[1][0][:7]], *given[2:])
        return call(*given)

    system(answer)
    local.run(verb, 0)
    assert cut


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_f4_a_full_disk(local: Place, call: str, error: int, system: Install) -> None:
    def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == call and (name != "open" or given[1] & os.O_CREAT):
            raise OSError(error, os.strerror(error))
        return does(*given)

    names = local.names()
    system(answer)
    done = here(*local.words("seal"))
    assert done.code == 12, done.stderr
    assert local.names() == names
    # Reading verbs need no space.
    for verb in READERS:
        local.run(verb, 0)


@pytest.mark.s3
def test_f4_a_full_bucket(s3: Place) -> None:
    s3.wire.faults = [Fault("^PUT", ALWAYS, status=507, code="InsufficientStorage")]
    s3.run("seal", 12)


@pytest.mark.parametrize("verb", VERBS)
def test_f5_refused(place: Place, verb: str, system: Install) -> None:
    if place.proxy is None:
        for at in (1, 4):
            system(Failing(place.newest, at, errno.EACCES, lasting=True))
            assert here(*place.words(verb)).code == 11
    else:
        place.wire.faults = [Fault("step-2", ALWAYS, status=403, code="AccessDenied")]
        assert here(*place.words(verb)).code == 11


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_f5_a_read_only_place(local: Place, error: int, system: Install) -> None:
    def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == "open" and given[1] & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return does(*given)

    system(answer)
    assert "--manifest" in local.run("seal", 11).told


@pytest.mark.s3
def test_f5_a_bucket_that_may_only_be_read(s3: Place) -> None:
    s3.wire.faults = [Fault("^PUT", ALWAYS, status=403, code="AccessDenied")]
    assert "--manifest" in s3.run("seal", 11).told


def flip_once(place: Place, file: str, at: int, longer: int, system: Install) -> list[int]:
    """Flip a bit at offset `at` in the first read longer than `longer`; return all such reads."""
    reads: list[int] = []
    if place.proxy is None:

        def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
            got = does(*given)
            if name != "preadv" or not os.readlink(f"/proc/self/fd/{given[0]}").endswith(file):
                return got
            view, offset = memoryview(given[1][0]), given[2]
            if got > longer and min(at, 1) <= offset <= at < offset + got:
                reads.append(at)
                if len(reads) == 1:
                    view[at - offset] ^= 1
            return got

        system(answer)
        return reads
    note = place.proxy.note

    def broken(head: str) -> Fault:
        asked = re.search(rf"GET \S+/step-2/{file}.*bytes=(\d+)-(\d+)", head, re.DOTALL)
        offset, end = (int(asked[1]), int(asked[2])) if asked else (0, 0)
        if end - offset > longer and min(at, 1) <= offset <= at <= end:
            reads.append(at)
            if len(reads) == 1:
                return Fault("", cut="flip", at=at - offset)
        return note(head)

    place.proxy.note = broken  # type: ignore[method-assign]
    return reads


@pytest.mark.parametrize("verb", VERBS)
def test_f11_a_bit_of_the_metadata_that_flips_on_the_way(
    place: Place, verb: str, system: Install
) -> None:
    if verb == "latest":
        place.remove("step-1/.metadata")  # only the newest can be the answer
    reads = flip_once(place, ".metadata", 0, 1000, system)
    assert place.run(verb, 0).document.get("step", 2) == 2
    assert len(reads) > 1


@pytest.mark.parametrize("verb", ["verify", "latest", "seal"])
def test_f11_a_bit_of_a_tensor_that_flips_on_the_way(
    place: Place, verb: str, system: Install
) -> None:
    if verb == "latest":
        place.remove("step-1/.metadata")
    info = max(open_checkpoint(place.newest).tensors.values(), key=lambda info: info.nbytes)
    payload = open_checkpoint(place.newest).payload(info.pieces[0])
    middle = payload.extent.offset + payload.extent.length // 2
    # A file is read from its begin for headers, and beyond the first header for its content.
    reads = flip_once(place, payload.extent.file, middle, 10_000, system)
    done = place.run(verb, 0)
    assert reads
    if verb != "latest":
        told = [f["message"] for f in done.document["findings"]]
        assert any("read wrongly once" in message for message in told)


def listing(place: Place, *, without: str) -> bytes:
    """The answer of a service whose listing of the newest checkpoint is behind."""
    assert place.service is not None
    found = place.service.client.list_objects_v2(Bucket=BUCKET, Prefix=place.key("step-2/"))
    rows = "".join(
        f"<Contents><Key>{o['Key']}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{o['ETag']}</ETag><Size>{o['Size']}</Size></Contents>"
        for o in found["Contents"]
        if without and not o["Key"].endswith(without)
    )
    name = "http://s3.amazonaws.com/doc/2006-03-01/"
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="{name}"><Name>{BUCKET}</Name>'
        f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
    ).encode()


@pytest.mark.s3
@pytest.mark.parametrize("verb", VERBS)
def test_f12_a_cut_listing(s3: Place, verb: str) -> None:
    s3.wire.faults = [Fault("list-type=2.*step-2", ALWAYS, cut="close", at=200)]
    assert here(*s3.words(verb)).code == 10


@pytest.mark.s3
@pytest.mark.parametrize("verb", VERBS)
def test_f12_a_listing_that_is_behind(s3: Place, verb: str) -> None:
    """A file that the listing lacks and the service has is no missing file.

    inspect reads other state in it, to say what a restart would lack.
    """
    old = listing(s3, without="__0_1.distcp")
    s3.wire.faults = [Fault("list-type=2.*step-2", ALWAYS, whole=old)]
    done = here(*s3.words(verb))
    assert done.code == 10, done.stderr
    assert "__0_1.distcp" in done.told


@pytest.mark.s3
@pytest.mark.parametrize(("verb", "code"), [("verify", 9), ("inspect", 9), ("seal", 9)])
def test_f12_an_empty_listing_is_nothing_there(s3: Place, verb: str, code: int) -> None:
    s3.wire.faults = [Fault("list-type=2.*step-2", ALWAYS, whole=listing(s3, without=""))]
    assert here(*s3.words(verb)).code == code


@pytest.mark.s3
def test_f12_an_empty_listing_of_the_newest_is_no_reason_to_go_back(s3: Place) -> None:
    """The root's listing names it, its own names nothing: one of them is wrong."""
    s3.wire.faults = [Fault("list-type=2.*step-2", ALWAYS, whole=listing(s3, without=""))]
    assert here(*s3.words("latest")).code == 10


def test_f12_a_directory_that_does_not_show_a_file(local: Place, system: Install) -> None:
    class Without:
        """What `os.scandir` returned, but for one name."""

        def __init__(self, entries: Any) -> None:
            self.entries = entries

        def __enter__(self) -> list[Any]:
            return [e for e in self.entries if e.name != "__0_1.distcp"]

        def __exit__(self, *exc: object) -> None:
            self.entries.close()

    def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        got = does(*given)
        return Without(got) if name == "scandir" and given[0] == local.newest else got

    system(answer)
    for verb in ("verify", "inspect", "latest", "seal"):
        local.run(verb, 10)


@pytest.mark.s3
def test_f14_a_service_that_ignores_conditions(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal only says what is there: written where none was seen, and read back."""
    from ftckpt.storage.s3.client import S3Client

    once = S3Client.once
    dropped = []

    async def unconditional(self: S3Client, operation: str, given: dict[str, Any]) -> Any:
        dropped.append(given.pop("IfNoneMatch", None))
        return await once(self, operation, given)

    monkeypatch.setattr(S3Client, "once", unconditional)
    assert s3.run("seal", 0).document["written"] is True
    assert "*" in dropped
    assert here(*s3.words("seal")).document["written"] is False
    manifest = s3.read(f"step-2/{MANIFEST}")
    s3.write("step-2/.metadata", s3.read("step-1/.metadata"))
    assert here(*s3.words("seal")).code in (4, 8)
    assert s3.read(f"step-2/{MANIFEST}") == manifest
