"""`ftckpt repair`: take from a replica what is damaged, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.commands.cli.replicas import ReplicaOptions
from ftckpt.commands.cli.transfer_report import taken_over
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option, switch
from ftckpt.operations.many import Machines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.findings import Finding
    from ftckpt.replication.damage import BadBlock
    from ftckpt.replication.repair import RepairReport
    from ftckpt.workers import Work

EXAMPLES = (
    ("ftckpt repair /ckpt/step-1000 --from s3://run7/ckpt/step-1000", "fetch the bad blocks only"),
    ("ftckpt repair /ckpt/step-1000 --from /shared/step-1000 --dry-run", "list them, fetch none"),
    ("ftckpt repair /ckpt/step-1000", "fetch them from its own copy-0, copy-1, …"),
    (
        "ftckpt repair s3://run7/ckpt/step-1000 --from /ckpt/step-1000 --to s3://run7/ckpt/mended",
        "in an object store the mended checkpoint gets a name of its own",
    ),
    (
        "srun ftckpt repair /ckpt/step-9 --from /b/step-9 --part auto --finish-last",
        "all nodes of a job look for the damage, and the last one mends it",
    ),
)
CODES = {
    ExitCode.OK: "mended and in place, or there already; or nothing was wrong; or --dry-run",
    ExitCode.CORRUPT: "a block is damaged in both; nothing has changed",
    ExitCode.INCOMPLETE: "one of the two changed meanwhile; parts are missing",
    ExitCode.UNVERIFIED: "neither is sealed, and nothing says which of two bytes is right",
    ExitCode.UNSAFE: "a file that is not regular, or hostile content; nothing was executed",
    ExitCode.REFUSED: "the replica is of another checkpoint, another run is at it, or DST is taken",
    ExitCode.NOT_FOUND: "one of the two is not there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "the filesystem cannot swap two names; --to writes elsewhere",
}
OPTIONS = (ReplicaOptions, Machines)

# How many blocks a text lists; --json lists all.
_LISTED = 20


def command(
    invocation: Invocation,
    path: Annotated[str, argument("PATH", "The damaged checkpoint: path, URL or ROOT@STEP.")],
    replica: Annotated[
        str,
        option(
            "REPLICA",
            "Another copy of the same checkpoint; without it, the copies that PATH keeps"
            " itself (copy-0, copy-1).",
            "--from",
        ),
    ] = "",
    to: Annotated[
        str, option("DST", "Write the repaired checkpoint there; DIR/ keeps its name.")
    ] = "",
    dry_run: Annotated[
        bool, switch("--dry-run", "List the damage; fetch and write nothing.")
    ] = False,
) -> Result:
    """Repair a damaged checkpoint with the blocks of a replica.

    Blocks are compared with the manifest of PATH, or of REPLICA where PATH has none that can be
    read; those that are wrong or missing are fetched, checked, and built into a new copy that takes
    the name of PATH in one act. The damaged one is kept in .ftckpt/damaged beside it.
    """
    from functools import partial

    from ftckpt.discovery.resolve import files_at, open_source
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.replication.damage import diagnose
    from ftckpt.replication.places import is_local
    from ftckpt.replication.repair import manifest_for_parts, repair, settle

    run = invocation.options(ReplicaOptions)
    run.bound()
    invocation.report(target=path, replica=replica)
    settle(files_at(path, FORMATS, invocation.stores))
    damaged = files_at(path, FORMATS, invocation.stores)  # as it is now
    other = files_at(replica, FORMATS, invocation.stores) if replica else None
    local = damaged.store.traits.local
    options = run.replication(
        reads_local=local and (other or damaged).store.traits.local,
        writes_local=is_local(to, invocation.stores) if to else local,
        counter=invocation.counter,
    )
    opened = partial(open_source, formats=FORMATS)

    if other is None:
        if invocation.options(Machines).asked:
            raise UsageError("--part needs --from: parts compare with one replica")
        from ftckpt.replication.own_copies import repair_from_own_copies

        report = repair_from_own_copies(
            damaged, opened=opened, to=to, dry_run=dry_run, options=options,
            stores=invocation.stores,
        )  # fmt: skip
        return _show(invocation, report, "its own copies")

    def whole(looking: Work) -> Result:
        report = repair(
            damaged, other, opened=opened, to=to, dry_run=dry_run, options=options,
            stores=invocation.stores, looked_by=looking.division,
        )  # fmt: skip
        return _show(invocation, report, replica)

    if not invocation.options(Machines).asked:
        return whole(options.work)
    from ftckpt.commands.cli.parts import session_of, shown
    from ftckpt.operations.many.run import Divided
    from ftckpt.parts.plan import plan_of_files
    from ftckpt.parts.shares import FilesAlone

    manifest = manifest_for_parts(damaged, other, opened=opened, work=options.work)

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        found = diagnose(damaged, manifest, work)
        return (), found.nbytes

    flags = {"to": to, "dry_run": dry_run}
    plan = plan_of_files(damaged, "repair", flags, manifest, other)
    names = [file.path for file in manifest.files]
    files = FilesAlone(damaged, {})
    return shown(
        invocation,
        Divided(session_of(invocation), files, plan, names, options.work, share, whole).run(),
    )


def _show(invocation: Invocation, report: RepairReport, replica: str) -> Result:
    invocation.report(
        destination=report.url,
        evidence=report.evidence,
        blocks=report.blocks,
        long_files=report.long,
        manifest_damaged=report.manifest,
        bytes_damaged=report.bad_bytes,
        fetched=report.fetched,
        files=report.files,
        bytes=report.nbytes,
        kept=report.kept,
        proven=report.proven,
        taken_over=report.taken_over,
        done=report.done,
        already_there=report.already_there,
        seconds=report.seconds,
    )
    for block in report.blocks[:_LISTED]:
        invocation.print(_line(block))
    if len(report.blocks) > _LISTED:
        invocation.print(f"and {len(report.blocks) - _LISTED} more")
    for name in report.long:
        invocation.print(f"{name}: bytes behind its end")
    if report.manifest:
        invocation.print("the manifest cannot be read")
    wrong = f"{counted(len(report.blocks), 'block')}, {human_bytes(report.bad_bytes)}"
    if not report.done:
        message = f"would fetch {wrong}, from {replica}"
        if report.sound:
            message = f"nothing to repair: every block is right by {_EVIDENCE[report.evidence]}"
        invocation.print(message)
        return Result(ExitCode.OK, message)
    if report.already_there:
        invocation.print(printable(f"there already: {report.url}"))
        return Result(ExitCode.OK, "the mended checkpoint is there already")
    message = (
        f"fetched {wrong}; wrote {counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    )
    speed = f" in {human_duration(report.seconds['write'])}{taken_over(report.taken_over)}"
    invocation.print(printable(f"{message}{speed}: {report.url}"))
    invocation.print("read back and equal" if report.proven else "not read back: --no-proof")
    if report.kept:
        invocation.print(printable(f"the damaged one is kept: {report.kept}"))
    return Result(ExitCode.OK, message)


_EVIDENCE = {"manifest": "the manifest", "crc32": "the replica, whose CRC-32s match"}


def _line(block: BadBlock) -> str:
    end = block.offset + block.length
    return printable(f"{block.why}: {block.file} bytes {block.offset}-{end}")
