"""`ftckpt doctor` on the command line: its answer, its codes, and packages that are absent."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ftckpt.capabilities import machine
from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from tests.commands.saves import answer


def test_the_machine_alone() -> None:
    document = answer("doctor")
    assert document["result"]["code"] == 0
    assert document["target"] is None
    assert {one["area"] for one in document["checks"]} == {
        "ftckpt", "packages", "processor", "limits",
    }  # fmt: skip


def test_a_place(tmp_path: Path) -> None:
    document = answer("doctor", str(tmp_path))
    assert (document["result"]["code"], document["target"]) == (0, str(tmp_path))
    assert "place" in {one["area"] for one in document["checks"]}
    assert list(tmp_path.iterdir()) == []
    assert answer("doctor", str(tmp_path / "absent"))["result"]["code"] == 9


def test_a_needed_package_that_is_absent_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("numpy", "torch"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(machine, "version", version)
    document = answer("doctor")
    found = {one["name"]: one for one in document["checks"]}
    assert found["numpy"]["state"] == "problem"
    assert found["torch"]["state"] == "note"
    assert found["torch"]["do"] == "pip install torch"
    assert document["result"]["code"] == 14
    assert document["result"]["hint"] == "pip install numpy"


def test_what_a_stranger_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The place under its own heading, and at the end what is to be done."""
    assert run(["doctor", str(tmp_path)], Invocation(verb="doctor")).code == 0
    text = capsys.readouterr().out
    machine, place = text.split(f"\n{tmp_path}:\n")
    assert machine.startswith("this machine:\n")
    assert "locks" in place
    assert "locks" not in machine
    assert place.splitlines()[-1].startswith("no problem, ")
