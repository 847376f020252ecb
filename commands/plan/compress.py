"""`ftckpt plan compress`: when compressing a checkpoint makes the save shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.amounts import decimal_bytes
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, table
from ftckpt.errors import ExitCode
from ftckpt.operations import estimating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.estimating import CompressionReport

operation = estimating.plan_compress


def render(invocation: Invocation, report: CompressionReport, _: Mapping[str, Any]) -> Result:
    """Print the ways to save, and the bandwidths that decide."""
    found = report.times
    limits = ["", f"below {decimal_bytes(float(found.sequential_below))}/s",
              f"below {decimal_bytes(float(found.pipelined_below))}/s"]  # fmt: skip
    times = {
        "uncompressed": float(found.plain),
        "compressed, then written": float(found.sequential),
        "both at once": float(found.pipelined),
    }
    rows = [
        [way, brief_duration(seconds), f"{times['uncompressed'] / seconds:.2f}x", limit,
         "<" if way == report.best else ""]
        for (way, seconds), limit in zip(times.items(), limits, strict=True)
    ]  # fmt: skip
    invocation.print(table(["save", "takes>", "speed-up>", "wins where storage is>", ""], rows))
    message = f"the shortest save is {report.best}: {brief_duration(times[report.best])}"
    invocation.print()
    invocation.print(message)
    return Result(ExitCode.OK, message)
