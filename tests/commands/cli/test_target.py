"""What is said about a path that is a part of something, or several things."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftckpt as api
from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.opening import STORES, open_target, opened

_METADATA = b"\x80\x02N."


def test_a_part_that_is_a_checkpoint_too_names_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "checkpoint_3"
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        (whole / name).mkdir(parents=True)
        (whole / name / ".metadata").write_bytes(_METADATA)
    target = open_target(f"{whole}/optimizer_0", STORES, Invocation())
    assert target.format == "dcp"
    part = f"{whole}/optimizer_0 is one part of the checkpoint {whole}: this is about it alone\n"
    assert capsys.readouterr().err == part
    open_target(str(whole), STORES, Invocation())
    assert capsys.readouterr().err == ""


def test_a_root_without_steps_in_its_names_lists_what_it_holds(tmp_path: Path) -> None:
    for name in ("first", "second", "notes"):
        (tmp_path / name).mkdir()
    for name in ("first", "second"):
        (tmp_path / name / ".metadata").write_bytes(_METADATA)
    with pytest.raises(UsageError) as caught:
        opened(str(tmp_path), STORES, Invocation())
    listed = f"name one of its checkpoints: {tmp_path}/first, {tmp_path}/second"
    assert caught.value.hint == listed


def test_a_tensor_that_is_not_there_has_near_ones(here: Path) -> None:
    names = list(api.open_checkpoint(f"{here}/run/step-1").tensors)
    result = run(["inspect", f"{here}/run/step-1", "--tensor", names[0][:-1]], Invocation())
    assert result.code is ExitCode.NOT_FOUND
    assert result.hint.startswith("did you mean ")
    assert names[0] in result.hint
    words = [
        "convert",
        f"{here}/run/step-1",
        f"{here}/out",
        "--to",
        "dcp",
        "--drop",
        names[0] + "s",
    ]
    dropped = run(words, Invocation())
    assert dropped.code is ExitCode.USAGE
    assert names[0] in dropped.hint
