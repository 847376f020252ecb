"""`ftckpt replay audit`: what a restart would lack, seen from the checkpoint alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import pairs, table
from ftckpt.errors import ExitCode
from ftckpt.operations import replaying

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.replaying import AuditReport

operation = replaying.replay_audit


def render(invocation: Invocation, report: AuditReport, _: Mapping[str, Any]) -> Result:
    """Print what is there, what is not, and what contradicts an exact restart."""
    rows = [[item.title, item.presence, item.reason] for item in report.resume]
    invocation.print(table(["component", "is", "because"], rows))
    if report.remarks:
        invocation.print()
        invocation.print(pairs([(one.weight, one.message) for one in report.remarks]))
    for item in report.absent:
        invocation.say(f"warning: absent: {item.title}. {item.consequence}")
    hint = "" if report.code is ExitCode.OK else "docs/replay.md says what each needs"
    return Result(report.code, report.message, hint)
