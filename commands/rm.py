"""`ftckpt rm`: checkpoints that a person wants gone, under the floors of gc."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.gc import PlanPrinter
from ftckpt.commands.gc.outcome import applied_text, ended
from ftckpt.commands.gc.text import command_to_apply, summary
from ftckpt.operations import retaining

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.operations.retaining import RetentionAnswer

operation = retaining.rm


def observer(invocation: Invocation, given: Mapping[str, Any]) -> Observer:
    """Return what prints the plan."""
    return PlanPrinter(invocation, apply=given["apply"])


def render(invocation: Invocation, report: RetentionAnswer, _: Mapping[str, Any]) -> Result:
    """Print what was done, or how the plan is carried out."""
    plan, applied = report.plan, report.applied
    if plan.refusal is not None:
        return invocation.fail(report.code, plan.refusal.message, plan.refusal.hint)
    invocation.print()
    if applied is None:
        invocation.print(summary(plan))
        invocation.print(f"carry it out: {command_to_apply(invocation.words)}")
        return Result(message=summary(plan))
    invocation.close()
    invocation.print(applied_text(applied))
    for thing in applied.trashed:
        invocation.say(f"undo: ftckpt gc undelete {quote(plan.url)} {quote(thing.name)}")
    return ended(invocation, applied_text(applied), applied)
