"""`ftckpt gc`: apply retention rules to a root: a plan, and with --apply the drops."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations import retaining

from .outcome import applied_text, ended, purged_lines, thinned_lines, thinned_text
from .text import command_to_apply, plan_text, summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.operations.retaining import RetentionAnswer
    from ftckpt.retention.policy.plan import RetentionPlan

# Sizes of this many files take seconds to ask for; a dry run of a larger root reads names alone.
_MOST_FILES = 1_000_000

operation = retaining.gc
OPTIONS = (AlertOptions,)


class PlanPrinter(Relay):
    """Prints the plan before it is carried out, or refused."""

    def __init__(self, invocation: Invocation, *, apply: bool) -> None:
        super().__init__(invocation)
        self.apply = apply

    def end(self, report: RetentionPlan) -> None:
        """Print the plan, and what speaks against it."""
        invocation = self.invocation
        invocation.close()
        if self.apply and not (report.order or report.thin) and not report.broken:
            invocation.print(summary(report))
        else:
            invocation.print(plan_text(report))
        for note in report.notes:
            invocation.warn(f"note: {note}")
        for one in report.broken[1:]:
            invocation.warn(f"also: {one.message}" + (f" ({one.hint})" if one.hint else ""))


def observer(invocation: Invocation, given: Mapping[str, Any]) -> Observer:
    """Return what prints the plan."""
    return PlanPrinter(invocation, apply=given["apply"])


def check(invocation: Invocation, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Begin to tell of what is not dropped, and take the policy of the user's settings.

    Raises:
        UsageError: the webhook is not a URL; with `--apply`: no file of settings may decide what is
            dropped.
    """
    root, apply = given["root"], given["apply"]
    invocation.groups[Alerts] = invocation.options(AlertOptions).begin(invocation, "gc", root)
    if not given["plan"] and not any(given[name] for name in retaining.RuleFlags.__annotations__):
        from ftckpt.commands.config.defaults import policy_of

        if known := policy_of(root):
            if apply:
                raise UsageError(
                    f"no rule is given, and the policy of {known.where} is for plans alone",
                    hint=f"ftckpt gc {quote(root)} --policy {quote(known.file)} --apply",
                )
            invocation.say(f"policy: {known.file} ({known.where})")
            invocation.report(policy_from=known.where)
            given = {**given, "policy": known.file}
    exact = apply or invocation.json or given["free"]
    return {**given, "most_files": None if exact else _MOST_FILES}


def render(invocation: Invocation, report: RetentionAnswer, given: Mapping[str, Any]) -> Result:
    """Print what was done, or how the plan is carried out."""
    plan = report.plan
    if plan.refusal is not None:
        return invocation.fail(report.code, plan.refusal.message, plan.refusal.hint)
    if not given["apply"]:
        invocation.print()
        invocation.print(summary(plan))
        if plan.order or plan.thin:
            settled = "policy_from" in invocation.document
            more = ("--policy", given["policy"]) if settled else ()
            invocation.print(f"carry it out: {command_to_apply([*invocation.words, *more])}")
        return _with_wish(invocation, plan, Result(message=summary(plan)), acted=False)
    applied, thinned = report.applied, report.thinned
    assert applied is not None
    assert thinned is not None
    invocation.close()
    if plan.order or applied.failed:
        invocation.print()
        invocation.print(applied_text(applied))
    for line in (*purged_lines(applied.purged), *thinned_lines(thinned)):
        invocation.print(line)
    if applied.trashed or thinned.trashed:
        invocation.say(f"undo: ftckpt gc undelete {quote(plan.url)} --all")
    said = applied_text(applied) + (f"; {thinned_text(thinned)}" if plan.thin else "")
    kinds = (("not-dropped", applied), ("not-thinned", thinned), ("not-purged", applied.purged))
    for kind, outcome in kinds:
        if outcome is not None and outcome.failed:
            first = next(iter(outcome.failed.values()))
            about = sorted(outcome.failed)
            invocation.options(Alerts).add(kind, first.message, first.hint, about)
    result = ended(invocation, said, *report.outcomes)
    return _with_wish(invocation, plan, result, acted=True)


def _with_wish(
    invocation: Invocation, plan: RetentionPlan, result: Result, *, acted: bool
) -> Result:
    """Return how it ended; PARTIAL where all is well but for the wish for space."""
    alerts, short = invocation.options(Alerts), retaining.short_of(plan)
    if short:
        alerts.add("not-enough", short, "a policy that keeps less frees more")
    alerts.complete(acted=acted)
    if result.code is not ExitCode.OK or not short:
        return result
    return invocation.fail(ExitCode.PARTIAL, short, "a policy that keeps less frees more")
