"""verl with Megatron: stores of core 0.16 in the places where verl of 2025 and 2026 puts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.builders.checkpoints import flip, open_checkpoint
from tests.formats.megatron.test_fsdp import of_data as of_fsdp
from tests.formats.megatron.torch_dist.test_reader import of_data, torch_dist
from tests.json_run import ftckpt_json

STEP = "global_step_7"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Make the layout of 2025: one store, side files beside it."""
    actor = tmp_path / STEP / "actor"
    shutil.copytree(of_data("model_space_tp2", tmp_path / "made").path, actor / "dist_ckpt")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    (actor / "transformer_config.json").write_text("{}")
    return actor


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Make layout schema 2: a store each, and the list that is written last."""
    actor = tmp_path / STEP / "actor"
    weight = torch.arange(12.0).view(3, 4)
    torch_dist(actor / "model" / "dist_ckpt", {"embedding.word_embeddings.weight": weight})
    state = {
        f"optimizer.state.{leaf}.embedding.word_embeddings.weight": weight + 1
        for leaf in ("param", "exp_avg", "exp_avg_sq")
    }
    torch_dist(actor / "optimizer" / "dist_ckpt", state)
    torch_dist(actor / "extra" / "dist_ckpt", {"rng_state/shard_0.0_1.1": [{"seed": 3}]})
    (actor / "model" / "huggingface").mkdir()
    (actor / "model" / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    say(actor, {
        "model": "model/dist_ckpt", "optimizer": "optimizer/dist_ckpt",
        "lr_scheduler": "optimizer/dist_ckpt", "rng_state": "extra/dist_ckpt",
        "hf_config": "model/huggingface",
    })  # fmt: skip
    return actor


def say(actor: Path, places: dict[str, Any]) -> None:
    contents = {name: {"path": path, "format": "x"} for name, path in places.items()}
    said = {"schema_version": 2, "global_step": 7, "world_size": 4, "contents": contents}
    (actor / "ckpt_contents.json").write_text(json.dumps(said))


def test_the_old_layout_is_its_store(old: Path, tmp_path: Path) -> None:
    whole, store = open_checkpoint(old), open_checkpoint(old / "dist_ckpt")
    assert (whole.format, whole.dialect) == ("bundle", "written by verl")
    assert whole.tensors.keys() == store.tensors.keys()
    assert {"huggingface/config.json", "transformer_config.json"} <= set(whole.members())
    assert ftckpt_json("verify", str(old), "--level", "values")["result"]["code"] == 0
    assert ftckpt_json("copy", str(old), str(tmp_path / "copy"))["result"]["code"] == 0
    assert (tmp_path / "copy" / "huggingface" / "config.json").is_file()


def test_the_new_layout_is_one_checkpoint(new: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(new)
    name = "embedding.word_embeddings.weight"
    assert set(whole.tensors) == {name, f"master:{name}", f"exp_avg:{name}", f"exp_avg_sq:{name}"}
    assert (whole.step, whole.topology.world_size) == (7, 4)
    assert whole.commit.marker == "ckpt_contents.json"
    assert ftckpt_json("verify", str(new), "--level", "content")["result"]["code"] == 0
    assert ftckpt_json("copy", str(new), str(tmp_path / "copy"))["result"]["code"] == 0
    assert (tmp_path / "copy" / "ckpt_contents.json").is_file()
    made = ftckpt_json("convert", str(new), str(tmp_path / "out"), "--to", "safetensors")
    assert made["result"]["code"] == 0
    assert ftckpt_json("diff", str(new), str(tmp_path / "out"))["result"]["code"] == 0


def test_to_hugging_face_by_the_configuration_beside(old: Path, tmp_path: Path) -> None:
    path, _ = of_fsdp("dense", tmp_path)
    shutil.rmtree(old / "dist_ckpt")
    store = str(old / "dist_ckpt")
    assert ftckpt_json("convert", str(path), store, "--to", "megatron-dist")["result"]["code"] == 0
    config = {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16,
    }  # fmt: skip
    (old / "huggingface" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "hf"
    args = ("--to", "safetensors", "--names", "hf", "--only", "model")
    assert ftckpt_json("convert", str(old), str(out), *args)["result"]["code"] == 0
    whole = load_file(path.parent / "truth.safetensors")
    made = load_file(out / "model.safetensors")
    gate, _ = whole["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(made["model.layers.1.mlp.gate_proj.weight"], gate)
    assert json.loads((out / "config.json").read_text()) == config


@pytest.mark.parametrize("part", ["model", "optimizer", "extra"])
def test_a_lost_store_is_damage(new: Path, part: str) -> None:
    shutil.rmtree(new / part / "dist_ckpt")
    answer = ftckpt_json("verify", str(new), "--level", "structure")
    lost = [f["file"] for f in answer["findings"] if f["kind"] == "missing-file"]
    assert f"{part}/dist_ckpt" in lost
    assert answer["result"]["code"] == 4


def test_a_flipped_bit_is_named_with_its_folder(new: Path) -> None:
    checkpoint = open_checkpoint(new)
    piece = checkpoint.tensors["exp_avg:embedding.word_embeddings.weight"].pieces[0]
    flip(new / piece.extent.file, checkpoint.payload(piece).extent.offset)
    answer = ftckpt_json("verify", str(new))
    bad = [f["file"] for f in answer["findings"] if f["kind"] == "bad-crc"]
    assert bad == ["optimizer/dist_ckpt/__0_0.distcp"]
    assert answer["result"]["code"] == 4


@pytest.mark.parametrize(("raw", "code"), [
    (b"{", 4),
    (b"[]", 4),
    (b'{"contents": {"model": 3}}', 4),
    (b'{"contents": {"model": {"path": "../model"}}}', 7),
    (b'{"contents": {"model": {"path": "/model"}}}', 7),
    (b'{"contents": {"model": {"path": "nowhere"}}}', 4),
    (b'{"contents": ' + b"[" * 50 + b"]" * 50 + b"}", 7),
])  # fmt: skip
def test_a_list_that_cannot_be_trusted(new: Path, raw: bytes, code: int) -> None:
    (new / "ckpt_contents.json").write_bytes(raw)
    assert ftckpt_json("verify", str(new), "--level", "structure")["result"]["code"] == code
