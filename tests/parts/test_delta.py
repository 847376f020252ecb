"""A delta that is packed or unpacked by parts is that of one machine."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.parts import shared_folder
from ftckpt.parts.division import FromRecords
from tests.builders.checkpoints import flip
from tests.campaign import examples
from tests.commands.golden import DATA
from tests.killing import KILLED, run_until

from .answers import answer
from .test_copy import files, objects, records, staged

PARTS = 3
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make data files so small that a checkpoint of a test has several."""
    monkeypatch.setattr("ftckpt.delta.pack.build.LEAST", 1 << 11)
    monkeypatch.setattr("ftckpt.delta.pack.build.MOST", 1 << 11)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "run/step-1", tmp_path / "a" / "step-1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")


@pytest.fixture
def done_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each finisher did itself."""
    counts: list[int] = []
    real = FromRecords.run

    def counted(self: FromRecords, *given: Any) -> Any:
        yield from real(self, *given)
        counts.append(self.done_here)

    monkeypatch.setattr(FromRecords, "run", counted)
    return counts


def words(*places: Any) -> list[Any]:
    return ["delta", "pack", *places, "-j1"]


def part(line: list[Any], number: int | None) -> ExitCode:
    share = ("--finish",) if number is None else ("--part", f"{number}/{PARTS}")
    return ExitCode(answer(*line, *share)[0].code)


@pytest.mark.parametrize("whole", [False, True])
def test_bytes_and_answer_are_those_of_one_machine(
    base: Path, source: Path, tmp_path: Path, whole: bool
) -> None:
    places = [source] if whole else [base, source]
    alone_at, target = tmp_path / "alone" / "made", tmp_path / "b" / "made"
    alone = answer(*words(*places, alone_at))
    assert alone[0].code is ExitCode.OK, alone
    line = words(*places, target)
    for number in (2, 0, 1):
        assert part(line, number) is ExitCode.OK
        assert not target.exists()
    result, document = answer(*line, "--finish")
    assert result == alone[0]
    assert files(target).keys() == files(alone_at).keys()
    assert len(files(target)) > PARTS
    assert files(target) == files(alone_at)
    for one in (document, alone[1]):
        # What was measured, and what one machine need not read again.
        for place in ("destination", "break_even", "extra_read"):
            one.pop(place, None)
        one["proof"].pop("source_bytes")
    assert document == alone[1]


def test_what_changes_after_its_proof_is_proven_again(
    base: Path, source: Path, tmp_path: Path
) -> None:
    line = words(base, source, tmp_path / "made")
    for number in (0, 1, 2, 0, 1):
        assert part(line, number) is ExitCode.OK
    victim = max(staged(tmp_path / "made").rglob("*.blocks"), key=lambda p: p.stat().st_size)
    flip(victim, victim.stat().st_size // 2)
    assert part(line, None) is ExitCode.CORRUPT
    assert not (tmp_path / "made").exists()


def test_the_proof_is_divided(
    base: Path, source: Path, tmp_path: Path, done_here: list[int]
) -> None:
    line = words(base, source, tmp_path / "made")
    for number in (0, 1, 2, 0, 1):
        assert part(line, number) is ExitCode.OK
    assert records(tmp_path / "made", "*.proof") == ["0-3.proof", "1-3.proof", "2-3.proof"]
    assert part(line, None) is ExitCode.OK
    assert set(done_here) == {0}


def test_tensors_that_parts_store_otherwise(
    base: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines whose arithmetic differs by a bit choose otherwise for a tensor that they share."""
    alone_at, target = tmp_path / "alone" / "made", tmp_path / "b" / "made"
    assert answer(*words(base, source, alone_at))[0].code is ExitCode.OK
    line = words(base, source, target)
    for number in range(PARTS):
        with monkeypatch.context() as other:
            if number == 1:
                from ftckpt.delta.codec.choose_encoding import untried
                from ftckpt.delta.codec.encode import DeltaEncoder

                def plain(self: DeltaEncoder, number: int) -> Any:
                    return untried(self.pairs[number].info.dtype, with_base=False)

                other.setattr(DeltaEncoder, "plan", plain)
            assert part(line, number) is ExitCode.OK
    assert part(line, 0) is ExitCode.OK  # there is nothing that it could prove
    assert part(line, None) is ExitCode.OK
    assert answer("diff", source, target)[0].code is ExitCode.OK


def test_a_damaged_source_is_not_packed(base: Path, source: Path, tmp_path: Path) -> None:
    flip(base / "__0_1.distcp", 15000)
    line = words(base, source, tmp_path / "made")
    ends = [part(line, number) for number in range(PARTS)]
    assert ends.count(ExitCode.CORRUPT) == 1
    assert part(line, None) is ExitCode.INCOMPLETE
    assert not (tmp_path / "made").exists()


def test_a_base_that_changes_between_parts(base: Path, source: Path, tmp_path: Path) -> None:
    line = words(base, source, tmp_path / "made")
    assert part(line, 0) is ExitCode.OK
    os.utime(base / "__0_1.distcp", (1, 1))
    assert part(line, 1) is ExitCode.REFUSED  # the staging place is of the other
    assert part(line, None) is ExitCode.INCOMPLETE


def test_a_file_that_is_gone(base: Path, source: Path, tmp_path: Path) -> None:
    line = words(base, source, tmp_path / "made")
    for number in range(PARTS):
        part(line, number)
    max(staged(tmp_path / "made").rglob("*.blocks")).unlink()
    assert part(line, None) is ExitCode.REFUSED


def test_parts_and_finishers_that_are_killed(
    base: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)  # a killed one is not waited for
    alone = tmp_path / "alone" / "made"  # as deep: a delta says from where its base is found
    assert answer(*words(base, source, alone))[0].code is ExitCode.OK
    chosen = random.Random(24)
    for number in range(examples(1, 200)):
        target = tmp_path / str(number) / "made"
        line = words(base, source, target)
        left = [*range(PARTS), *range(PARTS)]
        chosen.shuffle(left)
        while left:
            which = left.pop()
            point = chosen.randrange(1, 60)
            if run_until(lambda n=which, to=line: part(to, n), point) == KILLED:  # type: ignore[misc]
                left.insert(0, which)
            assert not target.exists()
        point = chosen.randrange(1, 60)
        run_until(lambda to=line: part(to, None), point)  # type: ignore[misc]
        assert not target.exists() or files(target) == files(alone)
        assert part(line, None) in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert files(target) == files(alone)
        shutil.rmtree(target.parent)


def test_to_an_object_store(base: Path, source: Path, tmp_path: Path) -> None:
    url = f"memory://packed-{next(_numbers)}/b/made"
    for number in (0, 1, 2, 0, 1):
        assert part(words(base, source, url), number) is ExitCode.OK
    assert part(words(base, source, url), None) is ExitCode.OK
    assert len(objects(url)) > PARTS
    assert answer("diff", source, url)[0].code is ExitCode.OK


@pytest.mark.parametrize("to", [(), ("--to", "safetensors", "--max-shard-size", "2000")])
def test_unpacking(
    base: Path, source: Path, tmp_path: Path, to: tuple[str, ...], done_here: list[int]
) -> None:
    delta, alone_at = tmp_path / "delta", tmp_path / "alone" / "made"
    assert answer(*words(base, source, delta))[0].code is ExitCode.OK
    alone = answer("delta", "unpack", delta, alone_at, *to, "-j1")
    target = tmp_path / "b" / "made"
    line = ["delta", "unpack", delta, target, *to, "-j1"]
    for number in (*range(PARTS), 0, 1):
        assert part(line, number) is ExitCode.OK
    assert records(target, "*.proof") == ["0-3.proof", "1-3.proof", "2-3.proof"]
    result, document = answer(*line, "--finish")
    assert result == alone[0]
    assert set(done_here) == {0}
    # One machine holds each block to its digest as it decodes it; parts check their shares before.
    differing = {"destination": "", "evidence": "", "extra_read": 0}
    assert {**document, **differing} == {**alone[1], **differing}
    assert files(target) == files(alone_at)


def test_the_documents_of_parts_fit_their_schemas(base: Path, source: Path, tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    schemas = Path(__file__).parents[2] / "docs" / "schemas"
    for name, line in (
        ("delta-pack", words(base, source, tmp_path / "made")),
        ("diff", ["diff", base, source, "--parts", tmp_path]),
    ):
        schema = json.loads((schemas / f"{name}.schema.json").read_text())
        for share in (["--part", "0/1"], ["--finish"]):
            result, found = answer(*line, *share)
            head = {"schema": f"ftckpt.{name}/1", "target": None, "format": None}
            code = {"code": int(result.code), "name": "", "message": "", "hint": ""}
            found = head | found | {"result": code}
            wrong = Draft202012Validator(schema).iter_errors(found)
            assert [e.message for e in wrong if list(e.path)[:1] != ["result"]] == []


def test_what_was_unpacked_wrongly_fails_the_proof(
    base: Path, source: Path, tmp_path: Path
) -> None:
    delta, target = tmp_path / "delta", tmp_path / "b" / "made"
    assert answer(*words(base, source, delta))[0].code is ExitCode.OK
    line = ["delta", "unpack", delta, target, "-j1"]
    for number in range(PARTS):
        assert part(line, number) is ExitCode.OK
    bad = max(staged(target).rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(bad, bad.stat().st_size // 2)
    ends = [part(line, number) for number in (0, 1)]
    assert ExitCode.CORRUPT in [*ends, part(line, None)]
    assert not target.exists()
