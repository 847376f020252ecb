"""Seal each checkpoint of a Lightning Trainer."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from ftckpt.own_files import SUFFIX
from ftckpt.torch import seal_after

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Path = str | os.PathLike[str]


class SealLightning(Callback):  # type: ignore[misc, unused-ignore]  # without its types
    """Seal what `trainer.save_checkpoint` writes, which every `ModelCheckpoint` calls.

    `Trainer(..., callbacks=[ModelCheckpoint(...), SealLightning()])`. Lightning has no hook after a
    save, so the trainer's own method is wrapped. A checkpoint that Lightning removes, or writes
    again, loses its seal first. A failure is a warning (`ftckpt.torch.SealWarning`).

    Args:
        strict: raise what hinders a seal, which ends the training.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._wrapped: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the trainer's methods, once."""
        if self._wrapped is trainer:
            return
        self._wrapped = trainer
        save, remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint

        def save_and_seal(filepath: Path, *args: Any, **kwargs: Any) -> None:
            if trainer.is_global_zero:
                _unseal(filepath)
            save(filepath, *args, **kwargs)  # ends with a barrier
            if trainer.is_global_zero:
                seal_after(filepath, strict=self._strict)

        def remove_both(filepath: Path) -> None:
            if trainer.is_global_zero:
                _unseal(filepath)
            remove(filepath)

        trainer.save_checkpoint = save_and_seal
        trainer.strategy.remove_checkpoint = remove_both


def _unseal(filepath: Path) -> None:
    """Remove the manifest beside a file; that of a directory goes with it."""
    with suppress(OSError):
        os.remove(os.fspath(filepath) + SUFFIX)
