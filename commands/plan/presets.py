"""`ftckpt plan --presets`: published failure rates, and the bytes of state of a parameter."""

from __future__ import annotations

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, pairs
from ftckpt.errors import ExitCode
from ftckpt.planning.presets import PRESETS
from ftckpt.planning.state_size import OPTIMIZERS, PRECISIONS


def show_presets(invocation: Invocation) -> Result:
    """Print every preset with its source, and what is saved of a parameter."""
    sizes = {
        "precisions": {name: sum(size for _, size in parts) for name, parts in PRECISIONS.items()},
        "optimizers": {name: sum(size for _, size in parts) for name, parts in OPTIMIZERS.items()},
    }
    invocation.report(presets=list(PRESETS.values()), bytes_per_param=sizes)
    for one in PRESETS.values():
        per_gpu = f"one GPU fails the job every {1 / one.per_gpu / 3600:,.0f} h"
        lines = [("run", one.run), ("rate", per_gpu), ("source", one.source)]
        lines += [("remark", one.remark)] if one.remark else []
        invocation.print(f"--preset {one.name}")
        invocation.print(block(pairs([(f"  {name}", value) for name, value in lines]), ""))
    invocation.print("--bytes-per-param PRECISION-OPTIMIZER, the sum of")
    for name, table in sizes.items():
        text = ", ".join(f"{key} {size}" for key, size in table.items())
        invocation.print(f"  {name}: {text}")
    return Result(ExitCode.OK, f"{len(PRESETS)} presets")
