"""The options that say what to keep and how much may go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

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
    thin_after: Annotated[
        str,
        typer.Option(
            metavar="T|N",
            help="Of milestones older than that, or not among the N newest, keep the weights.",
        ),
    ] = ""
    policy: Annotated[
        str, typer.Option(metavar="FILE", help="Take the rules from this retention.toml instead.")
    ] = ""
    tier: Annotated[
        str, typer.Option(metavar="NAME", help="Which tier of it; by default the one that fits.")
    ] = ""


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
