"""The same formula for one number and for an array.

A single answer must not wait for the import of numpy, and a sweep must not loop in Python. So every
closed form uses the functions below: numbers go to `math`, arrays to numpy.
"""

from __future__ import annotations

import math
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
