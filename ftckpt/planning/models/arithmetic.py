"""The same formula for one number and for an array.

A single answer must not wait for the import of numpy, and a sweep must not loop in Python. So every
closed form uses the functions below: numbers go to `math`, arrays to numpy.

Continue with fewer (or more) GPUs: effects on batch and learning rate, and whether to wait.

The global batch is per-GPU batch x accumulation steps x GPUs. Keeping the per-GPU batch changes the
optimisation; keeping the global batch needs numbers that divide. If the batch changes, the learning
rate follows it linearly (SGD; Goyal et al., 2017) or with its square root (Adam and the like;
Malladi et al., 2022).

Find the largest value of a function with one peak, without a formula for it.

Convert an interval in seconds to a number of steps for a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ftckpt.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Real: TypeAlias = float | npt.NDArray[np.float64]
else:
    Real = Any


# All quantities of a plan lie within; no product or quotient of a formula overflows there.
_LARGEST, _SMALLEST = 1e30, 1e-30


def exp(x: Real) -> Real:
    """Return e to the power x; infinity on overflow."""
    if isinstance(x, int | float):
        try:
            return math.exp(x)
        except OverflowError:
            return math.inf
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        return np.exp(x)


def expm1(x: Real) -> Real:
    """Return e to the power x, minus 1, exact for small x; infinity on overflow."""
    if isinstance(x, int | float):
        try:
            return math.expm1(x)
        except OverflowError:
            return math.inf
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        return np.expm1(x)


def log1p(x: Real) -> Real:
    """Return the natural logarithm of 1 + x, for x > -1."""
    if isinstance(x, int | float):
        return math.log1p(x)
    import numpy as np

    return np.log1p(x)


def sqrt(x: Real) -> Real:
    """Return the square root."""
    if isinstance(x, int | float):
        return math.sqrt(x)
    import numpy as np

    return np.sqrt(x)


def choose(condition: Any, yes: Real, no: Real) -> Real:
    """Return `yes` where the condition holds, else `no`, element by element."""
    if isinstance(condition, bool):
        return yes if condition else no
    import numpy as np

    chosen: Real = np.where(condition, yes, no)
    return chosen


def larger(a: Real, b: Real) -> Real:
    """Return the larger of the two, element by element."""
    return choose(a > b, a, b)


def smaller(a: Real, b: Real) -> Real:
    """Return the smaller of the two, element by element."""
    return choose(a < b, a, b)


def every(condition: Any) -> bool:
    """Whether the condition holds for each element."""
    return condition if isinstance(condition, bool) else bool(condition.all())


def exposed(rate: Real, seconds: Real) -> Real:
    """Return the mean time until a failure or the end of `seconds`, whichever is first.

    (1 - e^(-rate seconds)) / rate; `seconds` itself if nothing fails; 1 / rate for endless work.
    """
    fails = rate > 0
    divisor = choose(fails, rate, 1.0)
    span = choose(fails, seconds, 0.0)  # 0 x infinity is not a number
    return choose(fails, -expm1(-divisor * span) / divisor, seconds)


def require(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
    unit: str = "s",
) -> None:
    """Refuse a value outside its range; not-a-number is outside every range.

    Also refuses finite values above 1e30, and values below 1e-30 that must be above 0.

    Args:
        name: begins the sentence: `the save cost`.
        value: every element is checked.
        above: exclusive lower bound; 0 or more.
        at_least: inclusive lower bound.
        at_most: inclusive upper bound.
        finite: whether infinity is refused.
        unit: of the value, for the sentence; "" for none.

    Raises:
        UsageError: names the bound and the first value that breaks it.
    """
    unit = f" {unit}" if unit else ""
    bounds: list[tuple[Any, str]] = [(value == value, "a number")]
    if above is not None:
        bounds.append((value > above, f"above {above:g}{unit}"))
        bounds.append((value >= _SMALLEST, f"at least {_SMALLEST:g}{unit}"))
    if at_least is not None:
        bounds.append((value >= at_least, f"at least {at_least:g}{unit}"))
    if at_most is not None:
        bounds.append((value <= at_most, f"at most {at_most:g}{unit}"))
    if finite:
        bounds.append((abs(value) < math.inf, "finite"))
    size = abs(value)
    bounds.append(((size <= _LARGEST) | (size == math.inf), f"at most {_LARGEST:g}{unit}"))
    for holds, words in bounds:
        if not every(holds):
            found = value if isinstance(value, int | float) else float(value[~holds].flat[0])
            shown = f"{found:g}{unit}" if found == found else "not a number"
            raise UsageError(f"{name} must be {words}, but is {shown}")


NEARLY = 0.05
"""A batch that changes by at most this share is nearly kept: learning rates are tuned coarser."""

_STEP = "memory and time of a step"
_MEMORY = "memory of a GPU"
_TIME = "time of a step"
_PASSES = "passes"
_BATCH = "batch, learning rate, steps"


@dataclass(frozen=True, slots=True)
class ElasticOption:
    """One way to continue.

    Attributes:
        name: `same-per-gpu`, `same-batch`, `batch-up`, `batch-down`, `accumulate`,
            `accumulate-nearest`, `accumulate-full`.
        per_gpu: samples per GPU and pass.
        accumulation: passes per step.
        batch: global batch.
        batch_change: relative change of the batch; negative if it shrinks.
        lr_linear: learning rate in proportion to the batch.
        lr_sqrt: learning rate with the square root of the batch.
        steps: factor on the number of steps for the same number of samples.
        step_time: factor on the computing time of a step.
        memory: factor on a GPU's activations.
        keeps: quantities that stay, exactly or within `NEARLY`; then with the change.
        changes: the other quantities.
    """

    name: str
    per_gpu: int
    accumulation: int
    batch: int
    batch_change: float
    lr_linear: float
    lr_sqrt: float
    steps: float
    step_time: float
    memory: float
    keeps: str
    changes: str


def options(
    from_gpus: int, to_gpus: int, batch: int, lr: float, accumulation: int = 1
) -> tuple[ElasticOption, ...]:
    """Return the ways to continue with another number of GPUs.

    Args:
        from_gpus: data-parallel GPUs (or replicas) so far, >= 1.
        to_gpus: from now on, >= 1.
        batch: global batch so far; a multiple of `from_gpus * accumulation`.
        lr: learning rate so far, > 0.
        accumulation: passes per step so far, >= 1.

    Returns:
        In this order, without later duplicates:

        - the per-GPU batch and the passes kept;
        - the batch kept with as many passes, or rounded up and down to a divisible number;
        - with no more memory, the fewest passes that nearly keep the batch, and of those the
          nearest batch; or the nearest of all if none is within `NEARLY`;
        - with no more memory, the nearest batch of all, in as few passes as possible;
        - the per-GPU batch kept, with the number of passes that gives the nearest batch.

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

    # Name, per-GPU batch, passes, and what else it keeps and changes beside the batch.
    ways = [("same-per-gpu", per_gpu, accumulation, _STEP, "")]
    share, rest = divmod(batch, to_gpus * accumulation)
    if rest:
        ways.append(("batch-up", share + 1, accumulation, _PASSES, _STEP))
        ways.append(("batch-down", share, accumulation, _PASSES, _STEP))
    else:
        ways.append(("same-batch", share, accumulation, _PASSES, _STEP))
    nearest = _nearest(batch, to_gpus, per_gpu)
    few = _few_passes(batch, to_gpus, per_gpu) or nearest
    ways.append(("accumulate", *few, "no more memory", _TIME))
    ways.append(("accumulate-nearest", *nearest, "no more memory", _TIME))
    full = _full_passes(batch, to_gpus * per_gpu, accumulation)
    ways.append(("accumulate-full", per_gpu, full, _MEMORY, _TIME))
    found: dict[tuple[int, int], ElasticOption] = {}
    for name, each, count, keeps, changes in ways:
        if not each or (each, count) in found:  # more GPUs than samples leave some with none
            continue
        total = each * count * to_gpus
        kept, changed = _told(batch, total, keeps, changes)
        found[each, count] = ElasticOption(
            name=name,
            per_gpu=each,
            accumulation=count,
            batch=total,
            batch_change=total / batch - 1,
            lr_linear=lr * total / batch,
            lr_sqrt=lr * math.sqrt(total / batch),
            steps=batch / total,
            step_time=each * count / (per_gpu * accumulation),
            memory=each / per_gpu,
            keeps=kept,
            changes=changed,
        )
    return tuple(found.values())


def _is_near(batch: int, total: int) -> bool:
    return abs(total - batch) / batch <= NEARLY


def percent_change(change: float) -> str:
    """Return the relative change `change` (new / old - 1) as text: `+12.5 %`, `-0.78 %`, `0 %`."""
    percent = 100 * change
    if not percent:
        return "0 %"
    if abs(percent) < 0.01:
        return f"{percent:+.1g} %"
    return f"{percent:+,.2f}".rstrip("0").rstrip(".") + " %"


def _told(batch: int, total: int, keeps: str, changes: str) -> tuple[str, str]:
    """Return what a way keeps and changes, with the batch added to one of the two."""
    change = percent_change(total / batch - 1)
    if total == batch:
        keeps = f"{_BATCH}; {keeps}"
    elif _is_near(batch, total):
        keeps = f"{_BATCH}, nearly ({change}); {keeps}"
    else:
        changes = f"{_BATCH} ({change}); {changes}"
    return keeps, changes.removesuffix("; ")


def _nearest(batch: int, gpus: int, most: int) -> tuple[int, int]:
    """Return the per-GPU batch (at most `most`) and passes with the nearest batch, the fewest.

    One sample per pass reaches every multiple of the GPUs, so the nearest multiple is the nearest
    batch; of two as near, the one with fewer passes.
    """
    below = max(1, batch // gpus)
    found = []
    for each_step in (below, below + 1):
        each = _largest_divisor(each_step, most)
        passes = each_step // each
        found.append((abs(each_step * gpus - batch), passes, each))
    _, passes, each = min(found)
    return each, passes


def _largest_divisor(number: int, most: int) -> int:
    best = 1
    for low in range(1, math.isqrt(number) + 1):
        if number % low == 0:
            best = max(best, *(d for d in (low, number // low) if d <= most), 1)
    return best


def _few_passes(batch: int, gpus: int, most: int) -> tuple[int, int] | None:
    """Return the fewest passes that nearly keep the batch with at most `most` per GPU and pass.

    None if no number of passes does: the GPUs are many more than the samples, or a step has so few
    samples per GPU that one more or less is too many.
    """
    first = max(1, math.floor((1 - NEARLY) * batch / (gpus * most)))
    for passes in range(first, batch // gpus + 2):
        share = batch // (gpus * passes)
        near = [
            (abs(each * passes * gpus - batch), each)
            for each in (share, share + 1)
            if 1 <= each <= most and _is_near(batch, each * passes * gpus)
        ]
        if near:
            return min(near)[1], passes
    return None


def _full_passes(batch: int, a_pass: int, present: int) -> int:
    """Return the number of passes with the nearest batch, other than the present number.

    The present number only if it keeps the batch, or if nothing else is possible.
    """
    below = batch // a_pass
    tried = [n for n in (below, below + 1) if n and (n != present or n * a_pass == batch)]
    return min(tried, key=lambda n: (abs(n * a_pass - batch), n), default=present)


def shrink_above(reshard: float, gpus: int, lost: int) -> float:
    """Return the waiting time for a spare above which continuing without the lost GPUs is better.

    2 R / (1 - k/N): continuing costs two reshardings, now and when the spare comes, and yields (1 -
    k/N) of the speed meanwhile; waiting yields nothing. `reshard` is R, seconds to stop, reshard
    and continue, >= 0; `gpus` N, before the loss; `lost` k, in [0, N).
    """
    require("the resharding time", reshard, at_least=0)
    if not 0 <= lost < gpus:
        raise UsageError(f"{lost} of {gpus} GPUs lost leaves nothing to go on with")
    return 2 * reshard / (1 - lost / gpus)


def grow_above(reshard: float, gpus: int, gained: int) -> float:
    """Return the time for which further GPUs must stay so that going on with them is better.

    R (N + k) / k: resharding costs R of no work, and then the job works (N + k) / N times as fast.
    `reshard` is R, seconds to stop, reshard and continue, >= 0; `gpus` N, before; `gained` k, > 0.
    """
    require("the resharding time", reshard, at_least=0)
    if not gained > 0:
        raise UsageError("no GPU is gained")
    return reshard * (gpus + gained) / gained


_GOLDEN = (5**0.5 - 1) / 2


def peak(value: Callable[[Real], Real], guess: Real, factor: float, steps: int = 50) -> Real:
    """Return where `value` is largest between guess / factor and guess * factor.

    By golden section on the logarithm; each of `steps` evaluations narrows the bracket to 62 %.
    Near a smooth peak the place is found to half the digits of the value, and the value to all of
    them. `value` has one peak there, and takes and returns an array if `guess` (> 0) is one;
    `factor` > 1.
    """
    low, high = 0.0 * guess - 1.0, 0.0 * guess + 1.0  # exponents of `factor`
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(guess * factor**left), value(guess * factor**right)
    for _ in range(steps):
        rising = at_right > at_left
        low, high = choose(rising, left, low), choose(rising, high, right)
        probe = choose(rising, low + _GOLDEN * (high - low), high - _GOLDEN * (high - low))
        found = value(guess * factor**probe)
        left, right = choose(rising, right, probe), choose(rising, probe, left)
        at_left, at_right = choose(rising, at_right, found), choose(rising, found, at_left)
    return guess * factor ** ((low + high) / 2)


@dataclass(frozen=True, slots=True)
class RoundedInterval:
    """An interval in whole steps.

    Attributes:
        exact: steps without rounding.
        steps: rounded.
        interval: seconds of work in those steps.
        goodput_lost: goodput lost by rounding, as a fraction; below 0 if rounding helps.
    """

    exact: float
    steps: int
    interval: float
    goodput_lost: float


def to_steps(
    interval: float, step_time: float, goodput: Callable[[float], Real], least: float = 0.0
) -> RoundedInterval:
    """Round an interval to a memorable number of steps.

    To the nearest multiple of 1, 2 or 5 times a power of ten that is at most a tenth of it, so that
    it moves by 5 % at most from ten steps on; never below one step, nor below `least` seconds, the
    time of a flush. `step_time` is in seconds, > 0; `goodput` gives an interval's goodput.
    """
    require("the interval", interval, above=0)
    require("the step time", step_time, above=0)
    require("the least interval", least, at_least=0)
    exact = interval / step_time
    grain = _grain(exact)
    steps = max(grain, round(exact / grain) * grain)
    while steps * step_time < least * (1 - 1e-12):
        steps += grain
    rounded = steps * step_time
    return RoundedInterval(exact, steps, rounded, float(goodput(interval) - goodput(rounded)))


def _grain(steps: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, ... that is at most a tenth of `steps`."""
    grain = 1
    power = 1
    while power * 10 <= steps:
        grain = max(g * power for g in (1, 2, 5) if g == 1 or g * power * 10 <= steps)
        power *= 10
    return grain
