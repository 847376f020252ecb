"""Write `megatron.json`: what Megatron-core asks a store for, of models that we write for it.

PYTHONPATH=. python tests/data/families/make_megatron.py

Needs megatron-core 0.20 with `megatron.training`, Megatron-Bridge 0.7 and transformers 5. Each
small model is converted to torch_dist. Its arguments become the configuration of megatron-core, as
Megatron-LM makes it, and must be what Bridge's provider says of the same `config.json`. The model
that this configuration builds loads the store with `dist_checkpointing.load`, and must have the
weights that Megatron's names have in a plain file. All runs on a CPU: modules of Transformer Engine
are those below, with its names and shapes and without its mathematics.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import tempfile
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import typing_extensions
from torch import nn

import ftckpt as api
from tests.formats.families.test_native import MODELS, ROTARY, save_folder, tensors_of
from tests.peers.mcore_job import without_cuda

BRIDGES = {
    "gpt_oss": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
    "qwen3_next": ("qwen.qwen3_next_bridge", "Qwen3NextBridge"),
    "qwen3_5_moe_text": ("qwen.qwen35_bridge", "Qwen35MoEBridge"),
    "qwen3_5_text": ("qwen.qwen35_bridge", "Qwen35Bridge"),
    "nemotron_h": ("nemotronh.nemotron_h_bridge", "NemotronHBridge"),
    "glm4_moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "deepseek_v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
}
# What trains a model and does not make it, and what no job of one process has as a cluster has it.
BESIDE = (
    "use_cpu_init", "perform_init", "init_method", "output_layer_init", "embedding_init", "bf16",
    "params_dtype", "pipeline_dtype", "persist", "deallocate", "masked_softmax_fusion", "gradient",
    "apply_rope_fusion", "attention_backend", "cross_entropy", "moe_permute", "moe_token",
    "batch_p2p", "autocast", "bias_dropout", "bias_activation", "cp_comm", "expert_tensor",
    "microbatch", "first_last", "moe_shared_expert_overlap", "moe_router_bias_update", "mtp_",
    "moe_aux_loss", "hetereogenous", "overlap_p2p", "recompute", "cuda_graph", "inference",
)  # fmt: skip
_DTYPE = torch.bfloat16
_MADE = ("transformer_engine", "transformer_engine_torch", "fla", "mamba_ssm", "causal_conv1d")
_STUBS = (*_MADE, "modelopt")


class _Module(nn.Module):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        pass


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=_DTYPE))


class Linear(_Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool, **more: Any) -> None:
        super().__init__()
        self.parallel_mode = more.get("parallel_mode")
        self.weight = _zeros(out_features, in_features)
        self.bias = _zeros(out_features) if bias else None


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **more: Any) -> None:
        super().__init__(in_features, out_features, **more)
        self.layer_norm_weight = _zeros(in_features)


class RMSNorm(_Module):
    def __init__(self, normalized_shape: int, **_: Any) -> None:
        super().__init__()
        self.weight = _zeros(normalized_shape)


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads: int, softmax_type: str = "", **_: Any) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads))


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _zeros(out_features, in_features))
            if bias:
                self.register_parameter(f"bias{number}", _zeros(out_features))

    def init_fp8_metadata(self, **_: Any) -> None:
        pass


_KNOWN: dict[str, Any] = {
    one.__name__: one
    for one in (Linear, LayerNormLinear, RMSNorm, DotProductAttention, GroupedLinear)
}
_KNOWN["get_cpu_offload_context"] = lambda *_, **__: (None, None)


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (nn.Module,), {})


class _Stub(ModuleType):
    """A module that has the classes above, and one of any other name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _KNOWN.get(name) or _Named(name, (nn.Module,), {})


class _Finder:
    def find_spec(self, name: str, *_: object) -> Any:
        if name.split(".")[0] in _STUBS or name == "transformers.modeling_attn_mask_utils":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        made = _Stub(spec.name)
        made.__dict__.update(__path__=[], __version__="2.9.0")
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


def prepare() -> None:
    """Let Megatron run on a CPU, in one process."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())
    known = importlib.metadata.version
    versions = {"transformer-engine": "2.9.0", "mamba-ssm": "2.2.5", "mamba_ssm": "2.2.5"}
    metadata: Any = importlib.metadata
    metadata.version = lambda name: versions.get(name) or known(name)
    without_cuda()
    cuda: Any = torch.cuda
    cuda.manual_seed = cuda.set_rng_state = lambda *_, **__: None
    cuda.is_initialized = lambda: False
    cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29917", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    load = importlib.import_module
    load("megatron.core.parallel_state").initialize_model_parallel()
    random: Any = load("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda *_, **__: None
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def configured(said: dict[str, Any]) -> tuple[Any, Any]:
    """Return arguments of Megatron-LM with what a checkpoint says, and its configuration."""
    load = importlib.import_module
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args = load("megatron.training.arguments").add_megatron_arguments(parser).parse_args([])
    for name, value in said.items():
        setattr(args, name, value)
    args.moe_token_dispatcher_type = "alltoall"
    args.gradient_accumulation_fusion = args.perform_initialization = False
    args.no_persist_layer_norm = args.fp8_param_gather = args.fp4_param_gather = False
    args.use_cpu_initialization = True
    args.params_dtype = _DTYPE
    return args, load("megatron.training.argument_utils").core_transformer_config_from_args(args)


def built(args: Any, config: Any) -> Any:
    """Return the model that Megatron-LM builds."""
    load = importlib.import_module
    shared = {
        "position_embedding_type": args.position_embedding_type,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
    }
    sizes = (args.padded_vocab_size, args.max_position_embeddings)
    if args.hybrid_layer_pattern:
        spec = load("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
        hybrid = load("megatron.core.models.hybrid.hybrid_model").HybridModel
        return hybrid(
            config, spec, *sizes, hybrid_layer_pattern=args.hybrid_layer_pattern, **shared
        )
    specs = load("megatron.core.models.gpt.gpt_layer_specs")
    if args.experimental_attention_variant:
        variants = load("megatron.core.models.gpt.experimental_attention_variant_module_specs")
        spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    else:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return load("megatron.core.models.gpt").GPTModel(config, spec, *sizes, **shared)


def require_provided(name: str, config: Any) -> None:
    """Hold a configuration to what Bridge's provider says of the same `config.json`."""
    import transformers

    module, bridge = BRIDGES[name]
    # The first import of Bridge's models fails after it has registered what it names twice.
    for _ in range(2):
        try:
            found = importlib.import_module(f"megatron.bridge.models.{module}")
        except ValueError:
            continue
    made = transformers.AutoConfig.for_model(**MODELS[name]["config"])
    provider = getattr(found, bridge)().provider_bridge(
        SimpleNamespace(config=made, generation_config=None, model_name_or_path="")
    )
    aliases = {"gated_delta_net": "gdn"}
    different = []
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(provider, field.name, None)
        theirs = aliases.get(theirs, theirs) if isinstance(theirs, str) else theirs
        if field.name == "kv_channels" and config.multi_latent_attention:
            continue  # which has widths of its own
        if not field.name.startswith(BESIDE) and str(ours) != str(theirs):
            different.append((field.name, ours, theirs))
    assert different == [], f"{name}: {different}"


def loaded(name: str, folder: Path) -> dict[str, Any]:
    """Write a small model, let Megatron-core load it, and return what it asked for."""
    from safetensors.torch import load_file

    said = ROTARY.get(name, {})
    hf = save_folder(folder / "hf", name, tensors_of(MODELS[name]["stored"]), **said)
    for to in ("megatron-dist", "safetensors"):
        out = str(folder / to)
        api.convert(str(hf), out, to, names="megatron", only="model", spelling=["grouped"])
    state = torch.load(folder / "megatron-dist/common.pt", weights_only=False)
    said = vars(state["args"])
    args, config = configured(said)
    require_provided(name, config)
    model = built(args, config)
    checkpointing: Any = importlib.import_module("megatron.core.dist_checkpointing")
    mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    values: Any = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    metadata = state["content_metadata"]
    asked = model.sharded_state_dict(metadata=metadata)
    mapping.apply_factories(asked)
    wanted = {
        one.key: list(one.global_shape)
        for one in values.nested_values(asked)
        if isinstance(one, mapping.ShardedTensor)
    }
    asked = {"model": model.sharded_state_dict(metadata=metadata)}
    got, unasked, absent = checkpointing.load(
        asked, str(folder / "megatron-dist"), strict="return_all"
    )
    assert not absent, absent
    assert all("core_attention" in one for one in unasked), unasked
    model.load_state_dict(got["model"], strict=False)
    truth = load_file(folder / "safetensors/model.safetensors")
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            whole = truth.pop(key.replace("conv1d_", "conv1d.") if "mixer" in key else key)
            assert torch.equal(value[: len(whole)], whole.to(value.dtype)), key
    assert not truth, truth.keys()
    beside = {"params_dtype"}
    return {
        "arguments": {key: value for key, value in sorted(said.items()) if key not in beside},
        "stored": dict(sorted(wanted.items())),
    }


def main() -> None:
    """Ask about each family."""
    prepare()
    found = {}
    for name in BRIDGES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = loaded(name, Path(folder))
    said = {
        "megatron-core": importlib.import_module("megatron.core").__version__,
        "families": found,
    }
    text = json.dumps(said).replace('"families": {', '"families": {\n').replace("}}, ", "}},\n")
    Path(__file__).with_name("megatron.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
