"""`ftckpt gc`: apply retention rules to a root: a plan, and with --apply the drops."""

from __future__ import annotations

from dataclasses import asdict, fields
from shlex import quote
from typing import TYPE_CHECKING, Annotated, cast

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import RootArgument, open_place
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import argument, option, switch
from ftckpt.retention.document import dump_plan

from .options import RULES, KeepOptions, LimitOptions
from .outcome import (
    applied_record,
    applied_text,
    ended,
    purged_lines,
    thinned_lines,
    thinned_record,
    thinned_text,
)
from .text import command_to_apply, kept_saves, plan_text, short_of, summary

if TYPE_CHECKING:
    from ftckpt.api.retaining import KeepFlags
    from ftckpt.commands.config.defaults import RootPolicy
    from ftckpt.discovery.resolve import Place
    from ftckpt.retention.apply.prove import ContentCheck
    from ftckpt.retention.policy.plan import RetentionPlan

# Sizes of this many files take seconds to ask for; a dry run of a larger root reads names alone.
_MOST_FILES = 1_000_000

OPTIONS = (KeepOptions, LimitOptions, AlertOptions)
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
    (
        f"ftckpt gc /ckpt/run7 {RULES} --thin-after 30d --apply",
        "milestones of more than a month ago keep their weights alone",
    ),
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
    invocation: Invocation,
    root: RootArgument,
    plan: Annotated[
        str, argument("PLAN", "A plan that --json printed: show it, or --apply exactly it.")
    ] = "",
    apply: Annotated[
        bool, switch("--apply", "Carry the plan out; without it nothing changes.")
    ] = False,
    trash_ttl: Annotated[str, option("T", "How long dropped checkpoints can be restored.")] = "24h",
    purge_now: Annotated[
        bool, switch("--purge-now", "Free the space at once; this cannot be undone.")
    ] = False,
    yes: Annotated[
        bool, switch("--yes", "Confirm --purge-now, or a --trash-ttl under one day.")
    ] = False,
) -> Result:
    """Drop the checkpoints that no rule keeps: shows a plan, and --apply carries it out.

    Only COMMITTED entries without a known bad verdict count as survivors, and at least one survivor
    has passed a content check, remembered in the root's ledger or made now. The newest, what a kept
    delta is built on, and what is pinned, pointed to or being read stay in any case. What is
    dropped goes to the trash of the root, where gc undelete finds it until --trash-ttl is over.
    """
    from ftckpt.api.retaining import (
        asked_policy,
        make_plan,
        read_plan,
        require_no_policy,
        survivor_check,
        trash_seconds,
    )

    alerts = invocation.options(AlertOptions).begin(invocation, "gc", root)
    ttl = trash_seconds(trash_ttl, apply=apply, purge_now=purge_now, yes=yes)
    check = survivor_check(invocation.counter) if apply else None
    keep, limits = invocation.options(KeepOptions), invocation.options(LimitOptions)
    flags = cast("KeepFlags", asdict(keep) | asdict(limits))
    known: RootPolicy | None = None
    if plan:
        require_no_policy(flags)
        planned = read_plan(plan)
        place = open_place(invocation, root)
    else:
        flags, known = _with_policy(root, flags, apply=apply)
        if known:
            invocation.say(f"policy: {known.file} ({known.where})")
            invocation.report(policy_from=known.where)
        policy = asked_policy(root, flags)
        place = open_place(invocation, root)
        exact = apply or invocation.json or policy.reclaim is not None
        planned = make_plan(
            place, policy, check=check, most_files=None if exact else _MOST_FILES,
            stores=invocation.stores, counter=invocation.counter,
        )  # fmt: skip
    invocation.report(
        plan=dump_plan(planned), keeps=kept_saves(planned), drops=len(planned.drop),
        frees=planned.frees, thins=len(planned.thin), wins=planned.wins,
    )  # fmt: skip
    invocation.close()
    if apply and not (planned.order or planned.thin) and not planned.broken:
        invocation.print(summary(planned))
    else:
        invocation.print(plan_text(planned))
    for note in planned.notes:
        invocation.warn(f"note: {note}")
    for broken in planned.broken[1:]:
        invocation.warn(f"also: {broken.message}" + (f" ({broken.hint})" if broken.hint else ""))
    planned.require()
    if apply:
        return _carry_out(invocation, place, planned, ttl, check, alerts, purge_now=purge_now)
    invocation.print()
    invocation.print(summary(planned))
    if planned.order or planned.thin:
        more = ("--policy", known.file) if known else ()
        invocation.print(f"carry it out: {command_to_apply([*invocation.words, *more])}")
    result = Result(ExitCode.OK, summary(planned))
    return _with_wish(invocation, planned, result, alerts, acted=False)


def _with_policy(
    root: str, flags: KeepFlags, *, apply: bool
) -> tuple[KeepFlags, RootPolicy | None]:
    """Add the policy that the user's file of settings has for a root, where no rule is given.

    Raises:
        UsageError: with `--apply`: no file of settings may decide what is dropped.
    """
    if any(flags.get(one.name) not in (None, "", ()) for one in fields(KeepOptions)):
        return flags, None
    from ftckpt.commands.config.defaults import policy_of

    known = policy_of(root)
    if known is None:
        return flags, None
    if apply:
        raise UsageError(
            f"no rule is given, and the policy of {known.where} is for plans alone",
            hint=f"ftckpt gc {quote(root)} --policy {quote(known.file)} --apply",
        )
    return cast("KeepFlags", {**flags, "policy": known.file}), known


def _carry_out(
    invocation: Invocation,
    place: Place,
    plan: RetentionPlan,
    ttl: float,
    check: ContentCheck | None,
    alerts: Alerts,
    *,
    purge_now: bool,
) -> Result:
    from ftckpt.api.retaining import carry_out, thin_out

    counter = invocation.counter
    applied = carry_out(place, plan, ttl, check, purge_now=purge_now, counter=counter)
    thinned = thin_out(place, plan, purge_now=purge_now, stores=invocation.stores, counter=counter)
    invocation.close()
    invocation.report(applied=applied_record(applied), thinned=thinned_record(thinned))
    if plan.order or applied.failed:
        invocation.print()
        invocation.print(applied_text(applied))
    for line in purged_lines(applied.purged):
        invocation.print(line)
    for line in thinned_lines(thinned):
        invocation.print(line)
    if applied.trashed or thinned.trashed:
        invocation.say(f"undo: ftckpt gc undelete {quote(place.url)} --all")
    purged = () if applied.purged is None else (applied.purged,)
    said = applied_text(applied) + (f"; {thinned_text(thinned)}" if plan.thin else "")
    outcomes = (("not-dropped", applied), ("not-thinned", thinned))
    for kind, outcome in (*outcomes, *(("not-purged", one) for one in purged)):
        if outcome.failed:
            first = next(iter(outcome.failed.values()))
            alerts.add(kind, first.message, first.hint, sorted(outcome.failed))
    result = ended(invocation, said, applied, *purged, thinned)
    return _with_wish(invocation, plan, result, alerts, acted=True)


def _with_wish(
    invocation: Invocation, plan: RetentionPlan, result: Result, alerts: Alerts, *, acted: bool
) -> Result:
    """Return how it ended; PARTIAL where all is well but for the wish for space."""
    short = short_of(plan)
    if short:
        alerts.add("not-enough", short, "a policy that keeps less frees more")
    alerts.complete(acted=acted)
    if result.code is not ExitCode.OK or not short:
        return result
    return invocation.fail(ExitCode.PARTIAL, short, "a policy that keeps less frees more")
