"""`ftckpt latest`: the checkpoint to restart from."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.commands.cli.terminal import write_bytes
from ftckpt.errors import ExitCode
from ftckpt.findings import CheckLevel
from ftckpt.operations import choosing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.discovery.select import LatestReport

operation = choosing.latest


def render(invocation: Invocation, report: LatestReport, given: Mapping[str, Any]) -> Result:
    """Print the path, or why there is none."""
    invocation.close()
    if report.path is None and report.code is ExitCode.OK:
        invocation.say(f"{printable(report.message)}: its first start is from scratch")
        return Result(ExitCode.OK, report.message)
    if report.path is None:
        return invocation.fail(report.code, printable(report.message), printable(report.hint))
    if not invocation.json:
        # The bytes of the path, whatever the locale: the shell hands them on to the trainer.
        write_bytes(sys.stdout, os.fsencode(report.path) + b"\n")
    if given["level"] == CheckLevel.STRUCTURE:
        invocation.say(
            "note: only names, sizes and headers were checked; --level content reads every byte"
        )
    return Result(ExitCode.OK, f"{report.path} passes")
