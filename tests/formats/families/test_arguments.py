"""Of which `config.json` Megatron-core builds the same model, and of which it does not."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.families.arguments import arguments_of_config
from ftckpt.formats.families.facts import ModelFacts
from ftckpt.formats.families.tables import family
from ftckpt.formats.families.views.joins import Heads
from ftckpt.formats.megatron.rank_files.grid import Arguments
from tests.builders.hf_models import Model
from tests.formats.families.test_native import MODELS, ROTARY

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = YARN | {"factor": 40, "original_max_position_embeddings": 4096}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0}
NESTED = {"full_attention": YARN | {"rope_theta": 7.0}}
GPT_OSS = ROTARY["gpt_oss"]["rope_parameters"]
BUILT = ("gpt2", "gpt_neox", "llama", "mixtral", "qwen2_moe")
LIKE = {"mimo": "qwen2"}
LENGTH = "original_max_position_embeddings"


def arguments(name: str, config: dict[str, Any]) -> dict[str, Any]:
    own = Model(name).config() if name in BUILT else MODELS[LIKE.get(name, name)]["config"]
    said = {**own, **ROTARY.get(name, {}), **config}
    return arguments_of_config(ModelFacts(family(name), Heads(4, 2, 8), said, Arguments()))


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        # rotation
        ("glm4_moe", {"rope_scaling": YARN, "rope_parameters": None}, "factor = 0.5.* by yarn"),
        ("qwen3_next", {"rope_scaling": YARN, "rope_parameters": None}, "factor = 0.25.* by yarn"),
        ("gpt_oss", {"partial_rotary_factor": 0.5}, "factor = 0.5"),
        ("llama", {"partial_rotary_factor": 0.5}, "factor = 0.5"),
        (
            "glm4_moe",
            {"rope_parameters": PLAIN, "rope_scaling": LINEAR},
            "rope_scaling = .*4.0",
        ),
        ("glm4_moe", {"rope_parameters": NESTED}, "scales rotary frequencies in a way"),
        ("deepseek_v3", {"rope_parameters": NESTED}, "scales rotary frequencies in a way"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 40}}, "'factor': 40"),
        ("deepseek_v3", {"rope_parameters": LATENT, LENGTH: 64}, "and, in .* another"),
        ("gpt_oss", {LENGTH: 1024}, f"{LENGTH} = 1024 and, in"),
        ("gpt_oss", {"rope_parameters": GPT_OSS | {"truncate": None}}, "'truncate': None"),
        ("gpt_oss", {"rope_parameters": [1]}, r"rope_parameters = \[1\], not a map"),
        ("llama", {"rope_scaling": "a"}, "rope_scaling = 'a', not a map"),
        # routers
        ("deepseek_v3", {"num_experts_per_tok": 4}, "by its best 4, not 2"),
        ("glm4_moe", {"n_group": 2, "topk_group": 2}, "by its best 1, not 2"),
        ("nemotron_h", {"n_group": 2, "topk_group": 2}, "by its best 1, not 2"),
        ("glm4_moe", {"n_group": 3, "topk_group": 1}, "of 3 groups of 4 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "does not normalise"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "does not normalise"),
        ("nemotron_h", {"num_experts_per_tok": 1}, "does not normalise"),
        ("mixtral", {"num_experts_per_tok": 1}, "does not normalise"),
        # what is fixed in Megatron-core's code
        ("nemotron_h", {"layer_norm_epsilon": 0.001}, "layer_norm_epsilon = 0.001"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit = "),
        ("nemotron_h", {"mamba_dt_limit": [0.1, {"__float__": "Infinity"}]}, "mamba_dt_limit = "),
        ("mimo", {"attention_bias": False}, "attention_bias = False"),
        # no numbers of a model
        ("gpt_oss", {"num_experts_per_tok": 0}, "gives 0 for Megatron's moe_router_topk"),
        ("gpt_oss", {"num_experts_per_tok": 2.5}, "gives 2.5 for"),
        ("gpt_oss", {"num_experts_per_tok": 100}, "chooses 100 of 4 experts"),
        ("gpt_oss", {"rms_norm_eps": -1}, "gives -1 for Megatron's layernorm_epsilon"),
        ("qwen3_next", {"partial_rotary_factor": -0.5}, "gives -0.5 for"),
        ("llama", {"hidden_size": 16.5}, "gives 16.5 for"),
        ("llama", {"rms_norm_eps": True}, "gives True for"),
        # silent, where the classes' own defaults differ
        ("qwen2_moe", {"rms_norm_eps": None}, "does not say Megatron's layernorm_epsilon"),
        ("mimo", {"rms_norm_eps": None}, "does not say Megatron's layernorm_epsilon"),
        ("mixtral", {"rope_parameters": None}, "does not say Megatron's rotary_base"),
        ("gpt_neox", {"rope_parameters": None}, "does not say Megatron's rotary_percent"),
    ],
)
def test_another_model_than_the_configuration_says(
    name: str, config: dict[str, Any], says: str
) -> None:
    with pytest.raises((UnsupportedError, UsageError), match=says):
        arguments(name, {"rms_norm_eps": 1e-6, **config} if name == "mimo" else config)


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        (
            "glm4_moe",
            {"rope_scaling": YARN, "rope_parameters": None, "partial_rotary_factor": 1.0},
            {"rotary_percent": 1.0, "yarn_original_max_position_embeddings": 64},
        ),
        (
            "glm4_moe",
            {"rope_scaling": LINEAR, "rope_parameters": LINEAR},
            {"rotary_seq_len_interpolation_factor": 4, "rotary_percent": 0.5},
        ),
        (
            "gpt_oss",
            {"rope_parameters": {k: v for k, v in GPT_OSS.items() if k != LENGTH}, LENGTH: 1024},
            {"yarn_original_max_position_embeddings": 1024},
        ),
        ("deepseek_v3", {"rope_parameters": LATENT}, {"rotary_scaling_factor": 40.0}),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 4, "topk_group": 2},
            {"moe_router_num_groups": 2, "moe_router_group_topk": 2},
        ),
        ("deepseek_v2", {"num_experts_per_tok": 1}, {"moe_router_topk": 1}),
        ("nemotron_h", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {}),
        ("nemotron_h", {"time_step_limit": [0.0, float("inf")]}, {}),
        ("mimo", {"rms_norm_eps": 1e-5, "attention_bias": True}, {"norm_epsilon": 1e-5}),
        ("gpt2", {}, {"position_embedding_type": "learned_absolute"}),
        ("gpt_neox", {}, {"rotary_percent": 0.5}),
    ],
)
def test_the_same_model(name: str, config: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = arguments(name, config)
    assert {key: found.get(key) for key in wanted} == wanted
