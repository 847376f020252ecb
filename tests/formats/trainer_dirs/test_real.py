"""Folders of the Hugging Face Trainer and of accelerate, as those wrote them, against the truth."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.run import TransferOptions, transfer
from tests.builders.checkpoints import open_checkpoint

DATA = Path(__file__).parents[2] / "data" / "trainer_dirs"
NAMES = ("trainer", "trainer_peft", "accelerate", "accelerate_two")


def _require_truth(path: Path, truth: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.optimizer_count == 3
    # accelerate records no step of its own.
    assert checkpoint.step == (None if truth.stem.startswith("accelerate") else 3)
    expected = load_file(truth)
    for key, tensor in expected.items():
        data = read_tensor(checkpoint, key)
        assert data == tensor.contiguous().flatten().view(-1).numpy().tobytes(), key
    more = checkpoint.tensors.keys() - expected.keys()
    assert all(key.startswith("extra:") for key in more), more


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_that_were_in_memory(name: str) -> None:
    _require_truth(DATA / name, DATA / f"{name}.safetensors")


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_one_holds_the_same(name: str, to: str, tmp_path: Path) -> None:
    _convert(DATA / name, to, tmp_path / "out")
    _require_truth(tmp_path / "out", DATA / f"{name}.safetensors")


def test_an_object_with_tensors_inside_is_whole_in_safetensors(tmp_path: Path) -> None:
    # Its pickle alone was copied before: the tensors are other records of the file.
    _convert(DATA / "accelerate", "safetensors", tmp_path / "out")
    found: Any = open_checkpoint(tmp_path / "out").load_object("custom_checkpoint_0")
    assert found["names"] == ("a", "b")
    assert found["raw"] == b"\x00\xff"
    assert found["history"][2] == [1, 2]


def _convert(path: Path, to: str, out: Path) -> None:
    content = Content.of(open_checkpoint(path))
    target, writer = format_and_writer(to)
    transfer(
        content,
        writer.layout(content, LayoutRequest()),
        str(out),
        target,
        single=writer.single,
        same_objects=SameObject,
        options=TransferOptions(),
        store_options=StoreOptions(),
    )


@pytest.mark.peer
def test_folders_of_the_frameworks_that_are_installed(tmp_path: Path) -> None:
    if not all(find_spec(name) for name in ("transformers", "peft", "accelerate")):
        pytest.skip("transformers, peft or accelerate is not installed")
    script = [sys.executable, str(DATA / "make_trainer_dirs.py"), str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True, timeout=300)
    for name in NAMES:
        _require_truth(tmp_path / name, tmp_path / f"{name}.safetensors")
        for to in ("safetensors", "dcp"):
            _convert(tmp_path / name, to, tmp_path / f"{name}-{to}")
            _require_truth(tmp_path / f"{name}-{to}", tmp_path / f"{name}.safetensors")
