"""Whatever happens to parts: nothing is visible before the end, and the answer is the same."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode, UnavailableError
from ftckpt.own_files import MANIFEST
from ftckpt.parts import finish
from ftckpt.parts.plan import ShareRecord
from ftckpt.parts.shared_folder import ListedRecord, PartsPlace
from ftckpt.storage.local.store import LocalStore
from tests.builders.checkpoints import flip
from tests.campaign import examples
from tests.commands.golden import DATA
from tests.killing import KILLED, kill_points, run_until

from .answers import answer, in_parts, untimed

PARTS = 3


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of three files."""
    return shutil.copytree(DATA / "run/step-2", tmp_path / "step-2")


@pytest.fixture
def sealed(tmp_path: Path) -> bytes:
    """The manifest that one process writes."""
    copied = shutil.copytree(DATA / "run/step-2", tmp_path / "alone" / "step-2")
    assert answer("seal", copied)[0].code is ExitCode.OK
    return content(copied)


def content(place: Path) -> bytes:
    """Return a manifest without its times."""
    read = untimed(json.loads((place / MANIFEST).read_bytes()))
    del read["digest"]
    return json.dumps(read).encode()


def seal(place: Path, part: int | None, *more: str) -> ExitCode:
    share = ("--finish",) if part is None else ("--part", f"{part}/{PARTS}")
    return ExitCode(answer("seal", place, *share, *more)[0].code)


def records(place: Path, what: str = "*") -> list[str]:
    found = place.parent.glob(f".ftckpt/parts/*/{what}.json")
    return sorted(path.name.removesuffix(".json") for path in found)


def forked(work: Callable[[], ExitCode]) -> int:
    """Begin something in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(work())
        finally:
            os._exit(code)
    return child


def codes(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_a_part_that_is_killed_leaves_no_record_or_a_whole_one(place: Path, sealed: bytes) -> None:
    killed = 0
    for point in kill_points(lambda: seal(place, 0)):
        killed = point
        assert not (place / MANIFEST).exists()
        assert seal(place, None) is ExitCode.INCOMPLETE
    assert killed > 3
    assert [seal(place, part) for part in range(PARTS)] == [ExitCode.OK] * PARTS
    assert seal(place, None) is ExitCode.OK
    assert content(place) == sealed


def test_a_finisher_that_is_killed_leaves_nothing_or_the_whole(
    tmp_path: Path, sealed: bytes
) -> None:
    for point in itertools.count(1, examples(4, 1)):
        place = shutil.copytree(DATA / "run/step-2", tmp_path / str(point) / "step-2")
        for part in range(PARTS):
            seal(place, part)
        done = run_until(lambda place=place: seal(place, None), point) == 0  # type: ignore[misc]
        if (place / MANIFEST).exists():
            assert content(place) == sealed
        again = seal(place, None)
        # Killed after its answer it has used up some records: the others say what was.
        assert again in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert again is ExitCode.OK or (place / MANIFEST).exists()
        if done:
            break
    assert point > 4


def test_parts_that_are_killed_at_random_moments(tmp_path: Path, sealed: bytes) -> None:
    """Killed and started anew until all are done, in any order, some beside each other."""
    chosen = random.Random(24)
    for number in range(examples(2, 500)):
        place = shutil.copytree(DATA / "run/step-2", tmp_path / str(number) / "step-2")
        left = [*range(PARTS), *range(PARTS)]
        chosen.shuffle(left)
        while left:
            part = left.pop()
            point = chosen.randrange(1, 12)
            if run_until(lambda p=part, at=place: seal(at, p), point) == KILLED:  # type: ignore[misc]
                left.insert(0, part)
            assert not (place / MANIFEST).exists()
        assert seal(place, None) is ExitCode.OK
        assert content(place) == sealed
        shutil.rmtree(place.parent)


def test_the_re_run_does_only_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(PARTS, place.parent / "at", "verify", place, finish=False)
    record = next((place.parent / "at").rglob(f"1-{PARTS}.json"))
    record.unlink()
    result, _ = answer("verify", place, "--parts", place.parent / "at", "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert "--array=1, with --part auto/3" in result.hint
    read: list[str] = []
    real = LocalStore.open

    def told(self: LocalStore, path: str) -> Any:
        read.append(path)
        return real(self, path)

    monkeypatch.setattr(LocalStore, "open", told)
    for part in (0, 2):
        words = ("verify", place, "--parts", place.parent / "at", "--part", f"{part}/{PARTS}")
        result, document = answer(*words)
        assert (result.code, document["part"]["done_before"]) == (ExitCode.OK, True)
    assert not [path for path in read if path.endswith(".distcp")]


def test_missing_parts_are_named_as_an_array(place: Path) -> None:
    for part in (0, 1, 2, 4, 5):
        answer("verify", place, "--part", f"{part}/20")
    result, _ = answer("verify", place, "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert "--array=3,6-19, with --part auto/20" in result.hint


def test_the_same_part_twice_at_once(place: Path, sealed: bytes) -> None:
    twins = [forked(lambda part=part: seal(place, part)) for part in (0, 0, 1, 1, 2, 2)]  # type: ignore[misc]
    assert codes(twins) == [0] * 6
    assert records(place) == ["0-3", "1-3", "2-3"]
    assert seal(place, None) is ExitCode.OK
    assert content(place) == sealed


def test_two_finishers(place: Path, sealed: bytes) -> None:
    for part in range(PARTS):
        seal(place, part)
    ended = codes([forked(lambda: seal(place, None)) for _ in range(2)])
    assert 0 in ended
    assert set(ended) <= {0, 5, 8}  # the other finds the same manifest, or the records used up
    assert content(place) == sealed


def test_a_finisher_whose_records_another_one_uses_up_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its listing and its reading, where no condition keeps a second one away."""
    for part in range(PARTS):
        seal(place, part)
    read = PartsPlace.read
    others: list[ExitCode] = []

    def after_another(self: PartsPlace, one: ListedRecord) -> ShareRecord:
        if not others:
            monkeypatch.setattr(PartsPlace, "read", read)
            others.append(seal(place, None))
        return read(self, one)

    monkeypatch.setattr(PartsPlace, "read", after_another)
    result, _ = answer("seal", place, "--finish")
    assert others == [ExitCode.OK]
    assert result.code is ExitCode.INCOMPLETE
    assert "another process has finished this" in result.message


def test_the_last_part_finishes_and_no_other(place: Path, sealed: bytes) -> None:
    def part(number: int) -> ExitCode:
        _, document = answer("seal", place, "--part", f"{number}/{PARTS}", "--finish-last")
        return ExitCode.PARTIAL if document.get("manifest") else ExitCode.OK

    ended = codes([forked(lambda number=number: part(number)) for number in range(PARTS)])  # type: ignore[misc]
    assert sorted(ended) == [0, 0, int(ExitCode.PARTIAL)]
    assert content(place) == sealed


def test_an_elected_finisher_that_died_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a part that is started again, once the claim is old by the clock of the place."""
    for part in range(PARTS):
        seal(place, part)
    claim = next(place.parent.glob(".ftckpt/parts/*")) / "finish-1.json"
    claim.write_text("{}")
    assert seal(place, 0, "--finish-last") is ExitCode.OK
    assert not (place / MANIFEST).exists()
    os.utime(claim, (time.time() - 2 * finish.PATIENCE,) * 2)
    assert seal(place, 0, "--finish-last") is ExitCode.OK
    assert (place / MANIFEST).exists()


def test_a_part_of_an_older_plan_is_refused(place: Path) -> None:
    answer("verify", place, "--part", "0/2")
    answer("verify", place, "--part", "1/2", "--strict")
    result, _ = answer("verify", place, "--part", "0/2", "--finish")
    assert result.code is ExitCode.REFUSED
    assert "another plan" in result.message
    # What a dead plan has left does not hinder a whole one.
    answer("verify", place, "--part", "1/2")
    assert answer("verify", place, "--finish")[0].code is ExitCode.OK


def test_a_part_of_another_version_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("ftckpt.parts.plan.__version__", "0.0.9")
        answer("verify", place, "--part", "0/2")
    answer("verify", place, "--part", "1/2")
    assert answer("verify", place, "--finish")[0].code is ExitCode.REFUSED


def test_another_number_of_parts_is_refused(place: Path) -> None:
    """An array of the missing tasks, without the number of the first one."""
    answer("verify", place, "--part", "0/12")
    result, _ = answer("verify", place, "--part", "0/1")
    assert result.code is ExitCode.REFUSED
    assert "--part auto/12" in result.hint


def test_a_source_that_changes_between_parts(place: Path) -> None:
    assert seal(place, 0) is ExitCode.OK
    file = place / "__0_1.distcp"
    flip(file, 15000)
    os.utime(file, (1, 1))
    for part in (1, 2):
        seal(place, part)
    result, _ = answer("seal", place, "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert "has changed since part 0/3 was done" in result.message
    assert not (place / MANIFEST).exists()


def test_a_source_that_changes_while_a_part_reads(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStore.open

    def touching(self: LocalStore, path: str) -> Any:
        opened = real(self, path)
        if path.endswith("__0_0.distcp"):
            os.utime(place / "__0_0.distcp", (5, 5))
        return opened

    monkeypatch.setattr(LocalStore, "open", touching)
    result, _ = answer("verify", place, "--part", "0/1")
    assert result.code is ExitCode.INCOMPLETE
    assert records(place) == []


def test_a_cut_record_is_refused_and_named(place: Path) -> None:
    for part in range(PARTS):
        seal(place, part)
    record = next(place.parent.glob(".ftckpt/parts/*/1-3.json"))
    record.write_bytes(record.read_bytes()[:-40])
    result, _ = answer("seal", place, "--finish")
    assert result.code is ExitCode.REFUSED
    assert "1-3.json is not a whole record" in result.message
    assert not (place / MANIFEST).exists()
    assert seal(place, 1) is ExitCode.REFUSED  # nothing is overwritten
    record.unlink()
    assert seal(place, 1) is ExitCode.OK
    assert seal(place, None) is ExitCode.OK


@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_a_day_apart(place: Path, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seal(place, 0)
    real = time.time
    with monkeypatch.context() as skewed:
        skewed.setattr(time, "time", lambda: real() + days * 86400)
        for part in (1, 2):
            assert seal(place, part) is ExitCode.OK
        assert seal(place, None) is ExitCode.OK


def test_what_was_read_long_ago_is_no_answer(place: Path) -> None:
    in_parts(2, place.parent / "at", "verify", place, finish=False)
    record = next((place.parent / "at").rglob("1-2.json"))
    long_ago = time.time() - finish.MOST_AGE - 60
    os.utime(record, (long_ago, long_ago))
    result, _ = answer("verify", place, "--parts", place.parent / "at", "--finish")
    assert result.code is ExitCode.REFUSED
    assert "7 days old" in result.message


def test_records_speak_once(place: Path) -> None:
    """A run of tomorrow reads the bytes of tomorrow."""
    in_parts(2, place.parent / "at", "verify", place)
    result, _ = answer("verify", place, "--parts", place.parent / "at", "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert "used up" in result.message
    words = ("verify", place, "--parts", place.parent / "at", "--part", "0/2")
    assert answer(*words)[1]["part"]["done_before"] is False


def test_records_of_damage_stay(place: Path) -> None:
    flip(place / "__0_1.distcp", 15000)
    words = ("verify", place, "--parts", place.parent / "at")
    first = in_parts(2, place.parent / "at", "verify", place)
    assert first[0].code is ExitCode.CORRUPT
    assert answer(*words, "--finish") == first


def test_a_part_that_found_damage_says_so(place: Path) -> None:
    flip(place / "__0_1.distcp", 15000)
    ended = [answer("verify", place, "--part", f"{part}/2")[0].code for part in (0, 1)]
    assert sorted(ended) == [ExitCode.OK, ExitCode.CORRUPT]
    again = [answer("verify", place, "--part", f"{part}/2")[0].code for part in (0, 1)]
    assert again == ended
    # Where the last one gives the verdict no other may: launchers end all where one fails.
    last = [answer("verify", place, "--part", f"{p}/2", "--finish-last")[0].code for p in (0, 1)]
    assert last == [ExitCode.CORRUPT, ExitCode.OK]


def test_what_a_machine_cannot_read_leaves_no_record(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStore.open

    def failing(self: LocalStore, path: str) -> Any:
        if path.endswith("__0_0.distcp"):
            raise UnavailableError(f"{path}: Input/output error")
        return real(self, path)

    assert answer("seal", place)[0].code is ExitCode.OK  # so that only tasks read data files
    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "open", failing)
        result, _ = answer("verify", place, "--part", "0/1")
    assert result.code is ExitCode.UNAVAILABLE
    assert records(place, "*-1") == []
    assert answer("verify", place, "--part", "0/1")[0].code is ExitCode.OK


def test_flags_that_contradict_each_other(place: Path) -> None:
    for flags in (["--finish", "--finish-last", "--part", "0/2"], ["--finish-last"]):
        assert answer("verify", place, *flags)[0].code is ExitCode.USAGE
