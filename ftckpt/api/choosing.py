"""Which checkpoint a run goes on from: `latest`, and what `restart` shares with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.select import Note, Selection, SelectionRules, select
from ftckpt.errors import (
    DeniedError,
    MissingError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from ftckpt.formats.catalog import FORMATS
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions
from ftckpt.workers import Work

from .opening import STORES, chosen, seconds

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Checks
    from ftckpt.discovery.conditions import Condition, Part
    from ftckpt.discovery.roots import Root
    from ftckpt.discovery.tiers import Tier


class ChoiceFlags(TypedDict, total=False):
    """Which checkpoint is taken, and which checks count.

    Attributes:
        require: parts of the training state that must show, such as "model,optimizer,rng".
        step_at_most: the largest step that is taken.
        max_fallback: the largest number of checkpoints that are walked over.
        reuse: seconds ("24h") for which a content check counts, if no file changed.
        ledger: directory or URL of the ledger of verdicts; "" for that of the root.
        stop_at_unsafe: take nothing older than a hostile or ambiguous one.
    """

    require: str
    step_at_most: int | None
    max_fallback: int | None
    reuse: float | str
    ledger: str
    stop_at_unsafe: bool


def quiet(_: str) -> None:
    """Take a note that nobody asked for."""


def latest(
    root: str | Sequence[str],
    *,
    verify: str = "structure",
    world_size: int | None = None,
    or_reshard: bool = False,
    wait: bool = False,
    timeout: float | str = "10m",
    skip_unverified: bool = False,
    weights: bool = False,
    pointer: str = "",
    series: str = "",
    allow_missing_tier: bool = False,
    create_root: bool = False,
    also: Sequence[str] = (),
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    note: Note = quiet,
    **flags: Unpack[ChoiceFlags],
) -> Selection:
    """Choose the newest checkpoint of a root that passes; see `ftckpt.discovery.select.select`.

    Args:
        root: directory or URL that holds the checkpoints, or several tiers, the nearest first.
        verify: how deep each is checked: `structure`, `content` or `values`.
        world_size: take only one that this number of ranks loads as it is.
        or_reshard: with `world_size`: take any.
        wait: wait for a newer save in flight.
        timeout: seconds that this takes at most, or a text such as "10m".
        skip_unverified: walk back over those without evidence.
        weights: take one that gc has thinned to its weights, too.
        pointer: take what this pointer means.
        series: choose in this series alone (see `ftckpt.discovery.one_series`).
        allow_missing_tier: choose although a tier cannot be read.
        create_root: mark the root of a run, once, before its first start.
        also: directories with more files of the root's checkpoints (see `open_checkpoint`).
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told why a newer one was not taken.
        flags: see `ChoiceFlags`.

    Raises:
        MissingError: the root is not there.
        UsageError: it is one checkpoint, or arguments contradict each other.
        UnavailableError, DeniedError: the root could not be listed.
    """
    from ftckpt.discovery.conditions import Worlds, all_of

    roots = [root] if isinstance(root, str) else list(root)
    require_one_root(
        roots, wait=wait, pointer=pointer, series=series, create_root=create_root,
        allow_missing_tier=allow_missing_tier, also=also,
    )  # fmt: skip
    if or_reshard and world_size is None:
        raise UsageError("--or-reshard needs --world-size")
    condition = all_of([condition_of(flags, note), Worlds(world_size, any_size=or_reshard)])
    rules = selection_rules(flags, condition, skip_unverified=skip_unverified, weights=weights)
    check = checks_of(
        chosen(Level, verify, "--verify"), flags.get("reuse", ""), flags.get("ledger", ""),
        stores, counter, note,
    )  # fmt: skip
    if len(roots) > 1:
        from ftckpt.discovery.tiers import select_tiers

        tiers = read_tiers(roots, stores)
        return select_tiers(tiers, check, rules, note, allow_missing=allow_missing_tier).chosen
    if pointer:
        from ftckpt.discovery.follow_pointer import follow

        return select(
            follow(read_root(roots[0], stores, also=also), pointer, rules), check, rules, note
        )
    read = partial(read_root, roots[0], stores, create=create_root, also=also)
    if series:
        from ftckpt.discovery.one_series import select_series

        return select_series(read(), series, check, rules, note)
    if wait:
        from ftckpt.discovery.wait import select_waiting

        return select_waiting(read, check, rules, seconds(timeout, "--timeout"), note)
    return select(read(), check, rules, note)


def condition_of(flags: ChoiceFlags, note: Note) -> Condition:
    """Return the condition that a checkpoint has the parts that `require` names."""
    from ftckpt.discovery.conditions import parse_parts

    require = flags.get("require", "")
    return requiring(parse_parts(require) if require else (), note)


def requiring(parts: Sequence[Part], note: Note) -> Condition:
    """Return the condition that a checkpoint has parts, as its names and its content show."""
    from ftckpt.discovery.conditions import lacking
    from ftckpt.formats.state import state_contents

    return partial(lacking, parts=parts, note=note, contents=state_contents)


def selection_rules(
    flags: ChoiceFlags,
    condition: Condition,
    *,
    skip_unverified: bool = False,
    weights: bool = False,
) -> SelectionRules:
    """Return the rules of a selection, with a condition on each checkpoint."""
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
    if create:
        from ftckpt.discovery.root_marker import create_root
    try:
        place = opening.locate_root(path, stores)
    except MissingError as error:
        if not create:
            words = shlex.join(["ftckpt", "latest", path, "--create-root"])
            first = f"for a first start, once: {words}"
            error.hint = f"{error.hint}; {first}" if error.hint else first
            raise
        create_root(path, stores)
        place = opening.locate_root(path, stores)
    if place.which:
        raise UsageError(f"the root is wanted, not one step of it: {path}")
    if also:
        if create:
            raise UsageError("--create-root marks one place, and --also names more")
        place = opening.gathered(place, also, stores)
    try:
        root = opening.open_root(place, FORMATS)
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


def checks_of(
    level: Level,
    reuse: float | str,
    ledger: str,
    stores: StoreOptions,
    counter: Counter,
    note: Note,
) -> Checks:
    """Return the check of each checkpoint of a root.

    Args:
        level: how deep.
        reuse: seconds for which a check that passed counts; "" for not at all.
        ledger: directory or URL of the ledger; "" for that of each root.
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told which verdicts stand for a check.

    Raises:
        UsageError: `reuse` is not a duration, or there is nothing that it could save.
    """
    from ftckpt.discovery.checks import Checks

    wanted = reuse != ""
    if level is Level.STRUCTURE and wanted:
        raise UsageError("--reuse is about a check of the content: add --verify content")
    options = VerifyOptions(level, require_content=level is Level.VALUES)
    age = seconds(reuse, "--reuse") if wanted else None
    return Checks(options, stores, age, ledger, Work.of(counter=counter), note)
