"""What keeps and drops the checkpoints of a root: `gc`, `gc undelete`, `gc purge`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from ftckpt.amounts import DAY
from ftckpt.errors import DeniedError, NoResourceError, UnavailableError, UsageError
from ftckpt.formats.catalog import FORMATS
from ftckpt.operations.tables import read_text
from ftckpt.progress import NULL, Counter
from ftckpt.retention.policy import DeleteLimit, Metric, Policy, flag
from ftckpt.retention.records.who import actor
from ftckpt.storage import StoreOptions

from .opening import STORES, root_at, seconds

if TYPE_CHECKING:
    from ftckpt.discovery.resolve import Place
    from ftckpt.retention.apply.outcome import Applied, Purged, Thinned, Undeleted
    from ftckpt.retention.apply.prove import ContentCheck
    from ftckpt.retention.policy.plan import RetentionPlan
    from ftckpt.retention.trash import Trashed

RULES = "--keep-last 3 --keep-every 1000"  # of the examples

# What `ftckpt gc --json` prints holds the plan under this key.
_KEY = "plan"
_NUMBERS = ("last", "every", "hourly", "daily", "weekly", "monthly", "best")


class KeepFlags(TypedDict, total=False):
    """Which checkpoints stay, and how much may go at once; None or "" where not given.

    Attributes:
        keep_last, keep_every, keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_best: see
            `ftckpt.retention.policy.Policy`.
        keep_within: seconds back from the newest, or a text such as "36h".
        metric: `min:NAME` or `max:NAME`: what `keep_best` compares.
        keep_tag: tags.
        thin_after: milestones older than this keep their weights alone: seconds before the newest,
            a text such as "30d", or the number of the newest that stay whole as a text: "10".
        policy: a retention.toml with the rules instead.
        tier: which tier of it; "" for the one that matches the root.
        min_survivors: good ones that each run must keep.
        max_delete: most to drop at once: 20 or "50%".
        free: bytes, or a text such as "20TB": drop the oldest until that is freed.
        delete_corrupt: let damaged ones go.
        any_name: let those go, too, whose names no trainer gives.
        no_check: do not read the content of a survivor where none is known to be good.
    """

    keep_last: int | None
    keep_every: int | None
    keep_hourly: int | None
    keep_daily: int | None
    keep_weekly: int | None
    keep_monthly: int | None
    keep_within: float | str
    keep_best: int | None
    metric: str
    keep_tag: Sequence[str] | None
    thin_after: float | str
    policy: str
    tier: str
    min_survivors: int | None
    max_delete: int | str
    free: int | str
    delete_corrupt: bool
    any_name: bool
    no_check: bool


class RetentionAnswer(NamedTuple):
    """What `gc` found, and did.

    Attributes:
        plan: what becomes of each checkpoint, and why; `plan.broken` are limits that it breaks.
        applied: what was dropped; None where the plan was not carried out.
        thinned: what keeps its weights alone; None where the plan was not carried out.
    """

    plan: RetentionPlan
    applied: Applied | None
    thinned: Thinned | None = None


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


def gc(
    root: str,
    plan: RetentionPlan | str = "",
    *,
    apply: bool = False,
    trash_ttl: float | str = "24h",
    purge_now: bool = False,
    yes: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[KeepFlags],
) -> RetentionAnswer:
    """Plan which checkpoints no rule keeps; with `apply`, drop them to the trash of the root.

    A plan that breaks a limit is returned, and is not carried out.

    Args:
        root: directory or URL that holds the checkpoints.
        plan: carry out exactly this one: as `gc` returned it, or a file of `ftckpt gc --json`.
        apply: carry the plan out; without it nothing changes.
        trash_ttl: seconds, or a text: for how long what is dropped can be restored.
        purge_now: free the space at once.
        yes: confirm `purge_now`, or a `trash_ttl` under one day.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `KeepFlags`.

    Raises:
        UsageError: no rule, rules that contradict each other, what cannot be undone without `yes`.
        RefusedError: with `apply`: the plan breaks a limit or is stale, or another gc is at work.
        NotFoundError: no such root, or no checkpoint in it.
        UnavailableError, DeniedError: something could not be read; nothing was touched.
    """
    ttl = trash_seconds(trash_ttl, apply=apply, purge_now=purge_now, yes=yes)
    check = survivor_check(counter) if apply else None
    if plan:
        require_no_policy(flags)
        planned = read_plan(plan) if isinstance(plan, str) else plan
        place = root_at(root, stores)
    else:
        policy = asked_policy(root, flags)
        place = root_at(root, stores)
        planned = make_plan(place, policy, check=check, stores=stores, counter=counter)
    if not apply:
        return RetentionAnswer(planned, None)
    planned.require()
    applied = carry_out(place, planned, ttl, check, purge_now=purge_now, counter=counter)
    thinned = thin_out(place, planned, purge_now=purge_now, stores=stores, counter=counter)
    return RetentionAnswer(planned, applied, thinned)


def trash_seconds(trash_ttl: float | str, *, apply: bool, purge_now: bool, yes: bool) -> float:
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


def require_no_policy(flags: KeepFlags) -> None:
    """Refuse rules and limits beside a plan, which holds its own.

    Raises:
        UsageError: there are some.
    """
    if any(flags.values()):
        raise UsageError(
            "a plan holds its rules and limits, and more of them were given",
            hint="make a new plan with them",
        )


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


def read_plan(path: str) -> RetentionPlan:
    """Return the plan of a document: what `ftckpt gc --json` printed, or its `plan` alone.

    Args:
        path: of the file; `-` is standard input.

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


def make_plan(
    place: Place,
    policy: Policy,
    *,
    check: ContentCheck | None,
    most_files: int | None = None,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> RetentionPlan:
    """Read a root and plan.

    Args:
        place: the root.
        policy: what to keep.
        check: reads survivors where none is known to be good, if the plan is to be carried out, and
            what was checked is remembered. None for a plan that is only looked at.
        most_files: files of what goes whose sizes are asked for; None for all.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        NotFoundError: no checkpoint in it.
        UnavailableError, DeniedError: something could not be read.
    """
    from ftckpt.retention.apply.prepare import prepare, remember

    weigh = None
    if policy.thins:
        from .thinning import WeightsAlone

        weigh = WeightsAlone(stores).weigh
    prepared = prepare(
        place, FORMATS, policy, time.time(), most_files=most_files, weigh=weigh, check=check,
        counter=counter,
    )  # fmt: skip
    if check is not None:
        check.asked = True
        # It saves time and nothing else: a full disk is when gc is needed most.
        with suppress(NoResourceError, DeniedError, UnavailableError):
            remember(prepared)
    return prepared.plan


def survivor_check(counter: Counter = NULL) -> ContentCheck:
    """Return what reads the content of survivors (see `ftckpt.retention.apply.prove`)."""
    from ftckpt.retention.apply.prove import ContentCheck
    from ftckpt.workers import Work

    return ContentCheck(Work.of(counter=counter))


def carry_out(
    place: Place,
    plan: RetentionPlan,
    ttl: float,
    check: ContentCheck | None,
    *,
    purge_now: bool = False,
    counter: Counter = NULL,
) -> Applied:
    """Drop what a plan drops (see `ftckpt.retention.apply`)."""
    from ftckpt.retention.apply.prepare import prepare
    from ftckpt.retention.apply.run import apply

    if check is not None and not check.asked and plan.drop:
        # A plan of a file: reading may take hours, and no root is locked for them.
        prepare(place, FORMATS, plan.policy, time.time(), known=plan, check=check, counter=counter)
    return apply(
        plan, place, FORMATS, actor=actor(), now=time.time, purge_now=purge_now, trash_ttl=ttl,
        check=check, counter=counter,
    )  # fmt: skip


def thin_out(
    place: Place,
    plan: RetentionPlan,
    *,
    purge_now: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> Thinned:
    """Leave the weights of what a plan thins (see `ftckpt.retention.apply.thin`)."""
    from ftckpt.retention.apply.outcome import Thinned

    if not plan.thin:
        return Thinned()
    from ftckpt.retention.apply.thin import thin
    from ftckpt.workers import Work

    from .thinning import WeightsAlone

    work = Work.of(counter=counter)
    weights = WeightsAlone(stores, work)
    return thin(
        plan, place, FORMATS, weights.take, actor=actor(), now=time.time, purge_now=purge_now,
        differ=weights.differ, work=work,
    )  # fmt: skip


def gc_undelete(
    root: str,
    names: Sequence[int | str] | int | str = (),
    *,
    all_: bool = False,
    stores: StoreOptions = STORES,
) -> TrashAnswer:
    """Restore checkpoints from the trash; without a name, list it.

    Args:
        root: directory or URL that holds the checkpoints.
        names: steps or names of what is to come back; one may be given as it is.
        all_: all of it, of several of one name the last (the flag is `--all`).
        stores: how to reach object stores.

    Raises:
        UsageError: names and `all_`, or a name of several runs.
        NotFoundError: no such root, or nothing of that name in its trash.
        RefusedError: something has that name now, or another gc is at work.
        UnsupportedError: the store keeps no trash.
    """
    from ftckpt.retention.apply.undelete import trashed, undelete

    given = [names] if isinstance(names, (int, str)) else names
    if given and all_:
        raise UsageError("names and --all contradict each other")
    place = root_at(root, stores)
    things = trashed(place, FORMATS)
    # What is being purged cannot be had back.
    last = {t.entry: t.id for t in things if not t.erasing}
    wanted = list(last.values()) if all_ else [str(one) for one in given]
    if not wanted:
        return TrashAnswer(things)
    undeleted = undelete(place, FORMATS, wanted, actor=actor(), now=time.time)
    paths = [place.store.describe(thing.entry) for thing in undeleted.restored]
    return TrashAnswer(things, wanted, undeleted, paths)


def gc_purge(
    root: str,
    *,
    trash_ttl: float | str = "24h",
    yes: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> Purged:
    """Free the space of what has been in the trash for long enough.

    Args:
        root: directory or URL that holds the checkpoints.
        trash_ttl: seconds, or a text: leave what was dropped later than that.
        yes: confirm a `trash_ttl` under one day.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        UsageError: a `trash_ttl` under one day without `yes`.
        RefusedError: another gc is at work, or the clock has gone back; nothing was touched.
        UnsupportedError: the store keeps no trash.
    """
    from ftckpt.retention.apply.purge import TRASH_TTL, purge

    ttl = seconds(trash_ttl, "--trash-ttl")
    if ttl < TRASH_TTL and not yes:
        raise UsageError(
            f"--trash-ttl {trash_ttl} cannot be undone", hint="add --yes if that is meant"
        )
    place = root_at(root, stores)
    return purge(place, FORMATS, actor=actor(), now=time.time, trash_ttl=ttl, counter=counter)
