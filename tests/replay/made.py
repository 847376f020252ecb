"""Logs made by hand: small runs whose every event is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from ftckpt.replay.record.log import Log, StepRecord, written
from ftckpt.replay.record.streams import python_stream

Change = Callable[[int, int, dict[str, dict[str, Any]]], None]


def stream(draws: int, seed: int = 1) -> dict[str, Any]:
    """Return Python's generator after some draws of 32 bits."""
    generator = random.Random(seed)
    for _ in range(draws):
        generator.getrandbits(32)
    return python_stream(generator.getstate()).record()


def events(step: int, rank: int) -> dict[str, dict[str, Any]]:
    """Return what an exact run records of a step."""
    digest = f"{1000 * step + rank:032x}"
    return {
        "params": {"w": f"float32[2]:{digest}"},
        "optimizer": {"w.exp_avg": f"float32[2]:{digest}"} if step > 1 else {},
        "lr": {"0.0": written(0.1)},
        "rng_start": {"python": stream(2 * step)},
        "batch": {"0": f"int64[2]:{digest}"},
        "loss": {"0": written(1.0 / step, "float32")},
        "grad": {"w": f"float32[2]:{digest}"},
    }


def log(
    steps: Iterable[int], name: str = "run", *, ranks: int = 1, change: Change | None = None
) -> Log:
    """Return the log of a run; `change` alters the events of a (step, rank) before they count."""
    steps = list(steps)
    made: dict[int, dict[int, StepRecord]] = {}
    for rank in range(ranks):
        made[rank] = {}
        for step in steps:
            of = events(step, rank)
            if change is not None:
                change(step, rank, of)
            made[rank][step] = StepRecord(step, rank, of)
    return Log(name, made, ranks)
