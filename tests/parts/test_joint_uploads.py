"""A file that is much of a share goes into a bucket as one upload of several parts."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import DeniedError, ExitCode, UnavailableError
from ftckpt.parts import shared_folder
from ftckpt.retention.scan.leftovers import own_uploads
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryJointUpload, MemoryStore
from ftckpt.storage.s3.client import S3Client
from ftckpt.storage.s3.upload import S3Upload
from ftckpt.transfer.staging.remote import RemoteStaging, StagedObject
from tests.builders.checkpoints import flip
from tests.campaign import examples

from .answers import answer, small_blocks
from .test_copy import files, objects, part
from .test_faults import codes, forked

PARTS = 3
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 5 << 20 if request.node.get_closest_marker("s3") else 4096
    small_blocks(monkeypatch, size)
    monkeypatch.setattr(S3Upload, "unit", size)


@pytest.fixture(params=["directory", "file"])
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of which nearly all bytes are one file."""
    made = tmp_path / "step-2"
    file = tmp_path / "big.safetensors"
    if request.param == "directory":
        made.mkdir()
        (made / "config.json").write_text("{}")
        file = made / "model.safetensors"
    write(file, 6_000)
    return made if request.param == "directory" else file


def write(file: Path, elements: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.arange(elements, dtype="<i4")}, file)


@pytest.fixture
def target(source: Path) -> str:
    return f"memory://joint-{next(_numbers)}/b/{source.name}"


def whole(source: Path) -> dict[str, bytes]:
    return files(source) if source.is_dir() else {"": source.read_bytes()}


def built(target: str) -> dict[str, bytes]:
    store = open_store(target)
    if target.endswith(".safetensors"):
        return {"": store.read("")} if _is_there(target) else {}
    return objects(target)


def _is_there(target: str) -> bool:
    parent, _, name = target.rpartition("/")
    return name in {entry.path for entry in open_store(parent).children("")}


def place(target: str) -> Any:
    parent, _, name = target.rpartition("/")
    inside = f".{name}.ftckpt-staging" if name.endswith(".safetensors") else name
    return open_store(f"{parent}/{inside}")


def uploads(target: str) -> list[str]:
    return [one.path for one in open_store(target.rpartition("/")[0]).unfinished("")]


def test_each_part_sends_blocks_and_the_last_one_joins_them(source: Path, target: str) -> None:
    assert part(source, target, 1) is ExitCode.OK
    assert len(uploads(target)) == 1
    assert part(source, target, 0) is ExitCode.OK
    assert len(uploads(target)) == 1  # the same one
    assert part(source, target, None) is ExitCode.INCOMPLETE
    assert part(source, target, 2) is ExitCode.OK
    assert uploads(target) == []
    seen = answer("verify", target)[0].code
    assert seen in (ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)
    assert part(source, target, None) is ExitCode.OK
    assert built(target) == whole(source)
    assert answer("verify", target, "--level", "content")[0].code is ExitCode.OK
    left = [e.path for e in open_store(target.rpartition("/")[0]).walk("")]
    assert not [path for path in left if "staging" in path or "transfer" in path]


def test_no_block_is_sent_twice(source: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    real = MemoryJointUpload.write

    def told(self: MemoryJointUpload, offset: int, view: memoryview) -> None:
        sent.append(offset)
        real(self, offset, view)

    monkeypatch.setattr(MemoryJointUpload, "write", told)
    for number in (*range(PARTS), 0, 1, None):
        assert part(source, target, number) is ExitCode.OK
    assert len(sent) == len(set(sent)) > PARTS


def test_what_is_read_back_by_whom(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can read it before it is joined; parts that are started again do it then."""
    for number in (*range(PARTS), *range(PARTS)):
        assert part(source, target, number) is ExitCode.OK
    said: list[str] = []
    monkeypatch.setattr(
        "ftckpt.commands.cli.invocation.Invocation.say", lambda _, t: said.append(t)
    )
    assert part(source, target, None) is ExitCode.OK
    assert not [text for text in said if "read back here" in text]


def ended_at(monkeypatch: pytest.MonkeyPatch, call: tuple[Any, str], when: int) -> list[int]:
    """End a run at its `when`-th call of a store, and at each later one; return which it met."""
    kind, name = call
    real, calls = getattr(kind, name), itertools.count(1)
    met: list[int] = []

    def dying(self: Any, *words: Any, **more: Any) -> Any:
        number = next(calls)
        if number >= when:
            met.append(number)
            raise AssertionError("the process has ended")
        return real(self, *words, **more)

    monkeypatch.setattr(kind, name, dying)
    return met


CALLS: list[tuple[Any, str]]
CALLS = [(MemoryStore, name) for name in ("put", "create", "begin_joint_upload", "delete", "abort")]
CALLS += [(MemoryJointUpload, name) for name in ("write", "finish")]


@pytest.mark.parametrize("source", ["file"], indirect=True)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[1]))
def test_ended_at_every_change(
    source: Path, target: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)
    for when in itertools.count(1):
        place = f"{target.rpartition('/')[0]}/{when}/{source.name}"
        ended = 0
        for number in (*range(PARTS), None):
            with monkeypatch.context() as dying:
                met = ended_at(dying, call, when)
                part(source, place, number)
            ended += bool(met)
            if number is not None:
                assert answer("verify", place)[0].code in (ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)
                assert part(source, place, number) is ExitCode.OK
        assert part(source, place, None) in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert built(place) == whole(source)
        if not ended:
            break
    assert when > 1


def lose_the_upload(target: str) -> None:
    store = place(target)
    store.abort(store.unfinished(""))


def lose_the_name(target: str) -> None:
    store = place(target)
    store.delete([e.path for e in store.walk("") if e.path.endswith(".upload")])


def lose_the_receipt(target: str) -> None:
    store = place(target)
    store.delete([e.path for e in store.walk(".ftckpt/transfer") if ".upload" not in e.path])


def tear_the_receipt(target: str) -> None:
    store = place(target)
    for entry in store.walk(".ftckpt/transfer"):
        if ".upload" not in entry.path:
            lines = store.read(entry.path).splitlines(keepends=True)
            store.put(entry.path, b"".join(lines[:-1]) + lines[-1][:-20])


def send_another_part(target: str) -> None:
    store = place(target)
    for one in store.unfinished(""):
        store.parts_of(one.path, one.id)[0] = b"other bytes"


@pytest.mark.parametrize("sent", [2, 3])
@pytest.mark.parametrize(
    "harm",
    [lose_the_upload, lose_the_name, lose_the_receipt, tear_the_receipt, send_another_part],
)
def test_what_the_store_no_longer_has_is_sent_again(
    source: Path, target: str, harm: Callable[[str], None], sent: int
) -> None:
    for number in range(sent):
        assert part(source, target, number) is ExitCode.OK
    harm(target)
    for number in range(sent, PARTS):
        assert part(source, target, number) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert built(target) == whole(source)
    assert uploads(target) == []


@pytest.mark.parametrize("how", [["--no-proof"], []])
def test_a_receipt_that_lacks_a_block_is_not_believed(
    source: Path, target: str, how: list[str]
) -> None:
    """A manifest that is made of it would describe less than the file."""
    for number in range(PARTS):
        assert answer("copy", source, target, "--part", f"{number}/{PARTS}", *how)[0].code == 0
    tear_the_receipt(target)
    root = open_store(target.rpartition("/")[0])
    root.delete([e.path for e in root.walk(".ftckpt/parts") if "/1-3" in e.path])
    assert answer("copy", source, target, "--part", f"1/{PARTS}", *how)[0].code == 0
    done = answer("copy", source, target, "--finish", *how)[0]
    assert done.code == 0, done
    assert answer("verify", target, "--level", "content")[0].code is ExitCode.OK
    assert built(target) == whole(source)


def test_a_damaged_name_is_refused(source: Path, target: str) -> None:
    part(source, target, 0)
    store = place(target)
    (name,) = [e.path for e in store.walk("") if e.path.endswith(".upload")]
    store.put(name, b"{}")
    assert part(source, target, 1) is ExitCode.REFUSED
    store.delete([name])
    finishing: list[int | None] = [1, 2, None]
    for each in finishing:
        assert part(source, target, each) is ExitCode.OK
    assert built(target) == whole(source)


def test_a_bucket_that_lets_two_names_win(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's blocks are sent again, and its upload is aborted."""
    for number in range(2):
        assert part(source, target, number) is ExitCode.OK
    store = place(target)
    (name,) = [e.path for e in store.walk("") if e.path.endswith(".upload")]
    (one,) = store.unfinished("")
    other = store.begin_joint_upload(one.path)
    store.put(name, store.read(name).replace(f'"{one.id}"'.encode(), f'"{other}"'.encode()))
    assert part(source, target, 2) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert built(target) == whole(source)
    assert uploads(target) == []


def test_a_damaged_source_is_not_copied(source: Path, target: str) -> None:
    answer("seal", source)
    file = source / "model.safetensors" if source.is_dir() else source
    flip(file, file.stat().st_size // 2)
    ends = [part(source, target, number) for number in range(PARTS)]
    assert ExitCode.CORRUPT in ends
    assert part(source, target, None) is ExitCode.INCOMPLETE
    assert "" not in built(target) or source.is_dir()
    assert answer("verify", target)[0].code in (ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)


def test_one_machine_begins_anew(source: Path, target: str) -> None:
    """What parts have left is forgotten, and their uploads with it."""
    if not source.is_dir():
        pytest.skip("a file is written under its own name by one machine")
    part(source, target, 0)
    source.joinpath("config.json").write_text('{"a": 1}')
    assert answer("copy", source, target)[0].code is ExitCode.REFUSED
    assert answer("copy", source, target, "--restart")[0].code is ExitCode.OK
    assert built(target) == whole(source)
    assert uploads(target) == []


def test_a_straggler_sends_nothing_more(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its twin has ended, and others have joined the upload: it is told to run again."""
    real, calls = MemoryJointUpload.write, itertools.count()

    def slow(self: MemoryJointUpload, offset: int, view: memoryview) -> None:
        if next(calls) == 1:
            for number in range(PARTS):
                assert part(source, target, number) is ExitCode.OK
        real(self, offset, view)

    with monkeypatch.context() as late:
        late.setattr(MemoryJointUpload, "write", slow)
        assert part(source, target, 0) is ExitCode.REFUSED
    assert part(source, target, 0) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert built(target) == whole(source)
    assert uploads(target) == []


def test_a_part_that_cannot_send_leaves_no_record(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Any, offset: int, view: memoryview) -> None:
        raise UnavailableError("the service is away")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryJointUpload, "write", away)
        assert part(source, target, 0) is ExitCode.UNAVAILABLE
    for number in [1, 2, 0, None]:
        assert part(source, target, number) is ExitCode.OK
    assert built(target) == whole(source)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("service", "source"),
    [("swift", "file"), ("rclone", "directory"), ("moto", "file")][: examples(1, 3)],
    indirect=["source"],
)
def test_on_a_real_service(
    source: Path, service: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a part whose record is lost: it finds its upload, or that others have joined it."""
    request.getfixturevalue(service).enter(monkeypatch)
    write(source / "model.safetensors" if source.is_dir() else source, 11 << 18)
    base = f"s3://ftckpt-tests/joint-{service}-{os.getpid()}-{next(_numbers)}"
    url: Any = f"{base}/{source.name}"
    assert part(source, url, 0) is ExitCode.OK
    for record in open_store(base).walk(".ftckpt"):
        open_store(base).delete([record.path])
    for number in (0, 1):
        assert part(source, url, number) is ExitCode.OK
    assert place(url).unfinished("") or service == "rclone"  # it lists none
    assert part(source, url, 2) is ExitCode.OK
    assert part(source, url, None) is ExitCode.OK
    assert built(url) == whole(source)
    assert answer("verify", url, "--level", "content")[0].code is ExitCode.OK
    assert open_store(base).unfinished("") == []


@pytest.mark.s3
@pytest.mark.parametrize("source", ["file"], indirect=True)
def test_killed_at_random_requests(
    source: Path, rclone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `kill -9`: a part or the finisher, before or after a request was answered."""
    rclone.enter(monkeypatch)
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)
    small_blocks(monkeypatch, 4096)
    monkeypatch.setattr(S3Upload, "unit", 4096)
    chosen = random.Random(24)
    for number in range(examples(1, 100)):
        url: Any = f"s3://ftckpt-tests/killed-{os.getpid()}-{number}/{source.name}"
        order: list[int | None] = [*chosen.sample(range(PARTS), PARTS), None]
        for at, which in enumerate(order):
            if at >= examples(2, 0):  # who joins it, and who finishes
                point = chosen.randrange(1, 60)
                codes([forked(lambda n=which, k=point, url=url: killed(source, url, n, k))])  # type: ignore[misc]
            if which is not None:
                assert answer("verify", url)[0].code in (ExitCode.INCOMPLETE, ExitCode.NOT_FOUND)
                assert part(source, url, which) is ExitCode.OK
        assert part(source, url, None) in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert built(url) == whole(source)


def killed(source: Path, url: str, number: int | None, point: int) -> ExitCode:
    """Do a part in a process that ends at a request, half of the times after its answer."""
    real, calls = S3Client._ask, itertools.count(1)

    async def ask(self: S3Client, *words: Any, **more: Any) -> Any:
        now = next(calls)
        if now == point and point % 2:
            os._exit(137)
        found = await real(self, *words, **more)
        if now == point:
            os._exit(137)
        return found

    S3Client._ask = ask  # type: ignore[method-assign]
    return part(source, url, number)


@pytest.mark.parametrize("source", ["directory"], indirect=True)
def test_what_everybody_has_given_up(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` names the upload, and `gc` aborts it, however it goes about the rest."""
    root = target.rpartition("/")[0]
    assert part(source, target, 0) is ExitCode.OK
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 9 * 86400)
    assert answer("copy", source, f"{root}/step-3")[0].code is ExitCode.OK
    said = answer("status", root)[1]
    (run,) = said["runs"]
    assert "step-2/model.safetensors" in run["leftovers"]
    line = ("gc", root, "--keep-last", "1", "--apply", "--trash-ttl", "0s", "--yes")
    for _ in range(3):
        result, document = answer(*line)
        assert result.code is ExitCode.OK, (result, document)
    assert uploads(target) == []
    left = {entry.path for entry in open_store(root).walk("")}
    assert not [path for path in left if path.startswith("step-2/")], left


@pytest.mark.parametrize("source", ["directory"], indirect=True)
def test_gc_keeps_what_parts_still_send(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place shows nothing new for days, and the store has got a part just now."""
    root = target.rpartition("/")[0]
    now, send = time.time, MemoryJointUpload.write
    monkeypatch.setattr(time, "time", lambda: now() - 3 * 86400)
    assert part(source, target, 0) is ExitCode.OK
    monkeypatch.setattr(time, "time", now)
    assert answer("copy", source, f"{root}/step-3")[0].code is ExitCode.OK
    left: list[str] = []

    def write(self: MemoryJointUpload, offset: int, view: memoryview) -> None:
        send(self, offset, view)
        if not left:
            result, said = answer("gc", root, "--keep-last", "1", "--apply", "--trash-ttl", "24h")
            assert (result.code, said["applied"]["dropped"]) == (ExitCode.OK, [])
            left.extend(uploads(target))

    monkeypatch.setattr(MemoryJointUpload, "write", write)
    assert part(source, target, 1) is ExitCode.OK
    assert set(left) == {"step-2/model.safetensors"}
    assert part(source, target, 2) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert built(target).items() >= whole(source).items()


@pytest.mark.parametrize("source", ["directory"], indirect=True)
def test_gc_keeps_what_parts_may_send_where_the_store_does_not_say_it(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = target.rpartition("/")[0]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3 * 86400)
    assert part(source, target, 0) is ExitCode.OK
    monkeypatch.setattr(time, "time", now)
    assert answer("copy", source, f"{root}/step-3")[0].code is ExitCode.OK

    def denied(self: MemoryStore, path: str = "") -> Any:
        raise DeniedError("no permission to list uploads")

    monkeypatch.setattr(MemoryStore, "unfinished", denied)
    result, said = answer("gc", root, "--keep-last", "1", "--apply", "--trash-ttl", "24h")
    assert (result.code, said["applied"]["dropped"]) == (ExitCode.OK, [])


@pytest.mark.parametrize("refused", [False, True])
def test_no_upload_is_left_without_its_marker(
    source: Path, target: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it swept up, or the store refuses to abort: it is known whose the upload is."""

    def killed(self: RemoteStaging) -> None:
        raise KeyboardInterrupt

    for number in range(PARTS):
        assert part(source, target, number) is ExitCode.OK
    name = "model.safetensors" if source.is_dir() else source.name
    place(target).begin_joint_upload(name)  # of two that a store without conditions let begin
    with monkeypatch.context() as patch:
        if refused:
            down = UnavailableError("down")
            patch.setattr(MemoryStore, "abort", lambda _, found: [down] * len(found))
        else:
            patch.setattr(RemoteStaging, "_sweep", killed)
            patch.setattr(StagedObject, "_sweep", killed)
        code = part(source, target, None)
        assert code is (ExitCode.OK if refused else ExitCode.INTERRUPTED)
    assert built(target).items() >= whole(source).items()
    assert uploads(target) != []
    assert ".ftckpt/transfer.json" in {entry.path for entry in place(target).walk("")}
    store = open_store(target.rpartition("/")[0])
    assert own_uploads(store, store.unfinished("")) == store.unfinished("")  # for gc
    if not refused:
        assert part(source, target, None) is ExitCode.OK
        assert uploads(target) == []
    assert built(target).items() >= whole(source).items()


def test_status_does_not_depend_on_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"memory://joint-{next(_numbers)}/b"
    (tmp_path / "step-1").mkdir()
    write(tmp_path / "step-1/model.safetensors", 6)
    assert answer("copy", tmp_path / "step-1", f"{root}/step-1")[0].code is ExitCode.OK

    def down(self: MemoryStore, path: str = "") -> Any:
        raise UnavailableError("500")

    before = answer("status", root)[0].code
    monkeypatch.setattr(MemoryStore, "unfinished", down)
    assert answer("status", root)[0].code is before is not ExitCode.UNAVAILABLE
