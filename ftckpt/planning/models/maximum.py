"""Find the largest value of a function with one peak, without a formula for it."""

from __future__ import annotations

from collections.abc import Callable

from .arithmetic import Real, choose

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
