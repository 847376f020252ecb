"""What a job of another number of ranks restarts from: `restart`, which `guard` shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack, cast

from ftckpt import amounts
from ftckpt.errors import (
    ExitCode,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.findings import CheckLevel
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import UNSAID, document
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .choosing import (
    ChoiceFlags,
    checks_of,
    condition_of,
    read_root,
    remembered,
    selection_rules,
    warn_of,
)
from .definition import argument, operation, option, switch
from .many import ALONE, Session
from .opening import STORES, Jobs, Memory, Rate, chosen, opened
from .tables import RulesFile, read_rules
from .transferring import LayoutFlags, carry_out, layout_flags, layout_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.discovery.select import Selection
    from ftckpt.findings import Finding
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyOptions, VerifyReport
    from ftckpt.verification.seen import SeenBytes

    SourceVerifier = Callable[[Checkpoint, Content, Work, SeenBytes | None], VerifyReport] | None


class RestartFlags(ChoiceFlags, LayoutFlags, total=False):
    """Which checkpoint is taken, and for which job it is laid out."""


class Loadable(NamedTuple):
    """What a job loads of a checkpoint.

    Attributes:
        path: the checkpoint itself, or a resharded copy.
        grid: sizes of the groups of ranks that it was resharded for; empty where it was not.
        made: what was written now; None where nothing was.
    """

    path: str
    grid: Mapping[str, int] = {}
    made: TransferReport | None = None


@dataclass(frozen=True, kw_only=True)
class RestartReport:
    """What a job restarts from.

    Attributes:
        target: the root.
        path: what it loads; None where nothing passes.
        step: of it.
        format: of it.
        grid: see `Loadable`.
        selection: the checkpoint that was chosen, or why none.
        made: see `Loadable`.
    """

    target: str
    path: str | None
    step: int | None
    format: str | None
    grid: Mapping[str, int]
    selection: Selection = field(metadata=UNSAID)
    made: TransferReport | None = field(default=None, metadata=UNSAID)

    @property
    def code(self) -> ExitCode:
        """OK, or why nothing was chosen."""
        return self.selection.code


@operation(
    examples=(
        (
            'CKPT=$(ftckpt restart "$ROOT" --world 64 --scratch /nvme/restart) || exit $?',
            "in a job script: the newest good checkpoint, resharded if it was written by others",
        ),
        (
            "ftckpt restart /ckpt/run7 --world 16 --tp 4 --pp 1 --scratch /nvme/restart",
            "on another grid",
        ),
        (
            'CKPT=$(ftckpt restart "$ROOT" --world 64 --reader) || exit $?',
            "the job loads with ftckpt.torch.Reader, which needs no files for its ranks",
        ),
        (
            "ftckpt restart s3://run7/ckpt --world 64 --scratch /nvme/restart --reuse 24h",
            "what was checked in the last day is not read again, unless a file has changed",
        ),
    ),
    codes={
        ExitCode.OK: "one path on stdout: a checkpoint that N ranks load",
        ExitCode.CORRUPT: "all checkpoints are damaged or gone, or the proof of the resharding "
        "failed",
        ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
        ExitCode.UNVERIFIED: "the newest has no evidence for its content, or each lacks a part",
        ExitCode.UNSAFE: "the newest is hostile or ambiguous",
        ExitCode.REFUSED: "another run is resharding it now, or it went meanwhile",
        ExitCode.NOT_FOUND: "a root made by `latest --create-root` without a checkpoint: a first "
        "start",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "the scratch place is full; run it again to go on",
        ExitCode.UNSUPPORTED: "a format that is not read, or cannot be resharded",
        ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first "
        "start",
    },
    everyday=("--world", "--scratch", "--tp", "--pp", "--level", "--reader"),
)
def restart(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    world: Annotated[int, option("N", "Ranks of the job to restart.", min=1)],
    *,
    scratch: Annotated[
        str, option("DIR", "Where a checkpoint is resharded to, if it must be.")
    ] = "",
    level: Annotated[
        CheckLevel | str, option("", "How deep each checkpoint is checked.")
    ] = CheckLevel.CONTENT,
    rules: RulesFile = "",
    reader: Annotated[
        bool, switch("--reader", "The job loads with ftckpt.torch.Reader: reshard nothing.")
    ] = False,
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[RestartFlags],
) -> RestartReport:
    """Print a checkpoint that N ranks load: find, check, reshard.

    The newest that passes is chosen as `latest` does it. If N ranks load it as it is, its path is
    printed; DCP and safetensors load at any N. Otherwise it is resharded below --scratch, proven,
    and the path of the result is printed. tp and pp stay unless flags say otherwise, dp changes.
    Killed and run again, it goes on; what an earlier run has made of the same files is checked and
    taken. A job that loads with ftckpt.torch.Reader takes any checkpoint as it is: --reader. The
    code is that of the step that failed; 9 is a first start and nothing else.

    Raises:
        MissingError: the root is not there.
        UsageError: the grid does not make up the world, or `scratch` is not given.
        RefusedError: the chosen checkpoint went meanwhile, or an earlier result is damaged.
        FtckptError: the resharding failed (see `reshard`).
    """
    from ftckpt.discovery.select import select

    level = chosen(CheckLevel, level, "--level")
    on.report(target=root, path=None, step=None, source=None, level=level, grid={})
    on.report(world_size=world, skipped=[], pointers=[], findings=[])
    choice = cast(ChoiceFlags, flags)
    condition = condition_of(choice, on)
    job = Job(world, layout_flags(flags), scratch, rules, reader, jobs, limit_rate, stores)
    checks = checks_of(level, choice, stores, on)
    making = _Making(job, on)
    if level is CheckLevel.CONTENT:
        checks.reads = making
    found = select(read_root(root, stores), checks, selection_rules(choice, condition), on.warn)
    on.report(**document(found) | {"path": None, "source": found.path})
    taken = remembered(checks, found)
    if taken is not None:
        on.report(remembered=taken)
    warn_of(found, on)
    made = None if found.path is None else making.loadable(found.path)
    return RestartReport(
        target=root, path=made and made.path, step=found.step, format=found.format,
        grid=made.grid if made else {}, selection=found, made=made and made.made,
    )  # fmt: skip


class Job(NamedTuple):
    """A job that is to load a checkpoint; see `restart`.

    Attributes:
        world: its ranks.
        layout: what else is asked of the layout.
        scratch: where a checkpoint is resharded to; "" for nowhere.
        rules: a table of how tensors are divided over ranks; "" for none.
        reader: whether it loads with `ftckpt.torch.Reader`.
        jobs: threads of the resharding; 0 for one a processor.
        limit_rate: of the resharding.
        stores: how to reach object stores.
    """

    world: int
    layout: LayoutFlags
    scratch: str
    rules: str = ""
    reader: bool = False
    jobs: int = 0
    limit_rate: amounts.Rate = ""
    stores: StoreOptions = STORES


class _Later(Observer):
    """Keeps what is reported of a checkpoint that may not be the chosen one."""

    def __init__(self, on: Observer) -> None:
        super().__init__(on.counter)
        self.note, self.warn = on.note, on.warn  # type: ignore[method-assign]
        self.fields: dict[str, Any] = {}

    def report(self, **fields: Any) -> None:
        self.fields |= fields


@dataclass
class _Making:
    """Verifies what must be resharded while it is resharded, so that its bytes are read once.

    Where that does not end well, it is verified by itself: so the choice falls as it does without.
    """

    job: Job
    on: Observer
    made: dict[str, tuple[Loadable | FtckptError, _Later]] = field(default_factory=dict)

    def __call__(
        self,
        checkpoint: Checkpoint,
        options: VerifyOptions,
        *,
        work: Work,
        emit: Callable[[Finding], None],
    ) -> VerifyReport:
        from ftckpt.operations.writing import verified
        from ftckpt.verification import Level, verify

        last: list[VerifyReport] = []

        def checked(
            source: Checkpoint, content: Content, how: Work, seen: SeenBytes | None
        ) -> VerifyReport:
            found = verified(source, content, how, seen, options)
            if seen is None or seen.ended:
                last[:] = [found]
            return found

        url, told = checkpoint.source.url, _Later(self.on)
        alone = not self.job.scratch or self.job.rules or options.level is not Level.CONTENT
        if alone or not _reason(checkpoint, self.job) or self.job.reader:
            return verify(checkpoint, options, work=work, emit=emit)
        ended: Loadable | FtckptError
        try:
            ended = _loadable(url, self.job, told, checked)
        except FtckptError as error:
            ended = error
        if isinstance(ended, Loadable) and last:
            found = last[0]
        else:
            found = verify(checkpoint, options, work=work, emit=emit)
        if found.code is ExitCode.OK:
            self.made[url] = ended, told
        return found

    def loadable(self, path: str) -> Loadable:
        """Return what the job loads of the chosen checkpoint.

        Raises:
            FtckptError: see `loadable`.
        """
        if path not in self.made:
            return loadable(path, self.job, self.on)
        ended, told = self.made[path]
        self.on.report(**told.fields)
        if isinstance(ended, FtckptError):
            raise _kept_from_a_first_start(path, ended)
        return ended


def loadable(path: str, job: Job, on: Observer) -> Loadable:
    """Return what a job loads of a checkpoint, after it was made where needed.

    Raises:
        UsageError: the grid does not make up the world, or `scratch` is not given.
        RefusedError: the checkpoint went meanwhile, or an earlier result is damaged.
        FtckptError: the resharding failed (see `reshard`).
    """
    try:
        return _loadable(path, job, on)
    except NotFoundError as error:
        raise _kept_from_a_first_start(path, error) from error


def _kept_from_a_first_start(path: str, error: FtckptError) -> FtckptError:
    """Return an error, with another code than 9, which would start the run from scratch."""
    if not isinstance(error, NotFoundError):
        return error
    return RefusedError(f"{path} went while it was read: {error.message}")


def _sizes(job: Job) -> dict[str, int]:
    given = {name: cast("int | None", job.layout.get(name)) for name in ("tp", "pp", "dp")}
    return {name: size for name, size in given.items() if size is not None}


def _reason(checkpoint: Checkpoint, job: Job) -> str:
    """Return why a checkpoint does not load with the job's ranks; "" if it does."""
    from ftckpt.discovery.conditions import not_at_grid

    return not_at_grid(checkpoint, job.world, _sizes(job))


def _loadable(path: str, job: Job, on: Observer, verify: SourceVerifier = None) -> Loadable:
    from ftckpt.discovery.conditions import grid_of
    from ftckpt.transfer.content import Content

    table, layout, stores = read_rules(job.rules), job.layout, job.stores
    checkpoint = opened(path, stores, on, rules=table)
    reason = _reason(checkpoint, job)
    if not reason:
        return Loadable(path)
    if job.reader:
        on.note(f"{path} {reason}; the job's Reader loads it as it is, and nothing is resharded")
        return Loadable(path)
    grid = {} if layout.get("like") else grid_of(checkpoint.topology, job.world, _sizes(job))
    shown = " ".join(f"--{name} {size}" for name, size in grid.items())
    if not job.scratch:
        raise UsageError(f"{path} {reason}", hint=f"--scratch DIR: it is resharded there ({shown})")
    place = scratch_place(checkpoint, job.world, grid, layout, job.scratch, stores)
    on.report(grid=grid)
    on.note(f"{path} {reason}: resharding to {place} ({shown})")
    earlier = made_before(place, stores, on)
    if earlier is not None:
        on.note(f"an earlier run has made {place}: {earlier.message}")
        return Loadable(place, grid)
    asked = layout | cast(LayoutFlags, {n: grid[n] for n in ("tp", "pp", "dp") if n in grid})
    request = layout_request(asked, table, stores, on=on)
    try:
        made = carry_out(
            Session("restart", ALONE, stores, on), checkpoint, Content.of(checkpoint),
            checkpoint.source_format, request, place,
            {"jobs": job.jobs, "limit_rate": job.limit_rate}, verify=verify,
        )  # fmt: skip
    except FtckptError:
        _remove_if_empty(place, stores)
        raise
    on.report(**document(made))
    return Loadable(place, grid, made)


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


def _remove_if_empty(place: str, stores: StoreOptions) -> None:
    """Remove the local folder around a place where nothing was made."""
    from ftckpt.storage import open_store

    local = open_store(place, stores).local_path()
    if local is not None:
        with suppress(OSError):
            os.rmdir(os.path.dirname(local.rstrip("/")))


def _plain(value: object) -> object:
    """Return one form of what can be said in two: a size, an example of the layout."""
    source = getattr(value, "source", None)
    if source is not None:
        return source.url
    if isinstance(value, str):
        with suppress(UsageError):
            return amounts.size(value)
    return value


def made_before(destination: str, stores: StoreOptions, on: Observer) -> VerifyReport | None:
    """Return the check of a result that an earlier run made; None where there is none.

    Raises:
        RefusedError: it is damaged.
    """
    from ftckpt.discovery.resolve import open_target
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.own_files import MANIFEST
    from ftckpt.verification import Level, VerifyOptions, verify

    try:
        target = open_target(destination, FORMATS, stores)
    except FtckptError:
        return None  # absent or unfinished: the transfer says what stands in its way
    if target.part is None:
        return None
    made = target.open()
    if MANIFEST not in made.source.entries:
        return None
    report = verify(made, VerifyOptions(Level.CONTENT), work=Work(counter=on.counter))
    if report.code is not ExitCode.OK:
        raise RefusedError(
            f"{destination} was made by an earlier run and does not pass: {report.message}",
            hint=f"remove {destination} and run the same command again",
        )
    return report
