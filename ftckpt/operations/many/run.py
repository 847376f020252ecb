"""Do a part of a verb's work, or finish it from the records of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import (
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UsageError,
    worst,
)
from ftckpt.findings import Severity, as_error, finding
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart, parse_part
from ftckpt.parts.division import OF_THE_MACHINE, VERDICTS, FromRecords, OwnShare
from ftckpt.parts.finish import Gathered, consume, dump_error, elected, gather, is_complete
from ftckpt.parts.plan import ShareRecord, WorkPlan
from ftckpt.parts.shared_folder import Heartbeat, PartsPlace, host, parts_place
from ftckpt.parts.shares import Divisible, Shares

from . import Machines, PartDone, PartReport, Session, Whole

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.observer import Observer
    from ftckpt.workers import Work


@dataclass(frozen=True)
class Divided:
    """One operation on a checkpoint, divided.

    Attributes:
        session: of the operation.
        checkpoint: that is read, or its files.
        plan: what is divided.
        names: of the files that are read.
        work: of this process.
        share: does a part; returns its findings and the bytes that it read.
        whole: gives the verb's whole answer.
    """

    session: Session
    checkpoint: Divisible
    plan: WorkPlan
    names: Iterable[str]
    work: Work
    share: Callable[[Work], tuple[Sequence[Finding], int]]
    whole: Callable[[Work], Whole]

    def run(self) -> Whole:
        """Do what the options of the verb ask for.

        Raises:
            UsageError: they contradict each other, or no scheduler says which part this is.
            IncompleteError: parts are missing, or the source changed.
            RefusedError: a record is not whole, too old, or of another plan.
        """
        options, source = self.session.division, self.checkpoint.source
        sizes = (source.entries[name].size for name in self.names if name in source.entries)
        return carry_out(
            self.session,
            lambda: parts_place(source, self.plan, options.parts, self.session.stores),
            [""], lambda: sum(sizes), self._own, self._finish,
        )  # fmt: skip

    def _own(self, place: PartsPlace, part: WorkPart) -> OwnPart:
        record = place.find(part)
        again = record is not None
        if record is None:
            require_same_number(place, part)
            record = self._made(place, part)
        asked = self.session.division.finish_last
        return OwnPart(record, again, asked and is_complete(place, part.of))

    def _made(self, place: PartsPlace, part: WorkPart) -> ShareRecord:
        own = OwnShare(Shares(self.checkpoint, self.names, part.of), part.number)
        began = time.monotonic()
        findings: Sequence[Finding] = ()
        nbytes, raised = 0, None
        with Heartbeat(place, part, self.work.counter) as counter:
            work = replace(self.work, division=own, counter=counter)
            try:
                findings, nbytes = self.share(work)
            except FtckptError as error:
                if error.exit_code not in VERDICTS:
                    raise
                raised = error
        moved = self.checkpoint.source.changed(self.names) if raised is not None else []
        findings = [*findings, *(finding("changed-file", f"{name} changed", file=name)
                                 for name in moved)]  # fmt: skip
        errors = [one for one in findings if one.severity is Severity.ERROR]
        for one in errors:
            if one.kind == "changed-file" or one.code in OF_THE_MACHINE:
                raise as_error(one)  # no record: the part is to be done again
        made = ShareRecord(
            self.plan, part, own.results, host=host(), ended=utc_now(),
            seconds=time.monotonic() - began, nbytes=nbytes, errors=len(errors),
            code=worst([*(one.code for one in errors), *([raised.exit_code] if raised else [])]),
            raised=dump_error(raised),
        )  # fmt: skip
        return place.create(made)

    def _finish(self, place: PartsPlace, number: int | None) -> Whole:
        gathered = gather(place, number)
        division = FromRecords(gathered.results, sum(one.seconds for one in gathered.records))
        result = self.whole(replace(self.work, division=division))
        use_up(self.session, place, gathered, result)
        return result


class OwnPart(NamedTuple):
    """The part of this process.

    Attributes:
        record: of it.
        again: whether that was there before.
        ready: whether all that others do is done too.
    """

    record: ShareRecord
    again: bool
    ready: bool


def carry_out(
    session: Session,
    place: Callable[[], PartsPlace],
    stages: Sequence[str],
    nbytes: Callable[[], int],
    own: Callable[[PartsPlace, WorkPart], OwnPart],
    finish: Callable[[PartsPlace, int | None], Whole],
) -> Whole:
    """Do what the options of a verb ask for: all parts by a cluster, one of them, or the end.

    Args:
        session: of the operation.
        place: returns the place of the records.
        stages: of which each part leaves a record, in order; [""] if there is one.
        nbytes: returns the bytes that are read, roughly.
        own: does a part.
        finish: gives the answer of the whole from the records of a number of parts; None: as many
            as they say.

    Raises:
        UsageError: options contradict each other, or no scheduler says which part this is.
    """
    options = session.division
    finish = partial(_finish_once, finish)
    if options.cluster:
        from .cluster import on_cluster

        where = place()
        return on_cluster(session, where, nbytes(), stages, partial(finish, where))
    if _finishes(options):
        return finish(place(), _named_count(options.part))
    part = _named_part(session, options.part)
    where = place()
    record, again, ready = own(where, part)
    if options.finish_last and ready and _is_last(session, where, part, again=again):
        return finish(where, part.of)
    stage = f".{stages[0]}" if stages[0] else ""
    return _part_report(where, record, again=again, stage=stage)


def _finish_once(
    finish: Callable[[PartsPlace, int | None], Whole], place: PartsPlace, parts: int | None
) -> Whole:
    """Finish, and say so where another process has done it meanwhile, and has cleaned up.

    A store without conditions does not keep a second one away.

    Raises:
        IncompleteError: the records were used up.
    """
    try:
        return finish(place, parts)
    except NotFoundError as error:
        done = place.look("finished")
        if done is None:
            raise
        raise IncompleteError(
            f"another process has finished this, at {done.get('time')} on {done.get('host')}:"
            f" {done.get('message')}",
            hint="look at its answer; run the parts again to read the checkpoint anew",
        ) from error


def _finishes(options: Machines) -> bool:
    """Say whether the whole is to be finished, and no part done.

    Raises:
        UsageError: both ways to finish were named.
    """
    if options.shares:
        raise UsageError("--shares says how many parts --cluster has", hint="--cluster WHERE")
    if options.finish and options.finish_last:
        raise UsageError("--finish and --finish-last are two ways to end: name one")
    return options.finish


def _is_last(session: Session, place: PartsPlace, part: WorkPart, *, again: bool) -> bool:
    """Say whether this process, which saw that all is done, is the one that finishes."""
    if not elected(place, part, again=again):
        return False
    session.on.note(f"part {part} is the last to end, and finishes")
    return True


def use_up(session: Session, place: PartsPlace, gathered: Gathered, result: Whole) -> None:
    """Remove the records that have given a good answer; what is left is a warning."""
    code = getattr(result, "code", ExitCode.OK)
    if code not in (ExitCode.OK, ExitCode.DIFFERENT):
        return
    try:
        consume(place, gathered, {"code": int(code), "message": getattr(result, "message", "done")})
    except FtckptError as error:
        session.on.warn(f"the records could not be removed: {error}")


def require_same_number(place: PartsPlace, part: WorkPart) -> None:
    """Refuse a part of another division than those that have begun.

    Raises:
        RefusedError: there are records of another number of parts.
    """
    others = sorted({one.part.of for one in place.listed() if one.part.of != part.of})
    if others:
        raise RefusedError(
            f"{place.url} holds records of a division into {others[0]} parts, and this is part"
            f" {part}",
            hint=f"--part auto/{others[0]} goes on with it; or remove that directory",
        )


def _part_report(
    place: PartsPlace, record: ShareRecord, *, again: bool, stage: str = ""
) -> PartReport:
    """Return what a part did, which says nothing of the whole.

    Args:
        place: of the records.
        record: of the part.
        again: whether it was there before.
        stage: of the record.
    """
    part = PartDone(
        record.part.number, record.part.of, record.plan.digest,
        place.store.describe(place.path(record.part, stage)), len(record.units), record.errors,
        record.host, again,
    )  # fmt: skip
    if stage:
        return PartReport(
            part=part, bytes=record.nbytes, seconds={"copy": record.seconds}, code=record.code,
            made=record,
        )  # fmt: skip
    return PartReport(
        part=part, bytes_read=record.nbytes, seconds=record.seconds, code=record.code, made=record
    )


def errors_of(on: Observer) -> Callable[[Finding], None]:
    """Return what tells of the errors of a part: remarks are for who sees the whole."""

    def tell(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            on.found(found)

    return tell


def _named_part(session: Session, text: str) -> WorkPart:
    """Return the part that `--part` names, and say who named it where the environment did.

    Raises:
        UsageError: it names none.
    """
    if not text:
        raise UsageError("--finish-last needs --part: I/N, or auto")
    word, _, number = text.partition("/")
    if word != "auto":
        return parse_part(text)
    from ftckpt.parts.environment import part_of

    part = part_of(parts=_number(number) if number else None)
    session.on.note(f"part {part}, by {part.found}")
    return part


def _named_count(text: str) -> int | None:
    """Return the number of parts that `--part` names beside `--finish`; None: the records do."""
    word, _, number = text.partition("/")
    if not text or (word == "auto" and not number):
        return None
    return _number(number) if word == "auto" else parse_part(text).of


def _number(text: str) -> int:
    return parse_part(f"0/{text}").of
