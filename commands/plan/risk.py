"""`ftckpt plan risk`: how likely a run is to fail, and what it would be without checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ftckpt.amounts import YEAR
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, pairs
from ftckpt.errors import ExitCode
from ftckpt.operations import estimating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.estimating import RiskReport

operation = estimating.plan_risk


def render(invocation: Invocation, report: RiskReport, given: Mapping[str, Any]) -> Result:
    """Print the chances."""
    chance, expected = report.probability, report.expected_failures
    likely = f"{100 * chance:.4g} %" if chance < 0.99995 else f"1 - {_power(-expected)}"
    rows = [
        ("first failure after", brief_duration(report.mtbf_s) + " on average"),
        ("at least one", likely),
        ("expected failures", f"{expected:,.4g}"),
        ("without checkpoints", _without(report)),
    ]
    invocation.print(pairs(rows))
    return Result(ExitCode.OK, f"{expected:,.4g} failures expected in {given['run']}")


def _power(exponent_of_e: float) -> str:
    return f"10^{exponent_of_e / math.log(10):.1f}"


def _without(report: RiskReport) -> str:
    """Return the mean time to finish, whose logarithm is given, in words."""
    power, times = report.log10_completion_s, report.log10_slowdown
    if power < 11:
        return f"{brief_duration(10**power)}, {10**times:,.3g} times the work"
    return f"10^{power - math.log10(YEAR):.1f} years on average: it never finishes"
