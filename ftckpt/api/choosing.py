"""Which checkpoint a run goes on from: `latest`, `restart`, `promote`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack, cast

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery import resolve as opening
from ftckpt.discovery.select import Note, Selection, SelectionRules, select
from ftckpt.errors import (
    DeniedError,
    ExitCode,
    FtckptError,
    MissingError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from ftckpt.formats.catalog import FORMATS
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport
from ftckpt.verification import verify as check_one

from .opening import STORES, chosen, job_count, open_checkpoint, rate_limit, seconds
from .transferring import LayoutFlags

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Checks
    from ftckpt.discovery.conditions import Condition
    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.discovery.roots import Child, Root
    from ftckpt.discovery.tiers import Tier


class ChoiceFlags(TypedDict, total=False):
    """Which checkpoint is taken, and which checks count.

    Attributes:
        require: parts of the training state that must show, such as "model,optimizer,rng".
        step_at_most: the largest step that is taken.
        max_fallback: the largest number of checkpoints that are walked over.
        reuse: seconds ("24h") for which a content check counts, if no file changed.
        receipts: where receipts are kept; "" for beside each checkpoint.
    """

    require: str
    step_at_most: int | None
    max_fallback: int | None
    reuse: float | str
    receipts: str


class Restart(NamedTuple):
    """What a job restarts from.

    Attributes:
        path: what it loads; None where nothing passes.
        selection: the checkpoint that was chosen, or why none.
        grid: sizes of the groups of ranks that it was resharded for; empty where it was not.
    """

    path: str | None
    selection: Selection
    grid: Mapping[str, int]


class Promotion(NamedTuple):
    """What pointers say.

    Attributes:
        url: the checkpoint that they point to.
        step: its step; None where nothing shows it.
        moves: each pointer, with what it said and says; moved where it `changes`.
        reports: of the checks of the checkpoint's parts; none for a dry run.
        dry_run: whether nothing was moved.
    """

    url: str
    step: int | None
    moves: Sequence[PointerMove]
    reports: Sequence[VerifyReport]
    dry_run: bool


def _quiet(_: str) -> None: ...


def latest(
    root: str | Sequence[str],
    *,
    verify: str = "structure",
    world_size: int | None = None,
    or_reshard: bool = False,
    wait: bool = False,
    timeout: float | str = "10m",
    skip_unverified: bool = False,
    skip_unsafe: bool = False,
    pointer: str = "",
    allow_missing_tier: bool = False,
    create_root: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    note: Note = _quiet,
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
        skip_unsafe: walk back over hostile ones.
        pointer: take what this pointer means.
        allow_missing_tier: choose although a tier cannot be read.
        create_root: mark the root of a run, once, before its first start.
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
    from ftckpt.discovery.followed import follow
    from ftckpt.discovery.wait import select_waiting

    roots = [root] if isinstance(root, str) else list(root)
    require_one_root(
        roots, wait=wait, pointer=pointer, create_root=create_root,
        allow_missing_tier=allow_missing_tier,
    )  # fmt: skip
    if or_reshard and world_size is None:
        raise UsageError("--or-reshard needs --world-size")
    condition = all_of([_lacking(flags, note), Worlds(world_size, any_size=or_reshard)])
    rules = _rules(flags, condition, skip_unverified=skip_unverified, skip_unsafe=skip_unsafe)
    check = checks_of(
        chosen(Level, verify, "--verify"), flags.get("reuse", ""), flags.get("receipts", ""),
        stores, counter, note,
    )  # fmt: skip
    if len(roots) > 1:
        from ftckpt.discovery.tiers import select_tiers

        tiers = read_tiers(roots, stores)
        return select_tiers(tiers, check, rules, note, allow_missing=allow_missing_tier).chosen
    if pointer:
        return select(follow(read_root(roots[0], stores), pointer, rules), check, rules, note)
    read = partial(read_root, roots[0], stores, create=create_root)
    if wait:
        return select_waiting(read, check, rules, seconds(timeout, "--timeout"), note)
    return select(read(), check, rules, note)


def _lacking(flags: ChoiceFlags, note: Note) -> Condition:
    from ftckpt.discovery.conditions import lacking, parse_parts

    require = flags.get("require", "")
    return partial(lacking, parts=parse_parts(require) if require else (), note=note)


def _rules(
    flags: ChoiceFlags,
    condition: Condition,
    *,
    skip_unverified: bool = False,
    skip_unsafe: bool = False,
) -> SelectionRules:
    steps, back = flags.get("step_at_most"), flags.get("max_fallback")
    return SelectionRules(steps, back, skip_unverified, skip_unsafe, condition)


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


def read_root(path: str, stores: StoreOptions, *, create: bool = False) -> Root:
    """Read a root; with `create`, one without checkpoints is made or marked first.

    Raises:
        MissingError: it is not there.
        UsageError: it is a checkpoint, or one step of a root.
    """
    from ftckpt.discovery import root_marker

    try:
        place = opening.locate_root(path, stores)
    except MissingError as error:
        if not create:
            words = shlex.join(["ftckpt", "latest", path, "--create-root"])
            first = f"for a first start, once: {words}"
            error.hint = f"{error.hint}; {first}" if error.hint else first
            raise
        root_marker.create_root(path, stores)
        place = opening.locate_root(path, stores)
    if place.which:
        raise UsageError(f"the root is wanted, not one step of it: {path}")
    try:
        root = opening.open_root(place, FORMATS)
        if create and not root.holds_checkpoints():
            root_marker.create_root(path, stores)
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
    receipts: str,
    stores: StoreOptions,
    counter: Counter,
    note: Note,
) -> Checks:
    """Return the check of each checkpoint of a root.

    Args:
        level: how deep.
        reuse: seconds for which a check that passed counts; "" for not at all.
        receipts: folder of receipts; "" for beside each checkpoint.
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told which receipts are taken or ignored.

    Raises:
        UsageError: `reuse` is not a duration, or there is nothing that it could save.
    """
    from ftckpt.discovery.checks import Checks, Reuse

    wanted = reuse != ""
    if level is Level.STRUCTURE and (wanted or receipts):
        raise UsageError("--reuse is about a check of the content: add --verify content")
    if receipts and not wanted:
        raise UsageError("--receipts needs --reuse")
    options = VerifyOptions(level, jobs=job_count(0), require_content=level is Level.VALUES)
    age = Reuse(seconds(reuse, "--reuse"), receipts) if wanted else None
    return Checks(options, stores, age, counter, note)


class RestartFlags(ChoiceFlags, LayoutFlags, total=False):
    """Which checkpoint is taken, and for which job it is laid out."""


def restart(
    root: str,
    world: int,
    *,
    scratch: str = "",
    verify: str = "content",
    rules: str = "",
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    note: Note = _quiet,
    **flags: Unpack[RestartFlags],
) -> Restart:
    """Find a checkpoint that a job of `world` ranks loads: choose, check, reshard if needed.

    What an earlier run has made of the same files is checked and taken.

    Args:
        root: directory or URL that holds the checkpoints.
        world: ranks of the job.
        scratch: where a checkpoint is resharded to, if it must be.
        verify: how deep each checkpoint is checked.
        rules: a TOML file, or a family's name, of how tensors are divided over ranks.
        jobs: threads of the resharding; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MB/s".
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told why a newer one was not taken, and what is made.
        flags: see `ChoiceFlags` and `ftckpt.api.transferring.LayoutFlags`.

    Raises:
        MissingError: the root is not there.
        UsageError: the grid does not make up the world, or `scratch` is not given.
        RefusedError: the chosen checkpoint went meanwhile, or an earlier result is damaged.
        FtckptError: the resharding failed (see `reshard`).
    """
    from ftckpt.discovery.conditions import grid_of, not_at_grid
    from ftckpt.transfer.content import Content

    from .tables import read_rules
    from .transferring import WritingFlags, layout_request, write
    from .writing import prepare

    check = checks_of(
        chosen(Level, verify, "--verify"), flags.get("reuse", ""), flags.get("receipts", ""),
        stores, counter, note,
    )  # fmt: skip
    found = select(read_root(root, stores), check, _rules(flags, _lacking(flags, note)), note)
    if found.path is None:
        return Restart(None, found, {})
    keys = LayoutFlags.__annotations__
    layout = cast(LayoutFlags, {name: value for name, value in flags.items() if name in keys})
    given = {"tp": layout.get("tp"), "pp": layout.get("pp"), "dp": layout.get("dp")}
    sizes = {name: size for name, size in given.items() if size is not None}
    table = read_rules(rules)
    try:
        checkpoint = open_checkpoint(found.path, stores, rules=table)
        reason = not_at_grid(checkpoint, world, sizes)
        if not reason:
            return Restart(found.path, found, {})
        grid = {} if layout.get("like") else grid_of(checkpoint.topology, world, sizes)
        shown = " ".join(f"--{name} {size}" for name, size in grid.items())
        if not scratch:
            hint = f"--scratch DIR: it is resharded there ({shown})"
            raise UsageError(f"{found.path} {reason}", hint=hint)
        place = scratch_place(checkpoint, world, grid, repr(layout), scratch, stores)
        note(f"{found.path} {reason}: resharding to {place} ({shown})")
        if made_before(place, stores, counter) is None:
            layout |= cast(LayoutFlags, {n: grid[n] for n in ("tp", "pp", "dp") if n in grid})
            request = layout_request(layout, table, stores)
            laid_out = prepare(
                checkpoint, Content.of(checkpoint), checkpoint.source_format, request, place,
                jobs=job_count(jobs), stores=stores,
            )  # fmt: skip
            write(laid_out, WritingFlags(limit_rate=limit_rate), counter)
    except NotFoundError as error:  # 9 would start the run from scratch
        raise RefusedError(f"{found.path} went while it was read: {error.message}") from error
    return Restart(place, found, grid)


def scratch_place(
    checkpoint: Checkpoint,
    world: int,
    grid: Mapping[str, int],
    layout: str,
    scratch: str,
    stores: StoreOptions,
) -> str:
    """Return where the resharded checkpoint goes: one folder for each source as it is, and grid.

    The name of the checkpoint stays, because some trainers read the step from it. A local folder
    around it is made.

    Args:
        checkpoint: the source.
        world: ranks of the job.
        grid: sizes of the groups of ranks.
        layout: what else is asked of the layout.
        scratch: the folder or URL around all of them.
        stores: how to reach object stores.

    Raises:
        DeniedError, NoResourceError: the folder cannot be made.
    """
    import xxhash

    from ftckpt.storage import open_store
    from ftckpt.storage.local.oserror import translate
    from ftckpt.verification.receipts import fingerprint

    source = checkpoint.source
    try:
        identity = fingerprint(source)
    except UnsupportedError:  # a store without ETags
        identity = repr(sorted((n, e.size, e.mtime) for n, e in source.entries.items()))
    told = [identity, source.url, world, sorted(grid.items()), layout]
    digest = xxhash.xxh3_64_hexdigest(repr(told).encode("utf-8", "surrogateescape"))
    folder = f"world{world}-{digest[:8]}"
    place = f"{scratch.rstrip('/') or '/'}/{folder}"
    store = open_store(place, stores)
    local = store.local_path()
    if local is not None:
        try:
            os.makedirs(local, exist_ok=True)
        except OSError as error:
            raise translate(error, local, "make", place) from error
    return f"{place}/{source.name}"


def made_before(destination: str, stores: StoreOptions, counter: Counter) -> VerifyReport | None:
    """Return the check of a result that an earlier run made; None where there is none.

    Raises:
        FtckptError: it is damaged.
    """
    from ftckpt.own_files import MANIFEST

    try:
        target = opening.open_target(destination, FORMATS, stores)
    except FtckptError:
        return None  # absent or unfinished: the transfer says what stands in its way
    if target.part is None:
        return None
    made = target.open()
    if MANIFEST not in made.source.entries:
        return None
    report = check_one(made, VerifyOptions(Level.CONTENT), counter=counter)
    if report.code is not ExitCode.OK:
        raise RefusedError(
            f"{destination} was made by an earlier run and does not pass: {report.message}",
            hint=f"remove {destination} and run the same command again",
        )
    return report


def checkpoint_of_root(path: str, stores: StoreOptions) -> tuple[Root, Child]:
    """Return the root around a checkpoint, and the checkpoint as the root has it.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
    """
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.promotion import find_in_root
    from ftckpt.storage.remotes import split

    target = opening.open_target(path, FORMATS, stores)
    place = target.place
    if target.root is not None:
        if not place.which:
            raise UsageError(
                f"{path} is a root, not one checkpoint",
                hint=f"{place.url.rstrip('/')}@latest is its newest; ftckpt inspect lists them",
            )
        return target.root, choose_child(target.root, place.which)
    local = place.store.local_path(place.entry.path)
    whole = place.url.rstrip("/") if local is None else os.path.realpath(local)
    parent, name = split(whole)
    around = opening.locate(parent, stores)
    root = opening.open_root(around, FORMATS)
    if root.base:
        raise UsageError(f"{path} does not lie in a root", hint="name ROOT@STEP")
    return root, find_in_root(root, name)


def promote(
    checkpoint: str,
    *,
    pointer: Sequence[str] = (),
    verify: str = "content",
    backwards: bool = False,
    dry_run: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    found: Callable[[str, str], None] = lambda *_: None,
) -> Promotion:
    """Point a root at a checkpoint, after verifying it.

    A checkpoint that does not pass moves no pointer: the last of the `reports` says why, and no
    move is told.

    Args:
        checkpoint: a checkpoint, `ROOT@STEP` or `ROOT@latest`.
        pointer: `latest`, a tracker, `last-known-good`, or a link that is there; none for all.
        verify: how deep it is checked: `structure`, `content` or `values`.
        backwards: move a pointer that says a later step.
        dry_run: say what would be moved; read and write no more.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MB/s".
        stores: how to reach object stores.
        counter: is told of the work.
        found: is told the checkpoint's URL and format, before anything is read.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
        RefusedError: a pointer says a later step, or was changed meanwhile.
        DeniedError: the root cannot be written.
    """
    from ftckpt.discovery.open_part import open_child
    from ftckpt.discovery.promotion import find_in_root, held, move, moves
    from ftckpt.replication.sync.lock import leased
    from ftckpt.retention.records.who import actor

    depth = chosen(Level, verify, "--verify")
    root, child = checkpoint_of_root(checkpoint, stores)
    name, url = child.candidate.path, root.url_of(child.candidate)
    step = child.candidate.step
    found(url, child.parts[0].format.name)
    # Before terabytes are read: by the name, which the content has to confirm.
    wanted = moves(root, name, step, tuple(pointer), backwards=backwards)
    if dry_run:
        return Promotion(url, step, wanted, (), dry_run=True)
    options = VerifyOptions(depth, jobs=job_count(jobs), limiter=rate_limit(limit_rate))
    reports = []
    with leased(root, name, actor()):
        opened = open_child(root, child)
        for one in opened:
            reports.append(check_one(one, options, counter=counter))
            if reports[-1].code is not ExitCode.OK:
                return Promotion(url, step, (), reports, dry_run=False)
        step = opened[0].step if opened[0].step is not None else step
        with held(root, actor()) as now:
            find_in_root(now, name)
            wanted = moves(now, name, step, tuple(pointer), backwards=backwards)
            for to_move in wanted:
                if to_move.changes:
                    fields = {"entry": name, "step": step, "verified": depth.value}
                    move(now, to_move, actor=actor(), now=time.time(), fields=fields)
    return Promotion(url, step, wanted, reports, dry_run=False)
