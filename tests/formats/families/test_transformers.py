"""The families held to transformers: its models' logits, by its own code and by Megatron's rules.

The reference is a forward pass over Megatron-core's parameters, written from megatron/core: rows of
linear_qkv by KV group, [gate; up] in linear_fc1, rotation of halves. It shares nothing with the
translation but the parameters' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ftckpt.formats.families import to_hugging_face, to_megatron
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.narrowing import Only, only
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
    "max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": COMMON,
    "qwen2": {k: v for k, v in COMMON.items() if k != "head_dim"},
    "qwen3": COMMON | {"tie_word_embeddings": True},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": COMMON | MOE | {"num_experts": 4},
    "qwen2_moe": {k: v for k, v in (COMMON | MOE).items() if k != "head_dim"} | {
        "num_experts": 4, "shared_expert_intermediate_size": 20, "norm_topk_prob": False,
    },
    "phi3": {k: v for k, v in COMMON.items() if k != "head_dim"} | {
        "partial_rotary_factor": 0.5, "pad_token_id": None, "eos_token_id": None,
        "bos_token_id": None,
    },
    "gpt_neox": {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 6, "use_parallel_residual": False, "rotary_pct": 0.5,
    },
    "gpt2": {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32},
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """Let transformers make a model with random weights, norms and biases, and save it."""
    import torch

    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def convert(source: Path, folder: Path, translate: Any, **options: Any) -> None:
    before = open_checkpoint(source)
    content = translate(Content.of(before), **options)
    materialise(SafetensorsWriter().layout(content, LayoutRequest()), content.checkpoint, folder)


def logits(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_gives_bitwise_the_same_logits(name: str, tmp_path: Path) -> None:
    import torch

    model = make(name, tmp_path / "hf")
    tokens = torch.arange(20).view(2, 10)
    convert(tmp_path / "hf", tmp_path / "megatron", to_megatron)
    convert(tmp_path / "megatron", tmp_path / "back", to_hugging_face)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert {k: list(v) for k, v in info.items() if v} == {}
    assert torch.equal(logits(back.eval(), tokens), logits(model, tokens))


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("name", CONFIGS)
def test_megatrons_files_give_bitwise_the_same_logits(name: str, form: str, tmp_path: Path) -> None:
    """By way of Megatron's ranks, with a padded vocabulary: the configuration has to come along."""
    import torch

    model = make(name, tmp_path / "hf")
    tokens = torch.arange(20).view(2, 10)
    content = to_megatron(Content.of(open_checkpoint(tmp_path / "hf")))
    layout = format_and_writer(form)[1].layout(content, LayoutRequest(tp=2, pp=2))
    materialise(layout, content.checkpoint, tmp_path / "there")
    there = only(Content.of(open_checkpoint(tmp_path / "there")), Only.MODEL)
    back = to_hugging_face(there)
    materialise(
        SafetensorsWriter().layout(back, LayoutRequest()), back.checkpoint, tmp_path / "back"
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits(loaded.eval(), tokens), logits(model, tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_megatrons_rules_give_the_same_logits(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = make(name, tmp_path / "hf")
    tokens = torch.arange(20).view(2, 10)
    convert(tmp_path / "hf", tmp_path / "megatron", to_megatron)
    weights = load_file(tmp_path / "megatron" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    made = Megatron(weights, config).forward(tokens)
    torch.testing.assert_close(made, logits(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["mcore_torch_tp2pp2", "mcore_torch_tp2dp2_distopt_bf16", "mcore_torchdist_tp2pp2"]
)
def test_transformers_loads_what_megatron_wrote(name: str, tmp_path: Path) -> None:
    """The result's logits are those of the tensors that Megatron had in memory."""
    import torch
    from safetensors.torch import load_file

    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    extract(archive, tmp_path)
    source = tmp_path / name / "ckpt" / "iter_0000003"
    convert(source, tmp_path / "hf", to_hugging_face, true_vocab_size=1000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert {k: list(v) for k, v in info.items() if v} == {}
    assert model.dtype is (torch.bfloat16 if "bf16" in name else torch.float32)
    weights: dict[str, Any] = {}
    for key, value in load_file(tmp_path / name / "truth" / "state.safetensors").items():
        if key.startswith("decoder.layers."):
            for layer, part in enumerate(value.float()):
                weights[key.replace("layers.", f"layers.{layer}.", 1)] = part
        else:
            weights[key] = value.float()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    tokens = torch.arange(20).view(2, 10)
    made = Megatron(weights, config).forward(tokens)[..., :1000]
    torch.testing.assert_close(made, logits(model.float().eval(), tokens), rtol=1e-4, atol=1e-4)


class Megatron:
    """A forward pass over Megatron-core's parameters (Transformer Engine's names)."""

    def __init__(self, weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.w = weights
        self.old = config["model_type"] in ("gpt2", "gpt_neox")
        self.heads = config.get("num_attention_heads", config.get("n_head"))
        self.groups = config.get("num_key_value_heads") or self.heads
        hidden = config.get("hidden_size", config.get("n_embd"))
        self.width = config.get("head_dim") or hidden // self.heads
        rope = config.get("rope_parameters") or {}
        self.base = rope.get("rope_theta", 10000.0)
        share = rope.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
        self.rotated = 0 if config["model_type"] == "gpt2" else int(self.width * share)
        self.eps = next(config[k] for k in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
                        if k in config)  # fmt: skip
        self.topk = config.get("num_experts_per_tok", 0)
        self.before = not config.get("norm_topk_prob", True)  # the softmax
        tanh = config["model_type"] == "gpt2"
        self.gelu = {"approximate": "tanh"} if tanh else {}

    def forward(self, tokens: Any) -> Any:
        import torch

        embedding = self.w["embedding.word_embeddings.weight"]
        x = embedding[tokens]
        if "embedding.position_embeddings.weight" in self.w:
            x = x + self.w["embedding.position_embeddings.weight"][: tokens.shape[1]]
        layers = {int(k.split(".")[2]) for k in self.w if k.startswith("decoder.layers.")}
        for layer in sorted(layers):
            at = f"decoder.layers.{layer}."
            x = x + self.attention(at, self.norm(f"{at}self_attention.linear_qkv.layer_norm_", x))
            experts = f"{at}pre_mlp_layernorm.weight" in self.w
            norm = "pre_mlp_layernorm." if experts else "mlp.linear_fc1.layer_norm_"
            y = self.norm(at + norm, x)
            x = x + (self.experts(f"{at}mlp.", y) if experts else self.mlp(f"{at}mlp.", y))
        x = self.norm("decoder.final_layernorm.", x)
        return torch.nn.functional.linear(x, self.w.get("output_layer.weight", embedding))

    def norm(self, name: str, x: Any) -> Any:
        from torch.nn.functional import layer_norm, rms_norm

        weight = self.w[f"{name}weight"]
        if self.old:
            return layer_norm(x, weight.shape, weight, self.w[f"{name}bias"], self.eps)
        return rms_norm(x, weight.shape, weight, self.eps)

    def linear(self, name: str, x: Any) -> Any:
        import torch

        return torch.nn.functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def attention(self, at: str, x: Any) -> Any:
        import torch

        batch, length, _ = x.shape
        each = self.heads // self.groups
        qkv = self.linear(f"{at}self_attention.linear_qkv", x)
        qkv = qkv.view(batch, length, self.groups, each + 2, self.width)
        q = qkv[..., :each, :].reshape(batch, length, self.heads, self.width).transpose(1, 2)
        k, v = (qkv[..., each + i, :].transpose(1, 2) for i in (0, 1))
        if f"{at}self_attention.q_layernorm.weight" in self.w:
            q = self.norm(f"{at}self_attention.q_layernorm.", q)
            k = self.norm(f"{at}self_attention.k_layernorm.", k)
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(each, dim=1) for t in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(f"{at}self_attention.linear_proj", y.transpose(1, 2).flatten(2))

    def rotate(self, x: Any) -> Any:
        import torch

        n = self.rotated
        if not n:
            return x
        frequencies = self.base ** (-torch.arange(0, n, 2) / n)
        angles = torch.outer(torch.arange(x.shape[2]), frequencies).repeat(1, 2)
        part, rest = x[..., :n], x[..., n:]
        turned = torch.cat([-part[..., n // 2 :], part[..., : n // 2]], dim=-1)
        return torch.cat([part * angles.cos() + turned * angles.sin(), rest], dim=-1)

    def mlp(self, at: str, x: Any) -> Any:
        from torch.nn.functional import gelu, silu

        y = self.linear(f"{at}linear_fc1", x)
        if self.old:
            return self.linear(f"{at}linear_fc2", gelu(y, **self.gelu))
        gate, up = y.chunk(2, dim=-1)
        return self.linear(f"{at}linear_fc2", silu(gate) * up)

    def experts(self, at: str, x: Any) -> Any:
        import torch

        scores = self.linear(f"{at}router", x)
        if self.before:
            shares, chosen = scores.softmax(dim=-1).topk(self.topk, dim=-1)
        else:
            scores, chosen = scores.topk(self.topk, dim=-1)
            shares = scores.softmax(dim=-1)
        made = torch.zeros_like(x)
        for expert in range(int(chosen.max()) + 1):
            share = (shares * (chosen == expert)).sum(dim=-1, keepdim=True)
            made = made + share * self.mlp(f"{at}experts.local_experts.{expert}.", x)
        if f"{at}shared_experts.gate_weight" in self.w:
            gate = torch.nn.functional.linear(x, self.w[f"{at}shared_experts.gate_weight"])
            made = made + gate.sigmoid() * self.mlp(f"{at}shared_experts.", x)
        return made
