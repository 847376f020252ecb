"""`ftckpt gc`: what of a root may go, and why; with --apply, let it go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.commands.invocation import Invocation, Result, invoked
from ftckpt.commands.marking import RootArgument, open_place
from ftckpt.errors import ExitCode, UsageError

from .document import KEY, read_plan
from .options import RULES, KeepOptions, LimitOptions, asked_policy
from .text import command_to_apply, plan_text, short_of, summary

if TYPE_CHECKING:
    from ftckpt.opening import Place
    from ftckpt.retention import Plan, Policy, Prepared

OPTIONS = (KeepOptions, LimitOptions)
EXAMPLES = (
    (f"ftckpt gc /ckpt/run7 {RULES}", "the plan: what stays, what goes, and why; nothing changes"),
    (f"ftckpt gc /ckpt/run7 {RULES} --apply", "carry it out, from cron; a day to undo it"),
    (
        "ftckpt gc s3://run7/ckpt --keep-daily 30 --keep-best 3 --metric min:val_loss",
        "other rules; a checkpoint stays as soon as one says so",
    ),
    (f"ftckpt gc /ckpt/run7 {RULES} --json > plan.json", "a plan to look at, and then"),
    ("ftckpt gc /ckpt/run7 plan.json --apply", "to carry out exactly as it is"),
    (
        f"ftckpt gc /ckpt/run7 {RULES} --free 20TB --apply --purge-now --yes",
        "the disk is full: the oldest first, and the space at once",
    ),
    ("ftckpt gc /ckpt/run7 --policy retention.toml --apply", "rules of each tier in one file"),
)
CODES = {
    ExitCode.OK: "planned, or carried out; also where there is nothing to drop",
    ExitCode.USAGE: "no rule, rules that contradict each other, or no root",
    ExitCode.UNSAFE: "a link stands where ftckpt's own files belong, or where an entry was",
    ExitCode.REFUSED: "a floor, a plan that no longer fits, or another gc; nothing was touched",
    ExitCode.NOT_FOUND: "no such root, or no checkpoint in it",
    ExitCode.UNAVAILABLE: "storage failed, or a listing is behind; nothing was concluded",
    ExitCode.DENIED: "credentials or permissions",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "the store cannot keep a second gc away",
    ExitCode.PARTIAL: "some of it could not be dropped, or --free asks for more than may go",
}


def command(
    ctx: typer.Context,
    root: RootArgument,
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN", help="What --json has printed: show it, or --apply exactly it."
        ),
    ] = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="Carry the plan out; without it nothing changes.")
    ] = False,
    trash_ttl: Annotated[
        str, typer.Option(metavar="T", help="How long what is dropped can be had back.")
    ] = "24h",
    purge_now: Annotated[
        bool, typer.Option("--purge-now", help="Free the space at once: there is no undoing it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Mean --purge-now.")] = False,
) -> Result:
    """Drop the checkpoints that no rule keeps: shows a plan, and --apply carries it out.

    Damaged and unfinished saves never count as kept. The newest, what a kept delta is built upon,
    and what is pinned, pointed to or being read stay in any case. What is dropped goes to the trash
    of the root, where gc undelete finds it until --trash-ttl is over.
    """
    invocation = invoked(ctx)
    _require_meant(apply=apply, purge_now=purge_now, yes=yes)
    if plan:
        _require_no_policy(invocation)
        planned = read_plan(plan)
        place = open_place(invocation, root)
    else:
        policy = asked_policy(
            invocation.options(KeepOptions), invocation.options(LimitOptions), root
        )
        place = open_place(invocation, root)
        planned = _prepare(invocation, place, policy).plan
    return _show(invocation, planned)


def _require_meant(*, apply: bool, purge_now: bool, yes: bool) -> None:
    """Refuse what would free space for good unless it is said twice.

    Raises:
        UsageError: it is not, or there is nothing that it could mean.
    """
    if purge_now and not apply:
        raise UsageError("--purge-now is about what is dropped", hint="add --apply")
    if purge_now and not yes:
        raise UsageError("--purge-now cannot be undone", hint="add --yes if that is meant")
    if yes and not purge_now:
        raise UsageError("--yes is for --purge-now alone: nothing else of gc asks")


def _require_no_policy(invocation: Invocation) -> None:
    """Refuse rules and limits beside a plan, which holds its own.

    Raises:
        UsageError: there are some.
    """
    for group in OPTIONS:
        if invocation.options(group) != group():
            raise UsageError(
                "a plan holds its rules and limits, and more of them were given",
                hint="make a new plan with them",
            )


def _prepare(invocation: Invocation, place: Place, policy: Policy) -> Prepared:
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention import prepare

    return prepare(place, FORMATS, policy, time.time(), counter=invocation.counter)


def _show(invocation: Invocation, plan: Plan) -> Result:
    """Print a plan; the verdict is that of carrying it out."""
    from ftckpt.retention.document import dump_plan

    frees = plan.frees
    invocation.report(
        **{KEY: dump_plan(plan)}, keeps=len(plan.keep), drops=len(plan.drop), frees=frees
    )
    invocation.close()
    invocation.print(plan_text(plan))
    for note in plan.notes:
        invocation.warn(f"note: {note}")
    for broken in plan.broken[1:]:
        invocation.warn(f"also: {broken.message}" + (f" ({broken.hint})" if broken.hint else ""))
    plan.require()
    message = summary(plan)
    invocation.print(f"\n{message}")
    if plan.order:
        invocation.print(f"carry it out: {command_to_apply(invocation.words)}")
    short = short_of(plan)
    if short:
        return invocation.fail(ExitCode.PARTIAL, short, "drop more by a policy that keeps less")
    return Result(ExitCode.OK, message)
