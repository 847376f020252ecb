"""A conversion by parts is the conversion of one machine."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.parts import shared_folder
from ftckpt.parts.division import FromRecords
from ftckpt.storage import open_store
from tests.builders.archives import extract
from tests.builders.checkpoints import flip
from tests.campaign import examples
from tests.commands.golden import DATA
from tests.killing import KILLED, run_until

from .answers import answer
from .test_copy import files, objects, records, staged
from .test_faults import codes, forked

PARTS = 3
CONVERT = ("convert", "--to", "safetensors", "--max-shard-size", "2000")
RESHARD = ("reshard", "--dp", "4")
_numbers = itertools.count()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "b" / "made"


def words(verb: tuple[str, ...], source: Any, target: Any) -> list[Any]:
    return [verb[0], source, target, *verb[1:]]


def part(verb: tuple[str, ...], source: Any, target: Any, number: int | None) -> ExitCode:
    share = ("--finish",) if number is None else ("--part", f"{number}/{PARTS}")
    return ExitCode(answer(*words(verb, source, target), *share)[0].code)


VERBS = {
    "safetensors": CONVERT,
    "dcp": RESHARD,
    "cast": ("convert", "--to", "safetensors", "--only", "model", "--dtype", "bf16"),
    "one file": ("convert", "--to", "torchsave"),
}


@pytest.mark.parametrize("name", VERBS)
def test_bytes_and_answer_are_those_of_one_machine(
    source: Path, target: Path, tmp_path: Path, name: str
) -> None:
    verb = VERBS[name]
    if name == "one file":
        target = target.with_suffix(".pt")
    alone_at = tmp_path / "alone" / target.name
    alone = answer(*words(verb, source, alone_at))
    for number in (2, 0, 1):
        assert part(verb, source, target, number) is ExitCode.OK
        assert not target.exists()
    result, document = answer(*words(verb, source, target), "--finish")
    assert result == alone[0]
    for one in (document, alone[1]):
        # One machine proves by sums of what it read to write; parts read the source again.
        del one["destination"], one["extra_read"], one["proof"]["source_bytes"]
    assert document == alone[1]
    if target.is_file():
        assert target.read_bytes() == alone_at.read_bytes()
    else:
        assert files(target) == files(alone_at)


def test_what_changes_after_its_proof_is_proven_again(source: Path, target: Path) -> None:
    for number in (0, 1, 2, 0, 1):
        assert part(CONVERT, source, target, number) is ExitCode.OK
    victim = max(staged(target).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(victim, victim.stat().st_size - 1)
    assert part(CONVERT, source, target, None) is ExitCode.CORRUPT
    assert not target.exists()


def test_the_proof_is_divided(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again when all is written, each part proves what the one before it wrote."""
    for number in (0, 1, 2, 0, 1):
        assert part(CONVERT, source, target, number) is ExitCode.OK
    assert records(target, "*.proof") == ["0-3.proof", "1-3.proof", "2-3.proof"]
    left: list[int] = []
    real = FromRecords.run

    def counted(self: FromRecords, *given: Any) -> Any:
        yield from real(self, *given)
        left.append(self.done_here)

    monkeypatch.setattr(FromRecords, "run", counted)
    assert part(CONVERT, source, target, None) is ExitCode.OK
    assert len(left) > 1
    assert set(left) == {0}


def test_parts_at_once_prove_each_other(source: Path, target: Path) -> None:
    def one(number: int) -> ExitCode:
        line = words(RESHARD, source, target)
        _, document = answer(*line, "--part", f"{number}/{PARTS}", "--finish-last")
        return ExitCode.OK if "part" in document else ExitCode.PARTIAL

    ended = codes([forked(lambda number=number: one(number)) for number in range(PARTS)])  # type: ignore[misc]
    assert sorted(ended) == [0, 0, int(ExitCode.PARTIAL)]
    assert answer("diff", source, target)[0].code is ExitCode.OK


def test_parts_and_finishers_that_are_killed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)  # a killed one is not waited for
    alone = tmp_path / "alone"
    answer(*words(RESHARD, source, alone))
    chosen = random.Random(24)
    for number in range(examples(2, 500)):
        target = tmp_path / str(number) / "made"
        left = [*range(PARTS), *range(PARTS)]
        chosen.shuffle(left)
        while left:
            which = left.pop()
            point = chosen.randrange(1, 60)
            if run_until(lambda n=which, to=target: part(RESHARD, source, to, n), point) == KILLED:  # type: ignore[misc]
                left.insert(0, which)
            assert not target.exists()
        point = chosen.randrange(1, 60)
        run_until(lambda to=target: part(RESHARD, source, to, None), point)  # type: ignore[misc]
        assert not target.exists() or files(target) == files(alone)
        assert part(RESHARD, source, target, None) in (ExitCode.OK, ExitCode.INCOMPLETE)
        assert files(target) == files(alone)
        shutil.rmtree(target.parent)


def test_a_source_that_changes_between_parts(source: Path, target: Path) -> None:
    part(CONVERT, source, target, 0)
    os.utime(source / "__0_1.distcp", (1, 1))
    assert part(CONVERT, source, target, 1) is ExitCode.REFUSED  # it is built of the other
    assert part(CONVERT, source, target, None) is ExitCode.INCOMPLETE
    assert not target.exists()


def test_other_flags_are_another_plan(source: Path, target: Path) -> None:
    for number in (0, 1):
        part(CONVERT, source, target, number)
    assert part((*CONVERT[:3], "--dtype", "bf16"), source, target, 2) is ExitCode.REFUSED
    assert part(CONVERT, source, target, None) is ExitCode.INCOMPLETE


def test_a_damaged_source_is_not_converted(source: Path, target: Path) -> None:
    flip(source / "__0_1.distcp", 15000)
    ends = [part(CONVERT, source, target, number) for number in range(PARTS)]
    assert ends.count(ExitCode.CORRUPT) == 1
    assert part(CONVERT, source, target, None) is ExitCode.INCOMPLETE
    assert not target.exists()


def test_what_was_built_wrongly_fails_the_proof_of_a_part(source: Path, target: Path) -> None:
    for number in range(PARTS):
        part(CONVERT, source, target, number)
    bad = max(staged(target).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(bad, bad.stat().st_size - 3)
    ends = [part(CONVERT, source, target, number) for number in (0, 1)]
    assert ExitCode.CORRUPT in [*ends, part(CONVERT, source, target, None)]
    assert not target.exists()


def test_a_staging_place_that_is_gone(source: Path, target: Path) -> None:
    for number in (0, 1, 2, 0, 1):
        part(CONVERT, source, target, number)
    shutil.rmtree(staged(target).parent)
    assert part(CONVERT, source, target, None) is ExitCode.REFUSED
    assert not target.exists()


def test_to_an_object_store(source: Path, tmp_path: Path) -> None:
    url = f"memory://converted-{next(_numbers)}/b/made"
    answer(*words(CONVERT, source, tmp_path / "alone"))
    for number in (0, 1, 2, 0, 1):
        assert part(CONVERT, source, url, number) is ExitCode.OK
    assert part(CONVERT, source, url, None) is ExitCode.OK
    assert objects(url) == files(tmp_path / "alone")


def test_one_object_is_proven_by_parts(source: Path, tmp_path: Path) -> None:
    """One part writes it; the check before and the proof are divided."""
    line = ("convert", "--to", "torchsave")
    url = f"memory://converted-{next(_numbers)}/b/made.pt"
    for number in (0, 1, 2, 0, 1):
        assert part(line, source, url, number) is ExitCode.OK
        assert answer("verify", url)[0].code is ExitCode.NOT_FOUND
    assert part(line, source, url, None) is ExitCode.OK
    alone = tmp_path / "made.pt"
    assert answer(*words(line, source, alone))[0].code is ExitCode.OK
    parent, _, name = url.rpartition("/")
    assert open_store(parent).read(name) == alone.read_bytes()


def test_restart_would_forget_others(source: Path, target: Path) -> None:
    line = words(CONVERT, source, target)
    assert answer(*line, "--part", "0/2", "--restart")[0].code is ExitCode.USAGE


def test_a_merge_of_adapters_is_that_of_one_machine(tmp_path: Path) -> None:
    from tests.formats.lora.samples import base_of, unpacked

    case = unpacked(tmp_path) / "dora"
    words: list[object] = ["convert", base_of(case), "--to", "safetensors", "--dtype", "fp16"]
    words += ["--adapter", case / "adapter", "--max-shard-size", "2000"]
    alone, made = tmp_path / "alone", tmp_path / "parted"
    _, whole = answer(words[0], words[1], alone, *words[2:])
    for number in (0, 2, 1, 0, 2):
        code = answer(*words[:2], made, *words[2:], "--part", f"{number}/3")[0].code
        assert code is ExitCode.OK
    result, document = answer(*words[:2], made, *words[2:], "--finish")
    assert result.code is ExitCode.OK
    assert {**document, "destination": ""} == {**whole, "destination": ""}
    assert document["rounding"]["tensor"]
    assert files(made) == files(alone)


def test_parts_are_of_one_adapter(tmp_path: Path) -> None:
    from tests.formats.lora.samples import base_of, unpacked

    case = unpacked(tmp_path) / "dora"
    words: list[object] = ["convert", base_of(case), tmp_path / "out", "--to", "safetensors"]
    words += ["--adapter", case / "adapter", "--max-shard-size", "2000"]
    assert answer(*words, "--part", "0/2")[0].code is ExitCode.OK
    file = case / "adapter" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert answer(*words, "--part", "1/2")[0].code is ExitCode.REFUSED
    assert answer(*words, "--finish")[0].code is ExitCode.INCOMPLETE
    assert not (tmp_path / "out").exists()


def test_an_indexed_job_converts_for_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that Megatron-Core wrote, by the pods of two Jobs, one after the other.

    Pods are killed, and started again with the same index.
    """
    monkeypatch.setattr(shared_folder, "SILENT", 0.0)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "JOB_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    extract(DATA / "megatron_dist/model_space_tp2.tar.xz", tmp_path)
    source = tmp_path / "model_space_tp2/iter_0000002"
    flags = ("--to", "safetensors", "--only", "model", "--max-shard-size", "500")
    alone, made = tmp_path / "alone/hf", tmp_path / "made/hf"
    url = f"memory://indexed-{next(_numbers)}/b/hf"
    assert answer("convert", source, alone, *flags)[0].code is ExitCode.OK
    for line in (("convert", source, made, *flags), ("copy", made, url)):
        for index in (1, 2, 0):
            monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
            pod = (*line, "--part", f"auto/{PARTS}", "--finish-last")
            if line[0] == "convert":  # the memory of a killed process is no bucket
                for point in (5, 25):
                    assert run_until(lambda pod=pod: answer(*pod), point) == KILLED  # type: ignore[misc]
                    assert not made.exists()
            result, _ = answer(*pod)
            assert result.code is ExitCode.OK
    assert files(made) == files(alone)
    assert len(files(alone)) > PARTS
    assert objects(url) == files(alone)
