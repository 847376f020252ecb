"""Going on with fewer (or more) GPUs: what happens to batch and learning rate, and whether to wait.

The global batch is per-GPU batch x accumulation steps x GPUs. Keeping the per-GPU batch changes the
optimisation; keeping the global batch needs numbers that divide. Where the batch changes, the
learning rate follows it linearly (SGD; Goyal et al., 2017) or with its square root (Adam and the
like; Malladi et al., 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftckpt.errors import UsageError

from .arithmetic import require

_STEP = "memory and time of a step"
_BATCH = "batch, learning rate, steps"


@dataclass(frozen=True, slots=True)
class Option:
    """One way to go on.

    Attributes:
        name: `same-per-gpu`, `same-batch`, `batch-up`, `batch-down`, `accumulate`,
            `accumulate-full`.
        per_gpu: samples a GPU takes in at a time.
        accumulation: how many such passes make one step.
        batch: global batch.
        lr_linear: learning rate in proportion to the batch.
        lr_sqrt: learning rate with the square root of the batch.
        steps: factor on the number of steps for the same number of samples.
        step_time: factor on the time of a step, as far as it is computing.
        memory: factor on the activations that a GPU holds.
        keeps: what stays as it was.
        changes: what does not.
    """

    name: str
    per_gpu: int
    accumulation: int
    batch: int
    lr_linear: float
    lr_sqrt: float
    steps: float
    step_time: float
    memory: float
    keeps: str
    changes: str


def options(
    from_gpus: int, to_gpus: int, batch: int, lr: float, accumulation: int = 1
) -> tuple[Option, ...]:
    """Return the ways to go on with another number of GPUs.

    Args:
        from_gpus: data-parallel GPUs (or replicas) so far, >= 1.
        to_gpus: from now on, >= 1.
        batch: global batch so far; a multiple of `from_gpus * accumulation`.
        lr: learning rate so far, > 0.
        accumulation: passes in one step so far, >= 1.

    Returns:
        The per-GPU batch kept; the batch kept, or rounded up and down to what divides; as many
        passes as keep both the batch, nearly, and the memory; and those passes with a full per-GPU
        batch. Options that come to the same numbers are given once.

    Raises:
        UsageError: a number is out of range, or the batch does not divide.
    """
    if min(from_gpus, to_gpus, batch, accumulation) < 1:
        raise UsageError("GPUs, batch and accumulation must be at least 1")
    if batch % (from_gpus * accumulation):
        raise UsageError(
            f"a batch of {batch} does not divide among {from_gpus} GPUs in {accumulation} passes"
        )
    require("the learning rate", lr, above=0, unit="")
    per_gpu = batch // (from_gpus * accumulation)

    ways = [("same-per-gpu", per_gpu, accumulation, _STEP, "batch, learning rate, steps")]
    share = batch / (to_gpus * accumulation)
    if share == int(share):
        ways.append(("same-batch", int(share), accumulation, _BATCH, _STEP))
    else:
        for name, each in (("batch-up", math.ceil(share)), ("batch-down", math.floor(share))):
            ways.append((name, each, accumulation, f"{_BATCH}, nearly", _STEP))
    passes = math.ceil(batch / (to_gpus * per_gpu))
    each = batch // (to_gpus * passes)
    nearly = _BATCH if each * passes * to_gpus == batch else f"{_BATCH}, nearly"
    ways.append(("accumulate", each, passes, f"{nearly}; no more memory", "time of a step"))
    ways.append(("accumulate-full", per_gpu, passes, "memory of a GPU",
                       "batch, learning rate, steps, time of a step"))  # fmt: skip
    found: dict[tuple[int, int], Option] = {}
    for name, each, count, keeps, changes in ways:
        if not each or (each, count) in found:  # more GPUs than samples leave some with none
            continue
        total = each * count * to_gpus
        found[each, count] = Option(
            name=name,
            per_gpu=each,
            accumulation=count,
            batch=total,
            lr_linear=lr * total / batch,
            lr_sqrt=lr * math.sqrt(total / batch),
            steps=batch / total,
            step_time=each * count / (per_gpu * accumulation),
            memory=each / per_gpu,
            keeps=keeps,
            changes=changes,
        )
    return tuple(found.values())


def shrink_above(reshard: float, gpus: int, lost: int) -> float:
    """Return from which waiting time for a spare on it is better to go on without the lost GPUs.

    2 R / (1 - k/N): going on costs two reshardings, now and when the spare comes, and yields
    (1 - k/N) of the speed meanwhile; waiting yields nothing.

    Args:
        reshard: R, seconds to stop, reshard and go on, >= 0.
        gpus: N, before the loss.
        lost: k, in [0, N).

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the resharding time", reshard, at_least=0)
    if not 0 <= lost < gpus:
        raise UsageError(f"{lost} of {gpus} GPUs lost leaves nothing to go on with")
    return 2 * reshard / (1 - lost / gpus)
