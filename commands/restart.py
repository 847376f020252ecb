"""`ftckpt restart`: one path that a job of N ranks can load."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.commands.cli.terminal import write_bytes
from ftckpt.commands.cli.transfer_report import show_transfer
from ftckpt.errors import ExitCode
from ftckpt.operations import restarting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.restarting import RestartReport

operation = restarting.restart


def check(invocation: Invocation, _: Mapping[str, Any]) -> None:
    """Keep stdout for one path, or nothing."""
    invocation.aside = True


def render(invocation: Invocation, report: RestartReport, given: Mapping[str, Any]) -> Result:
    """Print the path, or why there is none."""
    if report.path is None:
        found = report.selection
        return invocation.fail(found.code, printable(found.message), printable(found.hint))
    if report.made is not None:
        show_transfer(invocation, report.made)
    invocation.close()
    if not invocation.json:
        write_bytes(sys.stdout, os.fsencode(report.path) + b"\n")
    return Result(ExitCode.OK, f"{report.path} loads with {given['world']} ranks")
