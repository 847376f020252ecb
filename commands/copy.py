"""`ftckpt copy`: the same checkpoint on another tier, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.commands.cli.replicas import ReplicaOptions
from ftckpt.commands.cli.target import AlsoOption, open_checkpoint
from ftckpt.commands.cli.transfer_options import SourceArgument
from ftckpt.commands.cli.transfer_report import taken_over
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted, listed
from ftckpt.operations.definition import argument, switch
from ftckpt.operations.many import Machines

from .cli import render

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.replication.copy import CopyReport

EXAMPLES = (
    ("ftckpt copy /nvme/run7/step-1000 /shared/run7/", "as /shared/run7/step-1000"),
    ("ftckpt copy run7@latest s3://bucket/run7/", "the newest of a root, to an object store"),
    ("ftckpt copy s3://bucket/run7/step-1000 step-1000", "and back"),
    ("ftckpt copy /n0/step-9 s3://b/run/ --also /n1/step-9", "gathered from two nodes' disks"),
    ("ftckpt copy hot:run7/step-1000 cold:run7/", "between two services: named remotes"),
    ("ftckpt copy run7/step-1200 s3://bucket/run7/ --include-bases", "a delta with its bases"),
    ("srun ftckpt copy /a/step-9 /b/ --part auto --finish-last", "by all nodes of a job"),
)
CODES = {
    ExitCode.OK: "copied, proven and visible; or the same checkpoint was there already",
    ExitCode.CORRUPT: "the source is damaged, or what is there already; nothing new is visible",
    ExitCode.INCOMPLETE: "the source is not committed, or changed meanwhile; parts are missing",
    ExitCode.UNSAFE: "a file that is not regular, or hostile content; nothing was executed",
    ExitCode.REFUSED: "DST holds something else or lies in a checkpoint, or is being written",
    ExitCode.NOT_FOUND: "no checkpoint there, or DST looks like a mistyped URL",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "",
}
OPTIONS = (ReplicaOptions, Machines)


def command(
    invocation: Invocation,
    source: SourceArgument,
    destination: Annotated[
        str, argument("DST", "Where the copy goes; DIR/ keeps the name of SRC.")
    ],
    also: AlsoOption = None,
    include_bases: Annotated[
        bool, switch("--include-bases", "Also copy a delta's bases, before it and beside it.")
    ] = False,
    unmanaged: Annotated[
        bool, switch("--unmanaged", "Also copy files that do not belong to the checkpoint.")
    ] = False,
) -> Result:
    """Copy a checkpoint between tiers: verified on the way, resumable, visible at the end.

    Every byte is read once, hashed, and compared with the manifest of SRC, or with the CRC-32s in
    its files; then the copy is read back. Nothing is overwritten: where the same checkpoint stands
    already, that is the answer. A checkpoint without a manifest gets one at DST.
    """
    from ftckpt.replication.copy import copy
    from ftckpt.replication.places import destination_of, is_local

    run = invocation.options(ReplicaOptions)
    run.bound()
    checkpoint = open_checkpoint(invocation, source, newest=False, also=also)
    destination = destination_of(checkpoint.source, destination)
    invocation.report(destination=destination, step=checkpoint.known_step)
    options = run.replication(
        reads_local=checkpoint.source.store.traits.local,
        writes_local=is_local(destination, invocation.stores),
        counter=invocation.counter,
        beside=unmanaged,
    )
    if invocation.options(Machines).asked:
        if include_bases:
            raise UsageError("--include-bases copies several checkpoints: run each with --part")
        from ftckpt.commands.cli.parts import session_of, shown
        from ftckpt.operations.many.copying import DividedCopy

        def show(report: CopyReport) -> Result:
            return _show(invocation, report, [])

        return shown(
            invocation,
            DividedCopy(session_of(invocation), checkpoint, destination, options, show).run(),
        )
    places = _with_bases(invocation, checkpoint, destination) if include_bases else []
    bases = [copy(base, to, options=options, stores=invocation.stores) for base, to in places]
    for report in bases:
        invocation.print(_line(report))
    report = copy(
        checkpoint,
        destination,
        options=options,
        stores=invocation.stores,
    )
    return _show(invocation, report, bases)


def _with_bases(
    invocation: Invocation, checkpoint: Checkpoint, destination: str
) -> list[tuple[Checkpoint, str]]:
    """Return what a delta depends on, the full checkpoint first, and where each goes: beside DST.

    A reader looks for a base where it was, seen from the delta, and then among its siblings.

    Raises:
        FtckptError: a base is missing, wrong, or cannot be opened.
    """
    from ftckpt.api.replicating import bases_beside

    found = bases_beside(checkpoint, destination)
    if not found and not checkpoint.decoding:
        invocation.say("no delta: it has no bases")
    return found


def _show(invocation: Invocation, report: CopyReport, bases: list[CopyReport]) -> Result:
    invocation.report(
        files=report.files,
        bytes=report.nbytes,
        evidence=report.evidence,
        bytes_covered=report.covered,
        proven=report.proven,
        sealed=report.sealed,
        already_there=report.already_there,
        taken_over=report.taken_over,
        left=report.left,
        findings=report.notes,
        bases=[{"destination": base.url, "already_there": base.already_there} for base in bases],
        seconds=report.seconds,
    )
    for note in report.notes:
        invocation.say(render.finding_line(note))
    if report.left:
        names = listed(report.left)
        invocation.say(f"left out, because they do not belong to it: {names} (--unmanaged)")
    invocation.print(_line(report))
    if report.already_there:
        return Result(ExitCode.OK, "the same checkpoint is there already")
    invocation.print(_EVIDENCE[report.evidence].format(covered=human_bytes(report.covered)))
    proven = "read back and equal" if report.proven else "not read back: --no-proof"
    seal = "" if report.sealed else "; its first manifest stands at the copy"
    invocation.print(f"{proven}{seal}")
    return Result(ExitCode.OK, f"copied {counted(report.files, 'file')}")


_EVIDENCE = {
    "manifest": "every block matches the manifest of the source",
    "crc32": "every record matches its CRC-32, {covered}; nothing covers the rest of the source",
    "none": "nothing was there to check the source against: ftckpt seal records digests",
}


def _line(report: CopyReport) -> str:
    amount = f"{counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    if report.already_there:
        return printable(f"there already: {amount}: {report.url}")
    seconds = max(report.seconds["copy"], 1e-6)
    speed = f"in {human_duration(seconds)} ({human_bytes(int(report.nbytes / seconds))}/s)"
    speed += taken_over(report.taken_over)
    return printable(f"copied {amount} {speed}: {report.url}")
