"""The options that say what to keep and how much may go, and the policy that they make."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import typer

from ftckpt.errors import UsageError
from ftckpt.planning.quantities import duration, size
from ftckpt.retention.policy import DeleteLimit, Metric, Policy, flag

RULES = "--keep-last 3 --keep-every 1000"


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """The keep rules."""

    TITLE: ClassVar[str] = "Keep (a checkpoint stays as soon as one rule says so)"

    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N newest, by step and by time.")
    ] = None
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", min=1, help="The nearest to each multiple of STEPS."),
    ] = None
    keep_hourly: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The latest of each of N hours that hold one (UTC)."),
    ] = None
    keep_daily: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The same for days.")
    ] = None
    keep_weekly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The same for ISO weeks.")
    ] = None
    keep_monthly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The same for months.")
    ] = None
    keep_within: Annotated[
        str, typer.Option(metavar="T", help="All up to so long before the newest: 36h, 7d.")
    ] = ""
    keep_best: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N best by --metric.")
    ] = None
    metric: Annotated[
        str,
        typer.Option(metavar="min:NAME|max:NAME", help="Which metric, and which way is better."),
    ] = ""
    keep_tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="What carries the tag. Repeatable.")
    ] = None
    policy: Annotated[
        str, typer.Option(metavar="FILE", help="Take the rules from this retention.toml instead.")
    ] = ""
    tier: Annotated[
        str, typer.Option(metavar="NAME", help="Which tier of it; by default the one that fits.")
    ] = ""

    def rules(self) -> dict[str, Any]:
        """Return the fields of `Policy` that these options set.

        Raises:
            UsageError: a value that is none.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("keep_")}
        given["keep_tags"] = tuple(given.pop("keep_tag") or ())
        within = given.pop("keep_within")
        given["keep_within"] = duration(within, "--keep-within") if within else None
        given["metric"] = Metric.parse(self.metric) if self.metric else None
        return {name: value for name, value in given.items() if value not in (None, ())}


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """How much may go at once."""

    TITLE: ClassVar[str] = "Limits (a plan that breaks one is refused)"

    min_survivors: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Good ones that each run must keep; by default 2."),
    ] = None
    max_delete: Annotated[
        str,
        typer.Option(metavar="N|P%", help="Most to drop at once; by default 50% or 50 entries."),
    ] = ""
    free: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Drop the oldest, until so much is freed: 20TB."),
    ] = ""
    delete_corrupt: Annotated[
        bool, typer.Option("--delete-corrupt", help="Let damaged ones go; else they are evidence.")
    ] = False

    def limits(self) -> dict[str, Any]:
        """Return the fields of `Policy` that these options set.

        Raises:
            UsageError: a value that is none.
        """
        given = {
            "min_survivors": self.min_survivors,
            "max_delete": DeleteLimit.parse(self.max_delete) if self.max_delete else None,
            "reclaim": int(size(self.free, "--free")) if self.free else None,
            "delete_corrupt": self.delete_corrupt or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def asked_policy(keep: KeepOptions, limits: LimitOptions, url: str) -> Policy:
    """Return the policy that the options ask for, or the file that they name.

    Rules stand in one place, so that nobody reads a policy file and misses what a command line adds
    to it; limits on the command line replace those of the file, for one run.

    Args:
        keep: the rules.
        limits: the limits.
        url: the root: a policy file is told by it which tier it is.

    Raises:
        UsageError: no rule, rules in both places, or something that is not understood.
    """
    rules = keep.rules()
    if keep.tier and not keep.policy:
        raise UsageError("--tier names a tier of a policy file", hint="add --policy FILE")
    if keep.policy:
        if rules:
            names = " and ".join(flag(name) for name in rules)
            raise UsageError(
                f"{names} and --policy {keep.policy} contradict each other",
                hint="keep the rules in one place",
            )
        found = policy_of_file(keep.policy, url, keep.tier or None)
    else:
        found = Policy(**rules)
    if not found.rules:
        where = f"the tier of {keep.policy} has no rule" if keep.policy else "no rule is given"
        raise UsageError(f"{where}: what is to be kept?", hint=f"ftckpt gc ROOT {RULES}")
    return replace(found, **limits.limits())


def policy_of_file(path: str, root: str, tier: str | None = None) -> Policy:
    """Return the policy that a policy file has for a root.

    A local root is matched by its absolute path, however it was typed; its links are not followed.

    Args:
        path: of the file.
        root: as typed.
        tier: the name of the tier; None for the one that matches the root.

    Raises:
        UsageError: the file cannot be read or understood, or no tier or several match.
    """
    from ftckpt.commands.cli.transfer_options import read_text
    from ftckpt.retention.policy.file import parse_policy_file, tier_of

    local = root.removeprefix("file://")
    absolute = local if "://" in local else os.path.abspath(local)
    return tier_of(parse_policy_file(read_text(path).encode(), path), absolute, path, tier).policy
