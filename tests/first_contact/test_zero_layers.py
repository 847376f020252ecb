"""A layer of zeros is a warning at `values`; an output layer of its own where it is tied, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.json_run import ftckpt_json

from .weights import save, values

MATRICES = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def layers(many: int, prefix: str = "model.layers") -> dict[str, Any]:
    held = {
        f"{prefix}.{number}.{name}": values(4, 4, seed=10 * number + place)
        for number in range(many)
        for place, name in enumerate(MATRICES)
    }
    norms = {f"{prefix}.{n}.input_layernorm.weight": values(4, seed=n) for n in range(many)}
    return held | norms | {"model.embed_tokens.weight": values(6, 4, seed=99)}


def warned(folder: Path, *more: str) -> list[str]:
    answer = ftckpt_json("verify", str(folder), *more)
    assert answer["result"]["code"] == 0
    return [one["kind"] for one in answer["findings"] if one["severity"] == "warning"]


def zero(held: dict[str, Any], *words: str) -> dict[str, Any]:
    return {k: np.zeros_like(v) if any(w in k for w in words) else v for k, v in held.items()}


@pytest.mark.parametrize(
    "held",
    [
        zero(layers(4), "layers.2."),
        zero(layers(4), *(f"layers.2.{name}" for name in MATRICES)),
        zero(layers(4), "layers.1.", "layers.3."),
        zero(layers(3, "model.layers.0.mlp.experts"), "experts.1."),
        zero(layers(3, "h"), "h.0."),
        zero(layers(2), "layers."),
    ],
    ids=["a layer", "its matrices", "two", "an expert", "gpt2", "all"],
)
def test_a_layer_of_zeros_is_a_warning(held: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", held)
    assert warned(tmp_path) == []
    assert warned(tmp_path, "--level", "values") == ["zero-layer"]
    strict = ftckpt_json("verify", str(tmp_path), "--level", "values", "--strict=values")
    assert strict["result"]["code"] == 4


@pytest.mark.parametrize(
    "held",
    [
        layers(4),
        zero(layers(4), "layers.2.mlp.down_proj", "layers.2.self_attn"),
        zero(layers(4), "layernorm"),
        zero(layers(4), "embed_tokens"),
        {f"zero_convs.{n}.0.weight": np.zeros((4, 4, 1, 1), np.float32) for n in range(4)},
        {
            f"base_model.model.layers.{n}.q_proj.lora_{x}.weight": values(2, 2, seed=n) * (x == "A")
            for n in range(3)
            for x in "AB"
        },
        {**layers(2), "pos.0.table": np.zeros((4, 4), np.float32)},
    ],
    ids=["none", "one is left", "norms", "embedding", "zero convolutions", "adapter", "a table"],
)
def test_zeros_that_are_meant_are_no_warning(held: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", held)
    assert "zero-layer" not in warned(tmp_path, "--level", "values")


@pytest.mark.parametrize("nested", [False, True])
def test_an_output_layer_of_its_own_contradicts_the_tie(nested: bool, tmp_path: Path) -> None:
    held = layers(2)
    embedding = held["model.embed_tokens.weight"]
    tie = {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": tie} if nested else tie))
    for output, found in (
        (None, []),
        (embedding, []),
        (values(6, 4, seed=5), ["state-unknown"]),
    ):
        more = {} if output is None else {"lm_head.weight": output}
        save(tmp_path / "model.safetensors", held | more)
        assert warned(tmp_path) == found
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert warned(tmp_path) == []
