"""Weights that are not those of the model that `config.json` describes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftckpt
from ftckpt.findings import Severity
from ftckpt.formats.families.shapes import Name
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


def warned(folder: Path) -> set[str]:
    report = verify(open_checkpoint(folder), VerifyOptions(level=Level.STRUCTURE))
    assert not report.code
    return {f.kind for f in report.findings if f.severity is Severity.WARNING}


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


def more_layers(tensors: Tensors, layers: int = 3) -> None:
    for name in [n for n in tensors if ".layers.0." in n]:
        for number in range(1, layers):
            tensors[name.replace("layers.0.", f"layers.{number}.")] = tensors[name].clone()


def without(*gone: str) -> Callable[[Tensors], None]:
    """Make a model of three layers that lacks all names with one of these in them."""

    def change(tensors: Tensors) -> None:
        more_layers(tensors)
        for name in [n for n in tensors if any(part in n for part in gone)]:
            del tensors[name]

    return change


def reshaped(*names: str, turned: bool = False) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        more_layers(tensors)
        for name in [n for n in tensors if any(part in n for part in names)]:
            one = tensors[name]
            tensors[name] = (one.T if turned else one[:-1]).clone().contiguous()

    return change


DAMAGED = [
    (without("layers.1.mlp.down_proj"), "missing-tensor"),
    (without("layers.2.input_layernorm", "layers.1.self_attn.q_proj"), "missing-tensor"),
    (reshaped("layers.1.mlp.down_proj"), "shape-mismatch"),
    (reshaped("lm_head", turned=True), "shape-mismatch"),  # every other width is as described
]


@pytest.mark.parametrize(("tensors", "kind"), DAMAGED)
def test_what_other_tensors_contradict_is_damage(
    tensors: Callable[[Tensors], None], kind: str, folder: Path
) -> None:
    assert said(change(folder, tensors, num_hidden_layers=3)) == {kind}


def test_a_shape_in_a_model_of_one_layer(folder: Path) -> None:
    turned = lambda tensors: tensors.update({LAST: tensors[LAST].T.contiguous()})  # noqa: E731
    assert said(change(folder, turned)) == {"shape-mismatch"}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (without("lm_head"), {}),
        (without("model.norm"), {}),
        (without("layers.1."), {}),  # a layer that is not trained
        (without("layers.1.", "layers.0.", "embed"), {}),
        # What is trained: the norms of all layers, and the whole of one.
        (without("layers.0.self", "layers.0.mlp", "layers.1.self", "layers.1.mlp"), {}),
        (without("k_proj"), {}),  # of no layer
        (without("layers.0.self_attn.k_proj", "layers.1.self_attn.k_proj"), {}),  # shared ones
        (without("layers.1.mlp"), {}),  # a block of another sort in its place, or none
        (len, {"num_hidden_layers": 2}),
        (more_layers, {"num_hidden_layers": 2}),
        (more_layers, {"hidden_size": 18}),
        (more_layers, {"vocab_size": 18}),
        (reshaped("down_proj"), {}),  # of all layers
        (reshaped("layers.1.mlp.gate", "layers.1.mlp.up"), {}),  # a layer that was made narrower
        (len, {"num_hidden_layers": 1_000_000}),
    ],
)
def test_what_config_json_alone_contradicts_is_told(
    tensors: Callable[[Tensors], None], config: dict[str, Any], folder: Path
) -> None:
    config = {"num_hidden_layers": 3} | config
    assert warned(change(folder, tensors, **config)) == {"state-unknown"}


def test_a_list_that_would_be_long_is_not_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `config.json` of 400 bytes may describe any number of tensors."""
    made: list[str] = []
    fill = Name.fill

    def counted(name: Name, numbers: Mapping[str, str]) -> str:
        made.append(name.text)
        return fill(name, numbers)

    monkeypatch.setattr(Name, "fill", counted)
    assert warned(change(folder, num_hidden_layers=40_000)) == {"state-unknown"}
    assert len(made) < 200


def mixtral(tensors: Tensors) -> None:
    """Make it one of three layers of four experts, as transformers 4 saves it."""
    for name in [n for n in tensors if ".mlp." in n]:
        del tensors[name]
    inner, width = 24, 16
    moe = "model.layers.0.block_sparse_moe"
    tensors[f"{moe}.gate.weight"] = torch.ones(4, width)
    for expert in range(4):
        for word, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
            tensors[f"{moe}.experts.{expert}.{word}.weight"] = torch.ones(shape)
    more_layers(tensors)


def raw(tensors: Tensors) -> None:
    """Make it one with the names that transformers 5 has in memory."""
    mixtral(tensors)
    for name in [n for n in tensors if ".experts." in n]:
        del tensors[name]
    renamed("block_sparse_moe.gate", "mlp.gate")(tensors)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        tensors[f"{experts}.gate_up_proj"] = torch.ones(4, 48, 16)
        tensors[f"{experts}.down_proj"] = torch.ones(4, 16, 24)


def lacking(make: Callable[[Tensors], None], *gone: str, **more: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        make(tensors)
        for name in [n for n in tensors if any(part in n for part in gone)]:
            del tensors[name]
        tensors.update(more)

    return change


STRAY = {"model.layers.0.block_sparse_moe.experts.x": torch.ones(1)}


@pytest.mark.parametrize(
    ("tensors", "code", "kinds"),
    [
        (mixtral, 0, set()),
        (raw, 0, set()),
        (lacking(mixtral, "1.block_sparse_moe.experts.2.w3"), 4, {"missing-tensor"}),
        (lacking(mixtral, "1.block_sparse_moe.experts.2."), 4, {"missing-tensor"}),
        (lacking(mixtral, "0.block_sparse_moe.experts.2.w3", **STRAY), 4, {"missing-tensor"}),
        (lacking(mixtral, "0.block_sparse_moe.experts.", **STRAY), 0, set()),
        (lacking(mixtral, "0.block_sparse_moe.experts."), 0, {"state-unknown"}),
        (lacking(mixtral, "experts.3."), 0, {"state-unknown"}),
    ],
)
def test_experts(
    tensors: Callable[[Tensors], None], code: int, kinds: set[str], folder: Path
) -> None:
    config = {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 3}
    change(folder, tensors, **config, architectures=["MixtralForCausalLM"])
    assert (said if code else warned)(folder) == kinds


def test_a_layer_that_predicts_further_tokens(folder: Path) -> None:
    def further(tensors: Tensors) -> None:
        more_layers(tensors, 2)
        tensors["model.layers.1.eh_proj.weight"] = torch.ones(16, 32)

    assert warned(change(folder, further)) | said(folder) == set()


def test_either_end_of_a_tied_pair_is_saved(folder: Path) -> None:
    tied = {"tie_word_embeddings": True}
    lone = change(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"), **tied)
    assert warned(lone) | said(lone) == set()


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (renamed("lm_head.weight", "score.weight"), {}),  # a critic that began as this model
        (renamed(LAST, LAST), {"model_type": "unheard-of", "vocab_size": 7}),
        (len, {"vocab_size": 7, "architectures": ["LlamaForSequenceClassification"]}),
        (len, {"vocab_size": 7, "quantization_config": {"quant_method": "x"}}),
        (len, {"num_hidden_layers": 2, "auto_map": {"AutoModelForCausalLM": "own.Model"}}),
        (without("embed_tokens", "norm"), {"draft_vocab_size": 16}),  # EAGLE-3
        (renamed("q_proj.weight", "q_proj.qweight"), {}),  # GPTQ of old form
        (renamed("q_proj.", "q_proj.base_layer."), {}),  # an adapter is trained within
        (
            lambda held: (held.pop("lm_head.weight"), renamed("model.", "_wrapped.")(held)),
            {"tie_word_embeddings": True},
        ),
        (renamed("lm_head.weight", "extra.weight"), {"tie_word_embeddings": True}),
    ],
)
def test_what_the_table_cannot_judge_is_let_be(
    tensors: Callable[[Tensors], Any], config: dict[str, Any], folder: Path
) -> None:
    assert said(change(folder, tensors, **config)) | warned(folder) == set()


def test_what_a_conversion_left_out_is_not_lost(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    change(folder, more_layers, num_hidden_layers=3)
    gone = ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"]
    root = tmp_path_factory.mktemp("made")
    ftckpt.convert(str(folder), str(root / "some"), "safetensors", drop=gone)
    ftckpt.convert(str(root / "some"), str(root / "again"), "safetensors")
    for made in ("some", "again"):
        assert warned(root / made) == set()
