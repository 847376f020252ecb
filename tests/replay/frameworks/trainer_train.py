"""Hugging Face's Trainer; averaged weights are saved and restored by a callback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.replay.frameworks import parts


class Averaging(TrainerCallback):  # type: ignore[misc]
    """Averages the weights, and does to saves and restores what `--drop` says."""

    def __init__(self, net: parts.Net, given: Any, resume: Path | None) -> None:
        self.averaged, self.net = AveragedModel(net), net
        self.given, self.resume = given, resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.resume is not None and self.given.drop != "ema":
            self.averaged.load_state_dict(torch.load(self.resume / "ema.pt"))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.averaged.update_parameters(self.net)
        back = parts.STALE.get(self.given.drop, 0)
        control.should_save = state.global_step in (self.given.save_at, self.given.save_at - back)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.averaged.state_dict(), folder / "ema.pt")
        back = parts.STALE.get(self.given.drop, 0)
        if state.global_step == self.given.save_at and back:
            older = Path(args.output_dir) / f"checkpoint-{self.given.save_at - back}"
            if not older.exists():  # a restart begins later
                return
            if self.given.drop == "torn":
                shutil.copy(older / "optimizer.pt", folder / "optimizer.pt")
            else:
                shutil.copytree(older, folder, dirs_exist_ok=True)
            shutil.rmtree(older)


def tamper(folder: Path, drop: str) -> None:
    """Take out of a checkpoint what a restart is to forget."""
    if drop in ("model", "buffers"):
        file = folder / "model.safetensors"
        save_file(parts.fresh(load_file(file), drop), file, metadata={"format": "pt"})
    elif drop == "optimizer":
        state = torch.load(folder / "optimizer.pt")
        torch.save(state | {"state": {}}, folder / "optimizer.pt")
    elif drop in ("scheduler", "late"):
        state = torch.load(folder / "scheduler.pt")
        parts.reset_schedule(state, drop)
        torch.save(state, folder / "scheduler.pt")
    elif drop in ("python", "numpy", "torch", "draw"):
        state = torch.load(folder / "rng_state.pth", weights_only=False)
        parts.seed(1)
        other = parts.generators()
        if drop == "draw":
            torch.set_rng_state(state["cpu"])
            torch.randint(1 << 40, ())
            state["cpu"] = torch.get_rng_state()
        else:
            state["cpu" if drop == "torch" else drop] = other[drop]
        torch.save(state, folder / "rng_state.pth")
    elif drop == "step":
        file = folder / "trainer_state.json"
        state = json.loads(file.read_text())
        file.write_text(json.dumps(state | {"global_step": state["global_step"] + 1}))


def main() -> None:
    given = parts.arguments()
    saves = sorted(given.dir.glob("checkpoint-*"), key=lambda p: int(p.name.partition("-")[2]))
    resume = saves[-1] if saves else None
    if resume is not None:
        tamper(resume, given.drop)
    parts.seed()
    net = parts.Net()
    settings = TrainingArguments(
        output_dir=str(given.dir), per_device_train_batch_size=parts.BATCH, max_steps=given.steps,
        learning_rate=1e-2, save_strategy="steps", save_steps=10_000, logging_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, seed=17, dataloader_pin_memory=False,
        ignore_data_skip=given.drop == "cursor" and resume is not None, remove_unused_columns=False,
    )  # fmt: skip
    callback = Averaging(net, given, resume)
    trainer = Trainer(net, settings, train_dataset=parts.Samples(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


if __name__ == "__main__":
    main()
