"""Run a format's self-checks: reads whose own digests prove them by decoding."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, SelfCheck
from ftckpt.checkpoint.read_ahead import for_reading, read_again, reading_ahead
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.extents import Extent
from ftckpt.findings import finding, from_error, listed
from ftckpt.own_files import is_own
from ftckpt.progress import Counter
from ftckpt.workers import ALONE, Work
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Report, Sample

_TASK = 32 << 20  # decoded bytes of the checks of one task
_MOST = 256  # checks per task: handing over a task costs more than a few checks


class ChosenSelfCheck(NamedTuple):
    """A check, and whether it is made: the sample takes it, and nothing else has made it."""

    check: SelfCheck
    sampled: bool


class SelfCheckDone(NamedTuple):
    """The result of one check; small, because it may come from another process.

    Attributes:
        extent, owner, nbytes: of the check.
        sampled: whether it was made.
        error: the defect.
        passing: whether the second reading was right.
    """

    extent: Extent
    owner: str
    nbytes: int
    sampled: bool = True
    error: FtckptError | None = None
    passing: bool = False


def check_itself(
    checkpoint: Checkpoint,
    *,
    sealed: bool,
    emit: Emit,
    work: Work = ALONE,
    sample: float | None = None,
    decode: bool = True,
    seen: bool = False,
) -> ContentResult:
    """Let a checkpoint check itself; the evidence is `none` if it cannot.

    With `sealed` its files were already compared with a manifest. `work` uses no processes with a
    rate limit or if a part of the data is not local. `decode` is of `VerifyOptions`; with `seen`
    other work has read the tensors, and what each reading checks is not done again. The other
    arguments are as in `blocks.check_manifest`.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    check = _Check(Report(checkpoint.source, emit))
    chosen = Sample(sample, checkpoint.source.name)
    made: Iterable[ChosenSelfCheck | FtckptError]
    made = _chosen(checkpoint, chosen, sealed=sealed, decode=decode, seen=seen)
    places: list[Extent] | None = None
    if seen:
        made = list(made)
        places = [one.check.extent for one in made if not isinstance(one, FtckptError) if one[1]]
    tasks = _tasks(made)
    total = None if sample else sum(info.nbytes for info in checkpoint.tensors.values())
    work = replace(work, processes=_affordable(work, checkpoint))
    if work.processes:
        # The progress bar of earlier work has a thread, and a process with threads must not fork.
        work.counter.start("decoding", total)

    def carry_out(
        task: Sequence[ChosenSelfCheck | FtckptError], _: Counter
    ) -> Sequence[SelfCheckDone]:
        return [_done(one, checkpoint, work.limiter) for one in task]

    whole = sample is None and work.division is None
    with reading_ahead(checkpoint, places, jobs=work.threads) if whole else nullcontext():
        for done in work.spread(tasks, carry_out):
            if not check.any and not work.processes:
                work.counter.start("decoding", total)
            for one in done:
                work.counter.add(one.nbytes if one.sampled else 0)
                check.take(one)
    members = [n for n in checkpoint.members() if n in checkpoint.source.entries and not is_own(n)]
    left = max(0, sum(checkpoint.source.size(name) for name in members) - check.covered)
    evidence = "digests" if check.any else "none"
    bare: list[str] = []
    if check.any and not checkpoint.decoding.covers_all:
        bare = [n for n in members if checkpoint.source.size(n) > check.files[n]]
        if bare:
            message = f"no checksum covers {left} bytes of {listed(bare)}"
            check.report.add(finding("not-covered", message, length=left))
    return ContentResult(
        evidence, check.read, check.covered, left, sample, check.report.ok, tuple(bare)
    )


class _Check:
    """Collects the results of one run over the checks."""

    def __init__(self, report: Report) -> None:
        self.any = False
        self.covered = self.read = 0
        self.files: Count[str] = Count()  # covered bytes of each
        self.report = report

    def take(self, done: SelfCheckDone) -> None:
        """Count one result, and report a defect."""
        file, offset, length = done.extent
        self.any = self.any or bool(file)
        self.covered += length
        self.files[file] += length
        if done.sampled:
            self.read += length
        if done.passing:
            message = f"{file} was read wrongly once at {offset} and rightly then"
            self.report.add(finding("note", message, file=file, offset=offset, length=length))
        elif not file and done.error is not None:
            self.report.add(from_error(done.error))
        elif isinstance(done.error, CorruptError):
            if not self.report.changed(file):
                self.report.add(from_error(done.error, tensor=done.owner or None))
        elif done.error is not None:
            self.report.fail(file, done.error)


def _affordable(work: Work, checkpoint: Checkpoint) -> int:
    if work.limiter is not None or work.processes < 2:
        return 0
    try:
        return for_reading(checkpoint, work.processes)
    except FtckptError:  # the checks report it
        return 0


def _chosen(
    checkpoint: Checkpoint, chosen: Sample, *, sealed: bool, decode: bool, seen: bool
) -> Iterator[ChosenSelfCheck | FtckptError]:
    """Yield all checks, and the error that stops them, if any."""
    started: set[str] = set()
    try:
        for check in checkpoint.decoding.checks(sealed=sealed):
            file, offset, _ = check.extent
            if check.only_decodes and not decode:
                continue
            takes = chosen.takes(file, offset, first=file not in started)
            yield ChosenSelfCheck(check, takes and not (seen and check.of_reading))
            started.add(file)
    except FtckptError as error:
        yield error


def _tasks(
    checks: Iterable[ChosenSelfCheck | FtckptError],
) -> Iterator[Sequence[ChosenSelfCheck | FtckptError]]:
    """Yield tasks of about one size, without separating checks that share decoded data."""
    task: list[ChosenSelfCheck | FtckptError] = []
    nbytes = 0
    for one in checks:
        follows = isinstance(one, ChosenSelfCheck) and one.check.follows
        if task and not follows and (nbytes > _TASK or len(task) >= _MOST):
            yield task
            task, nbytes = [], 0
        task.append(one)
        nbytes += one.check.nbytes if isinstance(one, ChosenSelfCheck) else 0
    if task:
        yield task


def _done(
    one: ChosenSelfCheck | FtckptError, checkpoint: Checkpoint, limiter: RateLimit | None
) -> SelfCheckDone:
    if isinstance(one, FtckptError):
        return SelfCheckDone(Extent("", 0, 0), "", 0, sampled=False, error=one)
    check, sampled = one
    done = SelfCheckDone(check.extent, check.owner, check.nbytes, sampled)
    if not sampled:
        return done
    if limiter is not None:
        limiter.take(check.nbytes)
    try:
        check.read()
    except CorruptError as error:
        # A bit can flip on the wire or in memory; damage at rest is read the same twice.
        try:
            read_again(checkpoint)
            check.read()
        except FtckptError:
            return done._replace(error=error)
        return done._replace(error=error, passing=True)
    except FtckptError as error:
        return done._replace(error=error)
    return done
