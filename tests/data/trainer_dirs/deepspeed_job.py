"""Train a tiny Llama with the Hugging Face Trainer and DeepSpeed on two ranks of a CPU.

    python -m torch.distributed.run --nproc_per_node 2 deepspeed_job.py OUT STAGE STEPS [RESUME]

Needs transformers, accelerate and DeepSpeed (the folders beside this file were made with 5.23, 1.15
and 0.19.8 on torch 2.13). Saves `OUT/checkpoint-2` and so on; `OUT/truth-2.safetensors` is what
memory held at that save, gathered by DeepSpeed's own functions, under the keys that ftckpt gives;
`OUT/losses.json` is the loss of each step that was trained.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from safetensors.torch import save_file


def truth_of(model: Any) -> dict[str, torch.Tensor]:
    """Return weights, masters and moments; every rank must ask."""
    import deepspeed.utils as of

    held = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        master = of.safe_get_full_fp32_param(parameter).cpu()
        held[name], held[f"master:{name}"] = master.bfloat16(), master.clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            value = of.safe_get_full_optimizer_state(parameter, moment)
            held[f"{moment}:{name}"] = value.cpu().clone()
    return held


def main() -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    out, stage, steps, *resume = sys.argv[1:]

    class Truth(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **held: Any) -> None:
            tensors = truth_of(held["model"])
            if torch.distributed.get_rank() == 0:
                save_file(tensors, Path(out) / f"truth-{state.global_step}.safetensors")

    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    arguments = TrainingArguments(
        out,
        max_steps=int(steps),
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="constant_with_warmup",
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "optimizer": {"type": "AdamW", "params": {**adam, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": int(stage),
                "stage3_gather_16bit_weights_on_model_save": True,
                "stage3_param_persistence_threshold": 0,
            },
        },
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Truth()],
    )
    trainer.train(resume_from_checkpoint=resume[0] if resume else None)
    if trainer.is_world_process_zero():
        losses = {h["step"]: h["loss"] for h in trainer.state.log_history if "loss" in h}
        (Path(out) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
