"""A file that an option names goes where its directory is; a typing error makes no tree."""

from __future__ import annotations

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
@pytest.mark.parametrize("folder", ["nowhere", "s3://bucket"])
def test_no_directory_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    option: str,
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = f"{folder}/out.html"
    end = ["--", "false"] if words[:2] == ["replay", "run"] else []
    result = run([*words, option, file, *end], Invocation())
    assert result.code is ExitCode.USAGE
    assert f"{option} {file}" in capsys.readouterr().err
    assert result.hint == ("name a path" if "://" in folder else "mkdir -p nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_goes_where_its_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seal = ["seal", str(RUN / "step-1"), "--manifest"]
    for place in ("nowhere/step-1.json", "nowhere/"):
        assert run([*seal, place], Invocation()).hint == "mkdir -p nowhere"
    for scheme in ("file", "local"):
        url = f"{scheme}://{tmp_path}/nowhere/step-1.json"
        assert run([*seal, url], Invocation()).hint == f"mkdir -p {tmp_path}/nowhere"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    for place in ("file/step-1.json", "file/and/more/step-1.json"):
        refused = run([*seal, place], Invocation())
        assert (refused.code, refused.hint) == (ExitCode.USAGE, "")
    (tmp_path / "there").mkdir()
    assert run([*seal, "there/"], Invocation()).code is ExitCode.OK
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["step-1.ftckpt.json"]


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
