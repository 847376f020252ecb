"""A comparison by parts is the comparison of one machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.parts.division import FromRecords
from tests.builders.checkpoints import flip
from tests.commands.golden import DATA

from .answers import answer, in_parts

A, B = DATA / "run/step-1", DATA / "run/step-2"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tasks so small that tensors are compared by several parts."""
    monkeypatch.setattr("ftckpt.comparison.read._TASK", 1 << 9)
    monkeypatch.setattr("ftckpt.comparison.read._BATCH", 1 << 10)


@pytest.fixture
def done_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = FromRecords.run

    def counted(self: FromRecords, *given: object) -> object:
        yield from real(self, *given)  # type: ignore[arg-type]
        counts.append(self.done_here)

    monkeypatch.setattr(FromRecords, "run", counted)
    return counts


FLAGS = {
    "bits": (),
    "tolerances": ("--rtol", "1e-3", "--atol", "1e-6"),
    "weights": ("--component", "model"),
    "sums": ("--top", "0"),
    "recorded": ("--trust-recorded",),
}


@pytest.mark.parametrize("name", FLAGS)
def test_the_answer_is_that_of_one_machine(tmp_path: Path, name: str, done_here: list[int]) -> None:
    words = ("diff", A, B, "-j1", *FLAGS[name])
    alone = answer(*words)
    assert alone[0].code is ExitCode.DIFFERENT
    assert in_parts(3, tmp_path / "parts", *words) == alone
    assert set(done_here) == {0}


def test_a_converted_copy_is_equal(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert answer("convert", A, made, "--to", "safetensors")[0].code is ExitCode.OK
    words = ("diff", A, made, "-j1")
    alone = answer(*words)
    assert alone[0].code is ExitCode.OK
    assert in_parts(4, tmp_path / "parts", *words) == alone
    assert not list((tmp_path / "parts").rglob("*-4.json"))  # they have spoken


def test_few_changed_elements_in_one_part(tmp_path: Path, done_here: list[int]) -> None:
    """The norm of a tensor that another part saw change is of all its elements."""
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    made = answer("convert", A, one, "--to", "safetensors", "--only", "model")[0]
    assert made.code is ExitCode.OK
    shutil.copy(one, two)
    (tmp_path / f"{one.name}.ftckpt.json").unlink()
    flip(two, two.stat().st_size - 3)
    words = ("diff", one, two, "-j1")
    alone = answer(*words)
    assert alone[0].code is ExitCode.DIFFERENT
    assert in_parts(3, tmp_path / "parts", *words) == alone
    assert set(done_here) == {0}


def test_damage_is_found(tmp_path: Path) -> None:
    two = shutil.copytree(A, tmp_path / "two")
    flip(max(two.rglob("*.distcp"), key=lambda path: path.stat().st_size), 15000)
    words = ("diff", A, two, "-j1")
    alone = answer(*words)
    assert alone[0].code is ExitCode.CORRUPT
    assert in_parts(3, tmp_path / "parts", *words) == alone


def test_what_cannot_be_read(tmp_path: Path) -> None:
    two = shutil.copytree(A, tmp_path / "two")
    max(two.rglob("*.distcp"), key=lambda path: path.stat().st_size).unlink()
    words = ("diff", A, two, "-j1")
    result, alone = answer(*words)
    parted = in_parts(3, tmp_path / "parts", *words)
    assert parted[0] == result
    # Who reads alone leaves out the rest of a tensor that it cannot read.
    assert parted[1] | {"bytes_read": 0} == alone | {"bytes_read": 0}


def test_a_difference_is_no_failure_of_a_part(tmp_path: Path) -> None:
    words = ("diff", A, B, "--parts", tmp_path)
    for number in (0, 1):
        assert answer(*words, "--part", f"{number}/2")[0].code is ExitCode.OK
    other = answer("diff", A, B, "--parts", tmp_path, "--rtol", "1", "--finish")[0]
    assert other.code is ExitCode.REFUSED
    assert answer(*words, "--finish")[0].code is ExitCode.DIFFERENT


def test_a_side_that_changes_between_parts(tmp_path: Path) -> None:
    two = shutil.copytree(B, tmp_path / "two")
    words = ("diff", A, two, "--parts", tmp_path / "parts")
    assert answer(*words, "--part", "0/2")[0].code is ExitCode.OK
    flip(max(two.rglob("*.distcp"), key=lambda path: path.stat().st_size), 15000)
    assert answer(*words, "--part", "1/2")[0].code in (ExitCode.OK, ExitCode.CORRUPT)
    assert answer(*words, "--finish")[0].code is ExitCode.INCOMPLETE
