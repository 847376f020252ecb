"""What keeps and drops the checkpoints of a root: `gc`, `rm`, `gc_undelete`, `gc_purge`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, Unpack

from ftckpt.amounts import DAY, Duration, human_bytes, seconds
from ftckpt.errors import (
    DeniedError,
    ExitCode,
    NoResourceError,
    UnavailableError,
    UsageError,
    worst,
)
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import IF_ANY, UNSAID, document
from ftckpt.retention.policy import DeleteLimit, Metric, Policy, flag
from ftckpt.retention.records.who import actor
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .opening import STORES, root_at, runs_at
from .tables import read_text

if TYPE_CHECKING:
    from ftckpt.discovery.resolve import Place
    from ftckpt.retention.apply.check import ContentCheck
    from ftckpt.retention.apply.outcome import Applied, ApplyOutcome, Purged, Thinned, Undeleted
    from ftckpt.retention.policy.plan import RetentionPlan
    from ftckpt.retention.trash import Trashed

RULES = "--keep-last 3 --keep-every 1000"  # of the examples

# What `ftckpt gc --json` prints holds the plan under this key.
_KEY = "plan"
_NUMBERS = ("last", "every", "hourly", "daily", "weekly", "monthly", "best")
_KEEP = "Keep (a checkpoint stays as soon as one rule says so)"
_LIMITS = "Limits (a plan that breaks one is refused)"

_Root = Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")]
_Planned = Annotated[
    "RetentionPlan | str",
    argument("PLAN", "A plan that --json printed: show it, or --apply exactly it."),
]


_Survivors = Annotated[
    int | None,
    option("N", "Good ones that each run must keep; by default 2.", min=1, under=_LIMITS),
]
_NoCheck = Annotated[
    bool,
    switch(
        "--no-check", "Read no survivor's content where none is known to be good.", under=_LIMITS
    ),
]


class RuleFlags(TypedDict, total=False):
    """Which checkpoints stay; None or "" where not given."""

    keep_last: Annotated[
        int | None, option("N", "The N newest, by step and by time.", min=1, under=_KEEP)
    ]
    keep_every: Annotated[
        int | None, option("STEPS", "The nearest to each multiple of STEPS.", min=1, under=_KEEP)
    ]
    keep_hourly: Annotated[
        int | None,
        option("N", "The latest of each of N hours that hold one (UTC).", min=1, under=_KEEP),
    ]
    keep_daily: Annotated[int | None, option("N", "The same for days.", min=1, under=_KEEP)]
    keep_weekly: Annotated[int | None, option("N", "The same for ISO weeks.", min=1, under=_KEEP)]
    keep_monthly: Annotated[int | None, option("N", "The same for months.", min=1, under=_KEEP)]
    keep_within: Annotated[
        Duration,
        option("T", "All up to so long before the newest: 36h, 7d.", under=_KEEP, default=""),
    ]
    keep_best: Annotated[int | None, option("N", "The N best by --metric.", min=1, under=_KEEP)]
    metric: Annotated[
        str,
        option(
            "min:NAME|max:NAME", "Which metric, and which way is better.", under=_KEEP, default=""
        ),
    ]
    keep_tag: Annotated[
        Sequence[str],
        option("TAG", "What carries the tag. Repeatable.", under=_KEEP, default=()),
    ]
    thin_after: Annotated[
        Duration,
        option(
            "T|N", "Of milestones older than that, or not among the N newest, keep the weights.",
            under=_KEEP, default="",
        ),
    ]  # fmt: skip
    policy: Annotated[
        str,
        option("FILE", "Take the rules from this retention.toml instead.", under=_KEEP, default=""),
    ]
    tier: Annotated[
        str,
        option("NAME", "Which tier of it; by default the one that fits.", under=_KEEP, default=""),
    ]


class LimitFlags(TypedDict, total=False):
    """How much may go at once; None or "" where not given."""

    min_survivors: _Survivors
    max_delete: Annotated[
        int | str,
        option(
            "N|P%", "Most to drop at once; by default 50% or 50 entries.", under=_LIMITS, default=""
        ),
    ]
    free: Annotated[
        int | str,
        option("SIZE", "Drop the oldest, until so much is freed: 20TB.", under=_LIMITS, default=""),
    ]
    delete_corrupt: Annotated[
        bool,
        switch("--delete-corrupt", "Let damaged ones go; else they are evidence.", under=_LIMITS),
    ]
    any_name: Annotated[
        bool,
        switch("--any-name", "Let those go, too, whose names no trainer gives.", under=_LIMITS),
    ]
    no_check: _NoCheck


class KeepFlags(RuleFlags, LimitFlags, total=False):
    """Which checkpoints stay, and how much may go at once."""


@dataclass(frozen=True, kw_only=True)
class RetentionAnswer:
    """What `gc` found, and did; its plan is told as soon as it is made.

    Attributes:
        plan: what becomes of each checkpoint, and why; `plan.broken` are limits that it breaks.
        applied: what was dropped; None where the plan was not carried out.
        thinned: what keeps its weights alone; None where the plan was not carried out.
    """

    plan: RetentionPlan = field(metadata=UNSAID)
    applied: Applied | None = field(default=None, metadata=IF_ANY)
    thinned: Thinned | None = field(default=None, metadata=IF_ANY)

    @property
    def outcomes(self) -> list[ApplyOutcome]:
        """Return what was done: dropped, purged, thinned."""
        purged = None if self.applied is None else self.applied.purged
        return [one for one in (self.applied, purged, self.thinned) if one is not None]

    @property
    def code(self) -> ExitCode:
        """Return the worst code; PARTIAL where all is well but for the wish for space."""
        if self.plan.refusal is not None:
            return self.plan.refusal.exit_code
        found = worst(one.code for one in self.outcomes)
        return ExitCode.PARTIAL if found is ExitCode.OK and short_of(self.plan) else found


class TrashAnswer(NamedTuple):
    """What `gc_undelete` found, and did.

    Attributes:
        trash: what lay in the trash.
        wanted: the names of what was to come back.
        undeleted: what came back; None where nothing was wanted.
        paths: of what came back.
    """

    trash: Sequence[Trashed]
    wanted: Sequence[str] = ()
    undeleted: Undeleted | None = None
    paths: Sequence[str] = ()

    @property
    def code(self) -> ExitCode:
        """Return the code of what came back."""
        return ExitCode.OK if self.undeleted is None else self.undeleted.code


_NO_SAVES = (EntryClass.FOREIGN, EntryClass.TRASH)


def kept_saves(plan: RetentionPlan) -> int:
    """Return how many saves a plan keeps, whole or not; strange names and the trash are none."""
    return sum(d.entry.entry_class not in _NO_SAVES for d in plan.keep)


def short_of(plan: RetentionPlan) -> str:
    """Say by how much the plan frees less than `--free` asks for; "" where it frees enough."""
    wanted = plan.policy.reclaim
    if wanted is None or plan.frees >= wanted:
        return ""
    return (
        f"only {human_bytes(plan.frees)} of the {human_bytes(wanted)} of --free can be freed: "
        "the policy keeps the rest"
    )


@operation(
    examples=(
        (
            f"ftckpt gc /ckpt/run7 {RULES}",
            "the plan: what stays, what goes, and why; nothing changes",
        ),
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
    ),
    codes={
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
    },
    everyday=(
        "--keep-last",
        "--keep-every",
        "--keep-daily",
        "--keep-tag",
        "--policy",
        "--free",
        "--apply",
    ),
)
def gc(
    root: _Root,
    plan: _Planned = "",
    *,
    apply: Annotated[
        bool, switch("--apply", "Carry the plan out; without it nothing changes.")
    ] = False,
    trash_ttl: Annotated[
        Duration, option("T", "How long dropped checkpoints can be restored.")
    ] = "24h",
    purge_now: Annotated[
        bool, switch("--purge-now", "Free the space at once; this cannot be undone.")
    ] = False,
    yes: Annotated[
        bool, switch("--yes", "Confirm --purge-now, or a --trash-ttl under one day.")
    ] = False,
    most_files: int | None = None,  # of what goes, whose sizes are asked for; None: all
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[KeepFlags],
) -> RetentionAnswer:
    """Drop the checkpoints that no rule keeps: a plan, then --apply.

    Only COMMITTED entries without a known bad verdict count as survivors, and at least one survivor
    has passed a content check, remembered in the root's ledger or made now. The newest, what a kept
    delta is built on, and what is pinned, pointed to or being read stay in any case. What is
    dropped goes to the trash of the root, where gc undelete finds it until --trash-ttl is over.

    Returns:
        The plan and what was done; `on.end` is told the plan before. One that breaks a limit has
        the code for that, and is not carried out. It may be given again as `plan`.

    Raises:
        UsageError: no rule, rules that contradict each other, what cannot be undone without `yes`.
        RefusedError: with `apply`: the plan breaks a limit or is stale, or another gc is at work.
        NotFoundError: no such root, or no checkpoint in it.
        UnavailableError, DeniedError: something could not be read; nothing was touched.
    """
    ttl = _trash_seconds(trash_ttl, apply=apply, purge_now=purge_now, yes=yes)
    check = None
    if apply:
        from ftckpt.retention.apply.check import ContentCheck

        check = ContentCheck(Work.of(counter=on.counter))
    if plan:
        if any(flags.values()):
            raise UsageError(
                "a plan holds its rules and limits, and more of them were given",
                hint="make a new plan with them",
            )
        planned = _read_plan(plan) if isinstance(plan, str) else plan
        on.report(target=root)
        place = root_at(root, stores)
    else:
        policy = asked_policy(root, flags)
        on.report(target=root)
        place = root_at(root, stores)
        planned = _plan(place, policy, check, most_files, stores, on)
    _tell(planned, on)
    if check is None:
        return RetentionAnswer(plan=planned)
    planned.require()
    applied = _drop(place, planned, ttl, check, on, purge_now=purge_now)
    thinned = _thin(place, planned, stores, on, purge_now=purge_now)
    return RetentionAnswer(plan=planned, applied=applied, thinned=thinned)


def _tell(plan: RetentionPlan, on: Observer) -> None:
    """Tell of a plan as soon as it is made."""
    from ftckpt.retention.document import dump_plan

    on.report(
        plan=dump_plan(plan), keeps=kept_saves(plan), drops=len(plan.drop), frees=plan.frees,
        thins=len(plan.thin), wins=plan.wins,
    )  # fmt: skip
    on.end(plan)


@operation(
    examples=(
        ("ftckpt rm /ckpt/run7 12000", "what would go, and what speaks against it"),
        ("ftckpt rm /ckpt/run7 12000 12500 --apply", "to the trash; a day to undo it"),
        ("ftckpt gc undelete /ckpt/run7 12000", "undo it"),
    ),
    codes={
        ExitCode.OK: "planned, or carried out",
        ExitCode.USAGE: "no root; or several runs have such a step",
        ExitCode.UNSAFE: "a link stands where ftckpt's own files belong, or where an entry was",
        ExitCode.REFUSED: "pinned, pointed to, read or needed by a delta; too few good ones would "
        "be left; it has changed meanwhile, or another gc is at work; nothing was touched",
        ExitCode.NOT_FOUND: "no such root or checkpoint",
        ExitCode.UNAVAILABLE: "storage failed, or a listing is behind; nothing was concluded",
        ExitCode.DENIED: "credentials or permissions",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "the store cannot keep a gc away",
        ExitCode.PARTIAL: "some of them could not be dropped",
    },
)
def rm(
    root: _Root,
    steps: Annotated[
        Sequence[int | str] | int | str,
        argument("STEP...", "A step, a name in the root, or latest."),
    ],
    *,
    apply: Annotated[
        bool, switch("--apply", "Carry the plan out; without it nothing changes.")
    ] = False,
    min_survivors: _Survivors = None,
    no_check: _NoCheck = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> RetentionAnswer:
    """Drop checkpoints by name: a plan, then --apply.

    What is pinned, pointed to, being read, still being written or needed by a delta stays, and the
    run keeps at least two good checkpoints, one of them with a content that was checked: otherwise
    nothing is touched (8). The newest and a damaged one go if they are named. gc undelete has them
    back until gc --apply or gc purge frees the trash, a day later.

    Returns:
        The plan and what was done; `on.end` is told the plan before. One that breaks a limit has
        the code for that, and is not carried out.

    Raises:
        UsageError: several runs have such a step.
        RefusedError: with `apply`: the plan breaks a limit or is stale, or another gc is at work.
        NotFoundError: no such root or checkpoint.
        UnavailableError, DeniedError: something could not be read; nothing was touched.
    """
    from ftckpt.retention.policy.select import choose_entries

    check = None
    if apply:
        from ftckpt.retention.apply.check import ContentCheck

        check = ContentCheck(Work.of(counter=on.counter))
    on.report(target=root)
    given = [steps] if isinstance(steps, (int, str)) else steps
    runs = runs_at(root, stores)
    chosen = [one.path for step in given for one in choose_entries(runs, str(step))]
    only = tuple(dict.fromkeys(chosen))
    limits = _limits({"min_survivors": min_survivors, "no_check": no_check})
    policy = Policy(only=only, delete_corrupt=True, max_delete=DeleteLimit(len(only)), **limits)
    # As many are opened to see whether they are good as the floor needs; all others stay closed.
    policy = replace(policy, keep_last=policy.min_survivors + len(only))
    place = root_at(root, stores)
    planned = _plan(place, policy, check, None, stores, on)
    _tell(planned, on)
    if check is None:
        return RetentionAnswer(plan=planned)
    planned.require()
    return RetentionAnswer(plan=planned, applied=_drop(place, planned, None, check, on))


def _trash_seconds(trash_ttl: Duration, *, apply: bool, purge_now: bool, yes: bool) -> float:
    """Return for how long the trash is kept; what cannot be undone has to be confirmed.

    Raises:
        UsageError: it is not, or there is nothing to confirm.
    """
    ttl = seconds(trash_ttl, "--trash-ttl")
    if not apply:
        for name, given in (("--purge-now", purge_now), ("--yes", yes)):
            if given:
                raise UsageError(f"{name} is about what is dropped", hint="add --apply")
        return ttl
    final = "--purge-now" if purge_now else f"--trash-ttl {trash_ttl}" if ttl < DAY else ""
    if final and not yes:
        raise UsageError(f"{final} cannot be undone", hint="add --yes if that is meant")
    if yes and not final:
        raise UsageError("--yes is for --purge-now or a --trash-ttl of less than a day")
    return ttl


def asked_policy(root: str, flags: KeepFlags) -> Policy:
    """Return the policy that flags ask for, or that of the file that they name.

    Rules stand in one place, so that nobody reads a policy file and misses what a caller adds to
    it; limits replace those of the file, for one run.

    Args:
        root: a policy file is told by it which tier it is.
        flags: rules and limits.

    Raises:
        UsageError: no rule, rules in both places, or something that is not understood.
    """
    rules, file, tier = _rules(flags), flags.get("policy", ""), flags.get("tier", "")
    if tier and not file:
        raise UsageError("--tier names a tier of a policy file", hint="add --policy FILE")
    if file:
        if rules:
            names = " and ".join(flag(name) for name in rules)
            raise UsageError(
                f"{names} and --policy {file} contradict each other",
                hint="keep the rules in one place",
            )
        found = policy_of_file(file, root, tier or None)
    else:
        found = Policy(**rules)
    if not found.rules:
        where = f"the tier of {file} has no rule" if file else "no rule is given"
        raise UsageError(f"{where}: what is to be kept?", hint=f"ftckpt gc ROOT {RULES}")
    return replace(found, **_limits(flags))


def _rules(flags: KeepFlags) -> dict[str, Any]:
    values: Mapping[str, Any] = flags
    within, metric = flags.get("keep_within", ""), flags.get("metric", "")
    thin_after = flags.get("thin_after", "")
    given = {f"keep_{unit}": values.get(f"keep_{unit}") for unit in _NUMBERS}
    given["keep_tags"] = tuple(flags.get("keep_tag") or ())
    given["keep_within"] = seconds(within, "--keep-within") if within != "" else None
    given["metric"] = Metric.parse(metric) if metric else None
    if isinstance(thin_after, str) and thin_after:
        from ftckpt.retention.policy.file import thin_fields

        given |= thin_fields(thin_after)
    elif thin_after != "":
        given["thin_after"] = thin_after
    return {name: value for name, value in given.items() if value not in (None, ())}


def _limits(flags: KeepFlags) -> dict[str, Any]:
    most, free = flags.get("max_delete", ""), flags.get("free", "")
    if isinstance(free, str) and free:
        from ftckpt.planning.quantities import size

        free = int(size(free, "--free"))
    given = {
        "min_survivors": flags.get("min_survivors"),
        "max_delete": DeleteLimit.parse(str(most)) if most != "" else None,
        "reclaim": free or None,
        "delete_corrupt": flags.get("delete_corrupt") or None,
        "any_name": flags.get("any_name") or None,
        "check": False if flags.get("no_check") else None,
    }
    return {name: value for name, value in given.items() if value is not None}


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
    from ftckpt.retention.policy.file import parse_policy_file, tier_of

    local = root.removeprefix("file://")
    absolute = local if "://" in local else os.path.abspath(local)
    return tier_of(parse_policy_file(read_text(path).encode(), path), absolute, path, tier).policy


def _read_plan(path: str) -> RetentionPlan:
    """Return the plan of a document: what `ftckpt gc --json` printed; `-` is standard input.

    Raises:
        UsageError: it cannot be read, or is not a plan of this version, or was changed.
    """
    from ftckpt.retention.document import load_plan

    name = "standard input" if path == "-" else path
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the plan {name}: {error.strerror or error}") from error
    return load_plan(_inner(data), name)


def _inner(data: bytes) -> bytes:
    """Return the plan inside the verb's document; `data` itself where it is something else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    inner = document.get(_KEY) if isinstance(document, dict) else None
    return json.dumps(inner).encode() if isinstance(inner, dict) else data


def _plan(
    place: Place,
    policy: Policy,
    check: ContentCheck | None,
    most_files: int | None,
    stores: StoreOptions,
    on: Observer,
) -> RetentionPlan:
    """Read a root and plan; what `check` reads, where the plan is carried out, is remembered."""
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.prepare import prepare, remember

    from .thinning import WeightsAlone

    weigh = WeightsAlone(stores).weigh if policy.thins else None
    prepared = prepare(
        place, FORMATS, policy, time.time(), most_files=most_files, weigh=weigh, check=check,
        counter=on.counter,
    )  # fmt: skip
    if check is not None:
        check.asked = True
        # It saves time and nothing else: a full disk is when gc is needed most.
        with suppress(NoResourceError, DeniedError, UnavailableError):
            remember(prepared)
    return prepared.plan


def _drop(
    place: Place,
    plan: RetentionPlan,
    ttl: float | None,
    check: ContentCheck,
    on: Observer,
    *,
    purge_now: bool = False,
) -> Applied:
    """Drop what a plan drops (see `ftckpt.retention.apply`); `ttl`: None leaves the trash alone."""
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.prepare import prepare
    from ftckpt.retention.apply.run import apply

    if not check.asked and plan.drop:
        # A plan of a file: reading may take hours, and no root is locked for them.
        prepare(
            place, FORMATS, plan.policy, time.time(), known=plan, check=check, counter=on.counter
        )
    return apply(
        plan, place, FORMATS, actor=actor(), now=time.time, purge_now=purge_now, trash_ttl=ttl,
        check=check, counter=on.counter,
    )  # fmt: skip


def _thin(
    place: Place, plan: RetentionPlan, stores: StoreOptions, on: Observer, *, purge_now: bool
) -> Thinned:
    """Leave the weights of what a plan thins (see `ftckpt.retention.apply.thin`)."""
    from ftckpt.retention.apply.outcome import Thinned

    if not plan.thin:
        return Thinned()
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.thin import thin

    from .thinning import WeightsAlone

    work = Work.of(counter=on.counter)
    weights = WeightsAlone(stores, work)
    return thin(
        plan, place, FORMATS, weights.take, actor=actor(), now=time.time, purge_now=purge_now,
        differ=weights.differ, work=work,
    )  # fmt: skip


@operation(
    examples=(
        ("ftckpt gc undelete /ckpt/run7", "list what lies in the trash"),
        ("ftckpt gc undelete /ckpt/run7 12000 step-13000", "these have their names again"),
        (
            "ftckpt gc undelete /ckpt/run7 --all",
            "everything that was dropped and is not purged yet",
        ),
    ),
    codes={
        ExitCode.OK: "listed, or had back",
        ExitCode.UNSAFE: "a link stands where ftckpt's own files belong",
        ExitCode.REFUSED: "something has that name now, it is being purged, "
        "or another gc is at work",
        ExitCode.NOT_FOUND: "no such root, or nothing of that name in its trash",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "the store keeps no trash",
        ExitCode.PARTIAL: "some of them could not be had back",
    },
)
def gc_undelete(
    root: _Root,
    names: Annotated[
        Sequence[int | str] | int | str,
        argument("STEP|NAME...", "What to have back; without, the trash is listed."),
    ] = (),
    *,
    all_: Annotated[bool, switch("--all", "All of it; of several of one name the last.")] = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> TrashAnswer:
    """Restore checkpoints from the trash (without a name: list it).

    Nothing that stands in its place now is replaced. The next gc by the same rules drops it again,
    so pin what is to stay.

    Raises:
        UsageError: names and `all_`, or a name of several runs.
        NotFoundError: no such root, or nothing of that name in its trash.
        RefusedError: something has that name now, or another gc is at work.
        UnsupportedError: the store keeps no trash.
    """
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.purge import trashed, undelete

    on.report(target=root)
    given = [names] if isinstance(names, (int, str)) else names
    if given and all_:
        raise UsageError("names and --all contradict each other")
    place = root_at(root, stores)
    things = trashed(place, FORMATS)
    # What is being purged cannot be had back.
    last = {t.entry: t.id for t in things if not t.erasing}
    wanted = list(last.values()) if all_ else [str(one) for one in given]
    if not wanted:
        on.report(trash=things)
        return TrashAnswer(things)
    undeleted = undelete(place, FORMATS, wanted, actor=actor(), now=time.time)
    on.report(**document(undeleted))
    paths = [place.store.describe(thing.entry) for thing in undeleted.restored]
    return TrashAnswer(things, wanted, undeleted, paths)


@operation(
    examples=(
        ("ftckpt gc purge /ckpt/run7", "free what was dropped at least a day ago"),
        ("ftckpt gc purge /ckpt/run7 --trash-ttl 7d", "a week; gc --apply takes the same flag"),
        ("ftckpt gc purge /ckpt/run7 --trash-ttl 0s --yes", "all of it, now, for good"),
    ),
    codes={
        ExitCode.OK: "purged, also where nothing was due",
        ExitCode.UNSAFE: "a link stands where ftckpt's own files belong, or in what is purged",
        ExitCode.REFUSED: "another gc is at work, or the clock has gone back; nothing was touched",
        ExitCode.NOT_FOUND: "no such root",
        ExitCode.UNAVAILABLE: "storage failed; nothing was concluded",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "the store keeps no trash",
        ExitCode.PARTIAL: "some of it could not be removed; the next purge takes it up",
    },
)
def gc_purge(
    root: _Root,
    *,
    trash_ttl: Annotated[
        Duration, option("T", "Leave what was dropped less than so long ago.")
    ] = "24h",
    yes: Annotated[bool, switch("--yes", "Confirm a --trash-ttl under one day.")] = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> Purged:
    """Free the space of trash that is old enough.

    gc --apply does this first by itself. What a kept delta is built on by now, and what somebody
    has pinned or points to, stays; only what was dropped is removed, file by file.

    Raises:
        UsageError: a `trash_ttl` under one day without `yes`.
        RefusedError: another gc is at work, or the clock has gone back; nothing was touched.
        UnsupportedError: the store keeps no trash.
    """
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.purge import TRASH_TTL, purge

    on.report(target=root)
    ttl = seconds(trash_ttl, "--trash-ttl")
    if ttl < TRASH_TTL and not yes:
        raise UsageError(
            f"--trash-ttl {trash_ttl} cannot be undone", hint="add --yes if that is meant"
        )
    place = root_at(root, stores)
    return purge(place, FORMATS, actor=actor(), now=time.time, trash_ttl=ttl, counter=on.counter)
