"""What a job of another number of ranks restarts from: `restart`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Unpack, cast

from ftckpt.amounts import size as size_in_bytes
from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import open_target
from ftckpt.discovery.select import Note, Selection, select
from ftckpt.errors import (
    ExitCode,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.formats.catalog import FORMATS
from ftckpt.observer import Observer
from ftckpt.operations.choosing import (
    CheckLevel,
    ChoiceFlags,
    checks_of,
    condition_of,
    read_root,
    selection_rules,
)
from ftckpt.operations.tables import read_rules
from ftckpt.operations.transferring import (
    LayoutFlags,
    WritingFlags,
    layout_flags,
    layout_request,
    write,
)
from ftckpt.operations.writing import prepare
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport
from ftckpt.verification import verify as check_one
from ftckpt.workers import Work

from .opening import STORES, chosen, job_count, open_checkpoint


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


class RestartFlags(ChoiceFlags, LayoutFlags, total=False):
    """Which checkpoint is taken, and for which job it is laid out."""


def restart(
    root: str,
    world: int,
    *,
    scratch: str = "",
    verify: str = "content",
    rules: str = "",
    reader: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    note: Note = lambda _: None,
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
        reader: the job loads with `ftckpt.torch.Reader`, at any number of ranks: nothing is
            resharded.
        jobs: threads of the resharding; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MiB/s".
        stores: how to reach object stores.
        counter: is told of the work.
        note: is told why a newer one was not taken, and what is made.
        flags: see `ChoiceFlags` and `ftckpt.operations.transferring.LayoutFlags`.

    Raises:
        MissingError: the root is not there.
        UsageError: the grid does not make up the world, or `scratch` is not given.
        RefusedError: the chosen checkpoint went meanwhile, or an earlier result is damaged.
        FtckptError: the resharding failed (see `reshard`).
    """
    on = _Noted(counter, note)
    choice = cast(ChoiceFlags, {k: v for k, v in flags.items() if k in ChoiceFlags.__annotations__})
    check = checks_of(chosen(CheckLevel, verify, "--verify"), choice, stores, on)
    which = selection_rules(choice, condition_of(choice, on))
    found = select(read_root(root, stores), check, which, note)
    if found.path is None:
        return Restart(None, found, {})
    path, grid = loadable(
        found.path, world, scratch=scratch, rules=rules, reader=reader, jobs=jobs,
        limit_rate=limit_rate,
        stores=stores, counter=counter, note=note, **layout_flags(flags),
    )  # fmt: skip
    return Restart(path, found, grid)


def loadable(
    path: str,
    world: int,
    *,
    scratch: str,
    rules: str = "",
    reader: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    note: Note = lambda _: None,
    **layout: Unpack[LayoutFlags],
) -> tuple[str, Mapping[str, int]]:
    """Return what a job of `world` ranks loads of a checkpoint: itself, or a resharded copy.

    Also returns the sizes of the groups of ranks that it was resharded for; none if it was not.
    The arguments are those of `restart`.

    Raises:
        UsageError: the grid does not make up the world, or `scratch` is not given.
        RefusedError: the checkpoint went meanwhile, or an earlier result is damaged.
        FtckptError: the resharding failed (see `reshard`).
    """
    from ftckpt.discovery.conditions import grid_of, not_at_grid
    from ftckpt.transfer.content import Content

    given = {"tp": layout.get("tp"), "pp": layout.get("pp"), "dp": layout.get("dp")}
    sizes = {name: size for name, size in given.items() if size is not None}
    table = read_rules(rules)
    try:
        checkpoint = open_checkpoint(path, stores, rules=table)
        reason = not_at_grid(checkpoint, world, sizes)
        if not reason:
            return path, {}
        if reader:
            note(by_reader(path, reason))
            return path, {}
        grid = {} if layout.get("like") else grid_of(checkpoint.topology, world, sizes)
        shown = " ".join(f"--{name} {size}" for name, size in grid.items())
        if not scratch:
            hint = f"--scratch DIR: it is resharded there ({shown})"
            raise UsageError(f"{path} {reason}", hint=hint)
        place = scratch_place(checkpoint, world, grid, layout, scratch, stores)
        note(f"{path} {reason}: resharding to {place} ({shown})")
        if made_before(place, stores, counter) is None:
            layout |= cast(LayoutFlags, {n: grid[n] for n in ("tp", "pp", "dp") if n in grid})
            request = layout_request(layout, table, stores)
            laid_out = prepare(
                checkpoint, Content.of(checkpoint), checkpoint.source_format, request, place,
                jobs=job_count(jobs), stores=stores,
            )  # fmt: skip
            write(laid_out, WritingFlags(limit_rate=limit_rate), counter)
    except NotFoundError as error:  # 9 would start the run from scratch
        raise RefusedError(f"{path} went while it was read: {error.message}") from error
    return place, grid


class _Noted(Observer):
    def __init__(self, counter: Counter, note: Note) -> None:
        super().__init__(counter)
        self.note = self.warn = note  # type: ignore[assignment,method-assign]


def by_reader(path: str, reason: str) -> str:
    """Return the sentence that says why a checkpoint of other ranks is not resharded."""
    return f"{path} {reason}; the job's Reader loads it as it is, and nothing is resharded"


def scratch_place(
    checkpoint: Checkpoint,
    world: int,
    grid: Mapping[str, int],
    layout: Mapping[str, object],
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
        layout: what else is asked of the layout, as `LayoutFlags`.
        scratch: the folder or URL around all of them.
        stores: how to reach object stores.

    Raises:
        DeniedError, NoResourceError: the folder cannot be made.
    """
    import xxhash

    from ftckpt.discovery.ledger import identity_of_files
    from ftckpt.storage import open_store
    from ftckpt.storage.local.oserror import translate

    source = checkpoint.source
    try:
        identity = identity_of_files(source)
    except UnsupportedError:  # a store without ETags
        identity = repr(sorted((n, e.size, e.mtime) for n, e in source.entries.items()))
    asked = sorted((name, _plain(value)) for name, value in layout.items() if value)
    told = [identity, source.url, world, sorted(grid.items()), asked]
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


def _plain(value: object) -> object:
    """Return one form of what can be said in two: a size, an example of the layout."""
    if isinstance(value, Checkpoint):
        return value.source.url
    if isinstance(value, str):
        with suppress(UsageError):
            return size_in_bytes(value)
    return value


def made_before(destination: str, stores: StoreOptions, counter: Counter) -> VerifyReport | None:
    """Return the check of a result that an earlier run made; None where there is none.

    Raises:
        FtckptError: it is damaged.
    """
    from ftckpt.own_files import MANIFEST

    try:
        target = open_target(destination, FORMATS, stores)
    except FtckptError:
        return None  # absent or unfinished: the transfer says what stands in its way
    if target.part is None:
        return None
    made = target.open()
    if MANIFEST not in made.source.entries:
        return None
    report = check_one(made, VerifyOptions(Level.CONTENT), work=Work(counter=counter))
    if report.code is not ExitCode.OK:
        raise RefusedError(
            f"{destination} was made by an earlier run and does not pass: {report.message}",
            hint=f"remove {destination} and run the same command again",
        )
    return report
