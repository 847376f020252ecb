"""Tiny Hugging Face folders of every family, as transformers writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.formats.families.tables import family

if TYPE_CHECKING:
    import torch

VOCAB = 37
_OLD: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_act": "gelu", "use_parallel_residual": False},
    "gpt2": {"activation_function": "gelu_new"},
}


@dataclass(frozen=True)
class Model:
    """A model and its sizes; those of gpt2 and gpt_neox have as many groups as heads.

    Attributes:
        name: the family.
        layers, heads, groups, width, ffn, experts: sizes; heads of `width` rows make hidden states.
        tied: whether the output layer is the embedding.
    """

    name: str = "llama"
    layers: int = 4
    heads: int = 4
    groups: int = 2
    width: int = 4
    ffn: int = 24
    experts: int = 4
    tied: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * self.width

    @property
    def old(self) -> bool:
        return self.name in _OLD

    @property
    def sparse(self) -> bool:
        return self.name in ("mixtral", "qwen2_moe", "qwen3_moe")

    def config(self) -> dict[str, Any]:
        """Return what its `config.json` says, in transformers' own words."""
        found: dict[str, Any] = {
            **{key: family(self.name).config[key] for key in ("model_type", "architectures")},
            "vocab_size": VOCAB, "tie_word_embeddings": self.tied, "dtype": "bfloat16",
            "initializer_range": 0.02,
        }  # fmt: skip
        if self.name == "gpt2":
            return found | _OLD["gpt2"] | {
                "n_embd": self.hidden, "n_inner": self.ffn, "n_layer": self.layers,
                "n_head": self.heads, "n_positions": 16, "layer_norm_epsilon": 1e-5,
            }  # fmt: skip
        found |= {
            "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "max_position_embeddings": 16,
        }  # fmt: skip
        if self.name == "gpt_neox":
            rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
            return found | _OLD["gpt_neox"] | {"layer_norm_eps": 1e-5, "rope_parameters": rope}
        found |= {
            "num_key_value_heads": self.groups, "head_dim": self.width, "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        }  # fmt: skip
        if self.name == "mistral":
            found["sliding_window"] = None
        if self.name == "mixtral":
            found |= {"num_local_experts": self.experts, "num_experts_per_tok": 2}
        if self.name == "qwen2_moe":
            found["shared_expert_intermediate_size"] = self.ffn
        if self.name in ("qwen2_moe", "qwen3_moe"):
            found |= {
                "num_experts": self.experts, "num_experts_per_tok": 2, "norm_topk_prob": True,
                "moe_intermediate_size": self.ffn, "decoder_sparse_step": 1, "mlp_only_layers": [],
            }  # fmt: skip
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        leaf = name.rsplit(".", 2)[-2]
        groups = self.heads if self.old else self.groups
        queries, keys = self.hidden, groups * self.width
        rows = {
            "k_proj": keys, "v_proj": keys, "query_key_value": 3 * queries, "c_attn": 3 * queries,
            "gate_proj": self.ffn, "up_proj": self.ffn, "w1": self.ffn, "w3": self.ffn,
            "dense_h_to_4h": self.ffn, "c_fc": self.ffn, "gate": self.experts, "wpe": 16,
            "q_norm": self.width, "k_norm": self.width, "qkv_proj": queries + 2 * keys,
            "gate_up_proj": 2 * self.ffn, "shared_expert_gate": 1,
        }.get(leaf, self.hidden)  # fmt: skip
        if leaf in ("embed_tokens", "lm_head", "embed_in", "embed_out", "wte"):
            rows = VOCAB
        down = leaf in ("down_proj", "w2", "dense_4h_to_h") or ".mlp.c_proj" in name
        if name.endswith(".bias") or "norm" in leaf or leaf.startswith("ln_"):
            return (rows,)
        columns = self.ffn if down else self.hidden
        return (columns, rows) if leaf.startswith("c_") else (rows, columns)

    def names(self) -> list[str]:
        """Return every parameter, in the order of the family's table."""
        found: dict[str, None] = {}
        for entry in family(self.name).entries:
            for known in entry.hf:
                dense = ".mlp." in known.text and known.text.split(".mlp.")[1].startswith(
                    ("gate_proj", "up_proj", "down_proj")
                )
                if (self.sparse and dense) or (self.tied and known.text.startswith(
                    ("lm_head", "embed_out"))):  # fmt: skip
                    continue
                if known.text.split(".")[-2] in ("enorm", "hnorm", "eh_proj") or "shared_head" in (
                    known.text
                ):  # of layers behind these
                    continue
                for layer in range(self.layers):
                    for expert in range(self.experts):
                        found[known.fill({"layer": str(layer), "expert": str(expert)})] = None
        return list(found)

    def save(self, folder: Path) -> dict[str, torch.Tensor]:
        """Write the folder; return the weights."""
        import torch
        from safetensors.torch import save_file

        source = torch.Generator().manual_seed(7)
        weights = {
            name: torch.randn(self.shape(name), generator=source).bfloat16()
            for name in self.names()
        }
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config()))
        return weights
