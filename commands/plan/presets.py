"""`ftckpt plan --preset list`: published failure rates, and the bytes of state of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, pairs
from ftckpt.errors import ExitCode

if TYPE_CHECKING:
    from ftckpt.operations.planning import PresetList


def show_presets(invocation: Invocation, report: PresetList) -> Result:
    """Print every preset with its source, and what is saved of a parameter."""
    for one in report.presets:
        per_gpu = f"one GPU fails the job every {1 / one.per_gpu / 3600:,.0f} h"
        lines = [("run", one.run), ("rate", per_gpu), ("source", one.source)]
        lines += [("remark", one.remark)] if one.remark else []
        invocation.print(f"--preset {one.name}")
        invocation.print(block(pairs([(f"  {name}", value) for name, value in lines]), ""))
    invocation.print("--set bytes-per-param=PRECISION-OPTIMIZER, the sum of")
    for name, table in report.bytes_per_param.items():
        text = ", ".join(f"{key} {size}" for key, size in table.items())
        invocation.print(f"  {name}: {text}")
    return Result(ExitCode.OK, f"{len(report.presets)} presets")
