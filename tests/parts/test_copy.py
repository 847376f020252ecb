"""A copy by parts is the copy of one machine, whatever happens to the parts."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.operations.many.copying import _spans
from ftckpt.parts import WorkPart, shared_folder
from ftckpt.parts.plan import WorkPlan
from ftckpt.parts.shared_folder import Neighbours, PartsPlace
from ftckpt.storage import open_store
from ftckpt.storage.local.store import LocalStore
from ftckpt.transfer.staging.local import LocalStaging
from tests.builders.checkpoints import flip
from tests.campaign import examples
from tests.commands.golden import DATA
from tests.killing import KILLED, kill_points, run_until

from .answers import answer, small_blocks
from .test_faults import codes, content, forked

PARTS = 3
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("s3"):
        small_blocks(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "b" / "step-2"


def files(place: Path) -> dict[str, bytes]:
    found = {p.relative_to(place).as_posix(): p for p in place.rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in found.items() if not n.startswith("ftckpt.manifest")}


def part(source: Any, target: Any, number: int | None, *more: str) -> ExitCode:
    share = ("--finish",) if number is None else ("--part", f"{number}/{PARTS}")
    return ExitCode(answer("copy", source, target, *share, *more)[0].code)


def staged(target: Path) -> Path:
    return target.parent / f".{target.name}.ftckpt-staging" / "state"


def records(target: Path, what: str = "*") -> list[str]:
    found = target.parent.glob(f".ftckpt/parts/*/{what}.json")
    return sorted(path.name.removesuffix(".json") for path in found)


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("sealed", [False, True])
def test_bytes_and_answer_are_those_of_one_machine(
    source: Path, target: Path, tmp_path: Path, parts: int, sealed: bool
) -> None:
    if sealed:
        answer("seal", source)
    alone = answer("copy", source, tmp_path / "alone" / "step-2")
    order = random.Random(parts).sample(range(parts), parts)
    for number in order:
        result, _ = answer("copy", source, target, "--part", f"{number}/{parts}")
        assert result.code is ExitCode.OK
        assert not target.exists()
    result, document = answer("copy", source, target, "--finish")
    assert result == alone[0]
    assert {**document, "destination": ""} == {**alone[1], "destination": ""}
    assert files(target) == files(tmp_path / "alone" / "step-2")
    assert content(target) == content(tmp_path / "alone" / "step-2")
    assert sorted(path.name for path in target.parent.iterdir()) == [".ftckpt", "step-2"]


def test_one_file_by_parts(tmp_path: Path) -> None:
    """Each part writes its own blocks of it."""
    import numpy as np
    from safetensors.numpy import save_file

    source = tmp_path / "model.safetensors"
    save_file({"w": np.arange(6_000, dtype="<i4")}, source)
    target = tmp_path / "b" / "model.safetensors"
    ends = [part(source, target, number) for number in range(PARTS)]
    assert ends == [ExitCode.OK] * PARTS
    assert part(source, target, None) is ExitCode.OK
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("keep_time", [False, True])
def test_what_changes_after_its_proof_is_proven_again(
    source: Path, target: Path, keep_time: bool
) -> None:
    for number in (*range(PARTS), 0):
        assert part(source, target, number) is ExitCode.OK
    assert len(records(target, "*.proof")) == PARTS
    victim = max(staged(target).rglob("*.distcp"), key=lambda path: path.stat().st_size)
    found = victim.stat()
    flip(victim, found.st_size // 2)
    if keep_time:
        os.utime(victim, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert part(source, target, None) is ExitCode.CORRUPT
    assert not target.exists()


def test_parts_that_write_one_file_are_known() -> None:
    """Who proves it before they have ended does it in vain: its mark changes."""

    def spans(of: int, cuts: Callable[[int, int], bool]) -> dict[str, range]:
        sizes = {"a": 100_000, "b": 900_000, "c": 0}
        job: Any = SimpleNamespace(sizes=sizes, staging=SimpleNamespace(cuts=cuts))
        return _spans(job, of)

    assert spans(2, lambda size, share: True) == {"b": range(2)}
    assert spans(1, lambda size, share: True) == {}
    assert spans(10, lambda size, share: True) == {"b": range(1, 10)}
    assert spans(10, lambda size, share: False) == {}


def test_a_proof_of_an_earlier_copy_proves_nothing(source: Path, target: Path) -> None:
    """A finisher that dies while it removes the records may leave proofs."""
    for number in (*range(PARTS), 0):
        assert part(source, target, number) is ExitCode.OK
    (place,) = target.parent.glob(".ftckpt/parts/*")
    kept = {path: path.read_bytes() for path in place.glob("*.proof.json")}
    assert len(kept) == PARTS
    assert part(source, target, None) is ExitCode.OK
    shutil.rmtree(target)
    for path, data in kept.items():
        path.write_bytes(data)
    for number in range(PARTS):
        assert part(source, target, number) is ExitCode.OK
    victim = max(staged(target).rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(victim, victim.stat().st_size // 2)
    assert part(source, target, None) is ExitCode.CORRUPT
    assert not target.exists()


def test_no_part_proves_what_it_has_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the finisher reads back only what nobody could: here of the last part."""
    for number in range(PARTS):
        part(source, target, number)
    assert records(target, "*.proof") == ["0-3.proof", "1-3.proof"]
    assert part(source, target, 0) is ExitCode.OK  # started again, it reads back the last one
    assert records(target, "*.proof") == ["0-3.proof", "1-3.proof", "2-3.proof"]
    read: list[str] = []
    real = LocalStore.open

    def told(self: LocalStore, path: str) -> Any:
        read.append(self.local_path(path))
        return real(self, path)

    monkeypatch.setattr(LocalStore, "open", told)
    assert part(source, target, None) is ExitCode.OK
    assert not [path for path in read if path.endswith(".distcp") and "staging" in path]


def test_parts_at_once_read_back_each_other(source: Path, target: Path) -> None:
    def one(number: int) -> ExitCode:
        _, document = answer("copy", source, target, "--part", f"{number}/{PARTS}", "--finish-last")
        return ExitCode.PARTIAL if "proven" in document else ExitCode.OK

    ended = codes([forked(lambda number=number: one(number)) for number in range(PARTS)])  # type: ignore[misc]
    assert sorted(ended) == [0, 0, int(ExitCode.PARTIAL)]
    assert files(target) == files(source)


def test_who_waits_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PartsPlace(open_store(str(tmp_path)), "parts", WorkPlan("copy", "/a", "0", "1"))

    def put(number: int, what: str) -> None:
        place.note(f"{number}-4.{what}", {"beat": 1})

    me = Neighbours(place, WorkPart(2, 4))
    put(2, "write")
    assert me.next() == (None, False)  # the one before has not begun
    put(1, "running")
    assert me.next() == (None, True)
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)
    assert me.next() == (None, False)  # it does not get on
    put(1, "write")
    assert me.next() == (WorkPart(1, 4), False)
    put(1, "proof")
    put(3, "write")
    assert me.next() == (None, False)  # part 0 reads it, and has not begun
    put(0, "write")
    put(0, "running")
    assert me.next() == (None, False)
    assert not me.ended()
    place.remove(["0-4.running"])
    assert me.next() == (WorkPart(3, 4), False)  # its reader has ended
    assert not me.ended()
    place.remove(["1-4.running"])
    assert me.ended()


def test_killed_at_every_change_of_a_part(source: Path, target: Path) -> None:
    killed = 0
    for point in kill_points(lambda: part(source, target, 0)):
        killed = point
        assert not target.exists()
        assert part(source, target, None) is ExitCode.INCOMPLETE
    assert killed > 10
    assert [part(source, target, number) for number in (1, 2)] == [ExitCode.OK] * 2
    assert part(source, target, None) is ExitCode.OK
    assert files(target) == files(source)


def test_a_finisher_that_is_killed_leaves_nothing_or_the_whole(
    source: Path, tmp_path: Path
) -> None:
    for point in itertools.count(1, examples(7, 1)):
        target = tmp_path / str(point) / "step-2"
        for number in range(PARTS):
            part(source, target, number)
        done = run_until(lambda target=target: part(source, target, None), point) == 0  # type: ignore[misc]
        if target.exists():
            assert files(target) == files(source)
        again = part(source, target, None)
        assert again in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert files(target) == files(source)
        if done:
            break
    assert point > 20


def test_parts_that_are_killed_at_random_moments(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)  # a killed one is not waited for
    chosen = random.Random(24)
    for number in range(examples(2, 500)):
        target = tmp_path / str(number) / "step-2"
        left = [*range(PARTS), *range(PARTS)]
        chosen.shuffle(left)
        while left:
            which = left.pop()
            point = chosen.randrange(1, 60)
            if run_until(lambda n=which, to=target: part(source, to, n), point) == KILLED:  # type: ignore[misc]
                left.insert(0, which)
            assert not target.exists()
        assert part(source, target, None) is ExitCode.OK
        assert files(target) == files(source)
        shutil.rmtree(target.parent)


def test_the_same_part_twice_at_once(source: Path, target: Path) -> None:
    """One writes; the other is refused while it does, or finds it done."""
    twins = codes([forked(lambda: part(source, target, 1)) for _ in range(2)])
    assert 0 in twins
    assert set(twins) <= {0, int(ExitCode.REFUSED)}
    for number in (0, 2):
        part(source, target, number)
    assert part(source, target, None) is ExitCode.OK
    assert files(target) == files(source)


def test_two_finishers(source: Path, target: Path) -> None:
    for number in range(PARTS):
        part(source, target, number)
    ended = codes([forked(lambda: part(source, target, None)) for _ in range(2)])
    assert 0 in ended
    assert set(ended) <= {0, 5, 8}
    assert files(target) == files(source)


def test_a_source_that_changes_between_parts(source: Path, target: Path) -> None:
    part(source, target, 0)
    flip(source / "__0_1.distcp", 15000)
    os.utime(source / "__0_1.distcp", (1, 1))
    # The staging place is of the source as it was.
    assert part(source, target, 1) in (ExitCode.REFUSED, ExitCode.CORRUPT)
    result, _ = answer("copy", source, target, "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert not target.exists()


def lose_everything(target: Path) -> None:
    shutil.rmtree(staged(target).parent)


def lose_a_file(target: Path) -> None:
    (staged(target) / "__0_1.distcp").unlink()


def cut_a_file(target: Path) -> None:
    os.truncate(staged(target) / "__0_1.distcp", 100)


@pytest.mark.parametrize("harm", [lose_everything, lose_a_file, cut_a_file])
def test_a_staging_place_that_lost_what_parts_have_written(
    source: Path, target: Path, harm: Callable[[Path], None]
) -> None:
    """Records of bytes that are gone do not make a copy."""
    for number in (0, 1, 2, 0):
        part(source, target, number)
    harm(target)
    assert part(source, target, None) is ExitCode.REFUSED
    assert not target.exists()


def test_a_block_that_is_not_what_was_written(source: Path, target: Path) -> None:
    """Who reads it back says so, and leaves no proof."""
    part(source, target, 0)
    flip(staged(target) / "__0_0.distcp", 20)
    assert part(source, target, 1) is ExitCode.CORRUPT
    part(source, target, 2)
    assert records(target, "0-*") == ["0-3.write"]
    assert part(source, target, None) is ExitCode.CORRUPT
    assert not target.exists()


def test_a_damaged_source_is_not_copied(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1 << 20)
    flip(source / "__0_1.distcp", 15000)
    ends = [part(source, target, number) for number in range(PARTS)]
    assert ExitCode.CORRUPT in ends
    assert part(source, target, None) is ExitCode.INCOMPLETE
    assert not target.exists()


def test_a_record_that_lies_in_two_parts_is_judged(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part sees the whole of it: the finisher puts the sums together."""
    small_blocks(monkeypatch, 256)
    flip(source / "__0_1.distcp", 15000)
    assert [part(source, target, number) for number in range(PARTS)] == [ExitCode.OK] * PARTS
    assert part(source, target, None) is ExitCode.CORRUPT
    assert not target.exists()


def test_one_alone_and_parts_do_not_mix(source: Path, target: Path) -> None:
    part(source, target, 0)
    # Nobody is at work: one machine begins anew, and the parts' records are of no place then.
    assert answer("copy", source, target)[0].code is ExitCode.OK
    assert files(target) == files(source)
    assert part(source, target, 1) is ExitCode.REFUSED  # it is there


@pytest.mark.parametrize("flag", ["--restart", "--include-bases"])
def test_what_is_not_divided_says_so(source: Path, target: Path, flag: str) -> None:
    assert part(source, target, 0, flag) is ExitCode.USAGE


def test_parts_share_the_place_and_one_alone_keeps_out(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.transfer.staging.lock._JOINING", 0.1)
    target.parent.mkdir()
    one, two, alone = (LocalStaging(str(target), single=False) for _ in range(3))
    called = one.join("p", {"f": 3}, "0-2")
    assert two.join("p", {"f": 3}, "1-2") == called
    assert answer("copy", source, target)[0].code is ExitCode.REFUSED
    one.close()
    two.close()
    assert not alone.begin("p", {"f": 3}, restart=False)
    assert part(source, target, 0) is ExitCode.REFUSED
    alone.close()


@pytest.fixture
def bucket() -> str:
    return f"memory://parts-{next(_numbers)}/b/step-2"


def objects(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {e.path: store.read(e.path) for e in store.walk("") if "manifest" not in e.path}


def test_whole_objects_by_parts(source: Path, bucket: str) -> None:
    """The format's own commit marker, and the manifest, only at the end."""
    for number in (2, 0, 1):
        assert part(source, bucket, number) is ExitCode.OK
        seen = [e.path for e in open_store(bucket).walk("")]
        assert ".metadata" not in seen
        assert answer("verify", bucket)[0].code is ExitCode.INCOMPLETE
    assert part(source, bucket, None) is ExitCode.OK
    assert objects(bucket) == files(source)
    assert answer("verify", bucket, "--level", "content")[0].code is ExitCode.OK


def test_an_object_that_was_written_anew_is_read_again(source: Path, bucket: str) -> None:
    for number in (0, 1, 2, 0):
        part(source, bucket, number)
    store = open_store(bucket)
    bad = bytearray(store.read("__0_1.distcp"))
    bad[9] ^= 1
    store.put("__0_1.distcp", bytes(bad))
    # Its receipt is of another version: the finisher writes it again, and reads it back.
    assert part(source, bucket, None) is ExitCode.OK
    assert objects(bucket) == files(source)


@pytest.mark.s3
def test_to_a_real_service(source: Path, swift: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swift.enter(monkeypatch)
    url = f"s3://ftckpt-tests/parts-{os.getpid()}/step-2"
    for number in range(PARTS):
        assert part(source, url, number) is ExitCode.OK
    assert part(source, url, None) is ExitCode.OK
    assert objects(url) == files(source)
