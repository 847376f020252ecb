"""Weights that are not those of the model that `config.json` describes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint

TRAINER = Path(__file__).parents[1] / "data" / "trainer_dirs" / "trainer"
Tensors = dict[str, torch.Tensor]
LAST = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model alone: its weights and its configuration."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TRAINER / name, tmp_path)
    return tmp_path


def said(folder: Path) -> set[str]:
    report = verify(open_checkpoint(folder), VerifyOptions(level=Level.STRUCTURE))
    return {f.kind for f in report.findings if f.code}


def change(folder: Path, tensors: Callable[[Tensors], Any] = len, **config: Any) -> Path:
    held = load_file(folder / "model.safetensors")
    tensors(held)
    save_file(held, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def rename(tensors: Tensors) -> None:
        for name in [n for n in tensors if old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rename


def test_a_model_as_it_was_saved(folder: Path) -> None:
    assert said(folder) == set()


@pytest.mark.parametrize("name", ["lm_head.weight", LAST, "model.norm.weight"])
def test_a_lost_tensor(name: str, folder: Path) -> None:
    assert said(change(folder, lambda tensors: tensors.pop(name))) == {"missing-tensor"}


def test_another_shape(folder: Path) -> None:
    turned = lambda tensors: tensors.update({LAST: tensors[LAST].T.contiguous()})  # noqa: E731
    assert said(change(folder, turned)) == {"shape-mismatch"}


def test_more_layers_than_are_there_and_fewer(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert said(change(folder, num_hidden_layers=layers + 1)) == {"missing-tensor"}
    if layers > 1:
        assert said(change(folder, num_hidden_layers=layers - 1)) == {"unindexed-tensor"}
    more = renamed("layers.0.", f"layers.{layers}.")
    assert "unindexed-tensor" in said(change(folder, more, num_hidden_layers=layers))


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (renamed("lm_head.weight", "score.weight"), {}),  # a critic that began as this model
        (renamed(LAST, LAST), {"model_type": "unheard-of", "vocab_size": 7}),
        (len, {"vocab_size": 7, "architectures": ["LlamaForSequenceClassification"]}),
        (len, {"vocab_size": 7, "quantization_config": {"quant_method": "x"}}),
        (renamed("q_proj.", "q_proj.base_layer."), {}),  # an adapter is trained within
        (renamed("model.", "_wrapped."), {"tie_word_embeddings": True}),
        (renamed("lm_head.weight", "extra.weight"), {"tie_word_embeddings": True}),
    ],
)
def test_what_the_table_cannot_judge_is_let_be(
    tensors: Callable[[Tensors], Any], config: dict[str, Any], folder: Path
) -> None:
    assert said(change(folder, tensors, **config)) == set()
