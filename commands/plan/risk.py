"""`ftckpt plan risk`: how likely a run is to fail, and what it would be without checkpoints."""

from __future__ import annotations

import math
from typing import Annotated

from ftckpt.amounts import DAY, YEAR
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, pairs
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option
from ftckpt.planning import quantities, risk

STORAGE = False
EXAMPLES = (
    ("ftckpt plan risk --gpus 1024 --afr 9% --days 30", "a month on a thousand GPUs"),
    (
        "ftckpt plan risk --gpus 16384 --afr 50000h --days 54 --restart 10m",
        "any form of a failure rate will do",
    ),
)
CODES = {ExitCode.OK: "printed", ExitCode.USAGE: "an option without its unit, or no number"}


def command(
    invocation: Invocation,
    gpus: Annotated[str, option("N", "GPUs of the job: 16384 or 16k.")],
    afr: Annotated[str, option("RATE", "Failures of one GPU: 9% a year, 50000h, 2300FIT.")],
    days: Annotated[float, option("N", "Days of work in the run.")],
    restart: Annotated[str, option("T", "Time from a failure until training goes on: 10m.")] = "0s",
) -> Result:
    """Compute how likely a run is to fail, and its time without checkpoints.

    Without checkpoints every failure begins the run anew, and the mean time to finish soon has more
    digits than seconds have names; it is computed as a logarithm.
    """
    number = quantities.count(gpus, "--gpus", kilo=1024)
    rate = number * quantities.failure_rate(afr, "--afr", annual=True)
    if not 0 < days < math.inf:
        raise UsageError(f"--days {days:g}: a run takes more than no time", hint="write 30")
    seconds, again = days * DAY, quantities.duration(restart, "--restart")
    expected = float(risk.expected_failures(rate, seconds))
    chance = float(risk.probability(rate, seconds))
    power = risk.log10_completion(seconds, 1 / rate, restart=again)
    invocation.report(
        inputs={"gpus": number, "per_gpu_per_s": rate / number, "seconds": seconds,
                "restart_s": again},
        mtbf_s=float(risk.time_to_first(rate)),
        probability=chance,
        expected_failures=expected,
        log10_completion_s=power,
        log10_slowdown=power - math.log10(seconds),
    )  # fmt: skip
    likely = f"{100 * chance:.4g} %" if chance < 0.99995 else f"1 - {_power(-expected)}"
    message = f"{expected:,.4g} failures expected in {days:g} days"
    invocation.print(
        pairs(
            [
                ("first failure after", brief_duration(1 / rate) + " on average"),
                ("at least one", likely),
                ("expected failures", f"{expected:,.4g}"),
                ("without checkpoints", _without(power, seconds)),
            ]
        )
    )
    return Result(ExitCode.OK, message)


def _power(exponent_of_e: float) -> str:
    return f"10^{exponent_of_e / math.log(10):.1f}"


def _without(power: float, seconds: float) -> str:
    """Return the mean time to finish, whose logarithm is given, in words."""
    times = power - math.log10(seconds)
    if power < 11:
        return f"{brief_duration(10**power)}, {10**times:,.3g} times the work"
    return f"10^{power - math.log10(YEAR):.1f} years on average: it never finishes"
