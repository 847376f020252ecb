"""The one-line hook for trainers that `ftckpt replay` cannot look into by itself.

    from ftckpt import hook
    ...
    hook.step(step=n, loss=loss, cursor=loader.state_dict(), ema=averaged)

Outside of a replay, and where FTCKPT_REPLAY_LOG names no directory, it does nothing and costs
nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftckpt.replay.record.step_records import Recorder


@cache
def _recorder() -> Recorder | None:
    from ftckpt.replay.processes import read_settings

    settings = read_settings()
    if not settings.log:
        return None
    from ftckpt.replay.record.step_records import Recorder

    return Recorder(settings)


def install() -> None:
    """Instrument torch in this process, where FTCKPT_REPLAY_LOG names the directory of a log.

    `ftckpt replay run` does this by itself. A training that calls it leaves a log to which later
    restarts can be compared: `ftckpt replay compare`.
    """
    recorder = _recorder()
    if recorder is not None:
        from ftckpt.replay.record.instruments import install as instrument

        instrument(recorder)


def step(
    step: int | None = None,
    *,
    loss: Any = None,
    batch: Any = None,
    params: Any = None,
    buffers: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    cursor: Any = None,
    grad: Any = None,
    grad_local: Any = None,
    metric: Any = None,
) -> None:
    """Record what belongs to this step; call it once a step, at the same place in every run.

    Each argument is nested state: mappings and sequences of tensors, arrays, numbers and text, such
    as a `state_dict()`. What is not given is not recorded; what the injected instruments see too is
    joined with it. Where no torch optimizer makes the steps, each call ends one.

    Args:
        step: the training's own count of this step; the first is 1.
        loss: one loss as a tensor or float, or several.
        batch: the samples, or their numbers.
        params: weights, as the step leaves them.
        buffers: as the step leaves them.
        optimizer: its state, as the step leaves it.
        scheduler: state of the learning-rate schedule.
        scaler: state of the loss scaler.
        ema: averaged weights.
        cursor: position in the data.
        grad: gradients after their reduction over ranks.
        grad_local: gradients before it.
        metric: any other numbers.
    """
    recorder = _recorder()
    if recorder is None:
        return
    values = {
        "loss": loss, "batch": batch, "params": params, "buffers": buffers,
        "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema,
        "cursor": cursor, "grad": grad, "grad_local": grad_local, "metric": metric,
    }  # fmt: skip
    recorder.told(step, {key: value for key, value in values.items() if value is not None})
