"""Layers that predict further tokens: Hugging Face's, Megatron-core's, torchtitan's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ftckpt as api
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.families import to_hugging_face, to_native
from ftckpt.formats.families.tables import family
from ftckpt.transfer.content import Content
from tests.builders.checkpoints import open_checkpoint
from tests.formats.families.test_native import (
    BRIDGED,
    MODELS,
    adapter_of,
    held,
    require_equal,
    tensors_of,
)

# Files with names of their own for such a layer: of which model, how they begin, which layer it is
# like, and what else it has.
OWN = {
    "qwen3_next": (
        "qwen3_next", "mtp.layers.0.", "model.layers.1.",
        {
            "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc", "final_layernorm": "mtp.norm",
        },
    ),
    "qwen3_5_text": (
        "qwen3_5_text", "mtp.layers.0.", "model.layers.1.",
        {
            "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc", "final_layernorm": "mtp.norm",
        },
    ),
    "mimo": (
        "qwen2", "model.mtp_layers.0.", "model.layers.2.",
        {
            "enorm": "model.mtp_layers.0.token_layernorm",
            "hnorm": "model.mtp_layers.0.hidden_layernorm",
            "eh_proj": "model.mtp_layers.0.input_proj",
            "final_layernorm": "model.mtp_layers.0.final_layernorm",
        },
    ),
}  # fmt: skip
LAYERS = MODELS["deepseek_v3"]["config"]["num_hidden_layers"]


def config_of(name: str, count: int = 1) -> dict[str, Any]:
    return {**MODELS[name]["config"], "num_nextn_predict_layers": count}


def weights_of(name: str, count: int = 1) -> dict[str, Any]:
    """Return a model as DeepSeek and Z.ai publish it: the layers behind the others are of their
    kind, and hold the embedding and the output layer a second time."""
    stored = dict(MODELS[name]["stored"])
    hidden = MODELS[name]["config"]["hidden_size"]
    last = f"model.layers.{LAYERS - 1}."
    for number in range(LAYERS, LAYERS + count):
        at = f"model.layers.{number}."
        stored |= {
            key.replace(last, at): shape for key, shape in stored.items() if key.startswith(last)
        }
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            stored[f"{at}{norm}.weight"] = [hidden]
        stored[f"{at}eh_proj.weight"] = [hidden, 2 * hidden]
    made = tensors_of(stored)
    for number in range(LAYERS, LAYERS + count):
        at = f"model.layers.{number}."
        made[f"{at}embed_tokens.weight"] = made["model.embed_tokens.weight"].clone()
        made[f"{at}shared_head.head.weight"] = made["lm_head.weight"].clone()
    return made


def published(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights and config.json as Qwen and Xiaomi publish them."""
    base, begin, like, more = OWN[name]
    stored = dict(MODELS[base]["stored"])
    hidden = MODELS[base]["config"]["hidden_size"]
    stored |= {
        key.replace(like, begin): shape for key, shape in stored.items() if key.startswith(like)
    }
    for meant, own in more.items():
        stored[f"{own}.weight"] = [hidden, 2 * hidden] if meant == "eh_proj" else [hidden]
    config = {**MODELS[base]["config"], "model_type": name}
    if name == "qwen3_5_text":
        config["mtp_num_hidden_layers"] = 1
    if name == "mimo":
        config["num_nextn_predict_layers"] = 1
    return tensors_of(stored), config


def save(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "names", "wanted"),
    [
        (
            "deepseek_v3",
            "megatron",
            {
                "mtp.layers.0.enorm.weight", "mtp.layers.1.eh_proj.weight",
                "mtp.layers.0.final_layernorm.weight",
                "mtp.layers.1.transformer_layer.self_attention.linear_q_up_proj.weight",
                "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
                "mtp.layers.0.transformer_layer.mlp.router.expert_bias",
            },
        ),
        (
            "deepseek_v3",
            "torchtitan",
            {
                "mtp_layers.0.enorm.weight", "mtp_layers.1.mtp_norm.weight",
                "mtp_layers.1.attention.wkv_b.weight",
                "mtp_layers.0.moe.routed_experts.inner_experts.w1_EFD",
            },
        ),
        (
            "glm4_moe",
            "megatron",
            {"mtp.layers.0.transformer_layer.self_attention.linear_qkv.bias"},
        ),
    ],
)  # fmt: skip
def test_there_and_back_gives_the_same_bits(
    name: str, names: str, wanted: set[str], tmp_path: Path
) -> None:
    count = 2 if name == "deepseek_v3" else 1
    weights, config = weights_of(name, count), config_of(name, count)
    save(tmp_path / "hf", weights, config)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names=names)
    there = held(tmp_path / "there")
    assert wanted <= there.keys()
    assert not any("enorm" in key and "mtp" not in key for key in there)
    (joined,) = [value for key, value in there.items() if "0.eh_proj" in key]
    assert joined.equal(weights[f"model.layers.{LAYERS}.eh_proj.weight"])
    assert len([key for key in there if "word_embed" in key or "tok_embed" in key]) == 1
    api.convert(
        str(tmp_path / "there"), str(tmp_path / "back"), "safetensors", names="hf",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    require_equal(held(tmp_path / "back"), weights)
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said.pop("torch_dtype") == "bfloat16"
    assert said == config


@pytest.mark.parametrize("name", OWN)
def test_names_of_their_own(name: str, tmp_path: Path) -> None:
    """Under Megatron's names, as Megatron-Bridge makes them, and back."""
    import torch

    weights, config = published(name)
    save(tmp_path / "hf", weights, config)
    convert = partial(api.convert, names="hf", config=str(tmp_path / "hf/config.json"))
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "m"), "safetensors", names="megatron",
        spelling=("grouped",),
    )  # fmt: skip
    there = held(tmp_path / "m")
    theirs = BRIDGED[f"{name}_mtp"]["tensors"]
    found = 0
    for key, value in there.items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        spelled = key.replace(".transformer_layer.", ".mtp_model_layer.")
        assert hashlib.sha256(raw).hexdigest()[:32] == theirs[spelled], key
        found += key.startswith("mtp.")
    assert found >= 11
    halves = weights[f"{OWN[name][3]['eh_proj']}.weight"].chunk(2, 1)
    ordered = halves[::-1] if name == "mimo" else halves
    assert there["mtp.layers.0.eh_proj.weight"].equal(torch.cat(ordered, 1))
    convert(str(tmp_path / "m"), str(tmp_path / "back"), "safetensors")
    require_equal(held(tmp_path / "back"), weights)
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said.pop("torch_dtype") == "bfloat16"
    assert said == config
    convert(str(tmp_path / "hf"), str(tmp_path / "same"), "safetensors")
    require_equal(held(tmp_path / "same"), weights)


@pytest.mark.parametrize("name", OWN)
def test_names_of_their_own_that_are_not_whole(name: str, tmp_path: Path) -> None:
    weights, config = published(name)
    _, begin, _, more = OWN[name]
    gone = dict(weights)
    del gone[f"{more['eh_proj']}.weight"]
    twice = weights | {
        f"{begin[:-2]}1.input_layernorm.weight": weights["model.norm.weight"].clone()
    }
    for folder, given, says in (
        ("gone", gone, "1 tensor missing"),
        ("twice", twice, "2 layers to predict further"),
    ):
        save(tmp_path / folder, given, config)
        with pytest.raises(UsageError, match=says):
            api.convert(
                str(tmp_path / folder), str(tmp_path / "none"), "safetensors", names="hf",
                config=str(tmp_path / folder / "config.json"),
            )  # fmt: skip
    save(tmp_path / "hf", weights, config)
    with pytest.raises(UnsupportedError, match="no layers that predict further") as found:
        api.convert(str(tmp_path / "hf"), str(tmp_path / "none"), "dcp", names="packed")
    drop = (found.value.hint or "").removesuffix(" leaves them out").split("'")[1::2]
    assert not (tmp_path / "none").exists()
    api.convert(str(tmp_path / "hf"), str(tmp_path / "d"), "dcp", names="packed", drop=drop)
    assert not any("mtp" in key for key in held(tmp_path / "d"))


def test_torchtitans_adapter_gives_the_same(tmp_path: Path) -> None:
    """It does not know what the files hold a second time."""
    weights, config = weights_of("deepseek_v3", 2), config_of("deepseek_v3", 2)
    save(tmp_path / "hf", weights, config)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names="torchtitan")
    again = ("embed_tokens.weight", "shared_head.head.weight")
    given = {
        key: value for key, value in weights.items()
        if not (key.startswith("model.layers.") and key.endswith(again))
    }  # fmt: skip
    attention = SimpleNamespace(q_lora_rank=12, rope=object())
    layer = SimpleNamespace(moe=SimpleNamespace(num_experts=4), attention=attention)
    model = SimpleNamespace(layers=[layer] * LAYERS, mtp_layers=[layer] * 2)
    with adapter_of("deepseek_v3") as module:
        wanted = module.DeepSeekV3StateDictAdapter(model, None).from_hf(given)
    require_equal(held(tmp_path / "there"), wanted)


def test_a_model_may_lack_them(tmp_path: Path) -> None:
    """transformers saves none, and keeps the field that counts them."""
    weights = tensors_of(MODELS["deepseek_v3"]["stored"])
    save(tmp_path / "hf", weights, config_of("deepseek_v3"))
    content = to_native(Content.of(open_checkpoint(tmp_path / "hf")), "torchtitan")
    assert not any("mtp" in key for key in content.tensors)


def test_newer_names_of_megatron_are_read(tmp_path: Path) -> None:
    save(tmp_path / "hf", weights_of("glm4_moe"), config_of("glm4_moe"))
    api.convert(str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names="megatron")
    newer = {
        key.replace(".transformer_layer.", ".mtp_model_layer."): value
        for key, value in held(tmp_path / "there").items()
    }
    save(tmp_path / "newer", newer, config_of("glm4_moe"))
    content = Content.of(open_checkpoint(tmp_path / "newer"))
    made = to_hugging_face(content, config=config_of("glm4_moe"))
    assert {wanted.name for wanted in made.tensors.values()} == weights_of("glm4_moe").keys()


@pytest.mark.parametrize(
    ("change", "names", "says"),
    [
        (lambda w, c: c.pop("num_nextn_predict_layers"), "megatron", "has 1 layer to predict"),
        (lambda w, c: c.update(num_nextn_predict_layers=2), "megatron", "= 2"),
        (lambda w, c: c.update(num_nextn_predict_layers=10**12), "megatron", "= 1000000000000"),
        (
            lambda w, c: w[f"model.layers.{LAYERS}.embed_tokens.weight"].add_(1),
            "torchtitan",
            "is not equal to model.embed_tokens.weight",
        ),
        (lambda w, c: w.pop(f"model.layers.{LAYERS}.eh_proj.weight"), "torchtitan", "1 tensor mis"),
    ],
)
def test_what_cannot_be_translated_is_refused(
    change: Any, names: str, says: str, tmp_path: Path
) -> None:
    weights, config = weights_of("deepseek_v3"), config_of("deepseek_v3")
    change(weights, config)
    save(tmp_path / "hf", weights, config)
    with pytest.raises((UsageError, UnsupportedError), match=says):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names=names)
    assert not (tmp_path / "there").exists()


def test_drop_leaves_them_out(tmp_path: Path) -> None:
    """The hint of the refusal is what does it."""
    save(tmp_path / "hf", weights_of("deepseek_v3"), config_of("deepseek_v3"))
    with pytest.raises(UnsupportedError, match="no layers that predict further") as found:
        api.convert(str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names="packed")
    pattern = f"model.layers.{LAYERS}.*"
    assert found.value.hint == f"--drop '{pattern}' leaves them out"
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "there"), "dcp", names="packed", drop=[pattern]
    )
    assert f"model.layers.{LAYERS - 1}.mlp.experts.gate_up_proj" in held(tmp_path / "there")


@pytest.mark.parametrize("row", ['copies = {a = "b"}', "count = 3", 'count = "n"\nmore = "x"'])
def test_a_table_of_ones_own_is_checked_word_by_word(row: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[mtp]\n{row}\n")
    with pytest.raises(UsageError, match=r"has an \[mtp\] without a count"):
        family(str(tmp_path / "mine.toml"))
