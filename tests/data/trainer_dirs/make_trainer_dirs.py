"""Make the folders beside this file: what the Hugging Face Trainer and accelerate save.

    python tests/data/trainer_dirs/make_trainer_dirs.py [DIR]

Needs transformers, peft and accelerate (made with 5.23, 0.21 and 1.15 on torch 2.13). The committed
files are the fixture. Each folder has its truth beside it, `NAME.safetensors`: weights and moments
taken from memory, under the keys that ftckpt gives them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent


class Progress:
    """A custom object with values that other containers like to change."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": 7,
            "best": float("nan"),
            "names": ("a", "b"),
            "history": {1: 0.5, 2: [1, 2], None: -0.0, (1, 2): {3, 4}},
            "raw": b"\x00\xff",
            "mean": torch.arange(3.0),
            "windows": [torch.zeros(2), 5],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 32, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._rows = samples()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


def truth(path: Path, weights: dict[str, torch.Tensor], optimizer: Any) -> None:
    """Save weights and optimizer state as they are in memory."""
    tensors = dict(weights)
    state = optimizer.state_dict()
    for number, group in enumerate(state["param_groups"]):
        for place, key in enumerate(group["params"]):
            name = f"{number}.{place}"
            for leaf, value in state["state"][key].items():
                prefix = f"{leaf}:{name}" if leaf != "step" else f"optimizer:{name}.step"
                tensors[prefix] = value
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path)


def by_trainer(to: Path, *, peft: bool) -> None:
    from transformers import Trainer, TrainingArguments

    trained = model()
    if peft:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        trained = get_peft_model(trained, config)
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        lr_scheduler_type="cosine",
    )
    trainer = Trainer(model=trained, args=arguments, train_dataset=samples())
    trainer.train()
    shutil.copytree("run/checkpoint-3", to)
    weights = trained.state_dict()
    if peft:
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(trained)
    truth(to.with_suffix(".safetensors"), weights, trainer.optimizer)
    shutil.rmtree("run")


def by_accelerate(to: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader: Any = torch.utils.data.DataLoader(_Samples(), batch_size=2, shuffle=True)
    trained, optimizer, scheduler, loader = accelerator.prepare(
        trained, optimizer, scheduler, loader
    )
    accelerator.register_for_checkpointing(Progress())
    for step, batch in enumerate(loader):
        if step == 3:
            break
        accelerator.backward(trained(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(to))
    truth(to.with_suffix(".safetensors"), trained.state_dict(), optimizer)


def by_accelerate_with_two_models(to: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    first, second, *prepared = accelerator.prepare(*models, *optimizers)
    for _ in range(3):
        loss = second(first(torch.ones(2, 4))).square().mean()
        accelerator.backward(loss)
        for optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(to))
    of_first, of_second = to.with_suffix(".safetensors"), to.with_name("second.safetensors")
    truth(of_first, first.state_dict(), prepared[0])
    truth(of_second, second.state_dict(), prepared[1])
    held = load_file(of_first) | {f"extra:model_1:{k}": v for k, v in load_file(of_second).items()}
    held = {key.replace("model_1:optimizer:", "model_1:"): v for key, v in held.items()}
    save_file(held, of_first)
    of_second.unlink()


def main() -> None:
    to = Path(sys.argv[1] if len(sys.argv) > 1 else HERE).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        by_trainer(to / "trainer", peft=False)
        by_trainer(to / "trainer_peft", peft=True)
        by_accelerate(to / "accelerate")
        by_accelerate_with_two_models(to / "accelerate_two")


if __name__ == "__main__":
    main()
