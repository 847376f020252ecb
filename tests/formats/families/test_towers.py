"""Models with a vision tower: the language model by its table, the tower by its names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ftckpt as api
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.families import to_hugging_face
from ftckpt.formats.families.check import check_family
from ftckpt.formats.families.tables import family
from ftckpt.transfer.content import Content
from tests.builders.checkpoints import open_checkpoint
from tests.formats.families.test_native import (
    BRIDGED,
    DATA,
    adapter_of,
    held,
    require_equal,
    tensor,
    tensors_of,
)

MODELS = json.loads((DATA / "towers.json").read_text())["models"]
BRIDGE = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "glm4v_moe", "kimi_k25")


def save(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_memory(name: str) -> dict[str, Any]:
    """Return weights under the names of transformers' state_dict."""
    made = tensors_of(MODELS[name]["memory"])
    if MODELS[name]["config"].get("tie_word_embeddings"):
        made["lm_head.weight"] = made["model.language_model.embed_tokens.weight"].clone()
    return made


def translated(folder: Path, name: str, **config: Any) -> Content:
    content = Content.of(open_checkpoint(folder))
    return to_hugging_face(content, config={**MODELS[name]["config"], **config})


def shapes(content: Content) -> dict[str, list[int]]:
    return {wanted.name: list(wanted.shape) for wanted in content.tensors.values()}


@pytest.mark.parametrize("name", MODELS)
def test_names_of_memory_become_those_of_files(name: str, tmp_path: Path) -> None:
    said = MODELS[name]
    found = shapes(translated(save(tmp_path / "run", in_memory(name)), name))
    if said["config"].get("tie_word_embeddings"):  # both are in memory
        found = {key: shape for key, shape in found.items() if not key.endswith("lm_head.weight")}
    assert found == released(name)


def released(name: str) -> dict[str, list[int]]:
    """Return the shapes in the files that were published.

    transformers 5.24 reads Qwen3-VL's experts either way, and saves them as it has them in memory.
    It saves Kimi K2.5 under names that it made of two layouts.
    """
    stored = {**MODELS[name]["stored"]}
    if name == "kimi_k25":
        for made, own in (
            ("language_model.model.blocks.", "language_model.model.layers."),
            ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
            ("model.mm_projector.", "mm_projector."),
        ):
            stored = {key.replace(made, own): shape for key, shape in stored.items()}
    if name == "qwen3_vl_moe":
        turned = [key for key in stored if ".experts." in key]
        assert turned
        stored |= {key: [stored[key][0], *stored[key][:0:-1]] for key in turned}
    return stored


@pytest.mark.parametrize("name", ["gemma3", "glm4v_moe"])
def test_there_and_back_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """From memory to files, to Megatron and to memory again; a config.json goes with them."""
    said = MODELS[name]
    (tmp_path / "c.json").write_text(json.dumps(said["config"]))
    save(tmp_path / "run", in_memory(name))

    def convert(source: str, target: str, to: str, **more: Any) -> None:
        api.convert(str(tmp_path / source), str(tmp_path / target), to, **more)

    config = str(tmp_path / "c.json")
    convert("run", "hf", "safetensors", names="hf", config=config)
    convert("hf", "megatron", "dcp", names="megatron")
    convert("megatron", "again", "safetensors", names="hf", config=config)
    convert("again", "memory", "dcp", names="packed")
    require_equal(held(tmp_path / "again"), held(tmp_path / "hf"))
    require_equal(held(tmp_path / "memory"), held(tmp_path / "run"))
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written["torch_dtype"] == written["text_config"].get("dtype", "bfloat16") == "bfloat16"
    assert written["vision_config"]["model_type"] == said["config"]["vision_config"]["model_type"]
    if name == "gemma3":  # its projector is output first there
        there = open_checkpoint(tmp_path / "megatron")
        projector = tensor(there, "multi_modal_projector.proj.weight")
        own = held(tmp_path / "hf")["multi_modal_projector.mm_input_projection_weight"]
        assert projector.equal(own.T)


@pytest.mark.parametrize("name", BRIDGE)
def test_megatrons_names_of_towers_are_read(name: str) -> None:
    """Each name that the table writes for Megatron comes back to the part it is from."""
    parts = [part for part in family(name).parts if "megatron" in part.beginnings]
    assert {part.beginnings["megatron"] for part in parts} >= {("language_model.",)}
    towers = [part for part in family(name).parts if part.language is None]
    assert all("megatron" in part.beginnings and "packed" in part.beginnings for part in towers)
    (side,) = check_family(name, MODELS[name]["config"], "megatron")
    assert side.problems == []
    assert len(side.rows) > 8


def test_fields_at_the_top_are_the_language_models(tmp_path: Path) -> None:
    """Qwen2-VL's first config.json has no text_config."""
    said = MODELS["qwen2_vl"]["config"]
    flat = {**said, **said["text_config"], "model_type": "qwen2_vl"}
    del flat["text_config"]
    content = Content.of(open_checkpoint(save(tmp_path / "run", in_memory("qwen2_vl"))))
    made = to_hugging_face(content, config=flat)
    assert shapes(made) == MODELS["qwen2_vl"]["stored"]
    written = json.loads(made.beside["config.json"])
    assert (written["hidden_size"], written["torch_dtype"]) == (32, "bfloat16")


def test_what_a_layout_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    said = MODELS["qwen3_vl"]
    save(tmp_path / "hf", tensors_of(said["stored"]), said["config"])
    with pytest.raises(UnsupportedError, match=r"torchtitan has no place for 39 .*visual") as found:
        api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan")
    assert found.value.hint == "--drop 'model.visual.*' leaves them out"
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan",
        drop=["model.visual.*"],
    )  # fmt: skip
    assert "layers.1.attention.qkv_linear.wq.weight" in held(tmp_path / "t")


def test_a_language_model_alone_where_no_layout_has_the_whole(tmp_path: Path) -> None:
    """Megatron-Bridge has no Llama 4 with its tower; Megatron-core has the language model."""
    said = MODELS["llama4"]
    save(tmp_path / "hf", tensors_of(said["stored"]), said["config"])
    with pytest.raises(UnsupportedError, match=r"megatron has no place for 42 .*projector"):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "m"), "dcp", names="megatron")
    drop = ["vision_model.*", "multi_modal_projector.*"]
    for names, one in (
        ("megatron", "decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight"),
        ("torchtitan", "layers.3.moe.experts.w3"),
    ):
        api.convert(str(tmp_path / "hf"), str(tmp_path / names), "dcp", names=names, drop=drop)
        assert one in held(tmp_path / names)
    gate_up = tensors_of(said["stored"])[
        "language_model.model.layers.3.feed_forward.experts.gate_up_proj"
    ]
    assert held(tmp_path / "torchtitan")[one].equal(gate_up.chunk(2, -1)[1].mT)


@pytest.mark.parametrize("name", [name for name in BRIDGED if name in MODELS])
def test_megatron_bridge_makes_the_same_tensors(name: str, tmp_path: Path) -> None:
    """`make_bridge_tensors.py` ran its mapping classes on these weights."""
    import torch

    weights = tensors_of(released(name))
    save(tmp_path / "hf", weights, MODELS[name]["config"])
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "m"), "safetensors", names="megatron",
        spelling=("grouped",),
    )  # fmt: skip
    theirs = BRIDGED[name]["tensors"]
    found = held(tmp_path / "m")
    for key, value in found.items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest()[:32] == theirs[key], key
    api.convert(
        str(tmp_path / "m"), str(tmp_path / "back"), "safetensors", names="hf",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    require_equal(held(tmp_path / "back"), weights)


def test_a_tower_of_an_older_bridge_is_read(tmp_path: Path) -> None:
    """Megatron-Bridge 0.3 had transformers' own module for Qwen3-VL's tower."""
    weights = tensors_of(released("qwen3_vl"))
    save(tmp_path / "hf", weights, MODELS["qwen3_vl"]["config"])
    api.convert(str(tmp_path / "hf"), str(tmp_path / "m"), "safetensors", names="megatron")
    language = {k: v for k, v in held(tmp_path / "m").items() if k.startswith("language_model.")}
    tower = {
        key.replace("model.visual.", "vision_model."): value
        for key, value in weights.items()
        if key.startswith("model.visual.")
    }
    save(tmp_path / "old", language | tower)
    content = translated(tmp_path / "old", "qwen3_vl")
    assert shapes(content) == released("qwen3_vl")


def test_torchtitans_adapter_of_kimi_gives_the_same(tmp_path: Path) -> None:
    """Its tower has three matrices for queries, keys and values, and flat patches."""
    weights = tensors_of(released("kimi_k25"))
    config = MODELS["kimi_k25"]["config"]
    save(tmp_path / "hf", weights, config)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan")
    found = held(tmp_path / "t")
    qkv = weights["vision_tower.encoder.blocks.1.wqkv.weight"].chunk(3)
    assert found["vision_encoder.layers.1.attn.wk.weight"].equal(qkv[1])
    patches = weights["vision_tower.patch_embed.proj.weight"]
    assert found["vision_encoder.patch_embed.weight"].equal(patches.flatten(1))
    api.convert(
        str(tmp_path / "t"), str(tmp_path / "back"), "safetensors", names="hf",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    require_equal(held(tmp_path / "back"), weights)
    attention = SimpleNamespace(q_lora_rank=12, rope=object())
    layer = SimpleNamespace(moe=SimpleNamespace(num_experts=4), attention=attention)
    model = SimpleNamespace(
        layers=[layer] * 2, mtp_layers=[],
        vision_encoder=SimpleNamespace(patch_size=14, in_channels=3),
    )  # fmt: skip
    with adapter_of("kimi_k2_7") as module:
        wanted = module.KimiK25StateDictAdapter(model, None).from_hf(dict(weights))
    require_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "names", "change", "says"),
    [
        ("kimi_k25", "megatron", {"merge_kernel_size": None}, "merge_kernel_size.0 = None"),
        ("qwen3_vl_moe", "packed", {"depth": 3}, "12 tensors missing"),
        ("qwen3_vl", "megatron", {"num_heads": 0}, "no attention of the tower"),
        ("qwen2_5_vl", "megatron", {"depth": 3}, "has 2 blocks of visual.blocks"),
        ("llama4", "packed", {"num_hidden_layers": 1}, "has 2 blocks of vision_model"),
        ("kimi_k25", "packed", {"num_heads": 2}, "num_heads = 2 and num_attention_heads = 4"),
        ("qwen3_vl", "megatron", {"deepstack_visual_indexes": 1}, "= 1, not a list"),
    ],
)
def test_a_tower_that_its_config_does_not_describe_is_refused(
    name: str, names: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    said = MODELS[name]["config"]
    config = {**said, "vision_config": {**said["vision_config"], **change}}
    save(tmp_path / "hf", tensors_of(released(name)), config)
    with pytest.raises(UsageError, match=says):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "out"), "dcp", names=names)
    assert not (tmp_path / "out").exists()


def test_a_config_as_it_was_published_gives_the_shapes(tmp_path: Path) -> None:
    """Kimi K2.5's has other fields than transformers 5, and kimi_k2 as its language model."""
    said = MODELS["kimi_k25"]["config"]
    renamed = {
        "pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width",
        **{
            key: f"vt_{key}"
            for key in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            )
        },
    }  # fmt: skip
    vision = {renamed.get(key, key): value for key, value in said["vision_config"].items()}
    config = {
        "model_type": "kimi_k25", "text_config": {**said["text_config"], "model_type": "kimi_k2"},
        "vision_config": {**vision, "mm_hidden_size": 32},
    }  # fmt: skip
    weights = tensors_of(released("kimi_k25"))
    save(tmp_path / "hf", weights, config)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "p"), "dcp", names="packed")
    memory = MODELS["kimi_k25"]["memory"]
    assert {key: list(value.shape) for key, value in held(tmp_path / "p").items()} == memory
    save(tmp_path / "hf", weights, config | {"num_attention_heads": 2})  # not the tower's
    api.convert(str(tmp_path / "hf"), str(tmp_path / "q"), "dcp", names="packed")
    require_equal(held(tmp_path / "q"), held(tmp_path / "p"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("qwen3_vl_moe", {"mlp_only_layers": [0]}, "called model.layers.0.mlp.gate"),
        ("qwen3_vl_moe", {"decoder_sparse_step": 2}, "shapes? different"),
        ("llama4", {"attention_bias": True}, "tensors missing"),
    ],
)
def test_layers_that_its_config_does_not_describe_are_refused(
    name: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    said = MODELS[name]["config"]
    config = {**said, "text_config": {**said["text_config"], **change}}
    save(tmp_path / "hf", tensors_of(released(name)), config)
    with pytest.raises((UnsupportedError, UsageError), match=says):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "out"), "dcp", names="packed")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["files", "memory", "both"])
def test_shapes_tell_how_experts_lie(change: str, tmp_path: Path) -> None:
    """Qwen3-VL's have one name in files and in memory: read either way, never a mixture."""
    said = MODELS["qwen3_vl_moe"]
    weights = tensors_of(released("qwen3_vl_moe"))
    experts = sorted(key for key in weights if ".experts." in key)
    given = dict(weights)
    if change != "files":
        turned = experts if change == "memory" else experts[:1]
        given |= {key: weights[key].mT.contiguous() for key in turned}
    save(tmp_path / "run", given, said["config"])
    if change == "both":
        for names in ("megatron", "packed"):
            with pytest.raises(UsageError, match=r"lies as in files and .* as in memory"):
                api.convert(str(tmp_path / "run"), str(tmp_path / "m"), "dcp", names=names)
        assert not (tmp_path / "m").exists()
        return
    api.convert(str(tmp_path / "run"), str(tmp_path / "m"), "safetensors", names="megatron")
    name = "language_model.decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert held(tmp_path / "m")[name].equal(weights[experts[3]][3].T)
    api.convert(str(tmp_path / "run"), str(tmp_path / "p"), "dcp", names="packed")
    memory = weights | {key: weights[key].mT.contiguous() for key in experts}
    require_equal(held(tmp_path / "p"), memory)
    for source in ("m", "p"):
        config = tmp_path / "run/config.json"
        api.convert(
            str(tmp_path / source), str(tmp_path / f"{source}-hf"), "safetensors", names="hf",
            config=str(config),
        )  # fmt: skip
        require_equal(held(tmp_path / f"{source}-hf"), weights)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("qwen2_vl", lambda w: w.pop("model.visual.blocks.1.norm1.bias"), "lacks norm1.bias"),
        (
            "qwen2_5_vl",
            lambda w: [w.pop(k) for k in list(w) if ".visual.blocks.1." in k],
            "has 1 block of visual.blocks, and vision_config.depth = 2",
        ),
        ("qwen3_vl", lambda w: w.pop("model.visual.merger.norm.bias"), "1 tensor missing .*merger"),
        (
            "qwen3_vl_moe",
            lambda w: [w.pop(k) for k in list(w) if ".deepstack_merger" in k],
            "6 tensors missing .*deepstack_merger_list.0.norm",
        ),
        ("kimi_k25", lambda w: w.pop("model.mm_projector.in_proj.bias"), "1 tensor missing"),
        ("llava", lambda w: [w.pop(k) for k in list(w) if "projector" in k], "multi_modal_projec"),
        ("gemma3", lambda w: w["lm_head.weight"].add_(1), "their values differ"),
        ("qwen3_vl", lambda w: w.pop("lm_head.weight"), "1 tensor missing"),
        ("mllama", lambda w: [w.pop(k) for k in list(w) if ".layers.2." in k], "2 blocks of lang"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(
    name: str, change: Any, says: str, tmp_path: Path
) -> None:
    weights = in_memory(name)
    change(weights)
    with pytest.raises(UsageError, match=says):
        translated(save(tmp_path / "run", weights), name)


@pytest.mark.parametrize(
    ("add", "says"),
    [
        ("visual.blocks.0.norm1.bias", "are names of two layouts"),
        ("audio.norm.weight", "has no part that audio.norm.weight is of"),
        ("model.norm.weight", "are names of two layouts"),
    ],
)
def test_names_of_no_layout_or_of_two_are_refused(add: str, says: str, tmp_path: Path) -> None:
    import torch

    weights = in_memory("qwen2_5_vl") | {add: torch.ones(32)}
    with pytest.raises(UnsupportedError, match=says):
        translated(save(tmp_path / "run", weights), "qwen2_5_vl")


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": 5},
        {"text_config": {"model_type": "bloom"}},
        {"vision_config": {"depth": True}},
        {"vision_config": [2]},
        {"tie_word_embeddings": True},
    ],
)
def test_a_config_that_does_not_say_it_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises((UsageError, UnsupportedError)):
        translated(save(tmp_path / "run", in_memory("qwen3_vl")), "qwen3_vl", **config)


def test_a_table_without_a_language_model_is_not_judged() -> None:
    with pytest.raises(UsageError, match="carries every tensor by its name"):
        check_family("mllama", MODELS["mllama"]["config"])


@pytest.mark.parametrize("row", ['hf = ["a.", 5]', 'blocks = "b"', 'hf = "a."\nmegatron2 = "b."'])
def test_a_part_of_ones_own_is_checked_word_by_word(row: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(f"[[part]]\n{row}\n")
    with pytest.raises(UsageError, match="a part in the table of mine"):
        family(str(table))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_torch_saved(name: str, tmp_path: Path) -> None:
    """Its own model, saved by torch's DCP: every key found, the same bits and the same logits."""
    transformers = pytest.importorskip("transformers")
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    torch.manual_seed(7)
    (tmp_path / "c.json").write_text(json.dumps(MODELS[name]["config"]))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "c.json")
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save_dcp(model.state_dict(), checkpoint_id=str(tmp_path / "run"), no_dist=True)
    api.convert(
        str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf",
        config=str(tmp_path / "c.json"),
    )  # fmt: skip
    again, told = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in told.items() if value} == {}
    before, after = model.state_dict(), again.state_dict()
    require_equal(after, before)
    tokens = torch.arange(3, 15)[None]
    both = [again.eval(), model]
    if name == "llama4":  # the whole model of 5.24 cannot be asked without an image
        both = [one.language_model for one in both]
    with torch.no_grad():
        ours, theirs = (one(input_ids=tokens).logits for one in both)
    assert torch.equal(ours, theirs)
