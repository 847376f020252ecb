"""The cache of the Hugging Face Hub: a folder of links, of which one may lead to nothing.

Sources: tenstorrent/tt-inference-server#4986, NVIDIA-NeMo/Automodel#3582 (dangling links), and
huggingface_hub's guide on its cache.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.json_run import ftckpt_json

from .weights import sharded

COMMIT = "a" * 40


def cached(hub: Path, commit: str = COMMIT, *, main: bool = True) -> Path:
    """Write a model into a cache as huggingface_hub does; return the folder of the model."""
    model = hub / "models--tiny--llama"
    plain = hub / "plain"
    sharded(plain, [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)])
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir(exist_ok=True)
    for file in sorted(plain.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(model / "blobs" / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    plain.rmdir()
    if main:
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(commit)
    return model


@pytest.mark.parametrize("main", [True, False])
def test_the_folder_of_a_model_opens_its_snapshot(main: bool, tmp_path: Path) -> None:
    model = cached(tmp_path, main=main)
    for verb in ("verify", "inspect"):
        answer = ftckpt_json(verb, str(model))
        assert (answer["result"]["code"], answer["format"]) == (0, "safetensors")
    assert ftckpt_json("copy", str(model), str(tmp_path / "copy"))["result"]["code"] == 0
    assert not (tmp_path / "copy" / "config.json").is_symlink()


def test_main_says_which_of_several_snapshots(tmp_path: Path) -> None:
    model = cached(tmp_path)
    cached(tmp_path, "b" * 40)
    assert ftckpt_json("verify", str(model))["result"]["code"] == 0
    (model / "snapshots" / ("b" * 40) / "model-00001-of-00003.safetensors").unlink()
    assert ftckpt_json("verify", str(model))["result"]["code"] == 4
    (model / "refs" / "main").write_text(COMMIT + "\n")
    assert ftckpt_json("verify", str(model))["result"]["code"] == 0
    (model / "refs" / "main").unlink()
    answer = ftckpt_json("verify", str(model))
    assert answer["result"]["code"] == 2
    assert "snapshots/aaaa" in answer["result"]["hint"]


@pytest.mark.parametrize(("said", "code"), [("c" * 40, 4), ("../../..", 7), ("", 7)])
def test_main_may_name_nothing(said: str, code: int, tmp_path: Path) -> None:
    model = cached(tmp_path)
    (model / "refs" / "main").write_text(said)
    assert ftckpt_json("verify", str(model))["result"]["code"] == code


@pytest.mark.parametrize(
    "file",
    ["model-00002-of-00003.safetensors", "model.safetensors.index.json", "config.json"],
)
def test_a_link_to_a_blob_that_is_gone_is_a_missing_file(file: str, tmp_path: Path) -> None:
    model = cached(tmp_path)
    link = model / "snapshots" / COMMIT / file
    link.resolve().unlink()
    answer = ftckpt_json("verify", str(model))
    assert answer["result"]["code"] == 4
    errors = [one for one in answer["findings"] if one["severity"] == "error"]
    assert [(one["kind"], one["file"]) for one in errors] == [("missing-file", file)]
    assert "which is not there" in errors[0]["message"]
    assert ftckpt_json("verify", str(link))["result"]["code"] == 4


def test_a_pickled_shard_may_lead_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").symlink_to("../blobs/gone")
    answer = ftckpt_json("verify", str(tmp_path / "model"))
    assert (answer["result"]["code"], answer["findings"][0]["kind"]) == (4, "missing-file")


def test_a_cut_blob_is_damage(tmp_path: Path) -> None:
    model = cached(tmp_path)
    blob = (model / "snapshots" / COMMIT / "model-00002-of-00003.safetensors").resolve()
    os.truncate(blob, blob.stat().st_size - 8)
    answer = ftckpt_json("verify", str(model))
    assert answer["result"]["code"] == 4
    assert "truncated-file" in [one["kind"] for one in answer["findings"]]


def test_a_link_to_a_device_is_refused_as_before(tmp_path: Path) -> None:
    model = cached(tmp_path)
    link = model / "snapshots" / COMMIT / "config.json"
    link.unlink()
    link.symlink_to("/dev/null")
    assert ftckpt_json("verify", str(model))["result"]["code"] == 7


def test_ls_shows_the_sizes_of_what_links_lead_to(tmp_path: Path) -> None:
    model = cached(tmp_path)
    (one,) = ftckpt_json("ls", str(model / "snapshots"))["checkpoints"]
    assert one["bytes"] == sum(file.stat().st_size for file in (model / "blobs").iterdir())
