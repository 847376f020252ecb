"""Lightning; random streams, averaged weights and the position in the data by its own hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.replay.frameworks import loop, parts


class Training(lightning.LightningModule):  # type: ignore[misc]
    """The network with its optimizer, schedule and data."""

    def __init__(self, drop: str) -> None:
        super().__init__()
        self.net, self.drop, self.position = parts.Net(), drop, 0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = loop.tuned(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def train_dataloader(self) -> Any:
        return DataLoader(parts.Samples(), parts.BATCH, sampler=parts.Cursor(self.position))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.position = 0 if self.drop == "cursor" else checkpoint["position"]


class Rest(lightning.Callback):  # type: ignore[misc]
    """Saves and restores what Lightning does not, and does to a save what `--drop` says."""

    def __init__(self, given: Any) -> None:
        self.given, self.saves = given, loop.Saves(given)
        self.state: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.averaged = AveragedModel(pl_module.net)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint |= {"position": trainer.global_step, "ema": self.averaged.state_dict()}
        checkpoint["rng"] = parts.generators()
        checkpoint |= self.saves.held(trainer.global_step, checkpoint) or {}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.state = checkpoint
        if self.given.drop != "ema":
            self.averaged.load_state_dict(checkpoint["ema"])

    def on_train_batch_start(self, *arguments: Any) -> None:
        if self.state is not None:
            parts.set_generators(self.state["rng"], self.given.drop)
            self.state = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.averaged.update_parameters(pl_module.net)


def tamper(file: Path, drop: str) -> None:
    """Take out of a checkpoint what a restart is to forget."""
    state = torch.load(file, weights_only=False)
    state["state_dict"] = parts.fresh(state["state_dict"], drop)
    if drop == "optimizer":
        state["optimizer_states"][0]["state"] = {}
    parts.reset_schedule(state["lr_schedulers"][0], drop)
    if drop == "step":
        state["global_step"] += 1
        progress = state["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
        for counts in progress["optimizer"]["step"].values():
            for name in counts:
                counts[name] += 1
    torch.save(state, file)


def main() -> None:
    given = parts.arguments()
    saves = sorted(given.dir.glob("*.ckpt"))
    if saves:
        tamper(saves[-1], given.drop)
    parts.seed()
    module = Training(given.drop)
    saving = ModelCheckpoint(
        dirpath=given.dir, filename="{step:04d}", every_n_train_steps=1, save_top_k=1,
        monitor="step", mode="max",
    )  # fmt: skip
    if saves or not given.drop:
        saving._every_n_train_steps = given.save_at
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=given.steps, logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=given.dir,
        callbacks=[Rest(given), saving],
    )  # fmt: skip
    trainer.fit(module, ckpt_path=str(saves[-1]) if saves else None, weights_only=False)


if __name__ == "__main__":
    main()
