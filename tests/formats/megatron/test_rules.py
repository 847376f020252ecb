"""The built-in table of Megatron's split rules, against what its layers declare of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import COLUMN, GATED, REPLICATED, ROW, Split
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.rank_files.grid import Arguments
from tests.builders.megatron_files import opened, write
from tests.builders.megatron_model import Job

LAYER = "decoder.layers.3."
MIXER = LAYER + "mixer."
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 32}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 5,
         "linear_num_value_heads": 4, "linear_value_head_dim": 6}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "split"),
    [
        ("embedding.word_embeddings.weight", {}, COLUMN),
        ("embedding.position_embeddings.weight", {}, REPLICATED),
        ("output_layer.weight", {}, COLUMN),
        ("decoder.final_layernorm.bias", {}, REPLICATED),
        (LAYER + "self_attention.linear_qkv.weight", {}, COLUMN),
        (LAYER + "self_attention.linear_qkv.bias", {}, COLUMN),
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", {}, REPLICATED),
        (LAYER + "self_attention.q_layernorm.weight", {}, REPLICATED),
        (LAYER + "self_attention.linear_proj.weight", {}, ROW),
        (LAYER + "self_attention.linear_proj.bias", {}, REPLICATED),
        (LAYER + "self_attention.linear_q_proj.weight", {}, COLUMN),
        (LAYER + "self_attention.linear_kv_up_proj.weight", {}, COLUMN),
        (LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight", {}, REPLICATED),
        (LAYER + "cross_attention.linear_kv.weight", {}, COLUMN),
        (LAYER + "mlp.linear_fc1.weight", {"swiglu": True}, GATED),
        (LAYER + "mlp.linear_fc1.bias", {"swiglu": True}, GATED),
        (LAYER + "mlp.linear_fc1.weight", {"swiglu": False}, COLUMN),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", {"swiglu": True}, REPLICATED),
        (LAYER + "mlp.linear_fc2.weight", {}, ROW),
        (LAYER + "mlp.linear_fc2.bias", {}, REPLICATED),
        (LAYER + "mlp.router.weight", {}, REPLICATED),
        (LAYER + "mlp.router.expert_bias", {}, REPLICATED),
        (LAYER + "mlp.experts.local_experts.7.linear_fc1.weight", {"swiglu": True}, GATED),
        (LAYER + "mlp.experts.local_experts.7.linear_fc2.weight", {}, ROW),
        (LAYER + "mlp.experts.local_experts.7.linear_fc2.bias", {}, REPLICATED),
        (LAYER + "mlp.experts.linear_fc1.weight12", {}, COLUMN),
        (LAYER + "mlp.experts.linear_fc2.weight12", {}, ROW),
        (LAYER + "mlp.experts.weight1", {"swiglu": True}, Split(2, (1, 1))),
        (LAYER + "mlp.experts.weight2", {}, Split(1)),
        (LAYER + "mlp.shared_experts.linear_fc1.weight", {"swiglu": True}, GATED),
        (LAYER + "mlp.shared_experts.linear_fc2.weight", {}, ROW),
        (LAYER + "mlp.shared_experts.gate_weight", {}, REPLICATED),
        (MIXER + "in_proj.weight", MAMBA, Split(0, (128, 128, 64, 64, 8))),
        (MIXER + "in_proj.layer_norm_weight", MAMBA, REPLICATED),
        (MIXER + "conv1d.weight", MAMBA, Split(0, (128, 64, 64))),
        (MIXER + "conv1d_bias", MAMBA, Split(0, (128, 64, 64))),
        (MIXER + "A_log", MAMBA, COLUMN),
        (MIXER + "norm.weight", MAMBA, COLUMN),
        (MIXER + "out_proj.weight", MAMBA, ROW),
        (MIXER + "in_proj.weight", {"hidden_size": 64}, Split(0, (128, 128, 1024, 1024, 2))),
        (LAYER + "self_attention.in_proj.weight", DELTA, Split(0, (10, 10, 24, 24, 4, 4))),
        (LAYER + "self_attention.conv1d.weight", DELTA, Split(0, (10, 10, 24))),
        (LAYER + "self_attention.dt_bias", DELTA, COLUMN),
        (LAYER + "self_attention.out_norm.weight", DELTA, REPLICATED),
        (LAYER + "self_attention.out_proj.weight", DELTA, ROW),
        ("mtp.layers.0.eh_proj.weight", {}, COLUMN),
        ("mtp.layers.0.enorm.weight", {}, REPLICATED),
        ("mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight", {}, COLUMN),
    ],
)
def test_how_a_tensor_is_cut(name: str, args: dict[str, Any], split: Split) -> None:
    rule = rules_of(Arguments(args), ()).find(name)
    assert rule.split == split
    assert rule.expert == (".experts." in name)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.novel.weight",
        MIXER + "in_proj.weight",
        LAYER + "self_attention.conv1d.weight",
    ],
)
def test_what_no_rule_knows_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError):
        rules_of(Arguments({}), ()).find(name)


@pytest.mark.parametrize("cut", [True, False])
def test_the_rows_of_latent_attention_show_whether_it_is_cut(cut: bool, tmp_path: Path) -> None:
    import torch

    job = Job(tp=2, layers=1, recorded=(("kv_lora_rank", 6), ("qk_pos_emb_head_dim", 2)))
    made = write(tmp_path, job)
    names = [f"{LAYER.replace('3', '0')}self_attention.linear_{n}_down_proj.weight"
             for n in ("q", "kv")]  # fmt: skip
    whole = torch.randn(8, 12)
    for rank, place in enumerate(sorted(made.path.iterdir())):
        state = torch.load(place / "model_optim_rng.pt", weights_only=False)
        own = whole.chunk(2)[rank].clone() if cut else whole
        state["model"] |= dict.fromkeys(names, own)
        torch.save(state, place / "model_optim_rng.pt")
    checkpoint = opened(made.path)
    for name in names:
        assert checkpoint.tensors[name].shape == (8, 12)
        assert read_tensor(checkpoint, name) == whole.numpy().tobytes()
