"""Carry out the reads that check themselves: what a format's own digests prove by decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

from ftckpt.ahead import read_again, reading_ahead
from ftckpt.checkpoint import Checkpoint, SelfCheck
from ftckpt.engine import run
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.findings import finding, from_error
from ftckpt.limits import RateLimit
from ftckpt.manifest import is_own
from ftckpt.progress import NULL, Counter

from .evidence import ContentResult, Emit, Report, Sample


class _Task(NamedTuple):
    check: SelfCheck
    checkpoint: Checkpoint
    limiter: RateLimit | None


class _Done(NamedTuple):
    check: SelfCheck
    error: FtckptError | None = None
    passing: bool = False  # whether the second reading was right


def check_itself(
    checkpoint: Checkpoint,
    *,
    sealed: bool,
    emit: Emit,
    jobs: int = 1,
    sample: float | None = None,
    seed: int = 0,
    limiter: RateLimit | None = None,
    counter: Counter = NULL,
) -> ContentResult:
    """Let a checkpoint check itself; the evidence is `none` where it cannot.

    Args:
        checkpoint: opened; its `self_checks` say what there is.
        sealed: whether its files were compared with a manifest.
        emit: receives the findings as they are found.
        jobs: number of threads.
        sample: share of the checks to make; None for all. A file's first is always made.
        seed: for another sample.
        limiter: bounds the rate of what they give.
        counter: is told of the bytes that they give.

    Raises:
        StopChecking: as `emit` does.
        UnavailableError: the storage does not answer.
    """
    check = _Check(checkpoint, Report(checkpoint.source, emit))
    chosen = Sample(sample, checkpoint.source.name, seed)
    tasks = check.tasks(chosen, limiter, sealed=sealed)
    total = None if sample else sum(info.nbytes for info in checkpoint.tensors.values())
    given = 0
    with reading_ahead(checkpoint, jobs=jobs) if sample is None else nullcontext():
        for done in run(tasks, _carry_out, jobs=jobs):
            if not given:
                counter.start("decoding", total)
            counter.add(done.check.nbytes)
            given += done.check.nbytes
            check.take(done)
    members = [n for n in checkpoint.members() if n in checkpoint.source.entries and not is_own(n)]
    left = sum(checkpoint.source.size(name) for name in members) - check.covered
    evidence = "digests" if check.any else "none"
    return ContentResult(evidence, check.read, check.covered, max(0, left), sample, check.report.ok)


class _Check:
    """One run over the checks, and what came of it."""

    def __init__(self, checkpoint: Checkpoint, report: Report) -> None:
        self.any = False
        self.covered = self.read = 0
        self.report = report
        self._checkpoint = checkpoint

    def tasks(self, chosen: Sample, limiter: RateLimit | None, *, sealed: bool) -> Iterator[_Task]:
        """Yield what is to be done; what cannot even begin is reported."""
        started: set[str] = set()
        try:
            for check in self._checkpoint.self_checks(sealed=sealed):
                self.any = True
                file, offset, length = check.extent
                self.covered += length
                if chosen.takes(file, offset, first=file not in started):
                    yield _Task(check, self._checkpoint, limiter)
                started.add(file)
        except FtckptError as error:
            self.report.add(from_error(error))

    def take(self, done: _Done) -> None:
        """Report what is wrong."""
        file, offset, length = done.check.extent
        self.read += length
        if done.passing:
            message = f"{file} was read wrongly once at {offset} and rightly then"
            self.report.add(finding("note", message, file=file, offset=offset, length=length))
        elif isinstance(done.error, CorruptError):
            if not self.report.changed(file):
                self.report.add(from_error(done.error, tensor=done.check.owner or None))
        elif done.error is not None:
            self.report.fail(file, done.error)


def _carry_out(task: _Task) -> _Done:
    check = task.check
    if task.limiter is not None:
        task.limiter.take(check.nbytes)
    try:
        check.read()
    except CorruptError as error:
        # A bit can flip on the wire or in memory; what is at rest is read the same twice.
        try:
            read_again(task.checkpoint)
            check.read()
        except FtckptError:
            return _Done(check, error)
        return _Done(check, error, passing=True)
    except FtckptError as error:
        return _Done(check, error)
    return _Done(check)
