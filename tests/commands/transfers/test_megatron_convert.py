"""A Hugging Face folder becomes a start for Megatron, and itself again, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.hf_models import Model
from tests.commands.golden import ftckpt

START = ("--names", "megatron", "--only", "model", "--tp", "2", "--pp", "2")


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_there_and_back(form: str, tmp_path: Path) -> None:
    Model("mixtral").save(tmp_path / "hf")
    flags = (*START, "--spelling", "transformer_engine", "--spelling", "grouped", "--ep", "2")
    there = ftckpt("convert", "hf", "there", "--to", form, *flags, cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    assert "proven: 55 tensors" in there.stdout
    assert "note: the arguments follow from config.json" in there.stderr
    back = ("--to", "safetensors", "--names", "hf", "--only", "model", "--family", "mixtral")
    done = ftckpt("convert", "there", "back", *back, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ftckpt("diff", "hf", "back", cwd=tmp_path).returncode == 0
    assert (tmp_path / "back/config.json").read_text() == (tmp_path / "hf/config.json").read_text()


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--to", "megatron"), 13, "--names megatron"),
        (("--to", "megatron", *START, "--tp", "3"), 2, "cannot be divided over 3 tensor ranks"),
        (("--to", "safetensors", "--spelling", "local"), 2, "--names megatron"),
    ],
)
def test_what_is_missing_is_said(
    flags: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    Model().save(tmp_path / "hf")
    refused = ftckpt("convert", "hf", "there", *flags, cwd=tmp_path)
    assert (refused.returncode, says in refused.stderr) == (code, True), refused.stderr
    assert not (tmp_path / "there").exists()
