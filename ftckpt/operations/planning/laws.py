"""How failures are drawn that a plan is simulated with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError
from ftckpt.planning import quantities

if TYPE_CHECKING:
    from ftckpt.planning.rates import Cause
    from ftckpt.planning.simulation import Law


def read_law(text: str, mtbf: float) -> Law:
    """Return the law of times between failures.

    Args:
        text: `exponential`, `weibull:0.7`, `lognormal:2`, or `trace:FILE` with one duration a line.
        mtbf: its mean, in seconds; a trace brings its own.

    Raises:
        UsageError: it is none of these, or a line of the trace is not a duration.
        NotFoundError: the trace does not exist.
    """
    from ftckpt.planning import simulation

    name, _, parameter = text.partition(":")
    if name == "exponential" and not parameter:
        return simulation.Exponential(mtbf)
    if name == "weibull" and parameter:
        return simulation.Weibull(mtbf, quantities.factor(parameter, "--law weibull"))
    if name == "lognormal" and parameter:
        return simulation.Lognormal(mtbf, quantities.factor(parameter, "--law lognormal"))
    if name == "trace" and parameter:
        return simulation.Trace(_trace(parameter))
    raise UsageError(
        f"--law {text}: unknown law of failures",
        hint="write exponential, weibull:0.7, lognormal:2 or trace:FILE",
    )


def read_ageing(texts: Sequence[str], causes: Sequence[Cause]) -> Law:
    """Return the law of parts that age, of `gpu=0.7` for each.

    Raises:
        UsageError: it is of another form, or nothing says how many such parts there are.
    """
    from ftckpt.planning.simulation import AgeingParts, Fleet

    shapes: dict[str, float] = {}
    for text in texts:
        name, _, shape = text.partition("=")
        shapes[name.strip()] = quantities.factor(shape, f"--ageing {name}")
    ageing, rest = [], 0.0
    for cause in causes:
        if cause.name not in shapes:
            rest += cause.per_second
        elif cause.parts is None:
            raise UsageError(
                f"--ageing {cause.name}: nothing says how many there are",
                hint="--gpus 16384 --gpu-mtbf 50000h, or --component name=N@RATE",
            )
        else:
            mean = cause.parts / cause.per_second
            ageing.append(AgeingParts(cause.name, cause.parts, mean, shapes.pop(cause.name)))
    if shapes:
        raise UsageError(
            f"--ageing {' and '.join(shapes)}: nothing says how often these fail",
            hint=f"what fails: {', '.join(dict.fromkeys(c.name for c in causes))}",
        )
    return Fleet(ageing, rest)


def _trace(path: str) -> list[float]:
    from ftckpt.storage.local.oserror import translate

    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise translate(error, path, "read") from error
    return [
        quantities.duration(line, f"line {number} of {path}:")
        for number, line in enumerate(lines, 1)
        if line
    ]
