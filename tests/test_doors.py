"""The shell and Python say the same of the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftckpt
from ftckpt.commands.cli import app
from ftckpt.errors import ExitCode, NotFoundError, UsageError
from ftckpt.workers import budget
from tests.builders.checkpoints import save_dcp


def said_by(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of a verb and what it says on stderr."""
    with pytest.raises(SystemExit) as ended:
        app.main(list(words))
    return int(ended.value.code or 0), capfd.readouterr().err


@pytest.mark.parametrize("text", ["1", "90000", "1.5", "soon"])
def test_a_duration_needs_its_unit_behind_both_doors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    with pytest.raises(UsageError) as refused:
        ftckpt.latest(str(tmp_path), wait=True, timeout=text)
    code, stderr = said_by(capfd, "latest", str(tmp_path), "--wait", "--timeout", text)
    assert (code, refused.value.message in stderr) == (2, True)
    code, stderr = said_by(capfd, "gc", str(tmp_path), "--keep-last", "1", "--trash-ttl", text)
    assert (code, refused.value.message.replace("--timeout", "--trash-ttl") in stderr) == (2, True)


def test_convert_keeps_the_format_unless_another_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    source, shell, python = (str(tmp_path / name) for name in ("step-1", "shell", "python"))
    assert said_by(capfd, "convert", source, shell, "--only", "model")[0] == 0
    ftckpt.convert(source, python, only="model")
    assert [ftckpt.open_checkpoint(one).format for one in (shell, python)] == ["dcp", "dcp"]
    assert ftckpt.diff(shell, python).code is ExitCode.OK


def test_gaps_without_an_adapter_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    source, out = str(tmp_path / "step-1"), str(tmp_path / "out")
    with pytest.raises(UsageError) as refused:
        ftckpt.convert(source, out, "dcp", allow_gaps=True)
    code, stderr = said_by(capfd, "convert", source, out, "--to", "dcp", "--allow-gaps")
    assert (code, refused.value.message in stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "SRC", "out", "--to", "dcp"),
        ("reshard", "SRC", "out", "--dp", "2"),
        ("delta", "unpack", "SRC", "out"),
    ],
)
def test_the_memory_limit_holds_while_the_source_is_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    seen: list[int] = []

    def opens(*_: object) -> None:
        seen.append(budget.budget())
        raise NotFoundError("nothing is opened here")

    before = budget.budget()
    monkeypatch.setattr("ftckpt.operations.opening.resolve.open_target", opens)
    try:
        said_by(capfd, *words, "--max-memory", "123MiB")
    finally:
        budget.set_budget(before)
    assert seen == [123 << 20]
