"""Seal each checkpoint of Megatron-Bridge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.bridge.training.callbacks import VALID_EVENTS, Callback

from .megatron import SealMegatron

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext

_EVENT = "on_checkpoint_save"


class SealBridge(Callback):  # type: ignore[misc, unused-ignore]  # without its types
    """Seal `iter_N` when Bridge has written `run_config.yaml` and its train state too.

    `pretrain(config, forward_step, callbacks=[SealBridge()])`, on every rank. Bridge before 0.5
    tells no callback of a save, and ignores a method for it: there this class stands in for the
    two functions that Bridge calls at the end of each.

    Args:
        strict: raise what hinders a seal, which ends the training.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._megatron = SealMegatron(strict=strict, hold=True)
        if _EVENT not in VALID_EVENTS:
            _seal_at_ends(self._megatron.seal)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Seal, on the first rank, what Megatron-Core has finished."""
        self._megatron.seal()


def _seal_at_ends(seal: Callable[[], None]) -> None:
    """Have a function called when Bridge has written all files of a save."""
    from megatron.bridge.training import checkpointing, fault_tolerance

    schedule: Any = checkpointing.schedule_async_save
    ended: Any = fault_tolerance.on_checkpointing_end

    @functools.wraps(schedule)
    def scheduled(global_state: Any, async_request: Any) -> None:
        async_request.add_finalize_fn(seal)  # after Bridge's own, which write its files
        schedule(global_state, async_request)

    @functools.wraps(ended)
    def sealed(*args: Any, **kwargs: Any) -> Any:
        seal()  # of a synchronous save: an asynchronous one has finished nothing here
        return ended(*args, **kwargs)

    checkpointing.schedule_async_save = scheduled
    fault_tolerance.on_checkpointing_end = sealed
