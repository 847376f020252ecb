"""A clone without git-lfs has pointers in place of large files: not damage, never fetched.

Sources: microsoft/OmniParser#34, codefuse-ai/MFTCoder#20, huggingface/transformers#27923.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.json_run import ftckpt_json

from .weights import save, sharded, values


def unfetched(path: Path) -> str:
    """Put a pointer in the place of a file, as git does without git-lfs; return the digest."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    path.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n"
    )
    return digest


def model(folder: Path) -> Path:
    """A model of one shard with everything that a clone may lack."""
    sharded(folder, ["model-00001-of-00001.safetensors"])
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>" * 100)
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
    ],
)
def test_a_pointer_is_an_unfetched_file_and_says_what_is_missing(file: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    size = (folder / file).stat().st_size
    digest = unfetched(folder / file)
    answer = ftckpt_json("verify", str(folder))
    assert answer["result"]["code"] == 5
    assert answer["result"]["hint"] == "`git lfs pull` in the clone fetches it"
    message = answer["result"]["message"]
    assert f"{file} is a Git LFS pointer: the content was never fetched" in message
    assert f"{size} bytes" in message
    assert digest in message
    for verb in (["seal"], ["copy", "OUT"], ["convert", "OUT", "--to", "safetensors"]):
        out = [str(tmp_path / "out") if word == "OUT" else word for word in verb[1:]]
        assert ftckpt_json(verb[0], str(folder), *out)["result"]["code"] == 5
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["bin", "pt", "safetensors", "ckpt", "gguf"])
def test_one_file_may_be_a_pointer(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"whole.{suffix}"
    file.write_bytes(b"x" * 5000)
    unfetched(file)
    answer = ftckpt_json("verify", str(file))
    assert answer["result"]["code"] == 5
    assert "5000 bytes" in answer["result"]["message"]


def test_pickled_weights_may_be_a_pointer(tmp_path: Path) -> None:
    import torch

    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 0
    unfetched(tmp_path / "pytorch_model.bin")
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 5


def test_latest_passes_over_a_step_that_was_not_fetched(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = model(tmp_path / f"checkpoint-{step}")
        os.utime(folder, (step, step))
    unfetched(tmp_path / "checkpoint-20" / "model-00001-of-00001.safetensors")
    answer = ftckpt_json("latest", str(tmp_path))
    assert answer["result"]["code"] == 0
    assert answer["path"].endswith("checkpoint-10")


def test_a_text_about_pointers_is_none(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a.weight": values(3, 4)})
    (tmp_path / "README.md").write_text("This model needs https://git-lfs.github.com/spec/v1.\n")
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 0
