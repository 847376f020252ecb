"""Write `bridge_tensors.json`: what Megatron-Bridge makes of small models, tensor by tensor.

PYTHONPATH=. python tests/data/families/make_bridge_tensors.py [FAMILY...]

Its own mapping classes run on a CPU, for one rank. Transformer Engine, which needs CUDA, is a mock:
no mapping calls it. A module is one that has the configuration and the name that they ask for.
Version 0.3.1 was asked, and 0.7.0 (commit 067f987d) about Qwen3.5, which the other lacks, about
layers that predict further tokens and about models with a tower; 0.5.1 about Qwen3-VL's experts in
one tensor, which the newer one takes one by one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.formats.families import test_mtp, test_towers
from tests.formats.families.test_native import MODELS, judged, tensors_of

BRIDGES = {
    "gpt_oss": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
    "gpt_oss_mxfp4": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
    "nemotron_h": ("nemotronh.nemotron_h_bridge", "NemotronHBridge"),
    "qwen3_next": ("qwen.qwen3_next_bridge", "Qwen3NextBridge"),
    "qwen3_5_moe_text": ("qwen.qwen35_bridge", "Qwen35MoEBridge"),
    "qwen3_5_text": ("qwen.qwen35_bridge", "Qwen35Bridge"),
    "qwen3_next_mtp": ("qwen.qwen3_next_bridge", "Qwen3NextBridge"),
    "qwen3_5_text_mtp": ("qwen.qwen35_bridge", "Qwen35Bridge"),
    "mimo_mtp": ("mimo.mimo_bridge", "MimoBridge"),
    "qwen3_vl": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLBridge"),
    "qwen3_vl_moe": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLMoEBridge"),
    "minimax_m2": ("minimax_m2.minimax_m2_bridge", "MiniMaxM2Bridge"),
    "glm4_moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "gemma3": ("gemma_vl.gemma3_vl_bridge", "Gemma3VLBridge"),
    "glm4v_moe": ("glm_vl.glm_45v_bridge", "GLM45VBridge"),
    "mistral3": ("ministral3.ministral3_bridge", "Ministral3Bridge"),
    "qwen2_5_vl": ("qwen_vl.qwen25_vl_bridge", "Qwen25VLBridge"),
    "kimi_k25": ("kimi_vl.kimi_k25_vl_bridge", "KimiK25VLBridge"),
}  # fmt: skip
_MOCKED = ("transformer_engine", "transformer_engine_torch", "modelopt")


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Mock(ModuleType):
    """A module in which every name is a class, because others are made from some of them."""

    __getattr__ = _Named.__getattr__


class _Mocks:
    """Finds modules that cannot be there without CUDA."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name.split(".")[0] in _MOCKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        made = _Mock(spec.name)
        made.__dict__.update(__path__=[], __version__="2.9.0")
        return made

    def exec_module(self, module: Any) -> None:
        pass


def settings(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return the fields of Megatron's configuration that mappings read."""
    return SimpleNamespace(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim"),
        attention_output_gate="linear_num_key_heads" in config,
        **{key: value for key, value in config.items() if key.startswith("linear_")},
        mamba_num_heads=config.get("mamba_num_heads"),
        mamba_head_dim=config.get("mamba_head_dim"),
        mamba_state_dim=config.get("ssm_state_size"),
        mamba_num_groups=config.get("n_groups"),
    )


def pattern(text: str) -> re.Pattern[str]:
    """Return the names that a mapping's name with stars stands for."""
    return re.compile(re.escape(text).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)"))


def resolved(mapping: Any, names: Mapping[str, Any], experts: int) -> Iterator[Any]:
    """Yield a mapping with numbers in place of its stars, for each tensor that it is about."""
    said = mapping.hf_param
    first = said if isinstance(said, str) else next(iter(said.values()))
    stars = len(re.findall(r"\*+", mapping.megatron_param))
    for name in names:
        match = pattern(first).fullmatch(name.removesuffix("_blocks"))
        if match is not None and len(match.groups()) == stars:
            yield mapping.resolve(match.groups())
        elif match is not None:  # one tensor of all experts
            for number in range(experts):
                yield mapping.resolve((*match.groups(), str(number)))


def asked(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights that a bridge is asked about, and their config.json."""
    if name in test_towers.MODELS:
        config = test_towers.MODELS[name]["config"]
        return tensors_of(test_towers.released(name)), config
    if name.endswith("_mtp"):
        return test_mtp.published(name.removesuffix("_mtp"))
    weights = judged(name)
    if name.endswith("_mxfp4"):
        weights = {k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()}
    return weights, MODELS[name.removesuffix("_mxfp4")]["config"]


def tower(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return the fields that mappings of a tower read."""
    heads = config.get("num_heads", config.get("num_attention_heads"))
    return SimpleNamespace(
        hidden_size=config["hidden_size"], num_attention_heads=heads, num_query_groups=heads,
        kv_channels=config["hidden_size"] // heads, attention_output_gate=False,
    )  # fmt: skip


def digests(name: str) -> dict[str, str]:
    """Return the digest of each tensor that a bridge makes, by Megatron's name."""
    import torch

    module_name, class_name = BRIDGES[name]
    found = importlib.import_module(f"megatron.bridge.models.{module_name}")
    utils = importlib.import_module("megatron.bridge.models.conversion.utils")
    vars(utils)["unwrap_model"] = lambda module: module  # which wrappers it knows is a mock's
    bridge = getattr(found, class_name)()
    weights, said = asked(name)
    text = said.get("text_config", said)
    bridge.hf_pretrained = None
    bridge.hf_config = SimpleNamespace(**text)
    modules = {
        kind: type(kind, (torch.nn.Module,), {})()
        for kind in ("ColumnParallelLinear", "RowParallelLinear")
    }
    experts = text.get("num_local_experts", 0)
    made = {}
    for mapping in bridge.mapping_registry():
        for one in resolved(mapping, weights, experts):
            row = modules["ColumnParallelLinear"]
            seen = "vision_model." in one.megatron_param
            shape: tuple[int, ...] = (1,)
            if "FusedGated" in type(one).__name__:  # it looks at the shape
                shape = (2 * text["moe_intermediate_size"], text["hidden_size"])
            elif "FusedExpert" in type(one).__name__:
                shape = (text["hidden_size"], text["moe_intermediate_size"])
                row = modules["RowParallelLinear"]
            row.config = tower(said["vision_config"]) if seen else settings(text)
            row.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
            row.weight0 = row.weight
            held = bridge.maybe_modify_loaded_hf_weight(one.hf_param, weights)
            value = one.hf_to_megatron(held, row)
            raw = value.contiguous().view(torch.uint8).numpy().tobytes()
            made[one.megatron_param] = hashlib.sha256(raw).hexdigest()[:32]
    return dict(sorted(made.items()))


def main(names: list[str]) -> None:
    """Ask the bridges of some families."""
    sys.meta_path.insert(0, _Mocks())
    place = Path(__file__).with_name("bridge_tensors.json")
    said = json.loads(place.read_text()) if place.exists() else {}
    for name in names:
        said[name] = {"megatron-bridge": version("megatron-bridge"), "tensors": digests(name)}
    place.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(BRIDGES))
