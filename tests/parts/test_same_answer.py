"""A verb that is divided answers what it answers alone: code, message, findings, every field."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode
from ftckpt.own_files import MANIFEST
from ftckpt.parts.division import FromRecords
from tests.builders.checkpoints import flip
from tests.commands.golden import DATA

from .answers import answer, in_parts, small_tasks, untimed

# Checkpoints that frameworks wrote: CRCs, sums of the format's own, SHA-256, and no evidence.
SOUND = {
    "dcp": "run/step-2",
    "dcp-many-ranks": "dcp/hsdp",
    "deepspeed": "deepspeed/z2/global_step2",
    "ranks": "ranks/tp_fsdp2",
    "orbax": "orbax/sharded",
    "delta": "",
}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 3)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip": flip_middle,
    "truncate": truncate,
    "remove": lambda path: path.unlink(),
}


def largest(place: Path) -> Path:
    return max((p for p in place.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p))


@pytest.fixture(params=SOUND)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_tasks(monkeypatch)
    if request.param == "delta":
        shutil.copytree(DATA / "run", tmp_path / "run")
        words = [str(tmp_path / "run" / name) for name in ("step-1", "step-2", "step-2-delta")]
        assert run(["delta", "pack", *words], Invocation(quiet=True)).code is ExitCode.OK
        return Path(words[-1])
    here = tmp_path / "ckpt" / Path(SOUND[request.param]).name
    shutil.copytree(DATA / SOUND[request.param], here)
    return here


@pytest.fixture
def done_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each finisher did itself."""
    counts: list[int] = []
    real = FromRecords.run

    def counted(self: FromRecords, *given: object) -> object:
        yield from real(self, *given)  # type: ignore[arg-type]
        counts.append(self.done_here)

    monkeypatch.setattr(FromRecords, "run", counted)
    return counts


def test_a_sound_one(place: Path, tmp_path: Path, done_here: list[int]) -> None:
    words = ("verify", place, "--level", "values")
    alone = answer(*words)
    assert in_parts(3, tmp_path / "parts", *words) == alone
    assert alone[1]["findings"] or alone[0].code is ExitCode.OK
    assert set(done_here) == {0}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one(place: Path, tmp_path: Path, damage: str) -> None:
    DAMAGE[damage](largest(place))
    words = ("verify", place, "--level", "values", "-j1")
    alone = answer(*words)
    assert in_parts(2, tmp_path / "parts", *words) == alone


def test_seal_writes_the_same_manifest(place: Path, tmp_path: Path) -> None:
    in_parts(3, tmp_path / "parts", "seal", place, "--manifest", tmp_path / "parted.json")
    answer("seal", place, "--manifest", tmp_path / "alone.json")
    if not (tmp_path / "alone.json").exists():  # it is refused: then by both
        assert not (tmp_path / "parted.json").exists()
        return
    parted, alone = (
        untimed(json.loads((tmp_path / f"{name}.json").read_bytes()))
        for name in ("parted", "alone")
    )
    del parted["digest"], alone["digest"]  # over the times too
    assert parted == alone


@pytest.mark.parametrize("damage", [None, *DAMAGE])
@pytest.mark.parametrize(
    "flags",
    [("--sample", "60%"), ("--level", "content"), ("--strict",), ("--level", "structure")],
    ids=lambda flags: flags[0],
)
def test_a_sealed_one(tmp_path: Path, damage: str | None, flags: tuple[str, ...]) -> None:
    place = shutil.copytree(DATA / "dcp/hsdp", tmp_path / "step-1")
    assert answer("seal", place)[0].code is ExitCode.OK
    if damage:
        DAMAGE[damage](max(place.rglob("*.distcp"), key=lambda p: p.stat().st_size))
    words = ("verify", place, "-j1", *flags)
    alone = answer(*words)
    assert in_parts(3, tmp_path / "parts", *words) == alone
    assert (place / MANIFEST).exists()


def test_against_a_replica(tmp_path: Path) -> None:
    place = shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")
    other = shutil.copytree(place, tmp_path / "b" / "step-2")
    flip_middle(largest(other))
    words = ("verify", place, "--against", other, "-j1")
    alone = answer(*words)
    assert alone[0].code is ExitCode.CORRUPT
    assert in_parts(3, tmp_path / "parts", *words) == alone


def test_against_another_layout(tmp_path: Path) -> None:
    """Tensor by tensor, where the two are no copies of each other."""
    words = ("verify", DATA / "run/step-2", "--against", DATA / "run/step-1", "-j1")
    alone = answer(*words)
    assert in_parts(3, tmp_path / "parts", *words) == alone


def test_several_places_are_not_divided(tmp_path: Path) -> None:
    """The plan would know the files of the first place alone, and not see another's change."""
    one, two = tmp_path / "n0" / "step-2", tmp_path / "n1" / "step-2"
    shutil.copytree(DATA / "run/step-2", one)
    shutil.copytree(one, two)
    result, _ = answer("verify", one, "--also", two, "--part", "0/3", "--parts", tmp_path / "parts")
    assert result.code is ExitCode.USAGE
    assert "--also" in result.message


def test_another_file_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    place = shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")
    words = ("verify", place, "--parts", tmp_path / "parts")
    for number in range(3):
        assert answer(*words, "--part", f"{number}/3")[0].code is ExitCode.OK
    victim = largest(place)
    held = victim.stat()
    flip_middle(victim)
    os.utime(victim, ns=(held.st_atime_ns, held.st_mtime_ns))
    result, _ = answer(*words, "--finish")
    assert result.code is ExitCode.INCOMPLETE
    assert "has changed" in result.message


def test_what_cannot_be_opened_is_the_answer_of_every_part(tmp_path: Path) -> None:
    place = shutil.copytree(DATA / "run/step-2", tmp_path / "step-2")
    truncate(place / ".metadata")
    alone = answer("verify", place)
    assert alone[0].code is ExitCode.CORRUPT
    words = ("verify", place, "--parts", tmp_path / "parts")
    assert answer(*words, "--part", "1/3") == alone
    assert answer(*words, "--finish") == alone


@pytest.mark.parametrize("flag", ["--all", "--fail-fast", "--remember"])
def test_what_is_not_divided_says_so(flag: str) -> None:
    assert answer("verify", DATA / "run", flag, "--part", "0/2")[0].code is ExitCode.USAGE


def test_a_root_needs_a_step(tmp_path: Path) -> None:
    """Two parts could find two newest ones."""
    words = ("--part", "0/2", "--parts", tmp_path)
    assert answer("verify", DATA / "run", *words)[0].code is ExitCode.USAGE
    assert answer("verify", f"{DATA / 'run'}@2", *words)[0].code is ExitCode.OK
