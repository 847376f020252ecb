"""The options that say what to keep and how much may go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ftckpt.operations.definition import option, switch

RULES = "--keep-last 3 --keep-every 1000"


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """The keep rules."""

    TITLE: ClassVar[str] = "Keep (a checkpoint stays as soon as one rule says so)"

    keep_last: Annotated[int | None, option("N", "The N newest, by step and by time.", min=1)] = (
        None
    )
    keep_every: Annotated[
        int | None, option("STEPS", "The nearest to each multiple of STEPS.", min=1)
    ] = None
    keep_hourly: Annotated[
        int | None, option("N", "The latest of each of N hours that hold one (UTC).", min=1)
    ] = None
    keep_daily: Annotated[int | None, option("N", "The same for days.", min=1)] = None
    keep_weekly: Annotated[int | None, option("N", "The same for ISO weeks.", min=1)] = None
    keep_monthly: Annotated[int | None, option("N", "The same for months.", min=1)] = None
    keep_within: Annotated[str, option("T", "All up to so long before the newest: 36h, 7d.")] = ""
    keep_best: Annotated[int | None, option("N", "The N best by --metric.", min=1)] = None
    metric: Annotated[
        str, option("min:NAME|max:NAME", "Which metric, and which way is better.")
    ] = ""
    keep_tag: Annotated[list[str] | None, option("TAG", "What carries the tag. Repeatable.")] = None
    thin_after: Annotated[
        str,
        option(
            "T|N", "Of milestones older than that, or not among the N newest, keep the weights."
        ),
    ] = ""
    policy: Annotated[str, option("FILE", "Take the rules from this retention.toml instead.")] = ""
    tier: Annotated[str, option("NAME", "Which tier of it; by default the one that fits.")] = ""


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """How much may go at once."""

    TITLE: ClassVar[str] = "Limits (a plan that breaks one is refused)"

    min_survivors: Annotated[
        int | None, option("N", "Good ones that each run must keep; by default 2.", min=1)
    ] = None
    max_delete: Annotated[
        str, option("N|P%", "Most to drop at once; by default 50% or 50 entries.")
    ] = ""
    free: Annotated[str, option("SIZE", "Drop the oldest, until so much is freed: 20TB.")] = ""
    delete_corrupt: Annotated[
        bool, switch("--delete-corrupt", "Let damaged ones go; else they are evidence.")
    ] = False
    any_name: Annotated[
        bool, switch("--any-name", "Let those go, too, whose names no trainer gives.")
    ] = False
    no_check: Annotated[
        bool, switch("--no-check", "Read no survivor's content where none is known to be good.")
    ] = False
