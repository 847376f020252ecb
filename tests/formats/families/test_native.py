"""Hugging Face's tensors and those of torchtitan, Meta and transformers 5 in memory, both ways."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import FtckptError, UnsupportedError, UsageError
from ftckpt.formats.families import family_names
from ftckpt.formats.families.arguments import arguments_of_config
from ftckpt.formats.families.facts import ModelFacts
from ftckpt.formats.families.tables import family
from ftckpt.formats.families.views.joins import Heads
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.ranks.meta_llama.parameters import inner_width, meta_parameters
from ftckpt.verification.file_digests import check_file_digests
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "families"
MODELS = json.loads((DATA / "models.json").read_text())["models"]
JUDGED = "cc147342bc0292d234b9dc5c1ce609cff0dc9e5ef696fd24d7b2a53fdfb0fc55"
BRIDGE = json.loads((DATA / "bridge.json").read_text())["families"]
BRIDGED = json.loads((DATA / "bridge_tensors.json").read_text())
TITAN = ("llama", "llama4_text", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
PACKED = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
)
MEGATRON = (
    "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama4_text",
    "minimax_m2", "nemotron_h", "phi3", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
)  # fmt: skip


# What transformers always says in the `config.json` of such a model, and Megatron must be told.
ROTARY: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        }
    }
}  # fmt: skip


def tensors_of(shapes: Mapping[str, list[int]], seed: int = 3) -> dict[str, Any]:
    """Random weights of these shapes; the router's bias is float32 as transformers has it."""
    import torch

    torch.manual_seed(seed)
    found = {
        name: torch.randn(shape).to(torch.float32 if "bias" in name else torch.bfloat16)
        for name, shape in shapes.items()
    }
    for name, value in found.items():  # near to one, so that one less is exact
        if name.endswith("linear_attn.norm.weight"):
            value.mul_(0.1).add_(1)
    return found


def judged(name: str) -> dict[str, Any]:
    """The weights that Megatron-Bridge was asked about; some of them are rounded by one less."""
    import torch

    if name == "gpt_oss_mxfp4":
        return mxfp4(tensors_of(MODELS["gpt_oss"]["stored"]))
    weights = tensors_of(MODELS[name]["stored"])
    for key, value in weights.items():
        if key.endswith("linear_attn.norm.weight"):
            value.copy_(torch.randn(value.shape))
    return weights


def mxfp4(weights: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-OSS as it was published: codes and scales of 4 experts of width 64."""
    import torch

    found = dict(weights)
    for key in weights:
        rows, blocks = (128, 1) if key.endswith("gate_up_proj") else (32, 2)
        if key.endswith(("gate_up_proj", "down_proj")):
            del found[key]
            code = torch.randint(256, (4, rows, blocks, 16), dtype=torch.uint8)
            found[f"{key}_blocks"] = code
            found[f"{key}_scales"] = torch.randint(119, 131, (4, rows, blocks), dtype=torch.uint8)
        elif key.endswith("gate_up_proj_bias"):
            found[key] = torch.randn(4, 128)
    return found


def save_folder(folder: Path, name: str, weights: Mapping[str, Any], **config: Any) -> Path:
    """Write a Hugging Face folder with an AdamW state beside it."""
    import torch
    from safetensors.torch import save_file

    (folder / "optimizer").mkdir(parents=True)
    state = {f"exp_avg.{n}": torch.randn(w.shape) for n, w in weights.items()}
    state |= {f"other.{n}.step": torch.tensor(3.0) for n in weights}
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "optimizer" / "optimizer.safetensors")
    (folder / "config.json").write_text(json.dumps({**MODELS[name]["config"], **config}))
    return folder


def tensor(checkpoint: Any, key: str) -> Any:
    import torch

    info = checkpoint.tensors[key]
    raw = bytearray(read_tensor(checkpoint, key))
    return torch.frombuffer(raw, dtype=getattr(torch, info.dtype.name)).reshape(info.shape)


def held(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    return {key: tensor(checkpoint, key) for key in checkpoint.tensors}


def require_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    import torch

    assert found.keys() == wanted.keys()
    different = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
    assert different == []


def halves(rows: Any, heads: int) -> Any:
    """`permute` of transformers' convert_llama_weights_to_hf.py, in one line of torch."""
    shape = rows.shape
    return rows.view(heads, shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(shape)


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_know_the_shapes_of_transformers(name: str) -> None:
    shapes = family(name).shapes
    assert shapes is not None
    found = shapes.tensors(MODELS[name]["config"])
    assert {key: list(shape) for key, shape in found.items()} == MODELS[name]["stored"]


@pytest.mark.parametrize("name", TITAN)
def test_there_and_back_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Masters and moments too; a tied model gets its output layer there, as torchtitan has it."""
    weights = tensors_of(MODELS[name]["stored"])
    save_folder(tmp_path / "hf", name, weights)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "titan"), "dcp", names="torchtitan")
    there = open_checkpoint(tmp_path / "titan")
    names = {info.name for info in there.tensors.values()}
    assert not any(one.startswith("model.") for one in names)
    api.convert(
        str(tmp_path / "titan"), str(tmp_path / "back"), "safetensors", names="hf",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    before, after = held(tmp_path / "hf"), held(tmp_path / "back")
    if MODELS[name]["config"]["tie_word_embeddings"]:
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    require_equal(after, before)
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said.pop("torch_dtype") == "bfloat16"
    assert said == MODELS[name]["config"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("old", [False, True])
def test_torchtitan_loads_and_saves(old: bool, tmp_path: Path) -> None:
    """By torch's own DCP, under the names of 2026 and those before; q and k by Meta's formula."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = tensors_of(MODELS["llama"]["stored"])
    wanted = titan_llama(weights, 4, 2)
    if old:
        wanted = {
            k.replace("qkv_linear.", "").replace("lm_head", "output"): v for k, v in wanted.items()
        }
    else:
        save_folder(tmp_path / "hf", "llama", weights)
        api.convert(
            str(tmp_path / "hf"), str(tmp_path / "start/step-0"), "dcp", only="model", dp=3,
            names="torchtitan",
        )  # fmt: skip
        loaded = {key: torch.zeros_like(value) for key, value in wanted.items()}
        load(loaded, checkpoint_id=tmp_path / "start/step-0", no_dist=True)
        require_equal(loaded, wanted)
    save(wanted, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]["config"]))
    api.convert(
        str(tmp_path / "step-1"), str(tmp_path / "out"), "safetensors", only="model", names="hf",
        config=str(tmp_path / "config.json"),
    )  # fmt: skip
    require_equal(held(tmp_path / "out"), weights)


def titan_llama(weights: Mapping[str, Any], queries: int, keys: int) -> dict[str, Any]:
    """Llama's weights as torchtitan has them: `_reverse_permute` of its adapter."""
    leaves = {
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings",
    }  # fmt: skip
    found = {}
    for name, value in weights.items():
        heads = queries if ".q_proj" in name else keys if ".k_proj" in name else 0
        for ours, theirs in leaves.items():
            name = name.replace(f"{ours}.weight", f"{theirs}.weight")
        if heads:
            half = value.shape[0] // heads // 2
            value = value.view(heads, 2, half, -1).transpose(1, 2).reshape(value.shape)
        found[name.removeprefix("model.")] = value
    return found


def test_what_torchtitan_trained_over_two_ranks(tmp_path: Path) -> None:
    """`make_torchtitan.py` ran its forward pass; transformers is asked where it is installed."""
    said = json.loads((DATA / "torchtitan.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps(said["config"]))
    for only in ("model", ""):
        api.convert(
            str(DATA / "torchtitan/step-3"), str(tmp_path / f"hf{only}"), "safetensors",
            only=only, names="hf", config=str(tmp_path / "c.json"), drop=() if only else ["train*"],
        )  # fmt: skip
    raw = (tmp_path / "hfmodel/model.safetensors").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == JUDGED
    whole = held(tmp_path / "hf")
    source = held(DATA / "torchtitan/step-3")
    q = "model.layers.1.self_attn.q_proj.weight"
    turned = halves(source["exp_avg:layers.1.attention.qkv_linear.wq.weight"], 4)
    assert (whole[f"exp_avg:{q}"] == turned).all()
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hfmodel")
    with torch.no_grad():
        logits = model(torch.tensor([said["tokens"]])).logits[0]
    torch.testing.assert_close(logits, torch.tensor(said["logits"]), rtol=0, atol=1e-6)


def test_the_two_formulas_are_inverse() -> None:
    import torch

    rows = torch.randn(24, 5)
    turned = titan_llama({"model.layers.0.self_attn.q_proj.weight": rows}, 3, 1)
    assert torch.equal(halves(turned["layers.0.attention.qkv_linear.wq.weight"], 3), rows)


def test_rows_of_padding_are_cut_on_demand_alone(tmp_path: Path) -> None:
    """A larger vocabulary may be a trained one: without --true-vocab-size it is refused."""
    import torch
    from safetensors.torch import save_file

    weights = tensors_of(MODELS["llama"]["stored"])
    padded = titan_llama({key: value.float() for key, value in weights.items()}, 4, 2)
    for key in ("tok_embeddings.weight", "lm_head.weight"):
        padded[key] = torch.cat([padded[key], torch.randn(3, 32)])
    (tmp_path / "run").mkdir()
    save_file(padded, tmp_path / "run/model.safetensors")
    config = MODELS["llama"]["config"]
    convert = partial(
        api.convert, str(tmp_path / "run"), to="safetensors", names="hf", dtype="bf16",
        config=str(tmp_path / "c.json"),
    )  # fmt: skip
    for name, said in (("a", config), ("b", {**config, "vocab_size": 64})):
        (tmp_path / "c.json").write_text(json.dumps(said))
        convert(str(tmp_path / name), true_vocab_size=61)
        require_equal(held(tmp_path / name), weights)
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert (found["vocab_size"], found["torch_dtype"]) == (61, "bfloat16")
    (tmp_path / "c.json").write_text(json.dumps(config))
    with pytest.raises(
        UsageError, match=r"2 shapes different.*\[64, 32\] is to be \[61"
    ) as refused:
        convert(str(tmp_path / "c"))
    assert refused.value.hint.startswith("--true-vocab-size 61 ")
    assert not (tmp_path / "c").exists()


def test_experts_that_the_config_does_not_have_are_refused(tmp_path: Path) -> None:
    """A stack of four for a configuration of three: the last one would be left out in silence."""
    save_folder(tmp_path / "hf", "qwen3_moe", tensors_of(MODELS["qwen3_moe"]["stored"]))
    api.convert(str(tmp_path / "hf"), str(tmp_path / "titan"), "dcp", names="torchtitan")
    for number in (3, 5):
        config = {**MODELS["qwen3_moe"]["config"], "num_experts": number}
        (tmp_path / "c.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=f"does not hold the {number} experts"):
            api.convert(
                str(tmp_path / "titan"), str(tmp_path / "out"), "safetensors", names="hf",
                config=str(tmp_path / "c.json"),
            )  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_model_that_dcp_saved_is_held_to_its_config(tmp_path: Path) -> None:
    """It has Hugging Face's names already: the folder gets a config.json that is true of it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = tensors_of(MODELS["qwen2"]["stored"])
    save({"model": weights}, checkpoint_id=tmp_path / "run", no_dist=True)
    config = MODELS["qwen2"]["config"]
    (tmp_path / "c.json").write_text(json.dumps(config))
    convert = partial(
        api.convert, str(tmp_path / "run"), to="safetensors", names="hf",
        config=str(tmp_path / "c.json"),
    )  # fmt: skip
    convert(str(tmp_path / "hf"))
    require_equal(held(tmp_path / "hf"), weights)
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    (tmp_path / "c.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(UsageError, match="9 shapes different"):
        convert(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", PACKED)
def test_experts_in_one_tensor_are_understood(name: str, tmp_path: Path) -> None:
    """A DCP of a model of transformers 5, whose experts are packed: to its files, and on."""
    import torch

    weights = tensors_of(MODELS[name]["stored"])
    memory = {}
    sparse = name in ("mixtral", "minimax_m2")  # by Mixtral's names
    for key, shape in MODELS[name]["memory"].items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            memory[key] = weights[key.replace("mlp", "block_sparse_moe")]
            continue
        pre = key.rpartition(".")[0]
        if sparse:
            pre = pre.replace("mlp", "block_sparse_moe")
        parts: tuple[str, ...] = ("w1", "w3") if sparse else ("gate_proj", "up_proj")
        if key.endswith("down_proj"):
            parts = ("w2",) if sparse else ("down_proj",)
        experts = [
            torch.cat([weights[f"{pre}.{number}.{part}.weight"] for part in parts])
            for number in range(4)
        ]
        memory[key] = torch.stack(experts)
        assert list(memory[key].shape) == shape
    packed = {key: value for key, value in weights.items() if ".experts." not in key}
    if sparse:
        packed = {key: value for key, value in packed.items() if "block_sparse" not in key}
    save_folder(tmp_path / "packed", name, packed | memory)
    api.convert(
        str(tmp_path / "packed"), str(tmp_path / "hf"), "safetensors", only="model", names="hf"
    )
    require_equal(held(tmp_path / "hf"), weights)
    if name in TITAN:
        for source in ("hf", "packed"):
            api.convert(
                str(tmp_path / source), str(tmp_path / f"titan-{source}"), "dcp",
                only="model", names="torchtitan",
            )  # fmt: skip
        require_equal(held(tmp_path / "titan-packed"), held(tmp_path / "titan-hf"))


# As DeepSpeed 0.19.8 named the modules of transformers 5.8: every preset but MiniMax-M3's.
@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_5_moe_text"],
)
def test_experts_that_autoep_stacks_get_the_names_of_files(name: str, tmp_path: Path) -> None:
    """DeepSpeed's `gate_proj` is `w1` and its `up_proj` is `w3`; it has the router twice."""
    import torch

    block, parts = "mlp", ("gate_proj", "down_proj", "up_proj")
    if name == "mixtral":
        block, parts = "block_sparse_moe", ("w1", "w2", "w3")
    weights = tensors_of(MODELS[name]["stored"])
    state = {key: value for key, value in weights.items() if f".{block}." not in key}
    for layer in {key.split(f".{block}.")[0] for key in weights.keys() - state.keys()}:
        inside, own = f"{layer}.{block}", f"{layer}.mlp"
        others = {k.removeprefix(inside): v for k, v in weights.items() if k.startswith(inside)}
        if f"{inside}.gate.weight" not in weights:  # a layer without experts
            state |= {own + key: value for key, value in others.items()}
            continue
        for copy in ("router", "gate"):
            state[f"{own}.{copy}.gate.weight"] = weights[f"{inside}.gate.weight"].clone()
        for number, part in enumerate(parts, 1):
            rows = [weights[f"{inside}.experts.{n}.{part}.weight"] for n in range(4)]
            state[f"{own}.experts.w{number}"] = torch.stack(rows)
        for key, value in others.items():
            if ".experts." not in key and key != ".gate.weight":
                renamed = key.replace(".gate.e_score", ".router.e_score")
                if renamed != key:  # the whole router has two names
                    state[own + key] = value.clone()
                if name.startswith("qwen"):
                    renamed = renamed.replace(".shared_expert", ".shared_experts")
                state[own + renamed] = value
    save_folder(tmp_path / "autoep", name, state)
    api.convert(
        str(tmp_path / "autoep"), str(tmp_path / "hf"), "safetensors", only="model", names="hf"
    )
    require_equal(held(tmp_path / "hf"), weights)


def test_two_routers_of_autoep_that_differ_are_refused(tmp_path: Path) -> None:
    import torch

    weights = tensors_of(MODELS["qwen3_moe"]["stored"])
    state = {key: value for key, value in weights.items() if ".mlp." not in key}
    for layer in range(3):
        own = f"model.layers.{layer}.mlp"
        for copy in ("router", "gate"):
            state[f"{own}.{copy}.gate.weight"] = weights[f"{own}.gate.weight"].clone()
        for number, part in enumerate(("gate_proj", "down_proj", "up_proj"), 1):
            rows = [weights[f"{own}.experts.{n}.{part}.weight"] for n in range(4)]
            state[f"{own}.experts.w{number}"] = torch.stack(rows)
    state["model.layers.1.mlp.gate.gate.weight"][0, 0] += 1
    save_folder(tmp_path / "autoep", "qwen3_moe", state)
    convert = partial(
        api.convert, str(tmp_path / "autoep"), str(tmp_path / "hf"), "safetensors",
        only="model", names="hf",
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"layers\.1\..*gate\.gate\.weight .*differ"):
        convert()
    convert(drop=["*.gate.gate.weight"])
    require_equal(held(tmp_path / "hf"), weights)


def test_two_names_of_one_parameter_are_one_in_every_dialect(tmp_path: Path) -> None:
    """torchtitan named a bias anew, and a store that carried both has it twice."""
    convert = partial(api.convert, to="safetensors", only="model", names="hf")
    save_folder(tmp_path / "plain", "deepseek_v3", tensors_of(MODELS["deepseek_v3"]["stored"]))
    api.convert(str(tmp_path / "plain"), str(tmp_path / "titan"), "dcp", only="model",
                names="torchtitan")  # fmt: skip
    state = held(tmp_path / "titan")
    key = next(key for key in state if key.endswith(".moe.expert_bias_E"))
    state[key.removesuffix("_E")] = state[key].clone()
    save_folder(tmp_path / "twice", "deepseek_v3", state)
    convert(str(tmp_path / "twice"), str(tmp_path / "hf"))
    require_equal(held(tmp_path / "hf"), tensors_of(MODELS["deepseek_v3"]["stored"]))
    state[key] = state[key] + 1
    save_folder(tmp_path / "other", "deepseek_v3", state)
    with pytest.raises(UnsupportedError, match="one parameter, and their values differ"):
        convert(str(tmp_path / "other"), str(tmp_path / "none"))


@pytest.mark.parametrize("columns", [True, False])
def test_metas_ranks_become_one_model_and_ranks_again(columns: bool, tmp_path: Path) -> None:
    """Two model-parallel ranks; up to Llama 2 they divide the columns of the embedding."""
    import torch

    weights = tensors_of(MODELS["llama"]["stored"] | {
        "model.embed_tokens.weight": [64, 32], "lm_head.weight": [64, 32],
    })  # fmt: skip
    meta = {
        key.replace("qkv_linear.", "").replace("lm_head", "output"): value
        for key, value in titan_llama(weights, 4, 2).items()
    }
    (tmp_path / "llama").mkdir()
    ranks = [meta_rank(meta, rank, columns) for rank in range(2)]
    for rank, state in enumerate(ranks):
        torch.save(
            {**state, "rope.freqs": torch.ones(5)}, tmp_path / f"llama/consolidated.0{rank}.pth"
        )
    said = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1}
    (tmp_path / "llama/params.json").write_text(json.dumps(said))
    assert ftckpt_json("verify", str(tmp_path / "llama"))["result"]["code"] == 0
    config = {**MODELS["llama"]["config"], "vocab_size": 64}
    (tmp_path / "c.json").write_text(json.dumps(config))
    convert = partial(api.convert, str(tmp_path / "llama"), str(tmp_path / "hf"), "safetensors")
    convert(names="hf", config=str(tmp_path / "c.json"))
    require_equal(held(tmp_path / "hf"), weights)
    (tmp_path / "c.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(
        UsageError, match=r"n_layers = 3, and config\.json says num_hidden_layers = 2"
    ):
        convert(names="hf", config=str(tmp_path / "c.json"))
    if columns:
        return
    one = tmp_path / "one/consolidated.00.pth"
    one.parent.mkdir()
    api.convert(str(tmp_path / "hf"), str(one), "torchsave", names="meta")
    api.convert(str(tmp_path / "hf"), str(tmp_path / "release"), "ranks", names="meta", tp=2)
    said = json.loads((tmp_path / "release/params.json").read_text())
    assert said.items() >= {"dim": 32, "n_kv_heads": 2, "head_dim": 10, "vocab_size": 64}.items()
    add_checklist(tmp_path / "release")
    assert ftckpt_json("verify", str(tmp_path / "release"))["evidence"] == "md5"
    api.reshard(str(one.parent), str(tmp_path / "two"), tp=2)
    api.reshard(str(tmp_path / "release"), str(tmp_path / "again"), tp=1)
    api.reshard(str(tmp_path / "again"), str(tmp_path / "three"), tp=2)
    for rank, state in enumerate(ranks):
        for folder in ("two", "release", "three"):
            require_equal(torch.load(tmp_path / folder / f"consolidated.0{rank}.pth"), state)
    assert (tmp_path / "three/params.json").exists()
    assert not (tmp_path / "three/checklist.chk").exists()  # its digests are of other files


@pytest.mark.parametrize(
    ("columns", "said", "kind"),
    [
        (True, {"dim": 32, "vocab_size": -1}, "missing-rank"),
        (True, None, "missing-rank"),  # its norms are as wide as the model
        (False, {"dim": 32, "vocab_size": 64, "n_heads": 4}, "missing-rank"),
        (False, {"dim": 32, "vocab_size": -1, "n_heads": 4, "head_dim": 10}, "missing-rank"),
        (False, {"dim": 32, "vocab_size": 24}, "shape-mismatch"),
        (False, {"dim": 32, "vocab_size": True, "n_heads": 0, "head_dim": -3}, ""),
    ],
)
def test_a_release_without_its_last_files(
    columns: bool, said: dict[str, int] | None, kind: str, tmp_path: Path
) -> None:
    """Two of four ranks: only params.json, or the width of a norm, says that more were saved."""
    import torch

    weights = tensors_of(MODELS["llama"]["stored"] | {
        "model.embed_tokens.weight": [64, 32], "lm_head.weight": [64, 32],
    })  # fmt: skip
    meta = {
        key.replace("qkv_linear.", "").replace("lm_head", "output"): value
        for key, value in titan_llama(weights, 4, 2).items()
    }
    for rank in range(2):
        part = meta_rank(meta_rank(meta, 0, columns), rank, columns)
        torch.save(part, tmp_path / f"consolidated.0{rank}.pth")
    if said is not None:
        (tmp_path / "params.json").write_text(json.dumps(said))
    found = ftckpt_json("verify", str(tmp_path))
    assert {one["kind"] for one in found["findings"] if one["severity"] == "error"} == (
        {kind} if kind else set()
    )
    assert found["result"]["code"] == {"missing-rank": 5, "shape-mismatch": 4, "": 0}[kind]


def add_checklist(folder: Path) -> None:
    """Write what md5sum prints of a folder's files."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("ftckpt"))
    lines = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "checklist.chk").write_text("".join(lines))
    for path in folder.glob("ftckpt.manifest*"):
        path.unlink()  # stronger evidence


def release(folder: Path) -> Path:
    """Write a release of one rank, with everything that Meta puts beside it."""
    import torch

    folder.mkdir()
    torch.save({"norm.weight": torch.ones(8)}, folder / "consolidated.00.pth")
    (folder / "params.json").write_text('{"dim": 8, "vocab_size": -1}')
    (folder / "tokenizer.model").write_text("a b c")
    add_checklist(folder)
    return folder


def odd(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["kind"], f["file"]) for f in found["findings"] if f["severity"] != "note"]


def test_files_of_a_release_are_no_strays_and_its_md5_are_checked(tmp_path: Path) -> None:
    folder = release(tmp_path / "llama")
    found = ftckpt_json("verify", str(folder))
    assert (found["evidence"], found["result"]["code"]) == ("md5", 0)
    assert odd(found) == []
    release(tmp_path / "other")
    assert ftckpt_json("verify", str(tmp_path), "--all")["evidence"] == "md5"
    both = (folder / "checklist.chk").read_text()
    (folder / "checklist.chk").write_text(f"{both}{'0' * 32}  consolidated.01.pth\n")
    found = ftckpt_json("verify", str(folder))
    assert {f["kind"] for f in found["findings"]} >= {"missing-rank"}
    assert found["result"]["code"] == 5
    (folder / "checklist.chk").write_text(both)
    (folder / "tokenizer.model").write_text("a b d")
    found = ftckpt_json("verify", str(folder))
    assert odd(found) == [("bad-digest", "tokenizer.model")]
    assert any("another MD5" in one["message"] for one in found["findings"])
    (folder / "tokenizer.model").unlink()
    found = ftckpt_json("verify", str(folder))
    assert odd(found) == [("missing-file", "tokenizer.model")]
    assert found["result"]["code"] == 4


def test_each_file_is_held_to_the_kind_of_digest_that_is_recorded_of_it(tmp_path: Path) -> None:
    """Parts of one checkpoint may have their own records: MD5 of these, SHA-256 of those."""
    folder = release(tmp_path / "llama")
    digests = {
        name: hashlib.md5((folder / name).read_bytes()).hexdigest()
        for name in ("params.json", "tokenizer.model")
    }
    weights = (folder / "consolidated.00.pth").read_bytes()
    for digests["consolidated.00.pth"], said in (
        (hashlib.sha256(weights).hexdigest(), []),
        ("0" * 64, ["consolidated.00.pth has another SHA-256"]),
    ):
        found: list[Any] = []
        result = check_file_digests(open_checkpoint(folder), digests, emit=found.append)
        assert (result.evidence, result.ok) == ("md5", not said)
        assert [one.message.partition(" (")[0] for one in found] == said


@pytest.mark.parametrize("zipped", [False, True])
def test_a_checklist_without_the_weights_is_no_evidence_of_them(
    zipped: bool, tmp_path: Path
) -> None:
    """A legacy `.pth` carries no CRC-32: nothing covers it."""
    import torch

    folder = release(tmp_path / "llama")
    weights = folder / "consolidated.00.pth"
    torch.save({"norm.weight": torch.ones(8)}, weights, _use_new_zipfile_serialization=zipped)
    lines = (folder / "checklist.chk").read_text().splitlines(keepends=True)
    (folder / "checklist.chk").write_text("".join(x for x in lines if weights.name not in x))
    found = ftckpt_json("verify", str(folder), "--level", "content")["result"]
    assert found["code"] == (0 if zipped else 6), found
    said = "or its records their CRC-32" if zipped else f"no digest or CRC covers {weights.name}"
    assert said in found["message"]
    found = ftckpt_json("verify", str(folder))["result"]
    assert zipped or f"MD5, and none covers {weights.name}" in found["message"]


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        (f"{'0' * 32}  ../x\n", "unsafe-path", 7),
        ("no list\n", "bad-index", 4),
        (f"{'0' * 32}  params.json\n{'1' * 32}  params.json\n", "bad-index", 4),
        ("\n" * (1 << 20) + " ", "bad-index", 4),
        (f"\n{'0' * 32} *./consolidated.00.pth\n", "bad-digest", 4),
    ],
)
def test_a_checklist_that_cannot_be_is_named(
    text: str, kind: str, code: int, tmp_path: Path
) -> None:
    folder = release(tmp_path / "llama")
    (folder / "checklist.chk").write_text(text)
    found = ftckpt_json("verify", str(folder))
    assert kind in {one["kind"] for one in found["findings"]} | {found["result"].get("kind")}
    assert found["result"]["code"] == code


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (  # Llama 3.1 8B: config.json of its release, and params.json of the same
            {
                "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
                "rope_theta": 500000.0, "vocab_size": 128256,
                "rope_scaling": {
                    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3",
                },
            },
            {
                "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
                "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
                "ffn_dim_multiplier": 1.3,
            },
        ),
        (  # Llama 2 13B
            {
                "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
                "num_hidden_layers": 40, "rms_norm_eps": 1e-05, "vocab_size": 32000,
            },
            {
                "dim": 5120, "multiple_of": 256, "n_heads": 40, "n_kv_heads": 40, "n_layers": 40,
                "norm_eps": 1e-05, "vocab_size": 32000, "rope_theta": 10000.0,
            },
        ),
    ],
)  # fmt: skip
def test_parameters_are_said_in_metas_words(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = meta_parameters(config)
    assert found.items() >= wanted.items()
    multiplier = found.get("ffn_dim_multiplier")
    made = inner_width(found["dim"], found["multiple_of"], multiplier)
    assert made == config["intermediate_size"]


@given(st.integers(1, 20000), st.integers(1, 80000))
def test_every_width_of_the_mlp_has_its_factor(dim: int, inner: int) -> None:
    config = {
        "hidden_size": dim, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9,
        "intermediate_size": inner,
    }  # fmt: skip
    found = meta_parameters(config)
    made = inner_width(dim, found["multiple_of"], found.get("ffn_dim_multiplier"))
    assert made == inner


def test_what_metas_code_does_not_do_is_refused() -> None:
    config = MODELS["llama"]["config"]
    with pytest.raises(UnsupportedError, match="scales rotary frequencies"):
        meta_parameters({**config, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(UsageError, match="hidden_size = None"):
        meta_parameters({})


def meta_rank(meta: Mapping[str, Any], rank: int, columns: bool) -> dict[str, Any]:
    """The part of a model that one of Meta's two ranks saves."""
    found = {}
    for key, value in meta.items():
        axis = 1 if key.endswith(("wo.weight", "w2.weight")) else 0
        if key.startswith("tok_embeddings") and columns:
            axis = 1
        found[key] = value if "norm" in key else value.chunk(2, axis)[rank].clone()
    return found


def page_of_families() -> str:
    """The table that docs/families.md shows."""
    text = (Path(__file__).parents[3] / "docs/families.md").read_text()
    return text.split("```toml\n")[1].split("```")[0]


def test_a_table_of_ones_own_turns_biases_too(tmp_path: Path) -> None:
    (tmp_path / "biased.toml").write_text(page_of_families())
    shapes = dict(MODELS["llama"]["stored"])
    for layer, (leaf, rows) in product(range(3), (("q", 40), ("k", 20), ("v", 20), ("o", 32))):
        shapes[f"model.layers.{layer}.self_attn.{leaf}_proj.bias"] = [rows]
    weights = tensors_of(shapes)
    save_folder(tmp_path / "hf", "llama", weights, attention_bias=True)
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan", only="model",
        family=str(tmp_path / "biased.toml"),
    )  # fmt: skip
    there = held(tmp_path / "t")
    for ours, theirs, heads in (("q", "wq", 4), ("k", "wk", 2)):
        bias = weights[f"model.layers.1.self_attn.{ours}_proj.bias"]
        assert (halves(there[f"layers.1.attention.{theirs}.bias"], heads) == bias).all()
    with pytest.raises(UsageError, match=r"12 tensors too many \(.*_proj.bias"):
        api.convert(
            str(tmp_path / "hf"), str(tmp_path / "u"), "dcp", names="torchtitan", only="model"
        )


@given(data=st.data())
def test_any_bytes_of_a_turned_tensor_can_be_read(data: st.DataObject) -> None:
    """In pieces of any size, from heads of any width, across pieces of the stored tensor."""
    import numpy as np

    from ftckpt.checkpoint import Box, TensorInfo
    from ftckpt.formats.families.views import arrays

    heads, half = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    columns = data.draw(st.sampled_from([(), (1,), (3,)]))
    shape = (2 * half * heads, *columns)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    to_halves = data.draw(st.booleans())
    axes = (heads, half, 2, -1) if to_halves else (heads, 2, half, -1)
    wanted = values.reshape(axes).swapaxes(1, 2).tobytes()

    def read_box(_: object, info: TensorInfo, box: Box) -> Any:
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        assert 0 <= rows.start < rows.stop <= shape[0]
        return values[rows]

    begin = data.draw(st.integers(0, len(wanted) - 1))
    end = data.draw(st.integers(begin + 1, len(wanted)))
    out = bytearray(end - begin)
    info: Any = SimpleNamespace(shape=shape, dtype=SimpleNamespace(nbytes=lambda n: 4 * n))
    block = data.draw(st.sampled_from([1, 64, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "read_box", read_box)
        patch.setattr(arrays, "_BLOCK", block)
        one = arrays.Rotated("k", 2 * half, to_halves)
        arrays._fill(None, info, one, begin, memoryview(out))  # type: ignore[arg-type]
    assert bytes(out) == wanted[begin:end]


@pytest.mark.parametrize("name", [*MODELS, "mine"])
def test_each_table_fits_its_model(name: str, tmp_path: Path) -> None:
    config = dict(MODELS.get(name, MODELS["llama"])["config"])
    if name == "mine":
        (tmp_path / "mine.toml").write_text(page_of_families())
        config["attention_bias"] = True
        name = str(tmp_path / "mine.toml")
    (tmp_path / "config.json").write_text(json.dumps(config))
    side = ("--names", "torchtitan") if name.endswith(".toml") else ()
    found = ftckpt_json("families", name, "--config", str(tmp_path / "config.json"), *side)
    assert found["result"]["code"] == 0
    rows = {side["side"]: side["rows"] for side in found["sides"]}
    assert not [side for side in found["sides"] if side["problems"]]
    if "torchtitan" in rows:
        count = sum(row["tensors"] for row in rows["torchtitan"])
        shapes = family(name).shapes
        assert shapes is not None
        assert count == len(shapes.tensors(config))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("wv.bias", "wq.bias"), "become one tensor"),
        (('rotated = "keys"', 'rotated = "queries"'), "does not hold 4 heads of width 10"),
        (("self_attn.v_proj.bias\"\n", "self_attn.v.bias\"\n"), "has nothing for"),
        (("[[native]]", "[[naive]]"), "has naive, which no table has"),
        (("hidden_size", "hidden"), "says hidden = None"),
        (('"model.layers.{layer}.self_attn.o_proj.bias" =', '"x" = 3 #'), "is given by 3"),
        (('extends = "llama"', 'extends = "alpaca"'), "no family is called 'alpaca'"),
        (("rotated", "= ="), "cannot be read as a table"),
        (('"queries"', '"values"'), "says rotated = 'values': queries or keys"),
        (("layers.{layer}.attention.wv", "attention.wv"), "does not have the numbers of"),
        (("layers.{layer}.attention.wv", "layers.{expert}.{layer}.wv"), "not have the numbers"),
        (('hf = "model.layers.{layer}.self_attn.v_proj.bias"', "hf = []"), "on one side alone"),
        (('hf = "model.layers.{layer}.self_attn.v_proj.bias"', "hf = 3"), "be read as a table"),
        (('rotated = "queries"', 'join = "sideways"'), "cannot be read as a table"),
        (("[config]", "[defaults]\nhead_dim = 3\n[config]"), "gives head_dim .* no text"),
        (("[config]", "[derived]\n[config]"), "has a derived that is not rows"),
        (('[config]\nmodel_type = "llama"', "shapes = 1"), "cannot be read|not a section"),
        (('extends = "llama"', 'extends = "mine.toml"'), "cannot read mine.toml"),
        (("[config]", '[megatron]\nx = {field = "a", flag = "b"}\n[config]'), "gives no value"),
        (("[config]", '[megatron]\nx = {letters = "M"}\n[config]'), "says x = .* no value"),
        (("[config]", '[megatron]\nx = {every = 3}\n[config]'), "says x = .* no value"),
        (("[config]", '[required]\n[[megatron]]\n[config]'), "megatron that is not a section"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_found(
    change: tuple[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(page_of_families().replace(*change))
    config = {**MODELS["llama"]["config"], "attention_bias": True}
    assert re.search(says, refusal_of(tmp_path, config))


def test_an_output_layer_without_an_embedding_is_named(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "formats/families/llama.toml").read_text()
    text = re.sub(r"(hf = \"model\.embed_tokens\.weight\"\n)vocabulary = true\n", r"\1", text)
    (tmp_path / "mine.toml").write_text(text)
    config = {**MODELS["llama"]["config"], "tie_word_embeddings": True}
    assert "an output layer and no embedding" in refusal_of(tmp_path, config)


def refusal_of(place: Path, config: dict[str, Any]) -> str:
    """Return why the table `mine.toml` there does not fit a configuration."""
    (place / "config.json").write_text(json.dumps(config))
    found = ftckpt_json(
        "families", str(place / "mine.toml"), "--config", str(place / "config.json"),
        "--names", "torchtitan",
    )  # fmt: skip
    assert found["result"]["code"] == 2, found["result"]
    return str(found["result"]["message"])


def test_the_list_of_tables() -> None:
    found = ftckpt_json("families")
    sides = {one["family"]: one["sides"] for one in found["families"]}
    assert sides["gpt2"] == ["megatron"]
    assert sides["llama"] == ["megatron", "torchtitan", "meta", "maxtext"]
    for arguments in (("llama",), ("--config", "c.json")):
        assert ftckpt_json("families", *arguments)["result"]["code"] == 2


# --- what is refused ------------------------------------------------------------------------------


def _without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {k: v for k, v in weights.items() if part not in k}


def _one_more(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "layers.3.ffn_norm.weight": weights["layers.0.ffn_norm.weight"].clone()}


def _other_shape(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "layers.1.attention.wo.weight": weights["norm.weight"].repeat(32, 1)}


def _unknown(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "layers.1.attention.gate.weight": weights["norm.weight"].clone()}


def _twice(weights: dict[str, Any]) -> dict[str, Any]:
    key = "layers.1.attention.qkv_linear.wq.weight"
    return {**weights, key.replace("qkv_linear.", ""): weights[key].clone()}


REFUSED: dict[
    str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], type[FtckptError], str]
] = {
    "a tensor is missing": (
        _without("layers.1.feed_forward.w2"), {}, UsageError,
        r"1 tensor missing \(model.layers.1.mlp.down_proj.weight\)",
    ),
    "a layer too many": (
        _one_more, {}, UsageError, r"1 tensor too many \(model.layers.3.post_attention_layernorm",
    ),
    "another shape": (_other_shape, {}, UsageError, r"o_proj.weight of \[32, 32\] is to be"),
    "a name of nobody's": (_unknown, {}, UnsupportedError, "no parameter that is called"),
    "two spellings of one": (_twice, {}, UnsupportedError, "two tensors of the source become"),
    "other heads": (dict, {"num_attention_heads": 8}, UsageError, "does not hold 8 heads"),
    "more layers": (dict, {"num_hidden_layers": 4}, UsageError, r"9 tensors missing"),
    "another vocabulary": (dict, {"vocab_size": 70}, UsageError, r"embed_tokens.weight of \[61,"),
    "a field that is not there": (
        dict, {"intermediate_size": None}, UsageError, "says intermediate_size = None",
    ),
    "layers beyond belief": (
        dict, {"num_hidden_layers": 1 << 21}, UsageError, "says 2,097,152 layers",
    ),
    "a field that is no number": (dict, {"vocab_size": "61"}, UsageError, "vocab_size = '61'"),
    "another family": (dict, {"model_type": "gpt2"}, UnsupportedError, "no parameter that Megatr"),
    "a family of nobody's": (dict, {"model_type": "x"}, UnsupportedError, "no table exists"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    change, config, error, says = REFUSED[case]
    weights = change(titan_llama(tensors_of(MODELS["llama"]["stored"]), 4, 2))
    (tmp_path / "run").mkdir()
    save_file(weights, tmp_path / "run/model.safetensors")
    (tmp_path / "c.json").write_text(json.dumps({**MODELS["llama"]["config"], **config}))
    with pytest.raises(error, match=says):
        api.convert(
            str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf",
            config=str(tmp_path / "c.json"),
        )  # fmt: skip
    assert sorted(one.name for one in tmp_path.iterdir()) == ["c.json", "run"]


def test_a_configuration_is_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = titan_llama(tensors_of(MODELS["llama"]["stored"]), 4, 2)
    (tmp_path / "run").mkdir()
    save_file(weights, tmp_path / "run/model.safetensors")
    with pytest.raises(UsageError, match="does not say what its model is") as caught:
        api.convert(str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf")
    assert "--config FILE" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("experts.2.up_proj"), "2 tensors missing"),
        (_without("self_attn.k_norm"), "3 tensors missing"),
        (
            lambda w: {**w, "model.layers.0.mlp.bias": w["model.norm.weight"].clone()},
            "1 tensor too many",
        ),
    ],
)
def test_a_folder_that_is_not_its_config_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], says: str, tmp_path: Path
) -> None:
    name = "qwen3_moe"
    weights = change(tensors_of(MODELS[name]["stored"]))
    if "2 tensors" in says:  # of one layer less, so that a stack has a gap
        weights |= {
            k: v for k, v in tensors_of(MODELS[name]["stored"]).items() if "layers.0.mlp" in k
        }
    save_folder(tmp_path / "hf", name, weights)
    with pytest.raises(UsageError, match=says):
        api.convert(
            str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan", only="model"
        )
    assert not (tmp_path / "t").exists()


TOWERS = {name for name in family_names() if family(name).parts or name.endswith("_vision")}
WITHOUT_TITAN = sorted(
    set(family_names()) - {*TITAN, *TOWERS, "llama3.1", "mistral", "kimi_k2", "qwen3_vl_moe_text"}
)


@pytest.mark.parametrize("name", WITHOUT_TITAN)
def test_a_family_without_rows_of_torchtitan_is_refused(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "hf/model.safetensors")
    config = {"model_type": name, "num_attention_heads": 4, "hidden_size": 16, "n_head": 4}
    config |= MODELS.get({"mimo": "qwen2"}.get(name, name), {}).get("config", {})
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "model_type": name}))
    with pytest.raises(UnsupportedError, match="no table says how"):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan")


# --- Megatron-core of families that its arguments alone do not give -------------------------------


@pytest.mark.parametrize("name", BRIDGE)
def test_megatron_bridge_gives_the_same_names(name: str) -> None:
    """Each of its mappings is a row here, and its parts are in that order."""

    def starred(text: str) -> str:
        return re.sub(r"\{\w+\}", "*", text)

    ours: dict[str, set[tuple[str, ...]]] = {}
    for entry in family(name).entries:
        for spelled in entry.megatron.values():
            parts = tuple(starred(part.text) for part in entry.hf)
            ours.setdefault(starred(spelled.text), set()).add(parts)
    theirs = {key: tuple(parts) for key, parts in BRIDGE[name].items()}
    theirs.pop("decoder.layers.*.mlp.shared_experts.router.weight", None)  # no such module
    assert [key for key, parts in theirs.items() if parts not in ours.get(key, ())] == []


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_names_there_and_back(name: str, tmp_path: Path) -> None:
    weights = tensors_of(MODELS[name]["stored"])
    save_folder(tmp_path / "hf", name, weights)
    config = str(tmp_path / "hf/config.json")
    api.convert(str(tmp_path / "hf"), str(tmp_path / "m"), "dcp", names="megatron")
    there = open_checkpoint(tmp_path / "m")
    if name == "glm4_moe":
        first, later = (
            there.tensors[f"decoder.layers.{n}.self_attention.linear_qkv.bias"].shape
            for n in (0, 1)
        )
        assert first == later == (80,)
        assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in there.tensors
        assert "decoder.layers.1.pre_mlp_layernorm.weight" in there.tensors
    convert = partial(api.convert, str(tmp_path / "m"), to="safetensors", names="hf")
    convert(str(tmp_path / "back"), config=config)
    require_equal(held(tmp_path / "back"), held(tmp_path / "hf"))
    with pytest.raises(UsageError, match="nothing says what the model"):
        convert(str(tmp_path / "none"))
    said = json.loads(Path(config).read_text())
    more: dict[str, Any] = {"num_hidden_layers": said.get("num_hidden_layers", 0) + 1}
    if name == "nemotron_h":
        more = {"layers_block_type": [*said["layers_block_type"], "mlp"]}
    Path(config).write_text(json.dumps({**said, **more}))
    with pytest.raises(UsageError, match=r"tensors? missing|not one for each layer"):
        convert(str(tmp_path / "more"), config=config)
    Path(config).write_text(json.dumps(said))
    if not family(name).unbuilt:
        return
    with pytest.raises(UnsupportedError, match=re.escape(family(name).unbuilt)):
        api.convert(
            str(tmp_path / "hf"), str(tmp_path / "job"), "megatron", names="megatron", only="model"
        )
    assert not {"none", "more", "job"} & {one.name for one in tmp_path.iterdir()}


@pytest.mark.parametrize("name", [n for n in BRIDGED if n.removesuffix("_mxfp4") in MODELS])
def test_megatron_bridge_makes_the_same_tensors(name: str, tmp_path: Path) -> None:
    """`make_bridge_tensors.py` ran its mapping classes on these weights."""
    import torch

    weights = judged(name)
    said: dict[str, Any] = {}
    if name == "gpt_oss_mxfp4":
        weights = {key: v.bfloat16() if v.is_floating_point() else v for key, v in weights.items()}
        said = {"intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    save_folder(tmp_path / "hf", name.removesuffix("_mxfp4"), weights, **said)
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "m"), "safetensors", only="model", names="megatron",
        spelling=("grouped",), dtype="bf16" if said else "",
    )  # fmt: skip
    theirs = BRIDGED[name]["tensors"]
    found = held(tmp_path / "m")
    assert len(found) > 20
    for key, value in found.items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest()[:32] == theirs[key], key
    if said:
        return
    api.convert(
        str(tmp_path / "m"), str(tmp_path / "back"), "safetensors", names="hf",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    for key in weights:
        if key.endswith("linear_attn.norm.weight"):
            weights[key] = weights[key] - 1 + 1
    require_equal(held(tmp_path / "back"), weights)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 2}),
        ("nemotron_h", {
            "layers_block_type": None, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4,
        }),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}),
    ],
)  # fmt: skip
def test_other_words_for_the_kinds_of_layers(name: str, change: dict[str, Any]) -> None:
    """What stands in the `config.json` of published models."""
    table = family(name)
    assert table.shapes is not None
    config = MODELS[name]["config"]
    assert table.shapes.tensors({**config, **change}) == table.shapes.tensors(config)
    rules = {entry.layers for entry in table.entries if entry.layers}
    assert rules
    for rule in rules:
        wanted = table.shapes.layers(rule, config)
        assert table.shapes.layers(rule, {**config, **change}) == wanted
        assert len(wanted) in (1, 2)


def test_experts_of_megatron_and_of_the_config_are_the_same(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    _, found = megatron_weights("gpt_oss", tmp_path)
    said = MODELS["gpt_oss"]["config"]
    config = tmp_path / "c.json"

    def back(folder: str, weights: Mapping[str, Any], experts: int) -> None:
        config.write_text(json.dumps({**said, "num_local_experts": experts}))
        (tmp_path / folder).mkdir()
        save_file(dict(weights), tmp_path / folder / "model.safetensors")
        api.convert(
            str(tmp_path / folder), str(tmp_path / f"{folder}-hf"), "safetensors", names="hf",
            config=str(config),
        )  # fmt: skip

    fewer = {key: v for key, v in found.items() if "local_experts.2.linear_fc2.weight" not in key}
    with pytest.raises(UnsupportedError, match="holds 4 experts; missing: 2"):
        back("fewer", fewer, 4)
    with pytest.raises(UnsupportedError, match="holds 3 experts; there: 3"):
        back("more", found, 3)
    with pytest.raises(UnsupportedError, match="holds 5 experts; missing: 4"):
        back("less", found, 5)
    key = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    with pytest.raises(UnsupportedError, match="differ in type or shape"):
        back("types", {**found, key: found[key].float()}, 4)
    twice = {**found, "decoder.layers.0.mlp.experts.linear_fc1.weight1": found[key].clone()}
    with pytest.raises(UnsupportedError, match="become one part of"):
        back("twice", twice, 4)
    (tmp_path / "hf/config.json").write_text(json.dumps({**said, "num_local_experts": 3}))
    with pytest.raises(UsageError, match="does not hold the 3 experts"):
        api.convert(str(tmp_path / "hf"), str(tmp_path / "m3"), "safetensors", names="megatron")


@given(data=st.data())
def test_any_bytes_of_moved_experts_can_be_read(data: st.DataObject) -> None:
    """In pieces of any size: one expert of a stack, and a stack of experts."""
    import numpy as np

    from ftckpt.formats.families.views import experts

    count, half, width = (data.draw(st.integers(1, 4)) for _ in range(3))
    turned, alternate = data.draw(st.booleans()), data.draw(st.booleans())
    shape = (2 * half, width) if turned or data.draw(st.booleans()) else (2 * half,)
    apart = np.arange(count * np.prod(shape), dtype=np.float32).reshape(count, *shape)
    mixed = apart
    if alternate:
        mixed = apart.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(apart.shape)
    whole = np.ascontiguousarray(mixed.swapaxes(1, 2) if turned else mixed)
    dtype = SimpleNamespace(nbytes=lambda n: 4 * n, itemsize=4)
    stack: Any = SimpleNamespace(key="s", shape=whole.shape, dtype=dtype, values=whole)
    each: list[Any] = [
        SimpleNamespace(key=str(n), shape=shape, dtype=dtype, values=one)
        for n, one in enumerate(apart)
    ]

    def read_box(_: object, info: Any, box: Any) -> Any:
        assert all(n > 0 for n in box.sizes)
        places = zip(box.offsets, box.sizes, info.shape, strict=True)
        assert all(0 <= begin < begin + size <= whole for begin, size, whole in places)
        return info.values[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]

    number = data.draw(st.integers(0, count - 1))
    cut = experts._Moved([(stack, number)], shape, turned, int(alternate))
    joined = experts._Moved([(one, None) for one in each], whole.shape[1:], turned, -alternate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "read_box", read_box)
        patch.setattr(experts, "_BLOCK", data.draw(st.sampled_from([1, 16, 1 << 20])))
        patch.setattr(experts, "_MOST", data.draw(st.sampled_from([0, 1 << 20])))
        for moved, wanted in ((cut, apart[number].tobytes()), (joined, whole.tobytes())):
            begin = data.draw(st.integers(0, len(wanted) - 1))
            end = data.draw(st.integers(begin + 1, len(wanted)))
            out = bytearray(end - begin)
            experts._fill(experts._Kept(stack), stack, moved, begin, memoryview(out))
            assert bytes(out) == wanted[begin:end]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('megatron = "a"\nhf = "b"\nstored = "two less"', "stored = 'two less'"),
        (
            'megatron = "a"\nhf = ["b", "c"]\njoin = "stacked"\nstored = "one less"',
            "joins or turns",
        ),
        ('megatron = "a.{expert}"\nhf = ["b", "c"]\njoin = "stacked"', "holds all experts"),
        ('megatron = "a"\nhf = "b"\njoin = "alternate"', "only experts do"),
        ('megatron = "a"\nhf = "b"\nsections = [3]', "sections that are no names"),
        ('sequential = "a.{expert}"\ngrouped = "b"\nhf = "c"', "does not have the numbers"),
    ],
)
def test_words_that_do_not_go_together(row: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[[tensor]]\n{row}\n")
    with pytest.raises(UsageError, match=says):
        family(str(tmp_path / "mine.toml"))


def test_megatron_cores_llama4_has_these_names_and_shapes(tmp_path: Path) -> None:
    """`make_core.py` loaded such a model into it, and it gave the logits of transformers."""
    theirs = json.loads((DATA / "core.json").read_text())["llama4_text"]
    save_folder(tmp_path / "hf", "llama4_text", tensors_of(MODELS["llama4_text"]["stored"]))
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "m"), "safetensors", only="model", names="megatron",
        spelling=("local",),
    )  # fmt: skip
    found = open_checkpoint(tmp_path / "m").tensors
    assert {key: list(info.shape) for key, info in found.items()} == theirs


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('share = "columns 3/2"', "says share = 'columns 3/2'"),
        ("share = 2", "says share = 2"),
        ('rotated = "halves"', "says rotated = 'halves'"),
        ('share = "rows 1/3"\nrotated = "keys"', "in two ways at once"),
        ('share = "columns 1/2"\ntransposed = true\nrotated = "halves"', "in two ways at once"),
        ("flat = true\ntransposed = true", "in two ways at once"),
        ('flat = "yes"', "says flat = 'yes'"),
    ],
)
def test_parts_of_a_tensor_are_said_in_one_way(row: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'[[native]]\nmeta = "a"\nhf = "b"\n{row}\n')
    with pytest.raises(UsageError, match=says):
        family(str(tmp_path / "mine.toml"))


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Gate and up of Llama 4 lie apart in torchtitan: one alone makes nothing."""
    from safetensors.torch import save_file

    save_folder(tmp_path / "hf", "llama4_text", tensors_of(MODELS["llama4_text"]["stored"]))
    api.convert(
        str(tmp_path / "hf"), str(tmp_path / "t"), "safetensors", names="torchtitan", only="model"
    )
    found = held(tmp_path / "t")
    gone = "layers.3.moe.experts.w3"
    short = {**found, gone: found[gone][..., :-1].contiguous()}
    for folder, tensors, says in (
        ("gone", {key: value for key, value in found.items() if key != gone}, "part 2 is not"),
        ("short", short, "differ in type or shape"),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        with pytest.raises(UnsupportedError, match=says):
            api.convert(
                str(tmp_path / folder), str(tmp_path / "back"), "safetensors", names="hf",
                config=str(tmp_path / "hf/config.json"),
            )  # fmt: skip
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("said", [[1, 9], [True], "1", {"a": 1}])
def test_a_list_of_layers_is_a_list_of_numbers(said: Any) -> None:
    shapes = family("llama4_text").shapes
    assert shapes is not None
    config = {**MODELS["llama4_text"]["config"], "moe_layers": said}
    with pytest.raises(UsageError, match="not a list of its layers"):
        shapes.tensors(config)


def test_a_model_may_have_no_layer_with_experts(tmp_path: Path) -> None:
    """Llama Guard 4: no layer, no expert, no step between them."""
    shapes = family("llama4_text").shapes
    assert shapes is not None
    config = {
        "moe_layers": [], "num_local_experts": 0, "interleave_moe_layer_step": 0,
        "num_hidden_layers": 1,
    }  # fmt: skip
    found = shapes.tensors({**MODELS["llama4_text"]["config"], **config})
    assert "model.layers.0.feed_forward.gate_proj.weight" in found
    assert not any("experts" in key or "router" in key for key in found)
    weights = tensors_of({key: list(shape) for key, shape in found.items()})
    save_folder(tmp_path / "hf", "llama4_text", weights, **config)
    for names in ("megatron", "torchtitan"):
        api.convert(str(tmp_path / "hf"), str(tmp_path / names), "dcp", names=names, only="model")
        api.convert(
            str(tmp_path / names), str(tmp_path / f"{names}-hf"), "safetensors", names="hf",
            config=str(tmp_path / "hf/config.json"),
        )  # fmt: skip
        require_equal(held(tmp_path / f"{names}-hf"), weights)


SECTIONS = {
    "qwen3_next": {
        "self_attention.in_proj.weight": [
            ("query", 10), ("key", 10), ("value", 24), ("z", 24), ("beta", 4), ("alpha", 4),
        ],
        "self_attention.conv1d.weight": [("query", 10), ("key", 10), ("value", 24)],
    },
    "nemotron_h": {
        "mixer.in_proj.weight": [("z", 32), ("x", 32), ("B", 12), ("C", 12), ("dt", 4)],
        "mixer.conv1d.weight": [("x", 32), ("B", 12), ("C", 12)],
        "mixer.conv1d.bias": [("x", 32), ("B", 12), ("C", 12)],
    },
}  # fmt: skip


def megatron_weights(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same weights by Hugging Face's names and, in a folder, by Megatron-core's."""
    weights = tensors_of(MODELS[name]["stored"])
    save_folder(folder / "hf", name, weights)
    api.convert(
        str(folder / "hf"), str(folder / "m"), "safetensors", only="model", names="megatron"
    )
    return weights, held(folder / "m")


@pytest.mark.parametrize("name", SECTIONS)
def test_what_torch_dist_stores_in_sections_is_put_together(name: str, tmp_path: Path) -> None:
    """`_split_tensor_factory` of megatron/core/ssm saves these parts under names of their own."""
    from safetensors.torch import save_file

    weights, found = megatron_weights(name, tmp_path)
    for key in list(found):
        for tail, sections in SECTIONS[name].items():
            if key.endswith(tail):
                parts = found.pop(key).split([rows for _, rows in sections])
                for (section, _), part in zip(sections, parts, strict=True):
                    found[f"{key}.{section}"] = part.clone()
    convert = partial(
        api.convert, to="safetensors", names="hf", config=str(tmp_path / "hf/config.json")
    )
    for folder in ("cut", "short"):
        (tmp_path / folder).mkdir()
    save_file(found, tmp_path / "cut/model.safetensors")
    convert(str(tmp_path / "cut"), str(tmp_path / "back"))
    require_equal(held(tmp_path / "back"), weights)
    gone = next(key for key in found if key.endswith(f".{sections[1][0]}"))
    del found[gone]
    save_file(found, tmp_path / "short/model.safetensors")
    with pytest.raises(UnsupportedError, match=r"is made of \d parts, and"):
        convert(str(tmp_path / "short"), str(tmp_path / "none"))


def test_a_number_of_thousands_of_digits_is_nobodys(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = MODELS["gpt_oss"]["config"]
    (tmp_path / "run").mkdir()
    (tmp_path / "c.json").write_text(json.dumps(config))
    name = f"decoder.layers.0.mlp.experts.linear_fc2.weight{'9' * 5000}"
    save_file({name: torch.ones(2, 2)}, tmp_path / "run/model.safetensors")
    with pytest.raises(UnsupportedError, match="no parameter"):
        api.convert(
            str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf",
            config=str(tmp_path / "c.json"),
        )  # fmt: skip


def test_a_routers_bias_is_a_tensor_where_the_table_has_it(tmp_path: Path) -> None:
    import torch

    weights, found = megatron_weights("nemotron_h", tmp_path)
    args = SimpleNamespace(num_layers=4, hidden_size=32, moe_router_enable_expert_bias=True)
    torch.save({"model": found, "args": args}, tmp_path / "job.pt")
    convert = partial(
        api.convert, str(tmp_path / "job.pt"), to="safetensors", names="hf", only="model"
    )
    convert(str(tmp_path / "back"), config=str(tmp_path / "hf/config.json"))
    require_equal(held(tmp_path / "back"), weights)
    (tmp_path / "c.json").write_text(json.dumps(MODELS["qwen3_next"]["config"]))
    with pytest.raises(UnsupportedError, match="a bias that is not a weight"):
        convert(str(tmp_path / "none"), config=str(tmp_path / "c.json"))


def tensor_rank(name: str, value: Any, rank: int) -> Any:
    """The part of a tensor of Qwen3-Next that one of two tensor-parallel ranks has."""
    import torch

    def cut(parts: Any) -> Any:
        return torch.cat([part.chunk(2)[rank] for part in parts])

    for tail, sections in SECTIONS["qwen3_next"].items():
        if name.endswith(tail):
            return cut(value.split([rows for _, rows in sections]))
    if name.endswith("linear_fc1.weight"):
        return cut(value.chunk(2))
    if name.endswith(("linear_fc2.weight", "linear_proj.weight", "out_proj.weight")):
        return value.chunk(2, 1)[rank].clone()
    if "norm" in name or name.endswith(("router.weight", "gate_weight")):
        return value
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):  # padded
        value = torch.cat([value, value[:1]])
    return value.chunk(2)[rank].clone()


def test_legacy_ranks_of_linear_attention(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with its own q, k, v, z, b and a."""
    import torch

    config = MODELS["qwen3_next"]["config"]
    weights, found = megatron_weights("qwen3_next", tmp_path)
    said = {
        "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 10, "swiglu": True, "num_experts": 4,
        "layernorm_zero_centered_gamma": True, "attention_output_gate": True,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "world_size": 2,
        **{key: value for key, value in config.items() if key.startswith("linear_")},
    }  # fmt: skip
    for rank in range(2):
        state = {key: tensor_rank(key, value, rank) for key, value in found.items()}
        place = tmp_path / f"iter_0000007/mp_rank_0{rank}"
        place.mkdir(parents=True)
        held_args = SimpleNamespace(**said)
        torch.save(
            {"model": state, "args": held_args, "iteration": 7, "checkpoint_version": 3.0},
            place / "model_optim_rng.pt",
        )
    api.convert(
        str(tmp_path / "iter_0000007"), str(tmp_path / "back"), "safetensors", names="hf",
        only="model", config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    require_equal(held(tmp_path / "back"), weights)


# --- judges ---------------------------------------------------------------------------------------


@contextmanager
def adapter_of(name: str) -> Iterator[Any]:
    """Import torchtitan's own adapter; of the modules around it only what it names is there."""
    found = importlib.util.find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    root = Path(found.submodule_search_locations[0])
    before = dict(sys.modules)

    def put(module: str, **held: Any) -> None:
        made = ModuleType(module)
        made.__path__ = [str(root.joinpath(*module.split(".")[1:]))]
        made.__dict__.update(held)
        sys.modules[module] = made

    rope = {
        "ComplexRoPE": SimpleNamespace(Config=object),
        "CosSinRoPE": SimpleNamespace(Config=object),
    }
    for module in ("", ".models", ".protocols", ".models.common", ".tools", f".models.{name}"):
        put(f"torchtitan{module}")
    put("torchtitan.models.common.rope", **rope)
    put("torchtitan.models.common.decoder", Decoder=SimpleNamespace(Config=object))
    put("torchtitan.protocols.model", BaseModel=SimpleNamespace(Config=object))
    put("torchtitan.tools.logging", logger=None)
    model = SimpleNamespace(Config=object)
    for module in {name, "deepseek_v3"}:  # whose adapter is another's base
        put(f"torchtitan.models.{module}")
        put(
            f"torchtitan.models.{module}.model",
            Llama3Model=model, Qwen3Model=model, DeepSeekV3Model=model, GptOssModel=model,
            KimiK25Model=model,
        )  # fmt: skip
    try:
        yield importlib.import_module(f"torchtitan.models.{name}.state_dict_adapter")
    finally:
        for module in set(sys.modules) - set(before):
            if module.startswith("torchtitan"):
                del sys.modules[module]


# What its model has behind the names of its adapter.
SUFFIXES = {
    "mlp1_weight": "EGD", "s.mlp1_bias": "EG", "mlp2_weight": "EDF", "s.mlp2_bias": "ED",
}  # fmt: skip
ADAPTERS = {
    "llama": ("llama3", "Llama3StateDictAdapter"),
    "qwen3": ("qwen3", "Qwen3StateDictAdapter"),
    "qwen3_moe": ("qwen3", "Qwen3StateDictAdapter"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "gpt_oss": ("gpt_oss", "GptOssStateDictAdapter"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_torchtitans_adapter_gives_the_same(name: str, tmp_path: Path) -> None:
    weights = tensors_of(MODELS[name]["stored"])
    config = MODELS[name]["config"]
    tied = config["tie_word_embeddings"]
    with adapter_of(ADAPTERS[name][0]) as module:
        attention = SimpleNamespace(
            n_heads=4,
            n_kv_heads=2,
            head_dim=10,
            rope=object(),
            q_lora_rank=config.get("q_lora_rank", 0),
        )
        moe = SimpleNamespace(moe=SimpleNamespace(num_experts=4), attention=attention)
        model = SimpleNamespace(dim=32, enable_weight_tying=tied, layers=[moe] * 3, mtp_layers=[])
        # Its GPT-OSS has the stored form of four bits, which is output first.
        given = {
            key + "_blocks" * key.endswith("_proj"): value.mT if key.endswith("_proj") else value
            for key, value in weights.items()
        }
        wanted = getattr(module, ADAPTERS[name][1])(model, None).from_hf(given)
        wanted = {key: value for key, value in wanted.items() if "inner_experts.mlp" not in key} | {
            f"{key}_{SUFFIXES[key[-11:]]}": value.contiguous()
            for key, value in wanted.items()
            if "inner_experts.mlp" in key
        }
    save_folder(tmp_path / "hf", name, weights)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan", only="model")
    require_equal(held(tmp_path / "t"), wanted)


def test_torchtitans_adapter_of_llama4_gave_the_same(tmp_path: Path) -> None:
    """`make_torchtitan_tensors.py` ran it; it passes over dense layers, which its model has."""
    import torch

    theirs = json.loads((DATA / "torchtitan_tensors.json").read_text())["llama4_text"]
    save_folder(tmp_path / "hf", "llama4_text", tensors_of(MODELS["llama4_text"]["stored"]))
    api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan", only="model")
    found = held(tmp_path / "t")
    dense = {f"layers.{n}.feed_forward.w{part}.weight" for n in (0, 2, 4) for part in (1, 2, 3)}
    assert found.keys() == theirs.keys() | dense
    for key, digest in theirs.items():
        raw = found[key].contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest()[:32] == digest, key


def test_the_rotation_gives_transformers_logits(tmp_path: Path) -> None:
    """A forward pass by Meta's rules over what became of transformers' own model."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(2)
    config = transformers.LlamaConfig(**MODELS["llama"]["config"])
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tokens = torch.arange(22).view(2, 11)
    with torch.no_grad():
        wanted = model(tokens).logits
    api.convert(str(tmp_path / "hf"), str(tmp_path / "t"), "dcp", names="torchtitan", only="model")
    made = meta_forward(held(tmp_path / "t"), tokens, 4, 2, 10)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    api.convert(
        str(tmp_path / "t"), str(tmp_path / "back"), "safetensors", names="hf", only="model",
        config=str(tmp_path / "hf/config.json"),
    )  # fmt: skip
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert {k: list(v) for k, v in info.items() if v} == {}
    with torch.no_grad():
        assert torch.equal(back.eval()(tokens).logits, wanted)


def meta_forward(w: Mapping[str, Any], tokens: Any, queries: int, keys: int, width: int) -> Any:
    """Llama by Meta's rules: each head's neighbours are one complex number."""
    import torch
    from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

    batch, length = tokens.shape
    angles = torch.outer(
        torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2).float() / width)
    )
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(3):
        at = f"layers.{layer}."
        y = rms_norm(x, x.shape[-1:], w[f"{at}attention_norm.weight"], 1e-6)
        pre = f"{at}attention.qkv_linear."
        q = rotate((y @ w[f"{pre}wq.weight"].T).view(batch, length, queries, width))
        k = rotate((y @ w[f"{pre}wk.weight"].T).view(batch, length, keys, width))
        v = (y @ w[f"{pre}wv.weight"].T).view(batch, length, keys, width)
        k, v = (t.repeat_interleave(queries // keys, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + y @ w[f"{at}attention.wo.weight"].T
        y = rms_norm(x, x.shape[-1:], w[f"{at}ffn_norm.weight"], 1e-6)
        gate = silu(y @ w[f"{at}feed_forward.w1.weight"].T)
        up = y @ w[f"{at}feed_forward.w3.weight"].T
        x = x + (gate * up) @ w[f"{at}feed_forward.w2.weight"].T
    return rms_norm(x, x.shape[-1:], w["norm.weight"], 1e-6) @ w["lm_head.weight"].T


HOSTILE = {
    "doubling": (
        "[defaults]\na0 = '1'\n" + "".join(f"a{n} = 'a{n - 1}*a{n - 1}'\n" for n in range(1, 40)),
        "a39", "",
    ),
    "deep": (
        "[defaults]\na0 = '1'\n" + "".join(f"a{n} = 'a{n - 1}'\n" for n in range(1, 3000)),
        "a2999", "50 deep",
    ),
    "many factors": ("", "*".join(["99999999"] * 50), "more than any shape has"),
    "a long number": ("", "9" * 5000, "needs a number"),
    "extends": ("extends = 5\n", "1", "extends no text"),
    "layers": (
        "[[tensor]]\nmegatron = 'x.{layer}'\nhf = 'm.{layer}'\nlayers = 5\n", "1", "layers = 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_table_of_the_users_ends_in_bounded_time(case: str, tmp_path: Path) -> None:
    text, axis, says = HOSTILE[case]
    path = tmp_path / "own.toml"
    path.write_text(f'{text}[shapes]\n"w" = "{axis}"\n')

    def shapes() -> Any:
        table = family(str(path)).shapes
        assert table is not None
        return table.tensors({})

    if not says:
        assert shapes() == {"w": (1,)}
        return
    with pytest.raises(UsageError, match=says):
        shapes()


def test_an_output_layer_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """A loader would take the embedding in its place; equal ones are kept."""
    import torch
    from safetensors.torch import save_file

    weights = titan_llama(tensors_of(MODELS["llama"]["stored"]), 4, 2)
    tied = {**MODELS["llama"]["config"], "tie_word_embeddings": True}
    (tmp_path / "c.json").write_text(json.dumps(tied))
    (tmp_path / "run").mkdir()
    convert = partial(
        api.convert, str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf",
        config=str(tmp_path / "c.json"),
    )  # fmt: skip
    weights["tok_embeddings.weight"] = weights["lm_head.weight"].clone()
    weights["tok_embeddings.weight"][-1, -1] += 1
    save_file(weights, tmp_path / "run/model.safetensors")
    with pytest.raises(UsageError, match=r"ties lm_head\.weight to .*, and their values differ"):
        convert()
    assert not (tmp_path / "hf").exists()
    weights["tok_embeddings.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, tmp_path / "run/model.safetensors")
    convert()
    assert torch.equal(held(tmp_path / "hf")["lm_head.weight"], weights["lm_head.weight"])


def test_a_model_without_its_head_is_not_torchtitans(tmp_path: Path) -> None:
    """AutoModel saves `norm.weight`, which is torchtitan's name, too."""
    weights = {
        name.removeprefix("model."): value
        for name, value in tensors_of(MODELS["llama"]["stored"]).items()
        if name != "lm_head.weight"
    }
    save_folder(tmp_path / "hf", "llama", weights)
    api.convert(str(tmp_path / "hf"), str(tmp_path / "out"), "dcp", names="megatron", only="model")
    assert "decoder.final_layernorm.weight" in open_checkpoint(tmp_path / "out").tensors


# --- a model without its head ---------------------------------------------------------------------


def headless(name: str, *, packed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what AutoModel has in files, and what it has in memory: experts packed."""
    import torch

    weights = {
        key.removeprefix("model."): value
        for key, value in tensors_of(MODELS[name]["stored"]).items()
        if key != "lm_head.weight"
    }
    memory = {key: value for key, value in weights.items() if ".experts." not in key}
    for key in MODELS[name]["memory"] if packed else ():
        pre, _, last = key.removeprefix("model.").rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        memory[f"{pre}.{last}"] = torch.stack(
            [
                torch.cat([weights[f"{pre}.{number}.{part}.weight"] for part in parts])
                for number in range(4)
            ]
        )
    return weights, memory if packed else weights


@pytest.mark.parametrize(("name", "packed"), [("qwen3_moe", True), ("llama", False)])
def test_a_model_without_its_head_is_known(name: str, packed: bool, tmp_path: Path) -> None:
    files, memory = headless(name, packed=packed)
    save_folder(tmp_path / "run", name, memory)
    for names in ("hf", "megatron"):
        api.convert(
            str(tmp_path / "run"), str(tmp_path / names), "safetensors", only="model", names=names
        )
    require_equal(held(tmp_path / "hf"), files)
    said = json.loads((tmp_path / "hf/config.json").read_text())
    assert said == {**MODELS[name]["config"], "torch_dtype": "bfloat16"}
    there = held(tmp_path / "megatron")
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in there
    assert "output_layer.weight" not in there
    with pytest.raises(UnsupportedError, match="without its head"):
        api.convert(
            str(tmp_path / "run"), str(tmp_path / "t"), "dcp", only="model", names="torchtitan"
        )


def test_a_model_without_its_head_must_be_whole(tmp_path: Path) -> None:
    _, memory = headless("qwen3_moe", packed=True)
    del memory["layers.1.mlp.experts.down_proj"]
    save_folder(tmp_path / "run", "qwen3_moe", memory)
    with pytest.raises(UsageError, match="4 tensors missing"):
        api.convert(
            str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", only="model", names="hf"
        )


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_transformers_loads_a_model_without_its_head(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(4)
    model = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(**MODELS[name]["config"])
    ).eval()
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "run").mkdir()
    save_file(dict(model.state_dict()), tmp_path / "run/model.safetensors")
    api.convert(
        str(tmp_path / "run"), str(tmp_path / "hf"), "safetensors", names="hf",
        config=str(tmp_path / "own/config.json"),
    )  # fmt: skip
    assert held(tmp_path / "hf").keys() == held(tmp_path / "own").keys()
    again, told = transformers.AutoModel.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert {key: list(value) for key, value in told.items() if value} == {}
    require_equal(again.state_dict(), model.state_dict())
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).last_hidden_state, model(tokens).last_hidden_state)


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    """transformers 5 saves `num_local_experts` of Qwen3-MoE; Megatron would start a dense model."""
    config = dict(MODELS["qwen3_moe"]["config"])
    config["num_local_experts"] = config.pop("num_experts")
    found = family("qwen3_moe")
    assert found.shapes is not None
    assert {k: list(v) for k, v in found.shapes.tensors(config).items()} == (
        MODELS["qwen3_moe"]["stored"]
    )
    config["rms_norm_eps"] = 1e-6
    made = arguments_of_config(ModelFacts(found, Heads(4, 2, 10), config, Arguments()))
    assert made["num_experts"] == 4
