"""The simulation of `plan`, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.commands.cli.render import block, brief_duration

from .text import percent, points

if TYPE_CHECKING:
    from ftckpt.planning.simulation import Simulated


def simulation_text(found: Simulated, closed: float) -> str:
    """Return what a simulation says, and whether the closed form's goodput agrees, in lines."""
    from ftckpt.planning.simulation import agreement

    goodput = f"{percent(found.mean, 3)} ± {percent(found.error, 3)}"
    lines = [
        f"simulated: {goodput} useful in {found.runs:,} runs with {found.failures:,} failures "
        f"({found.law}); single runs {percent(found.p10)} to {percent(found.p90)}",
    ]
    if found.law == "exponential failures":
        lines.append(agreement(closed, found).sentence)
    else:
        gap = points(found.mean - closed)
        lines.append(f"the closed form takes failures as exponential: {gap} from it")
        seen = found.seconds * (1 - float(found.outcome.detection)) / found.failures
        lines.append(f"a failure came every {brief_duration(seen)} of running and restarting")
    if found.unreached is not None:
        lines.append(
            f"{percent(found.unreached)} of the silent errors were noticed when every kept copy "
            "had them; an older one is taken to exist"
        )
    return block(*lines)
