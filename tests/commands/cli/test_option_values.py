"""The directory of a file that an option names is made, and never for a URL or through a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode
from tests.commands.golden import RUN


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["status", str(RUN)], "--prometheus"),
        (["status", str(RUN)], "--plot"),
        (["diff", str(RUN / "step-1"), str(RUN / "step-2")], "--plot"),
        (["plan", "--gpus", "1k", "--gpu-mtbf", "50000h", "--save", "60s"], "--plot"),
        (["plan", "sweep", "--over", "gpus=1k..2k"], "--plot"),
        (["replay", "compare", "a", "b"], "--html"),
        (["replay", "run", "--steps", "2"], "--html"),
    ],
)
@pytest.mark.parametrize("folder", ["file", "s3://bucket", "s3:/bucket"])
def test_no_directory_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    option: str,
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    file = f"{folder}/out.html"
    end = ["--", "false"] if words[:2] == ["replay", "run"] else []
    result = run([*words, option, file, *end], Invocation())
    assert result.code is ExitCode.USAGE
    assert f"{option} {file}" in capsys.readouterr().err
    hints = {"s3://bucket": "name a path", "file": "", "s3:/bucket": "a URL has two slashes"}
    assert result.hint.startswith(hints[folder])
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["status", str(RUN), "--prometheus", "a/b/x.prom"], Invocation()).code != 2
    assert (tmp_path / "a" / "b" / "x.prom").is_file()
    plan = ["plan", "--gpus", "1k", "--gpu-mtbf", "50000h", "--save", "60s", "--plot", "c/d/x.html"]
    if find_spec("matplotlib"):
        assert run(plan, Invocation()).code is ExitCode.OK
        assert sorted(path.name for path in (tmp_path / "c" / "d").iterdir()) == ["x.csv", "x.html"]
    # Not by a command that writes nothing.
    wrong = run(["status", str(tmp_path / "absent"), "--plot", "e/x.html"], Invocation())
    assert wrong.code is not ExitCode.OK
    assert not (tmp_path / "e").exists()


def test_the_directory_of_a_manifest_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seal = ["seal", str(RUN / "step-1"), "--manifest"]
    (tmp_path / "file").write_bytes(b"")
    for place in ("file/step-1.json", "file/and/more/step-1.json"):
        refused = run([*seal, place], Invocation())
        assert (refused.code, refused.hint) == (ExitCode.USAGE, "")
    for place in ("new/step-1.json", f"file://{tmp_path}/deep/er/step-1.json", "folder/"):
        assert run([*seal, place], Invocation()).code is ExitCode.OK, place
    assert (tmp_path / "new" / "step-1.json").is_file()
    assert (tmp_path / "deep" / "er" / "step-1.json").is_file()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["step-1.ftckpt.json"]


@pytest.mark.parametrize(
    "words", [["nosuchprogram"], ["--baseline", "nosuchprogram", "--", "true", "{checkpoint}"]]
)
def test_a_program_that_is_not_there_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--checkpoint", str(RUN / "step-1"), "--at", "1"] if len(words) > 1 else []
    assert run(["replay", "run", *more, *words], Invocation()).code is ExitCode.NOT_FOUND
    assert list(tmp_path.iterdir()) == []
