"""Roots of trainers of RL over Megatron, as their sources of 2026 lay them out.

The stores are Megatron-core's own (tests/data/megatron_dist), the files beside them torch's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from tests.builders.archives import extract

DATA = Path(__file__).parents[1] / "data" / "megatron_dist"
TRACKER = "latest_checkpointed_iteration.txt"


def store(folder: Path, name: str = "model_space_tp2") -> Path:
    """Unpack one step of Megatron-core's torch_dist and return its directory."""
    extract(DATA / f"{name}.tar.xz", folder)
    return folder / name / "iter_0000002"


def slime_root(root: Path, made: Path) -> Path:
    """Lay out `--save` of slime: Megatron's root, and the position in the prompts by step."""
    shutil.copytree(made, root / "iter_0000002")
    (root / TRACKER).write_text("2")
    (root / "rollout").mkdir()
    for step in (1, 2):
        position = {"sample_offset": 4 * step, "epoch_id": 0, "sample_index": 4 * step}
        torch.save(position, root / f"rollout/global_dataset_state_dict_{step}.pt")
    return root


def slime_release(root: Path, made: Path) -> Path:
    """Lay out what slime's convert_hf_to_torch_dist.py makes of a model."""
    shutil.copytree(made, root / "release")
    (root / TRACKER).write_text("release")
    return root


def rlinf_step(step: Path, made: Path) -> Path:
    """Lay out a step of RLinf with Megatron: a root of one iteration in each role's folder."""
    for role in ("actor", "critic"):
        shutil.copytree(made, step / role / "iter_0000002")
        (step / role / TRACKER).write_text("2")
    (step / "actor/hf_checkpoint").mkdir()
    (step / "actor/hf_checkpoint/config.json").write_text("{}")
    (step / "data").mkdir()
    torch.save({"sampler": {"step": 2}}, step / "data/data.pt")
    return step


def miles_lora_step(step: Path) -> Path:
    """Lay out a step of miles with LoRA over two ranks."""
    adapter = step / "adapter"
    adapter.mkdir(parents=True)
    module = "module.module.decoder.layers.0.self_attention.linear_qkv.adapter"
    for rank in range(2):
        torch.manual_seed(rank)
        native = {
            f"{module}.linear_in.weight": torch.randn(2, 8),
            f"{module}.linear_out.weight": torch.randn(8, 2),
        }
        torch.save(native, adapter / f"adapter_megatron_rank{rank}.pt")
        groups = [{"lr": 0.1, "params": [0]}]
        state = {"state": {0: {"exp_avg": torch.randn(2, 8)}}, "param_groups": groups}
        torch.save(
            {"iteration": 3, "optimizer": state, "opt_param_scheduler": {"num_steps": 3}},
            adapter / f"training_state_rank{rank}.pt",
        )
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(2, 8),
        f"{prefix}.lora_B.weight": torch.randn(8, 2),
    }
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 2,
                "lora_alpha": 4,
                "target_modules": ["q_proj"],
                "lora_dropout": 0.0,
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    return step
