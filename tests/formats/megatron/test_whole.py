"""Megatron's formats of models that no Megatron job saved: what they hold, and the way back."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import FtckptError, UnsupportedError, UsageError
from ftckpt.formats.families import to_hugging_face, to_megatron
from ftckpt.formats.families.arguments import arguments_of_config
from ftckpt.formats.families.facts import ModelFacts, arguments_of
from ftckpt.formats.families.tables import built_by_arguments, family, family_names
from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
from ftckpt.formats.families.views.joins import Heads
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.torch_dist.reader import MegatronDistCheckpoint
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.builders.checkpoints import open_checkpoint
from tests.builders.hf_models import VOCAB, Model
from tests.builders.materialise import materialise
from tests.builders.megatron_files import altered, opened
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.formats import Made
from tests.conformance.writers import assert_repeatable
from tests.formats.families.test_mtp import config_of as further_config
from tests.formats.families.test_mtp import published
from tests.formats.families.test_mtp import save as save_further
from tests.formats.families.test_mtp import weights_of as further_weights
from tests.formats.families.test_native import (
    DATA,
    MODELS,
    ROTARY,
    held,
    require_equal,
    save_folder,
    tensors_of,
)

JUDGED = json.loads((DATA / "megatron.json").read_text())["families"]
LOCAL = ("local", *DEFAULT_SPELLINGS)
SIZES: dict[str, dict[str, int]] = {
    "one rank": {},
    "tensor ranks": {"tp": 2},
    "stages": {"pp": 4},
    "interleaved": {"tp": 2, "pp": 2, "vp": 2, "dp": 2},
}


def made(content: Content, to: Path, form: str, **request: Any) -> tuple[Checkpoint, Layout]:
    """Write a content; hold what is read back to what the layout says."""
    writer = format_and_writer(form)[1]
    layout = writer.layout(content, LayoutRequest(**request))
    assert list(layout.unplaced) == []
    assert_repeatable(writer.layout(content, LayoutRequest(**request)), layout)
    materialise(layout, content.checkpoint, to)
    result = open_checkpoint(to)
    held = layout.content or content
    assert result.format == form
    assert [one for one in result.check() if one.kind != "opaque-object"] == []
    assert result.tensors.keys() | result.aliases.keys() == set(held.tensors) | set(held.aliases)
    return result, layout


def translated(folder: Path, **options: Any) -> Content:
    return to_megatron(Content.of(open_checkpoint(folder)), **options)


def arguments(checkpoint: Path) -> dict[str, Any]:
    """Return what plain torch reads of the arguments."""
    import torch

    file = checkpoint / "common.pt"
    if not file.exists():
        file = min(checkpoint.glob("mp_rank_*/model_optim_rng.pt"))
    found: dict[str, Any] = vars(torch.load(file, weights_only=False)["args"])
    return found


def require_back(model: Model, weights: Mapping[str, Any], there: Path, back: Path) -> None:
    """Hold what a Megatron checkpoint gives back to what it was made from."""
    from safetensors.torch import load_file

    content = to_hugging_face(only(Content.of(open_checkpoint(there)), Only.MODEL))
    made(content, back, "safetensors")
    found = load_file(back / "model.safetensors")
    assert set(found) == set(weights)
    for name, value in weights.items():
        assert value.equal(found[name]), name
    assert json.loads((back / "config.json").read_text()) == model.config()


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", built_by_arguments())
def test_there_and_back_gives_the_same_bits(
    name: str, sizes: str, form: str, tmp_path: Path
) -> None:
    model = Model(name, tied=sizes == "stages")
    weights = model.save(tmp_path / "hf")
    made(translated(tmp_path / "hf"), tmp_path / "there", form, **SIZES[sizes])
    require_back(model, weights, tmp_path / "there", tmp_path / "back")


WRITTEN = tuple(name for name in family_names() if family(name).written and name in MODELS)


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("cut", ["ranks", "stages"])
@pytest.mark.parametrize("name", WRITTEN)
def test_models_whose_layers_differ_there_and_back(
    name: str, cut: str, form: str, tmp_path: Path
) -> None:
    weights = tensors_of(MODELS[name]["stored"])
    save_folder(tmp_path / "hf", name, weights, **ROTARY.get(name, {}))
    content = only(translated(tmp_path / "hf"), Only.MODEL)
    sizes = {"pp": len(layers_of(weights))} if cut == "stages" else {"tp": 2, "dp": 2}
    if cut == "ranks" and any(".experts." in key for key in content.tensors):
        sizes["ep"] = 2
    made(content, tmp_path / "there", form, **sizes)
    back = to_hugging_face(only(Content.of(open_checkpoint(tmp_path / "there")), Only.MODEL))
    made(back, tmp_path / "back", "safetensors")
    found = held(tmp_path / "back")
    assert found.keys() == weights.keys()
    assert [key for key, value in weights.items() if not value.equal(found[key])] == []
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: said.get(key) for key in MODELS[name]["config"]} == MODELS[name]["config"]


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_parts_of_a_store_are_put_together_for_files_of_ranks(name: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", name, tensors_of(MODELS[name]["stored"]))
    content = only(translated(tmp_path / "hf"), Only.MODEL)
    made(content, tmp_path / "direct", "megatron", tp=2)
    made(content, tmp_path / "store", "megatron-dist", tp=2)
    (tmp_path / "store/config.json").unlink()  # the arguments alone say what the job is
    store = only(Content.of(open_checkpoint(tmp_path / "store")), Only.MODEL)
    made(store, tmp_path / "there", "megatron", tp=2)
    found, wanted = (opened(tmp_path / one) for one in ("there", "direct"))
    for at in wanted.layout.grid.directories():
        ours, theirs = found.tree(at)["model"], wanted.tree(at)["model"]
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    require_equal(held(tmp_path / "there"), held(tmp_path / "direct"))
    with pytest.raises(UnsupportedError, match="several parts") as refused:
        format_and_writer("megatron-fsdp")[1].layout(content, LayoutRequest())
    assert refused.value.hint == "--to megatron-dist"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens(name: str, tmp_path: Path) -> None:
    weights = further_weights(name)
    save_further(tmp_path / "hf", weights, further_config(name))
    content = translated(tmp_path / "hf")
    made(content, tmp_path / "there", "megatron-dist", pp=3)
    assert arguments(tmp_path / "there")["mtp_num_layers"] == 1
    back = to_hugging_face(only(Content.of(open_checkpoint(tmp_path / "there")), Only.MODEL))
    made(back, tmp_path / "back", "safetensors")
    require_equal(held(tmp_path / "back"), weights)
    with pytest.raises(UnsupportedError, match="depends on the version") as refused:
        format_and_writer("megatron")[1].layout(content, LayoutRequest())
    assert str(refused.value.tensor).startswith("mtp.layers.0.")


@pytest.mark.parametrize("kinds", [["full", "linear", "full"], ["linear", "full", "linear"], []])
def test_further_layers_are_built_as_the_last_of_the_others(
    kinds: list[str], tmp_path: Path
) -> None:
    """Of Qwen3-Next they have full attention; MiMo's layers are all alike."""
    weights, config = published("qwen3_next" if kinds else "mimo")
    if kinds:
        old = config["layer_types"]
        for number, kind in enumerate(kinds):
            like = old.index(f"{kind}_attention")
            weights |= {
                f"new.{number}{k.removeprefix(f'model.layers.{like}')}": v.clone()
                for k, v in weights.items()
                if k.startswith(f"model.layers.{like}.")
            }
        weights = {k: v for k, v in weights.items() if not k.startswith("model.layers.")}
        weights = {
            f"model.layers.{k[4:]}" if k.startswith("new.") else k: v for k, v in weights.items()
        }
        more = {"layer_types": [f"{kind}_attention" for kind in kinds], "num_hidden_layers": 3}
    else:
        more = {"rms_norm_eps": 1e-5}
    save_further(tmp_path / "hf", weights, config | more)
    content = only(translated(tmp_path / "hf"), Only.MODEL)
    if kinds[-1:] == ["linear"]:
        with pytest.raises(
            UnsupportedError, match=r"mtp\.layers\.0 as it builds decoder\.layers\.2"
        ):
            format_and_writer("megatron-dist")[1].layout(content, LayoutRequest())
        return
    made(content, tmp_path / "there", "megatron-dist")
    assert arguments(tmp_path / "there")["mtp_num_layers"] == 1


@pytest.mark.parametrize("name", sorted({*built_by_arguments(), *WRITTEN}))
def test_arguments_say_whether_first_matrices_hold_a_gate(name: str) -> None:
    """Else ranks would cut gate and up as one."""
    known = MODELS[name]["config"] if name in WRITTEN else Model(name).config()
    config = {**known, **ROTARY.get(name, {})}
    heads = Heads(4, 2, 10)
    said = arguments_of_config(ModelFacts(family(name), heads, config, Arguments()))
    gated = name not in ("gpt2", "gpt_neox", "nemotron_h")
    assert bool(said.get("swiglu") or said.get("quick_geglu")) is gated


def layers_of(names: Iterable[str]) -> set[str]:
    return {match[1] for name in names if (match := re.search(r"\.layers\.(\d+)\.", name))}


@pytest.mark.parametrize("name", JUDGED)
def test_megatron_core_asks_for_what_is_stored(name: str, tmp_path: Path) -> None:
    """`make_megatron.py` let Megatron-core load these stores, and Bridge describe the models."""
    import torch

    weights = tensors_of(MODELS[name]["stored"])
    save_folder(tmp_path / "hf", name, weights, **ROTARY.get(name, {}))
    content = translated(tmp_path / "hf", spellings=("grouped", *DEFAULT_SPELLINGS))
    made(only(content, Only.MODEL), tmp_path / "there", "megatron-dist")
    found = arguments(tmp_path / "there")
    assert found.pop("params_dtype") is torch.bfloat16
    assert json.loads(json.dumps(found)) == JUDGED[name]["arguments"]
    checkpoint = open_checkpoint(tmp_path / "there")
    assert isinstance(checkpoint, MegatronDistCheckpoint)
    stored = {key: list(one.size) for key, one in checkpoint.meta.tensors.items()}
    assert stored == JUDGED[name]["stored"]


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "x": 1}}, "'x': 1"),
        ("gpt_oss", {"rope_parameters": None}, "rope_type = None"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
         "'beta_fast': 'x'"),
        ("gpt_oss", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type': \['yarn'\]"),
        ("qwen3_next", {"rope_theta": "much"}, "rope_theta = 'much'"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen3_next", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ("nemotron_h", {"conv_kernel": 3}, "conv_kernel"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1}},
         "'beta_fast': 1"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("glm4_moe", {"moe_intermediate_size": None}, "moe_intermediate_size = None"),
    ],
)  # fmt: skip
def test_what_no_argument_says_is_refused(
    name: str, config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    said = {**ROTARY.get(name, {}), **config}
    save_folder(tmp_path / "hf", name, tensors_of(MODELS[name]["stored"]), **said)
    content = only(translated(tmp_path / "hf"), Only.MODEL)
    for form in ("megatron", "megatron-dist"):
        with pytest.raises((UnsupportedError, UsageError), match=says):
            format_and_writer(form)[1].layout(content, LayoutRequest())


@pytest.mark.parametrize(
    ("name", "gone", "says"),
    [
        ("gpt_oss", "model.layers.1.self_attn.sinks", "core_attention.softmax_offset"),
        ("qwen3_next", "model.layers.1.self_attn.q_norm.weight", "layers.1.self_attention.q_layer"),
        ("nemotron_h", "backbone.layers.0.mixer.D", "decoder.layers.0.mixer.D"),
        ("nemotron_h", "backbone.norm_f.weight", "decoder.final_norm.weight"),
        ("glm4_moe", "model.layers.0.mlp.down_proj.weight", "decoder.layers.0.mlp.linear_fc2"),
    ],
)
def test_a_tensor_that_the_configuration_describes_is_missing(
    name: str, gone: str, says: str, tmp_path: Path
) -> None:
    """No other layer shows it where layers differ."""
    weights = tensors_of(MODELS[name]["stored"])
    del weights[gone]
    save_folder(tmp_path / "hf", name, weights, **ROTARY.get(name, {}))
    content = only(translated(tmp_path / "hf"), Only.MODEL)
    with pytest.raises(UnsupportedError, match=f"lacks .*{re.escape(says)}"):
        format_and_writer("megatron-dist")[1].layout(content, LayoutRequest())


def test_norms_of_megatrons_own_layers_beside_linear_attention(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", "qwen3_next", tensors_of(MODELS["qwen3_next"]["stored"]))
    content = only(translated(tmp_path / "hf", spellings=LOCAL), Only.MODEL)
    with pytest.raises(UnsupportedError, match="of Transformer Engine's make alone") as refused:
        format_and_writer("megatron-dist")[1].layout(content, LayoutRequest())
    assert refused.value.hint == "--spelling transformer_engine"


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, dict[str, int], tuple[str, ...]]:
    tp, pp, vp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    name = draw(st.sampled_from(built_by_arguments()))
    groups = tp * draw(st.integers(1, 2))
    experts = 4 * draw(st.integers(1, 2))
    model = Model(
        name,
        layers=pp * vp * draw(st.integers(1, 2)) if pp > 1 else draw(st.integers(1, 3)),
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        width=2 * draw(st.integers(1, 3)),
        ffn=tp * draw(st.integers(1, 5)),
        experts=experts,
        tied=draw(st.booleans()),
    )
    sizes = {"tp": tp, "pp": pp, "vp": vp if pp > 1 else 1}
    if model.sparse:
        sizes["ep"] = draw(st.sampled_from([1, 2, 4]))
    spellings = draw(st.sampled_from([(), ("local",), ("grouped",)]))
    return model, sizes, spellings


@settings(max_examples=examples(short=8, full=100), deadline=None)
@given(models(), st.sampled_from(["megatron", "megatron-dist"]))
def test_any_sizes_of_any_family(
    case: tuple[Model, dict[str, int], tuple[str, ...]], form: str
) -> None:
    model, sizes, spellings = case
    with tempfile.TemporaryDirectory() as place:
        weights = model.save(Path(place) / "hf")
        content = translated(Path(place) / "hf", spellings=(*spellings, *DEFAULT_SPELLINGS))
        made(content, Path(place) / "there", form, **sizes)
        require_back(model, weights, Path(place) / "there", Path(place) / "back")


# --- what Megatron finds there --------------------------------------------------------------------


def test_each_rank_has_its_part_in_the_order_of_the_constructors(tmp_path: Path) -> None:
    import torch

    weights = Model(layers=2).save(tmp_path / "hf")
    content = translated(tmp_path / "hf", spellings=LOCAL)
    made(content, tmp_path / "there", "megatron", tp=2, pp=2)
    state = torch.load(tmp_path / "there/mp_rank_01_001/model_optim_rng.pt", weights_only=False)
    assert list(state) == ["args", "checkpoint_version", "iteration", "model"]
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 0)
    layer = "decoder.layers.0."
    assert list(state["model"]) == [
        f"{layer}input_layernorm.weight",
        f"{layer}self_attention.linear_proj.weight",
        f"{layer}self_attention.linear_qkv.weight",
        f"{layer}pre_mlp_layernorm.weight",
        f"{layer}mlp.linear_fc1.weight",
        f"{layer}mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    own = "model.layers.1."
    gate, up = (weights[f"{own}mlp.{half}_proj.weight"] for half in ("gate", "up"))
    fc1 = torch.cat([gate.chunk(2)[1], up.chunk(2)[1]])
    assert state["model"][f"{layer}mlp.linear_fc1.weight"].equal(fc1)
    queries, key, value = (weights[f"{own}self_attn.{x}_proj.weight"] for x in "qkv")
    qkv = torch.cat([queries.chunk(2)[1], key.chunk(2)[1], value.chunk(2)[1]])
    assert state["model"][f"{layer}self_attention.linear_qkv.weight"].equal(qkv)
    padded = torch.nn.functional.pad(weights["lm_head.weight"], (0, 0, 0, 256 - VOCAB))
    assert state["model"]["output_layer.weight"].equal(padded[128:])
    assert state["args"].padded_vocab_size == 256


def test_a_tied_embedding_lies_once_on_one_stage_and_twice_on_several(tmp_path: Path) -> None:
    Model(tied=True).save(tmp_path / "hf")
    content = translated(tmp_path / "hf")
    one, _ = made(content, tmp_path / "one", "megatron")
    several, _ = made(content, tmp_path / "several", "megatron", pp=2)
    assert dict(one.aliases) == {}
    assert dict(several.aliases) == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert arguments(tmp_path / "one")["untie_embeddings_and_output_weights"] is False


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_weights_that_share_memory_are_tied(form: str, tmp_path: Path) -> None:
    import torch

    model = Model()
    weights = model.save(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, tmp_path / "hf/pytorch_model.bin")
    result, _ = made(translated(tmp_path / "hf"), tmp_path / "there", form, pp=2)
    assert "output_layer.weight" not in result.tensors
    assert arguments(tmp_path / "there")["untie_embeddings_and_output_weights"] is False


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_the_arguments_build_the_model(form: str, tmp_path: Path) -> None:
    import torch

    Model("qwen3_moe").save(tmp_path / "hf")
    content = translated(tmp_path / "hf", spellings=("grouped", *DEFAULT_SPELLINGS))
    made(content, tmp_path / "there", form, tp=2, ep=2, dp=4)
    found = arguments(tmp_path / "there")
    wanted = {
        "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
        "group_query_attention": True, "num_query_groups": 2, "kv_channels": 4,
        "max_position_embeddings": 16, "seq_length": 16, "position_embedding_type": "rope",
        "rotary_base": 500000.0, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True,
        "add_bias_linear": False, "qk_layernorm": True, "padded_vocab_size": 256,
        "untie_embeddings_and_output_weights": True, "num_experts": 4, "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": False, "moe_grouped_gemm": True,
        "transformer_impl": "transformer_engine", "params_dtype": torch.bfloat16, "bf16": True,
        "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "data_parallel_size": 4,
        "ckpt_format": "torch" if form == "megatron" else "torch_dist",
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", built_by_arguments())
def test_the_arguments_say_what_the_configuration_said(name: str, tmp_path: Path) -> None:
    model = Model(name)
    model.save(tmp_path / "hf")
    made(translated(tmp_path / "hf"), tmp_path / "there", "megatron")
    (tmp_path / "there/config.json").unlink()
    content = Content.of(open_checkpoint(tmp_path / "there"))
    back = to_hugging_face(only(content, Only.MODEL), family=name, true_vocab_size=VOCAB)
    found = json.loads(back.beside["config.json"])
    rope = model.config().get("rope_parameters", {})
    wanted = model.config() | {"torch_dtype": "bfloat16"}
    if rope:
        wanted["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        wanted["rotary_pct"] = rope["partial_rotary_factor"]
    for new in ("dtype", "rope_parameters", "mlp_only_layers"):
        wanted.pop(new, None)
    assert {field: found.get(field) for field in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", "--bf16 --norm-epsilon 1e-06"),
        ("qwen3", "--bf16 --qk-layernorm --norm-epsilon 1e-06"),
        ("gpt_neox", "--bf16 --norm-epsilon 1e-05 --no-bias-gelu-fusion"),
    ],
)
def test_what_megatron_does_not_read_from_a_checkpoint_is_said(
    name: str, flags: str, tmp_path: Path
) -> None:
    Model(name).save(tmp_path / "hf")
    layout = format_and_writer("megatron")[1].layout(translated(tmp_path / "hf"), LayoutRequest())
    said = [note.message for note in layout.notes]
    assert said[0].endswith(f"start Megatron with --use-checkpoint-args {flags}")


def test_modules_of_a_store_have_what_old_versions_ask_for(tmp_path: Path) -> None:
    Model(layers=2).save(tmp_path / "hf")
    content = translated(tmp_path / "hf", spellings=LOCAL)
    store, _ = made(content, tmp_path / "there", "megatron-dist")
    extra = {name for name in store.objects if "_extra_state" in name}
    linear = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
              "mlp.linear_fc2")  # fmt: skip
    assert extra == {
        f"decoder.layers.{module}._extra_state/shard_{layer}_2"
        for module in linear
        for layer in range(2)
    }
    stored = {info.stored_name for info in store.tensors.values()}
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in stored


# --- from one of Megatron's formats to another ----------------------------------------------------


def test_a_store_becomes_files_of_ranks_under_their_own_names(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set("mcore_torchdist_tp2pp2", "iter_0000003", tmp_path_factory))
    result, _ = made(only(Content.of(source), Only.MODEL), tmp_path / "there", "megatron")
    real = opened(real_set("mcore_torch_tp2pp2", "iter_0000003", tmp_path_factory))
    mine = opened(tmp_path / "there")
    assert mine.layout.grid == real.layout.grid
    for at in real.layout.grid.directories():
        held = {k: v for k, v in real.tree(at)["model"].items() if not k.endswith("_extra_state")}
        found = mine.tree(at)["model"]
        assert [(k, v.shape) for k, v in found.items()] == [(k, v.shape) for k, v in held.items()]
        assert mine.tree(at)["iteration"] == 3
    for key, info in source.tensors.items():
        if info.component == "model":
            own = key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            own = own.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            assert read_tensor(result, own) == read_tensor(source, key), key


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_arguments_are_carried_through_another_format(
    form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = opened(real_set("mcore_torch_tp2pp2", "iter_0000003", tmp_path_factory))
    between, _ = made(Content.of(source), tmp_path / "between", "safetensors")
    there, _ = made(only(Content.of(between), Only.MODEL), tmp_path / "there", form, tp=4)
    before, after = (arguments_of(one).record.state for one in (source, there))
    changed = {name: after[name] for name in before if str(before[name]) != str(after[name])}
    assert changed.pop("no_save_rng", True) is changed.pop("no_save_optim", True) is True
    sizes = {
        "tensor_model_parallel_size": 4, "tensor_parallel_num_weight_shards": 4, "world_size": 8,
        "expert_tensor_parallel_size": 4, "expert_tensor_parallel_num_weight_shards": 4,
    }  # fmt: skip
    store = {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    assert changed == (sizes if form == "megatron" else sizes | store)


def carried(content: Content, place: Path, **args: Any) -> Content:
    """Return a content whose source carries other arguments, and no `config.json`."""
    made(content, place / "first", "megatron")
    (place / "first/config.json").unlink()
    altered(Made(place / "first", {}), "mp_rank_00", **{f"args__{k}": v for k, v in args.items()})
    between, _ = made(Content.of(open_checkpoint(place / "first")), place / "second", "safetensors")
    return only(Content.of(between), Only.MODEL)


@pytest.mark.parametrize("spelling", ["sequential", "grouped"])
def test_experts_get_the_names_of_the_job(spelling: str, tmp_path: Path) -> None:
    Model("mixtral").save(tmp_path / "hf")
    first = translated(tmp_path / "hf", spellings=("sequential", *DEFAULT_SPELLINGS))
    content = carried(first, tmp_path, moe_grouped_gemm=spelling == "grouped")
    result, _ = made(content, tmp_path / "there", "megatron", ep=2)
    own = {
        "sequential": "decoder.layers.3.mlp.experts.local_experts.3.linear_fc1.weight",
        "grouped": "decoder.layers.3.mlp.experts.linear_fc1.weight3",
    }
    assert {key for key in own.values() if key in result.tensors} == {own[spelling]}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}, "in one matrix"),
        ({"transformer_impl": "transformer_engine"}, "the arguments say otherwise"),
    ],
)
def test_names_that_the_job_does_not_have(args: Any, says: str, tmp_path: Path) -> None:
    Model("mixtral").save(tmp_path / "hf")
    content = carried(translated(tmp_path / "hf", spellings=LOCAL), tmp_path, **args)
    with pytest.raises(UnsupportedError, match=says):
        format_and_writer("megatron")[1].layout(content, LayoutRequest())


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_a_model_that_arguments_cannot_describe(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = Model()
    model.save(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(model.config() | config))
    with pytest.raises(UnsupportedError, match=says):
        format_and_writer("megatron")[1].layout(translated(tmp_path / "hf"), LayoutRequest())


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rotary_seq_len_interpolation_factor": 4}),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192},
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        ),
    ],
)  # fmt: skip
def test_stretched_frequencies(rope: Any, wanted: Any, tmp_path: Path) -> None:
    model = Model()
    model.save(tmp_path / "hf")
    said = model.config() | {"rope_parameters": {"rope_theta": 10000.0, **rope}}
    (tmp_path / "hf/config.json").write_text(json.dumps(said))
    made(translated(tmp_path / "hf"), tmp_path / "there", "megatron")
    found = arguments(tmp_path / "there")
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_other_names_are_refused_with_the_way_out(form: str, tmp_path: Path) -> None:
    Model().save(tmp_path / "hf")
    writer = format_and_writer(form)[1]
    with pytest.raises(FtckptError, match="is not a parameter of a GPT model") as refused:
        writer.layout(Content.of(open_checkpoint(tmp_path / "hf")), LayoutRequest())
    assert refused.value.hint is not None
    assert "--names megatron" in refused.value.hint


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("model.layers.3.*", "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"),
        ("model.layers.1.mlp.down_proj.weight", "decoder.layers.1.mlp.linear_fc2.weight"),
        ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    ],
)
@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
def test_a_model_with_a_gap_is_refused(gone: str, says: str, form: str, tmp_path: Path) -> None:
    Model().save(tmp_path / "hf")
    content = to_megatron(drop(Content.of(open_checkpoint(tmp_path / "hf")), [gone]))
    with pytest.raises(UnsupportedError, match=f"lacks {re.escape(says)}"):
        format_and_writer(form)[1].layout(content, LayoutRequest())


def test_spellings_that_no_implementation_has_together(tmp_path: Path) -> None:
    Model("mixtral").save(tmp_path / "hf")
    content = translated(tmp_path / "hf", spellings=("grouped", *LOCAL))
    with pytest.raises(UnsupportedError, match="grouped by matrix"):
        format_and_writer("megatron")[1].layout(content, LayoutRequest())


def test_more_layers_than_the_arguments_count(tmp_path: Path) -> None:
    model = Model()
    model.save(tmp_path / "hf")
    said = model.config() | {"num_hidden_layers": 3}
    (tmp_path / "hf/config.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match="has a layer 3, and its arguments count 3 layers"):
        format_and_writer("megatron")[1].layout(translated(tmp_path / "hf"), LayoutRequest())


def test_names_without_a_model_are_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"embedding.word_embeddings.weight": torch.zeros(4, 4)}, tmp_path / "one.pt")
    content = Content.of(open_checkpoint(tmp_path / "one.pt"))
    with pytest.raises(UnsupportedError, match="does not say what Megatron is to build"):
        format_and_writer("megatron")[1].layout(content, LayoutRequest())


def test_what_has_no_place_is_named(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set("mcore_torchdist_tp2pp2", "iter_0000003", tmp_path_factory))
    content = Content.of(source)
    alone = content.with_tensors(w for w in content.tensors.values() if w.component == "model")
    layout = format_and_writer("megatron")[1].layout(alone, LayoutRequest())
    assert layout.unplaced[0].startswith("rng_state/")
    assert not any("_extra_state" in name for name in layout.unplaced)


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    Model().save(tmp_path / "hf")
    writer = format_and_writer("megatron")[1]
    for request in (LayoutRequest(tp=3), LayoutRequest(pp=3), LayoutRequest(ep=2)):
        with pytest.raises(UsageError):
            writer.layout(translated(tmp_path / "hf"), request)
