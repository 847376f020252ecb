"""Seal each checkpoint of a Hugging Face Trainer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ftckpt.torch import barrier, seal_after

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class SealTransformers(TrainerCallback):  # type: ignore[misc, unused-ignore]  # without its types
    """Seal `OUTPUT_DIR/checkpoint-N` as soon as every rank has written it.

    `Trainer(..., callbacks=[SealTransformers()])`. A failure is a
    `ftckpt.torch.SealWarning`.

    Args:
        strict: raise what hinders a seal, which ends the training.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Seal the checkpoint of this step, on the first rank."""
        barrier()
        if state.is_world_process_zero:
            path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            seal_after(path, strict=self._strict)
