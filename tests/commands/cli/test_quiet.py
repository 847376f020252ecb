"""What `--quiet` leaves on stderr: no remarks, but what a job must be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode


def test_latest_still_says_what_was_not_taken(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    (here / "run/step-2/__0_1.distcp").unlink()
    assert run(["latest", "run", "--quiet"], Invocation()).code is ExitCode.OK
    assert capsys.readouterr().err.startswith("skipped (CORRUPT): ")


def test_a_root_says_nothing_of_the_newest(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    assert run(["inspect", "run@latest", "-q"], Invocation()).code is ExitCode.OK
    assert run(["verify", "run", "-q", "--level", "structure"], Invocation()).code is ExitCode.OK
    assert capsys.readouterr().err == ""
