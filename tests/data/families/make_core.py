"""Write `core.json`: names and shapes of Megatron-core's Llama 4, which gives the same logits.

PYTHONPATH=. python tests/data/families/make_core.py    # with megatron-core, transformers

Megatron-Bridge has no mapping for Llama 4, so Megatron-core's model is the judge: it loads what
`--names megatron` writes of transformers' model. It runs on a CPU; what asks for CUDA is put aside.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ftckpt as api
from tests.formats.families.test_native import MODELS, held

CONFIG = MODELS["llama4_text"]["config"]
TOKENS = torch.arange(22).view(2, 11)
STEP = CONFIG["interleave_moe_layer_step"]


def core_model() -> Any:
    """Return Megatron-core's model of this configuration, layers with and without experts."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    core = {
        name: importlib.import_module(f"megatron.core.{name}")
        for name in (
            "parallel_state", "tensor_parallel.random", "transformer.transformer_config",
            "transformer.moe.moe_utils", "models.gpt.gpt_model", "models.gpt.gpt_layer_specs",
        )
    }  # fmt: skip
    core["parallel_state"].initialize_model_parallel()
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    tracker = core["tensor_parallel.random"].CudaRNGStatesTracker
    tracker.fork = lambda *_: contextlib.nullcontext()
    vars(core["transformer.moe.moe_utils"])["te_general_gemm"] = None
    layers = CONFIG["num_hidden_layers"]
    config = core["transformer.transformer_config"].TransformerConfig(
        num_layers=layers, hidden_size=CONFIG["hidden_size"],
        ffn_hidden_size=CONFIG["intermediate_size_mlp"],
        num_attention_heads=CONFIG["num_attention_heads"],
        num_query_groups=CONFIG["num_key_value_heads"], kv_channels=CONFIG["head_dim"],
        normalization="RMSNorm", layernorm_epsilon=1e-5, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, qk_l2_norm=True,
        rotary_interleaved=True, apply_rope_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, num_moe_experts=CONFIG["num_local_experts"],
        moe_ffn_hidden_size=CONFIG["intermediate_size"],
        moe_shared_expert_intermediate_size=CONFIG["intermediate_size"],
        moe_layer_freq=[int((n + 1) % STEP == 0) for n in range(layers)], moe_router_topk=1,
        moe_router_score_function="sigmoid", moe_apply_probs_on_input=True,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = core["models.gpt.gpt_layer_specs"].get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=True
    )
    return core["models.gpt.gpt_model"].GPTModel(
        config, spec, vocab_size=CONFIG["vocab_size"], max_sequence_length=32, rotary_percent=1.0,
        position_embedding_type="rope", rotary_base=500000,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def main() -> None:
    """Compare both models, and write what Megatron-core's has."""
    import transformers

    torch.manual_seed(3)
    said = {key: value for key, value in CONFIG.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(
        "llama4_text", **said, attn_temperature_tuning=False, attention_chunk_size=32,
        no_rope_layers=[1] * CONFIG["num_hidden_layers"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(f"{folder}/hf")
        api.convert(
            f"{folder}/hf", f"{folder}/m", "safetensors", names="megatron", spelling=("local",)
        )
        other = core_model().eval()
        wanted = {key: one for key, one in other.state_dict().items() if hasattr(one, "shape")}
        found = held(Path(folder, "m"))
        assert found.keys() == wanted.keys()
        other.load_state_dict(found, strict=False)
        length = TOKENS.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        made = other(TOKENS, torch.arange(length)[None].expand_as(TOKENS), mask)
        torch.testing.assert_close(made, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    shapes = {key: list(one.shape) for key, one in sorted(wanted.items())}
    told = {"megatron-core": version("megatron-core"), "llama4_text": shapes}
    place = Path(__file__).with_name("core.json")
    place.write_text(json.dumps(told).replace(', "', ',\n "') + "\n")


if __name__ == "__main__":
    main()
