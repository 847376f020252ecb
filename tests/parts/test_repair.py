"""Parts look for damage, and who finishes mends it as one machine does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from tests.builders.checkpoints import flip
from tests.commands.golden import DATA

from .answers import answer, in_parts, small_blocks
from .test_copy import files


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A sealed checkpoint and its replica."""
    small_blocks(monkeypatch)
    for module in ("damage", "repair"):
        monkeypatch.setattr(f"ftckpt.replication.{module}.BLOCK", 4096)
    one = shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")
    answer("seal", one)
    return one, shutil.copytree(one, tmp_path / "b" / "step-2")


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["mend", "look"])
def test_it_is_the_repair_of_one_machine(
    pair: tuple[Path, Path], tmp_path: Path, more: tuple[str, ...]
) -> None:
    place, replica = pair
    whole = files(place)
    flip(place / "__0_0.distcp", 20)
    flip(place / "__0_1.distcp", 15000)
    other = shutil.copytree(place, tmp_path / "c" / "step-2")
    words = ("--from", replica, *more)
    parted = in_parts(3, tmp_path / "parts", "repair", place, *words)
    alone = answer("repair", other, *words)
    assert parted[0] == alone[0]
    assert parted[0].code is ExitCode.OK
    for field in ("blocks", "fetched", "files", "proven", "done", "bytes_damaged"):
        assert parted[1][field] == alone[1][field]
    assert files(place) == (files(other) if more else whole)


def test_nothing_is_mended_before_the_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    place, replica = pair
    flip(place / "__0_1.distcp", 15000)
    bad = files(place)
    words = ("repair", place, "--from", replica, "--parts", tmp_path / "parts")
    assert answer(*words, "--part", "0/2")[0].code is ExitCode.OK
    assert answer(*words, "--finish")[0].code is ExitCode.INCOMPLETE
    os.utime(place / "__0_0.distcp", (1, 1))
    assert answer(*words, "--part", "1/2")[0].code is ExitCode.OK
    assert answer(*words, "--finish")[0].code is ExitCode.INCOMPLETE  # it changed in between
    assert files(place) == bad


def test_what_is_not_sealed_is_not_divided(tmp_path: Path) -> None:
    place = DATA / "run/step-2"
    words = ("repair", place, "--from", DATA / "run/step-2", "--parts", tmp_path)
    assert answer(*words, "--part", "0/2")[0].code is ExitCode.UNSUPPORTED
