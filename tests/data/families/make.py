"""Write `models.json`: what transformers names and shapes in small models of each family.

python tests/data/families/make.py      # with transformers 5 installed
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 32, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PLAIN = {key: value for key, value in COMMON.items() if key != "head_dim"}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "llama4_text": COMMON | {
        "num_hidden_layers": 5, "intermediate_size_mlp": 48, "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "mistral": COMMON,
    "mixtral": COMMON | {"num_local_experts": 4},
    "qwen2": PLAIN,
    "qwen2_moe": PLAIN | QWEN | {"shared_expert_intermediate_size": 24},
    "qwen3": COMMON | {"tie_word_embeddings": True},
    "qwen3_next": COMMON | QWEN | {
        "shared_expert_intermediate_size": 24, **DELTA,
    },
    "qwen3_5_text": COMMON | DELTA,
    "qwen3_5_moe_text": COMMON | QWEN | DELTA | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v2": PLAIN | LATENT | {"q_lora_rank": None},
    "deepseek_v3": PLAIN | LATENT,
    "gemma2": COMMON | {"tie_word_embeddings": True},
    "gemma3_text": COMMON | {"tie_word_embeddings": True},
    "glm4_moe": COMMON | SPARSE | {
        "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "gpt_oss": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": PLAIN,
    "nemotron_h": COMMON | SPARSE | {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
        "conv_kernel": 4, "moe_shared_expert_intermediate_size": 24, "num_hidden_layers": None,
    },
    "minimax_m2": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def _on_one_line(found: re.Match[str]) -> str:
    return f"[{' '.join(found[1].split())}]"


def main() -> None:
    """Make each model, save it, and write what is in the files and in memory."""
    import torch
    import transformers
    from safetensors import safe_open

    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        made = transformers.AutoConfig.for_model(name, **config)
        model = transformers.AutoModelForCausalLM.from_config(made)
        stored: dict[str, list[int]] = {}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for file in filter(lambda one: one.endswith(".safetensors"), os.listdir(folder)):
                with safe_open(os.path.join(folder, file), "pt") as held:
                    names = list(held.keys())
                    stored |= {key: list(held.get_slice(key).get_shape()) for key in names}
        memory = {key: list(value.shape) for key, value in model.state_dict().items()}
        tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
        found[name] = {
            "config": {"model_type": name, **{k: v for k, v in config.items() if v is not None}},
            "stored": dict(sorted(stored.items())),
            "memory": {k: v for k, v in sorted(memory.items()) if k not in (*stored, *tied)},
        }
    said = {"transformers": transformers.__version__, "models": found}
    lines = re.sub(r"\[\s+([\d\s,]+?)\s+\]", _on_one_line, json.dumps(said, indent=1))
    Path(__file__).with_name("models.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
