"""Seal each checkpoint of Megatron-Bridge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.bridge.training.callbacks import Callback

from .megatron import SealMegatron

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext


class SealBridge(Callback):  # type: ignore[misc, unused-ignore]  # without its types
    """Seal `iter_N` when Bridge has written `run_config.yaml` and its train state too.

    `pretrain(config, forward_step, callbacks=[SealBridge()])`, on every rank.

    Args:
        strict: raise what hinders a seal, which ends the training.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._megatron = SealMegatron(strict=strict, hold=True)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Seal, on the first rank, what Megatron-Core has finished."""
        self._megatron.seal()
