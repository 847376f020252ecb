"""Coefficients for the rules of prediction, from the optimizer's settings or from a sample.

A fit is a guess: what it misses is stored. What the settings say is tried first, because a rule
with the trainer's own numbers is exact for most elements; learning rates may have moved on by the
time of the save, so that they are fitted too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Kind

from .predict import (
    ADAMW,
    CASTS,
    DRIFT,
    MOMENTUM,
    SCALED,
    SECOND_MOMENT,
    DeltaSide,
    Need,
    Predictor,
)

if TYPE_CHECKING:
    from .words import Array


class FitSettings(NamedTuple):
    """What is known of the optimizer; the defaults are the guesses where nothing is.

    Attributes:
        beta1, beta2, eps: AdamW's.
        lr, weight_decay: at the target's step; None where not known.
        step: the optimizer's own count at the target; None where not known.
        momentum: SGD's; None where not known.
        distance: steps from the base to the target; None where not known.
    """

    beta1: float = 0.9
    beta2: float | None = None
    eps: float = 1e-8
    lr: float | None = None
    weight_decay: float | None = None
    step: int | None = None
    momentum: float | None = None
    distance: int | None = None


class Fit(NamedTuple):
    """A rule with its coefficients."""

    rule: Predictor
    coefficients: tuple[float, ...]


Sampled = Mapping[Need, "Array"]
_SECOND_BETAS = (0.95, 0.98, 0.99, 0.999)  # what trainers use


def fits(kind: Kind, values: Array, sampled: Sampled, settings: FitSettings) -> list[Fit]:
    """Return the rules that may predict a tensor of some kind; not all fit its type.

    Args:
        kind: of the tensor.
        values: sampled words of it.
        sampled: the words, at the same places, of what a rule may need; what is absent is
            not there.
        settings: of the optimizer.
    """
    import numpy as np

    with np.errstate(all="ignore"):  # NaN and infinity are data here
        return list(_fits(kind, values, sampled, settings))


def _fits(kind: Kind, values: Array, sampled: Sampled, settings: FitSettings) -> Iterator[Fit]:
    for cast in CASTS:
        if set(cast.needs) <= sampled.keys():
            yield Fit(cast, ())
    own = sampled.get(Need(None, DeltaSide.BASE))
    if values.itemsize != 4 or own is None or not values.size:
        return
    if kind is Kind.EXP_AVG:
        yield from _first_moment(settings)
    elif kind is Kind.EXP_AVG_SQ:
        yield from _second_moment(values, own, sampled, settings)
    elif kind is Kind.OTHER and settings.momentum:
        yield Fit(SCALED, (settings.momentum,))
    elif kind in (Kind.PARAM, Kind.MASTER):
        yield from _weights(values, own, sampled, settings)


def _first_moment(settings: FitSettings) -> Iterator[Fit]:
    if (settings.distance or 1) <= 10:
        yield Fit(SCALED, (settings.beta1 ** (settings.distance or 1),))


def _second_moment(
    values: Array, own: Array, sampled: Sampled, settings: FitSettings
) -> Iterator[Fit]:
    steps = settings.distance or 1
    has_gradient = set(SECOND_MOMENT.needs) <= sampled.keys()
    for beta in _SECOND_BETAS if settings.beta2 is None else (settings.beta2,):
        if has_gradient and steps <= 100:
            kept = beta**steps
            yield Fit(SECOND_MOMENT, (1 - settings.beta1**steps, kept, 1 - kept))
    ratio = _ratio(values, own)
    if ratio is not None:
        yield Fit(SCALED, (ratio,))


def _ratio(values: Array, own: Array) -> float | None:
    """Return the factor by which most elements have changed."""
    import numpy as np

    ratios = values.view("<f4").astype("f8") / own.view("<f4")
    ratios = ratios[np.isfinite(ratios)]
    return float(np.median(ratios)) if ratios.size else None


def _weights(values: Array, own: Array, sampled: Sampled, settings: FitSettings) -> Iterator[Fit]:
    import numpy as np

    now, before = (array.view("<f4").astype("f8") for array in (values, own))
    held = {need: array.view("<f4").astype("f8") for need, array in sampled.items()}
    m0, v0 = (held.get(Need(kind, DeltaSide.BASE)) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ))
    m1, v1 = (held.get(Need(kind, DeltaSide.TARGET)) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ))
    b0, b1 = (held.get(need) for need in MOMENTUM.needs[1:])
    if b0 is not None and b1 is not None:
        yield from _momentum(now, before, b0, b1, settings)
    if m1 is None or v1 is None:
        return
    eps, step = settings.eps, settings.step
    if settings.distance in (None, 1):
        root = 1.0 if step is None else (1 - (settings.beta2 or 0.999) ** step) ** 0.5
        if settings.lr is not None and settings.weight_decay is not None and step is not None:
            size = -settings.lr / (1 - settings.beta1**step)
            yield Fit(ADAMW, (1 - settings.lr * settings.weight_decay, size, root, eps))
        found = _least_squares(now - before, before, m1 / (np.sqrt(v1) / root + eps))
        if found is not None:
            # The decay multiplies the whole weight, so that its last bit is worth two trials more.
            decay = np.float32(1 + found[0])
            for near in (decay, np.nextafter(decay, np.float32(0)), np.nextafter(decay, 2 * decay)):
                yield Fit(ADAMW, (float(near), found[1], root, eps))
    if settings.distance != 1 and m0 is not None and v0 is not None:
        found = _least_squares(now - before, m1 / (np.sqrt(v1) + eps), m0 / (np.sqrt(v0) + eps))
        if found is not None:
            yield Fit(DRIFT, (*found, eps))


def _momentum(
    now: Array, before: Array, b0: Array, b1: Array, settings: FitSettings
) -> Iterator[Fit]:
    """Yield fits of SGD: by the learning rate, plain and Nesterov's, and by both buffers."""
    if settings.lr is not None and settings.distance in (None, 1):
        yield Fit(MOMENTUM, (1.0, -settings.lr, 0.0))
        if settings.momentum is not None:
            # The gradient is b1 - momentum * b0, and the step goes along it and the buffer.
            ahead = 1 + settings.momentum
            kept = settings.lr * settings.momentum
            yield Fit(MOMENTUM, (1.0, -settings.lr * ahead, kept))
    found = _least_squares(now - before, b1, b0)
    if found is not None:
        yield Fit(MOMENTUM, (1.0, *found))


def _least_squares(wanted: Array, one: Array, other: Array) -> tuple[float, float] | None:
    """Return the factors of two arrays whose sum comes nearest to `wanted`."""
    import numpy as np

    good = np.isfinite(wanted) & np.isfinite(one) & np.isfinite(other)
    columns = np.stack([one[good], other[good]], axis=1)
    if len(columns) < 16 or not columns.any():
        return None
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1
    (a, b), *_ = np.linalg.lstsq(columns / scale, wanted[good], rcond=None)
    return float(a / scale[0]), float(b / scale[1])
