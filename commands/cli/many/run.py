"""Do a part of a verb's work, or finish it from the records of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.errors import ExitCode, FtckptError, RefusedError, UsageError, worst
from ftckpt.findings import Severity, as_error, counted, finding
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart, parse_part
from ftckpt.parts.division import OF_THE_MACHINE, VERDICTS, FromRecords, OwnShare
from ftckpt.parts.error_records import dump_error
from ftckpt.parts.finish import Gathered, consume, elected, gather, is_complete
from ftckpt.parts.place import Heartbeat, PartsPlace, host, parts_place
from ftckpt.parts.plan import WorkPlan
from ftckpt.parts.record import ShareRecord
from ftckpt.parts.shares import Divisible, Shares

from . import ManyOptions

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.workers import Work


@dataclass(frozen=True)
class Divided:
    """One operation on a checkpoint, divided.

    Attributes:
        invocation: of the verb.
        checkpoint: that is read, or its files.
        plan: what is divided.
        names: of the files that are read.
        work: of this process.
        share: does a part; returns its findings and the bytes that it read.
        whole: gives the verb's whole answer.
    """

    invocation: Invocation
    checkpoint: Divisible
    plan: WorkPlan
    names: Iterable[str]
    work: Work
    share: Callable[[Work], tuple[Sequence[Finding], int]]
    whole: Callable[[Work], Result]

    def run(self) -> Result:
        """Do what the options of the verb ask for.

        Raises:
            UsageError: they contradict each other, or no scheduler says which part this is.
            IncompleteError: parts are missing, or the source changed.
            RefusedError: a record is not whole, too old, or of another plan.
        """
        options = self.invocation.options(ManyOptions)
        stores = self.invocation.stores
        if options.cluster:
            from .cluster import on_cluster

            source = self.checkpoint.source
            place = parts_place(source, self.plan, options.parts, stores)
            names = [name for name in self.names if name in source.entries]
            nbytes = sum(source.entries[name].size for name in names)
            return on_cluster(
                self.invocation, place, nbytes, [""], lambda number: self._finish(place, number)
            )
        if finishes(options):
            place = parts_place(self.checkpoint.source, self.plan, options.parts, stores)
            return self._finish(place, named_count(options.part))
        part = named_part(self.invocation, options.part)
        place = parts_place(self.checkpoint.source, self.plan, options.parts, stores)
        record, again = self._own(place, part)
        if options.finish_last:
            return self._perhaps_finish(place, record, again=again)
        return tell_part(self.invocation, place, record, again=again)

    def _own(self, place: PartsPlace, part: WorkPart) -> tuple[ShareRecord, bool]:
        """Return the record of a part, and whether it was there before."""
        standing = place.find(part)
        if standing is not None:
            return standing, True
        require_same_number(place, part)
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
        return place.create(made), False

    def _perhaps_finish(self, place: PartsPlace, record: ShareRecord, *, again: bool) -> Result:
        if is_complete(place, record.part.of) and is_last(
            self.invocation, place, record.part, again=again
        ):
            return self._finish(place, record.part.of)
        return tell_part(self.invocation, place, record, again=again)

    def _finish(self, place: PartsPlace, number: int | None) -> Result:
        gathered = gather(place, number)
        division = FromRecords(gathered.results, sum(one.seconds for one in gathered.records))
        result = self.whole(replace(self.work, division=division))
        use_up(self.invocation, place, gathered, result)
        return result


def finishes(options: ManyOptions) -> bool:
    """Say whether the whole is to be finished, and no part done.

    Raises:
        UsageError: both ways to finish were named.
    """
    if options.shares:
        raise UsageError("--shares says how many parts --cluster has", hint="--cluster WHERE")
    if options.finish and options.finish_last:
        raise UsageError("--finish and --finish-last are two ways to end: name one")
    return options.finish


def is_last(invocation: Invocation, place: PartsPlace, part: WorkPart, *, again: bool) -> bool:
    """Say whether this process, which saw that all is done, is the one that finishes."""
    if not elected(place, part, again=again):
        return False
    invocation.say(f"part {part} is the last to end, and finishes")
    return True


def use_up(invocation: Invocation, place: PartsPlace, gathered: Gathered, result: Result) -> None:
    """Remove the records that have given a good answer; what is left is a warning."""
    if result.code not in (ExitCode.OK, ExitCode.DIFFERENT):
        return
    try:
        consume(place, gathered, {"code": int(result.code), "message": result.message})
    except FtckptError as error:
        invocation.warn(f"the records could not be removed: {error}")


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


def tell_part(
    invocation: Invocation, place: PartsPlace, record: ShareRecord, *, again: bool, stage: str = ""
) -> Result:
    """Say what a part did, which says nothing of the whole.

    Args:
        invocation: of the verb.
        place: of the records.
        record: of the part.
        again: whether it was there before.
        stage: of the record.
    """
    options = invocation.options(ManyOptions)
    url = place.store.describe(place.path(record.part, stage))
    invocation.report(
        part={
            "number": record.part.number, "of": record.part.of, "plan": record.plan.digest,
            "record": url, "tasks": len(record.units), "errors": record.errors,
            "host": record.host, "done_before": again,
        },
    )  # fmt: skip
    if stage:
        invocation.report(bytes=record.nbytes, seconds={"copy": record.seconds})
    else:
        invocation.report(bytes_read=record.nbytes, seconds=record.seconds)
    did = f"{counted(len(record.units), 'task')}, {human_bytes(record.nbytes)}"
    when = f"done before, by {record.host}" if again else human_duration(record.seconds)
    message = f"part {record.part}: {did}, {when}"
    if record.raised is not None:
        message += f"; ended by an error: {record.raised.get('message')}"
    elif record.errors:
        message += f"; {counted(record.errors, 'error')} found"
    invocation.print(printable(f"{message}: {url}"))
    if options.finish_last:
        # Launchers end all processes where one fails; who is last gives the verdict.
        return Result(ExitCode.OK, message)
    hint = "the answer is that of the same line with --finish"
    if record.code is not ExitCode.OK:
        return invocation.fail(record.code, message, hint)
    invocation.say(f"hint: {hint}")
    return Result(ExitCode.OK, message)


def errors_of(invocation: Invocation) -> Callable[[Finding], None]:
    """Return what tells of the errors of a part: remarks are for who sees the whole."""

    def tell(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            invocation.find(found)

    return tell


def named_part(invocation: Invocation, text: str) -> WorkPart:
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
    invocation.say(f"part {part}, by {part.found}")
    return part


def named_count(text: str) -> int | None:
    """Return the number of parts that `--part` names beside `--finish`; None: the records do."""
    word, _, number = text.partition("/")
    if not text or (word == "auto" and not number):
        return None
    return _number(number) if word == "auto" else parse_part(text).of


def _number(text: str) -> int:
    return parse_part(f"0/{text}").of
