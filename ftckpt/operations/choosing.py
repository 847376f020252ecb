"""Which checkpoint a run goes on from: `latest`, and what `restart` and `guard` share with it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

from ftckpt import amounts
from ftckpt.discovery import resolve
from ftckpt.errors import (
    DeniedError,
    ExitCode,
    MissingError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from ftckpt.findings import CheckLevel as CheckLevel
from ftckpt.findings import described
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import document
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .opening import STORES, Also, chosen

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Checks
    from ftckpt.discovery.conditions import Condition
    from ftckpt.discovery.roots import Root
    from ftckpt.discovery.select import LatestReport, Selection, SelectionRules, TierReport
    from ftckpt.discovery.tiers import Tier

_WHICH = "Which checkpoint is taken"


class ChoiceFlags(TypedDict, total=False):
    """Which checkpoint is taken, and which checks count."""

    require: Annotated[
        str,
        option(
            "PARTS",
            "Skip checkpoints without these parts of the training state: "
            "model,optimizer,scheduler,rng,dataloader,step,scaler.",
            under=_WHICH,
            default="",
        ),
    ]
    step_at_most: Annotated[
        int | None, option("STEP", "Take no step above this one.", min=0, under=_WHICH)
    ]
    max_fallback: Annotated[
        int | None, option("N", "Walk back over at most N checkpoints.", min=0, under=_WHICH)
    ]
    reuse: Annotated[
        amounts.Duration,
        option(
            "T", "Accept a content check of the last T if no file has changed.", under=_WHICH,
            default="",
        ),
    ]  # fmt: skip
    ledger: Annotated[
        str,
        option(
            "DIR", "Where verdicts are remembered; else .ftckpt/ in the root.", under=_WHICH,
            default="",
        ),
    ]  # fmt: skip
    stop_at_unsafe: Annotated[
        bool,
        switch(
            "--stop-at-unsafe", "Take nothing older than a hostile or ambiguous one.", under=_WHICH
        ),
    ]


@operation(
    examples=(
        ("ftckpt latest /ckpt/run7", "the newest whose names, sizes and coverage are right"),
        (
            'CKPT=$(ftckpt latest "$ROOT" --level content) || exit $?',
            "in a job script: every byte checked before the restart",
        ),
        (
            "ftckpt latest s3://run7/ckpt --wait --timeout 10m",
            "let the save in flight finish first",
        ),
        ("ftckpt latest /ckpt/run7 --step-at-most 12000", "go back to before a loss spike"),
        (
            "ftckpt latest /ckpt/run7 --level content --reuse 24h",
            "a check of the last day counts, unless a file has changed since",
        ),
        (
            "ftckpt latest /ckpt/run7 --require model,optimizer,rng --world 64",
            "walk back over those that 64 ranks cannot resume from exactly",
        ),
        ("ftckpt latest /nvme/run7 /shared/run7 s3://run7", "of several tiers, the nearest first"),
        (
            "ftckpt latest /ckpt/run7 --pointer last-known-good",
            "what ftckpt promote has verified",
        ),
        ("ftckpt latest /ckpt/gan --series G", "the newest G of a save whose D passes, too"),
        ("ftckpt latest /ckpt/run8 --create-root", "once, before the first start of a run"),
    ),
    codes={
        ExitCode.OK: "one path on stdout: the newest checkpoint that passes; none where "
        "--create-root marked a root that holds none yet",
        ExitCode.USAGE: "flags; or series that are saved together: one alone is half a checkpoint",
        ExitCode.CORRUPT: "all checkpoints are damaged; or there were some, and none is left",
        ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
        ExitCode.UNVERIFIED: "the newest has no evidence for --level content; or each lacks what "
        "--require or --world asks for; or nothing tells which is the newest",
        ExitCode.UNSAFE: "all are hostile or ambiguous; or the newest is, with --stop-at-unsafe",
        ExitCode.REFUSED: "every checkpoint is newer than --step-at-most, or was dropped",
        ExitCode.NOT_FOUND: "a root marked by --create-root, without a checkpoint: a first start",
        ExitCode.UNAVAILABLE: "storage failed; nothing older was taken instead",
        ExitCode.DENIED: "credentials or permissions; nothing older was taken instead",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "the newest is of a format that this version does not read",
        ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first "
        "start",
    },
    everyday=(
        "--level",
        "--require",
        "--step-at-most",
        "--wait",
        "--create-root",
    ),
)
def latest(
    root: Annotated[
        Sequence[str],
        argument(
            "ROOT...",
            "Directory or URL that holds the checkpoints; or several tiers, nearest first.",
        ),
    ],
    *,
    level: Annotated[
        CheckLevel | str,
        option("", "Check names, sizes and coverage; every byte; or the numbers, too."),
    ] = CheckLevel.STRUCTURE,
    world: Annotated[
        int | None, option("N", "Take only one that N ranks load as it is.", min=1)
    ] = None,
    wait: Annotated[bool, switch("--wait", "Wait for a save in flight that is newer.")] = False,
    timeout: Annotated[
        amounts.Duration, option("T", "How long --wait waits: 90s, 5m, 1h.")
    ] = "10m",
    skip_unverified: Annotated[
        bool, switch("--skip-unverified", "Walk back over those without evidence.")
    ] = False,
    weights: Annotated[
        bool, switch("--weights", "Take one that gc has thinned to its weights, too.")
    ] = False,
    pointer: Annotated[
        str, option("NAME", "Choose the target of this pointer: last-known-good (see promote).")
    ] = "",
    series: Annotated[
        str,
        option("NAME", "Choose in this series alone: G of G_N and D_N, saved together."),
    ] = "",
    allow_missing_tier: Annotated[
        bool,
        switch(
            "--allow-missing-tier",
            "Of several tiers: choose although one cannot be read and may hold a newer step.",
        ),
    ] = False,
    create_root: Annotated[
        bool,
        switch("--create-root", "Mark ROOT, once, before the first start of a run."),
    ] = False,
    also: Also = (),
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[ChoiceFlags],
) -> LatestReport:
    """Print the newest checkpoint that passes.

    Newest is the largest step in the content. Damaged, unsafe and uncommitted checkpoints are
    walked over, with the reason on stderr, and so is one that the ledger of the root knows as bad.
    A storage error stops the search with its own code, because an older checkpoint must not be
    taken while the newest could not be reached. Pointers (latest, tracker files, links) are
    compared with what is there, and never believed. A ROOT without checkpoints is a first start (9)
    only if --create-root has marked it: an unmounted filesystem is empty, too.

    Of several tiers the newest step that passes in any is taken, from the nearest that has it. A
    tier that cannot be read may hold the newest: nothing is taken then, with its code, unless
    --allow-missing-tier is given.

    Returns:
        The choice; where nothing passes, its `path` is None, and its code and sentence say why.

    Raises:
        MissingError: the root is not there.
        UsageError: it is one checkpoint, or arguments contradict each other.
        UnavailableError, DeniedError: the root could not be listed.
    """
    from ftckpt.discovery.conditions import all_of, not_at_world
    from ftckpt.discovery.select import LatestReport

    require_one_root(
        root, wait=wait, pointer=pointer, series=series, create_root=create_root,
        allow_missing_tier=allow_missing_tier, also=also,
    )  # fmt: skip
    if also:
        on.report(also=list(also))
    level = chosen(CheckLevel, level, "--level")
    on.report(target=root[0], path=None, step=None, level=level, skipped=[], pointers=[])
    patience = amounts.seconds(timeout, "--timeout")
    conditions = [condition_of(flags, on)]
    if world is not None:
        conditions.append(partial(not_at_world, world_size=world))
    rules = selection_rules(
        flags, all_of(conditions), skip_unverified=skip_unverified, weights=weights
    )
    check = checks_of(level, flags, stores, on)
    read = partial(read_root, root[0], stores, create=create_root, also=also)
    tiers: tuple[TierReport, ...] = ()
    # That a newer one is not taken can cost hours of training: also --quiet says so.
    if len(root) > 1:
        from ftckpt.discovery.tiers import select_tiers

        of_all = select_tiers(
            read_tiers(root, stores), check, rules, on.warn, allow_missing=allow_missing_tier
        )
        found, tiers = of_all.chosen, of_all.tiers
    else:
        found = _select(read, check, rules, on, pointer, series, patience if wait else None)
    taken = remembered(check, found)
    report = LatestReport(**vars(found), target=root[0], tiers=tiers, remembered=taken)
    if create_root and found.code is ExitCode.NOT_FOUND:
        report = replace(report, code=ExitCode.OK)  # what was asked for is done
    on.report(**document(report))
    warn_of(found, on)
    return report


def _select(
    read: Callable[[], Root],
    check: Checks,
    rules: SelectionRules,
    on: Observer,
    pointer: str,
    series: str,
    patience: float | None,
) -> Selection:
    """Choose of one root; `patience`: seconds to wait for a save in flight."""
    from ftckpt.discovery.select import select

    if pointer:
        from ftckpt.discovery.select import follow

        return select(follow(read(), pointer, rules), check, rules, on.warn)
    if series:
        from ftckpt.discovery.one_series import select_series

        return select_series(read(), series, check, rules, on.warn)
    if patience is not None:
        from ftckpt.discovery.tiers import select_waiting

        return select_waiting(read, check, rules, patience, on.warn, say=on.note)
    return select(read(), check, rules, on.warn)


def remembered(check: Checks, found: Selection) -> Sequence[Mapping[str, object]] | None:
    """Return the verdicts that stood for a check of what was chosen; None where none may."""
    if check.reuse is None:
        return None
    return [
        {"url": url, "verdict": one.url, "checked": one.verdict.checked, "by": one.verdict.by}
        | {"level": one.verdict.level, "evidence": one.verdict.evidence}
        for url, one in check.taken.items()
        if found.path is not None and (url + "/").startswith(found.path + "/")
    ]


def warn_of(found: Selection, on: Observer) -> None:
    """Tell what disagrees; of names that say another step, only the chosen one's.

    Some trainers number saves or epochs, so that every name of a root disagrees.
    """
    names = 0
    for one in found.findings:
        chosen = found.path is not None and found.path.endswith("/" + (one.file or ""))
        if one.kind == "step-name" and not chosen:
            names += 1
        else:
            on.warn(described(one))
    if names:
        on.note(f"note: {names} other names say another step than their content (--json)")


def condition_of(flags: ChoiceFlags, on: Observer) -> Condition:
    """Return the condition that a checkpoint has the parts that `require` names.

    Raises:
        UsageError: a part is not known.
    """
    from ftckpt.discovery.conditions import lacking, parse_parts
    from ftckpt.formats.state import state_contents

    require = flags.get("require", "")
    parts = parse_parts(require) if require else ()
    return partial(lacking, parts=parts, note=on.note, contents=state_contents)


def selection_rules(
    flags: ChoiceFlags,
    condition: Condition,
    *,
    skip_unverified: bool = False,
    weights: bool = False,
) -> SelectionRules:
    """Return the rules of a selection, with a condition on each checkpoint."""
    from ftckpt.discovery.select import SelectionRules

    steps, back = flags.get("step_at_most"), flags.get("max_fallback")
    stop = flags.get("stop_at_unsafe", False)
    return SelectionRules(steps, back, skip_unverified, stop, condition, weights)


def require_one_root(roots: Sequence[str], **given: object) -> None:
    """Refuse what is about one root where several tiers are given, and the other way round.

    Raises:
        UsageError: which flag.
    """
    several = given.pop("allow_missing_tier")
    if len(roots) == 1 and several:
        raise UsageError("--allow-missing-tier is for several tiers")
    wrong = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(roots) > 1 and wrong:
        raise UsageError(f"{wrong[0]} is about one root", hint="name the one that it is about")
    if given["pointer"] and (given["wait"] or given["create_root"]):
        raise UsageError("--pointer does not go with --wait or --create-root")
    if given["series"] and (given["wait"] or given["pointer"]):
        raise UsageError("--series does not go with --wait or --pointer")


def read_root(
    path: str, stores: StoreOptions, *, create: bool = False, also: Sequence[str] = ()
) -> Root:
    """Read a root; with `create`, one without checkpoints is made or marked first.

    `also` are further places with files of its checkpoints.

    Raises:
        MissingError: it is not there.
        UsageError: it is a checkpoint, or one step of a root; places that cannot be of one root.
    """
    from ftckpt.formats.catalog import FORMATS

    if create:
        from ftckpt.discovery.root_marker import create_root
    try:
        place = resolve.locate_root(path, stores)
    except MissingError as error:
        if not create:
            words = shlex.join(["ftckpt", "latest", path, "--create-root"])
            first = f"for a first start, once: {words}"
            error.hint = f"{error.hint}; {first}" if error.hint else first
            raise
        create_root(path, stores)
        place = resolve.locate_root(path, stores)
    if place.which:
        raise UsageError(f"the root is wanted, not one step of it: {path}")
    if also:
        if create:
            raise UsageError("--create-root marks one place, and --also names more")
        place = resolve.gathered(place, also, stores)
    try:
        root = resolve.open_root(place, FORMATS)
        if create and not root.holds_checkpoints():
            create_root(path, stores)
    except NotFoundError as error:  # it went while it was listed: no first start
        raise MissingError(error.message, hint=error.hint) from error
    return root


def read_tiers(roots: Sequence[str], stores: StoreOptions) -> list[Tier]:
    """Read several tiers of a run; one that cannot be read is told with its error.

    Raises:
        UsageError: one is a checkpoint, or one step of a root.
    """
    from ftckpt.discovery.tiers import Tier

    tiers = []
    for url in roots:
        try:
            tiers.append(Tier(url, read_root(url, stores)))
        except (DeniedError, MissingError, UnavailableError) as error:
            tiers.append(Tier(url, None, error))
    return tiers


def checks_of(level: CheckLevel, flags: ChoiceFlags, stores: StoreOptions, on: Observer) -> Checks:
    """Return the check of each checkpoint of a root.

    Args:
        level: how deep.
        flags: which remembered verdicts count.
        stores: how to reach object stores.
        on: is told of the work, and which verdicts stand for a check.

    Raises:
        UsageError: `reuse` is not a duration, or there is nothing that it could save.
    """
    from ftckpt.discovery.checks import Checks
    from ftckpt.verification import Level, VerifyOptions

    reuse = flags.get("reuse", "")
    age = None if reuse == "" else amounts.seconds(reuse, "--reuse")
    if level is CheckLevel.STRUCTURE and age is not None:
        raise UsageError("--reuse is about a check of the content: add --level content")
    options = VerifyOptions(Level(level.value), require_content=level is CheckLevel.VALUES)
    work = Work.of(counter=on.counter)
    return Checks(options, stores, age, flags.get("ledger", ""), work, on.warn)
