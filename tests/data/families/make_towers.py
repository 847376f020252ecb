"""Write `towers.json`: names and shapes of small models with a vision tower, by transformers.

python tests/data/families/make_towers.py      # with transformers 5 installed
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = TEXT | {"head_dim": 8}
TURNS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TURNED = {"rope_parameters": TURNS}
TOWER = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
OUT = QWEN | {"intermediate_size": 40, "out_hidden_size": 32}
SPARSE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1, "attention_bias": True,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": WIDE, "mm_tokens_per_image": 4,
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
    },
    "qwen2_vl": {"text_config": TEXT | TURNED, "vision_config": QWEN | {"embed_dim": 32}},
    "qwen2_5_vl": {
        "text_config": TEXT | TURNED, "vision_config": OUT | {"fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": WIDE | TURNED,
        "vision_config": OUT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_vl_moe": {
        "text_config": WIDE | TURNED | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        "vision_config": OUT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "kimi_k25": {
        "text_config": TEXT | LATENT | {"num_key_value_heads": 4},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "pos_emb_height": 3, "pos_emb_width": 5, "patch_size": 14,
            "merge_kernel_size": [2, 1],
        },
        "projection_hidden_size": 32, "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": WIDE | {
            "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8, "num_hidden_layers": 4,
        },
        "vision_config": TOWER | {
            "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24,
            "vision_output_dim": 24,
        },
    },
    "mistral3": {
        "text_config": WIDE | {"model_type": "mistral"}, "tie_word_embeddings": False,
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
    },
    "llava": {
        "text_config": WIDE | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
    },
    "glm4v_moe": {
        "text_config": WIDE | SPARSE | {"rope_parameters": TURNS | {"partial_rotary_factor": 1.0}},
        "vision_config": OUT | {"image_size": 28},
    },
    "mllama": {
        "text_config": TEXT | {"cross_attention_layers": [1], "num_hidden_layers": 3},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_global_layers": 1, "attention_heads": 4, "image_size": 28, "patch_size": 14,
            "vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
    },
}  # fmt: skip


def main() -> None:
    """Make each model, save it, and write what is in the files and in memory."""
    import torch
    import transformers
    from safetensors import safe_open

    lines = []
    for name, config in MODELS.items():
        torch.manual_seed(1)
        made = transformers.AutoConfig.for_model(name, **config)
        model = transformers.AutoModelForImageTextToText.from_config(made)
        stored: dict[str, list[int]] = {}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for file in filter(lambda one: one.endswith(".safetensors"), os.listdir(folder)):
                with safe_open(os.path.join(folder, file), "pt") as held:
                    names = list(held.keys())
                    stored |= {key: list(held.get_slice(key).get_shape()) for key in names}
            said = json.loads(Path(folder, "config.json").read_text())
        memory = {key: list(value.shape) for key, value in model.state_dict().items()}
        parts = {"config": said, "stored": stored, "memory": memory}
        rows = [f'  "{key}": {json.dumps(held, sort_keys=True)}' for key, held in parts.items()]
        lines.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    head = f'{{"transformers": "{transformers.__version__}", "models": {{\n'
    Path(__file__).with_name("towers.json").write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
