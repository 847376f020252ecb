"""`ftckpt guard`: one training job, from its newest good checkpoint to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import CommandCode, printable
from ftckpt.errors import ExitCode
from ftckpt.operations import guarding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.guarding import GuardReport

operation = guarding.guard
# It passes signals on to the command, and ends after it.
WATCHED = False


def render(invocation: Invocation, report: GuardReport, _: Mapping[str, Any]) -> Result:
    """Say how it ended, where that was not well."""
    invocation.close()
    ended = report.ended
    if ended.own is ExitCode.OK:
        return Result(ExitCode.OK, ended.message)
    code = ended.own if ended.own is not None else CommandCode(ended.code)
    return invocation.fail(code, printable(ended.message), printable(ended.hint))
