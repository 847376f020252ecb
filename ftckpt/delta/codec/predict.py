"""Predict a tensor from the base and from tensors decoded before it.

A prediction is a reference like any other: what it misses is stored, so that a wrong guess costs
room and never a bit. Every rule is a fixed order of float32 operations, each rounded to nearest,
so that reader and writer compute the same bits on any machine. NaN is the exception (its bits are
the processor's choice), so that a prediction that holds one is not used.

    scaled         p = x0 * c
    second-moment  g = (m1 - m0) / s + m0;  p = x0 * c + (g * g) * k
    adamw          p = x0 * d + (m1 * a) / (sqrt(v1) / r + e)
    drift          p = x0 + (m1 * a) / (sqrt(v1) + e) + (m0 * b) / (sqrt(v0) + e)
    momentum       p = x0 * d + (b1 * a) + (b0 * b)
    cast-T         p = the master, rounded to nearest even, for T of bfloat16, float16, float32

x0 is the tensor itself in the base; m and v are the first and second moment, 0 in the base and 1 in
the target; b is the momentum buffer of torch's SGD (`torch/optim/sgd.py`). second-moment and adamw
are torch's AdamW one step on (`torch/optim/adamw.py`); drift is what is left of it after several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DType

from .words import LEFT, RIGHT, scratch

if TYPE_CHECKING:
    from .words import Array

_CHUNK = 256 << 10  # elements at once: fewer calls are worth more than the nearest cache


class DeltaSide(IntEnum):
    """Which of the two checkpoints."""

    BASE = 0
    TARGET = 1


class Need(NamedTuple):
    """One array that a rule computes with.

    Attributes:
        kind: of the tensor that holds it; None for the predicted tensor itself.
        side: in which checkpoint.
    """

    kind: Kind | None
    side: DeltaSide


class Predictor(NamedTuple):
    """One way to predict.

    Attributes:
        name: as the index spells it.
        level: a rule uses only tensors whose own rule is of a lower level; 0 uses none.
        needs: the arrays it takes, in order.
        coefficients: how many numbers it takes; used as float32.
        compute: puts the prediction of one chunk into an array.
        fits: whether a tensor of some type can be predicted.
    """

    name: str
    level: int
    needs: tuple[Need, ...]
    coefficients: int
    compute: Callable[[Sequence[Array], Sequence[float], Array], None]
    fits: Callable[[DType], bool]

    def __reduce__(self) -> tuple[Callable[[str], Predictor], tuple[str]]:
        """Pickle it by its name: what it computes is code."""
        return rule_named, (self.name,)

    @property
    def helpers(self) -> tuple[Kind, ...]:
        """Kinds of the other tensors that it needs, in the order of their first use."""
        return tuple(dict.fromkeys(need.kind for need in self.needs if need.kind is not None))

    def of_base(self, kind: Kind | None) -> bool:
        """Say whether it needs the base's tensor of a kind (None: the tensor's own)."""
        return Need(kind, DeltaSide.BASE) in self.needs


def predict(
    rule: Predictor,
    arrays: Sequence[Array],
    coefficients: Sequence[float],
    out: Array,
    *,
    watch: bool = True,
) -> bool:
    """Put a prediction into `out` and say whether every machine computes the same one.

    Args:
        rule: which.
        arrays: words of what it needs, in its order; as many as `out` has.
        coefficients: as many as it takes.
        out: words of the predicted type.
        watch: False where it is known that every machine computes the same one.
    """
    import numpy as np

    certain = True
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _CHUNK):
            part = out[start : start + _CHUNK]
            given = [array[start : start + _CHUNK].view("<f4") for array in arrays]
            rule.compute(given, coefficients, part)
            if certain and watch:
                most = np.maximum.reduce(part.view("<f4") if part.itemsize == 4 else given[0])
                certain = bool(most == most)  # NaN is above all, and is not itself
    return certain


def _scaled(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    np.multiply(arrays[0], np.float32(numbers[0]), out=out.view("<f4"))


def _second_moment(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    before, m0, m1 = arrays
    s, c, k = (np.float32(number) for number in numbers)
    gradient = _scratch(out.size, LEFT)
    np.subtract(m1, m0, out=gradient)
    np.divide(gradient, s, out=gradient)
    np.add(gradient, m0, out=gradient)
    np.multiply(gradient, gradient, out=gradient)
    np.multiply(gradient, k, out=gradient)
    result = out.view("<f4")
    np.multiply(before, c, out=result)
    np.add(result, gradient, out=result)


def _adamw(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    before, m1, v1 = arrays
    d, a, r, e = (np.float32(number) for number in numbers)
    root, step = _scratch(out.size, LEFT), _scratch(out.size, RIGHT)
    np.sqrt(v1, out=root)
    np.divide(root, r, out=root)
    np.add(root, e, out=root)
    np.multiply(m1, a, out=step)
    np.divide(step, root, out=step)
    result = out.view("<f4")
    np.multiply(before, d, out=result)
    np.add(result, step, out=result)


def _drift(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    before, m0, v0, m1, v1 = arrays
    a, b, e = (np.float32(number) for number in numbers)
    root, step = _scratch(out.size, LEFT), _scratch(out.size, RIGHT)
    result = out.view("<f4")
    result[...] = before
    for moment, square, factor in ((m1, v1, a), (m0, v0, b)):
        np.sqrt(square, out=root)
        np.add(root, e, out=root)
        np.multiply(moment, factor, out=step)
        np.divide(step, root, out=step)
        np.add(result, step, out=result)


def _momentum(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    before, b0, b1 = arrays
    d, a, b = (np.float32(number) for number in numbers)
    step = _scratch(out.size, LEFT)
    result = out.view("<f4")
    np.multiply(before, d, out=result)
    for buffer, factor in ((b1, a), (b0, b)):
        np.multiply(buffer, factor, out=step)
        np.add(result, step, out=result)


def _cast_bfloat16(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    import numpy as np

    bits = arrays[0].view("<u4")
    wide = _scratch(out.size, LEFT).view("<u4")
    np.right_shift(bits, np.uint32(16), out=wide)
    np.bitwise_and(wide, np.uint32(1), out=wide)
    np.add(wide, np.uint32(0x7FFF), out=wide)
    np.add(wide, bits, out=wide)
    np.right_shift(wide, np.uint32(16), out=wide)
    np.copyto(out, wide, casting="unsafe")


def _cast_float16(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    out.view("<f2")[...] = arrays[0]


def _cast_float32(arrays: Sequence[Array], numbers: Sequence[float], out: Array) -> None:
    out.view("<f4")[...] = arrays[0]


def _scratch(count: int, slot: int) -> Array:
    return scratch(count, 4, slot).view("<f4")


def _is_float32(dtype: DType) -> bool:
    return dtype.name == "float32"


_OWN, _M0, _V0 = (Need(kind, DeltaSide.BASE) for kind in (None, Kind.EXP_AVG, Kind.EXP_AVG_SQ))
_M1, _V1 = (Need(kind, DeltaSide.TARGET) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ))
_MASTER = Need(Kind.MASTER, DeltaSide.TARGET)
# A momentum buffer has no kind of its own; `pairing` knows it by its name.
_B0, _B1 = (Need(Kind.OTHER, side) for side in (DeltaSide.BASE, DeltaSide.TARGET))

SCALED = Predictor("scaled", 0, (_OWN,), 1, _scaled, _is_float32)
SECOND_MOMENT = Predictor("second-moment", 1, (_OWN, _M0, _M1), 3, _second_moment, _is_float32)
ADAMW = Predictor("adamw", 2, (_OWN, _M1, _V1), 4, _adamw, _is_float32)
DRIFT = Predictor("drift", 2, (_OWN, _M0, _V0, _M1, _V1), 3, _drift, _is_float32)
MOMENTUM = Predictor("momentum", 2, (_OWN, _B0, _B1), 3, _momentum, _is_float32)
CASTS = (
    Predictor(
        "cast-bfloat16", 3, (_MASTER,), 0, _cast_bfloat16, lambda dtype: dtype.name == "bfloat16"
    ),
    Predictor(
        "cast-float16", 3, (_MASTER,), 0, _cast_float16, lambda dtype: dtype.name == "float16"
    ),
    Predictor("cast-float32", 3, (_MASTER,), 0, _cast_float32, _is_float32),
)


def rule_named(name: str) -> Predictor:
    """Return the rule that the index spells so."""
    return RULES[name]


RULES: dict[str, Predictor] = {
    rule.name: rule for rule in (SCALED, SECOND_MOMENT, ADAMW, DRIFT, MOMENTUM, *CASTS)
}
