"""`ftckpt seal`: record digests, so that any later change is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
)
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.option_values import check_file
from ftckpt.commands.cli.render import human_bytes, human_duration
from ftckpt.commands.cli.target import PathArgument, open_checkpoint
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import option, switch
from ftckpt.operations.many import Machines

from .cli import render
from .verify import LevelChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.findings import Finding
    from ftckpt.storage.store import Store
    from ftckpt.verification import VerifyOptions
    from ftckpt.workers import Work

OPTIONS = (Machines,)
EXAMPLES = (
    ("ftckpt seal /ckpt/run7/step-1000", "check it, then write ftckpt.manifest.json beside it"),
    ("ftckpt seal s3://run7/ckpt/step-1000", "the same on object storage"),
    ("ftckpt seal /ro/step-9 --manifest /var/seals/step-9.json", "keep the manifest elsewhere"),
    ("ftckpt seal run/iter_0001000 --integrity", "for Megatron's --verify-integrity too"),
    ("srun ftckpt seal /ckpt/step-9 --part auto --finish-last", "by all nodes of a job"),
)
CODES = {
    ExitCode.OK: "sealed, or sealed before with the same content",
    ExitCode.CORRUPT: "the check before sealing found damage; nothing was written",
    ExitCode.INCOMPLETE: "not committed, changed meanwhile, or parts missing; nothing was written",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was written",
    ExitCode.REFUSED: "another manifest or integrity.json stands there, or parts do not fit",
    ExitCode.NOT_FOUND: "no checkpoint there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the place cannot be written; --manifest names another",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "",
}


def command(
    invocation: Invocation,
    path: PathArgument,
    manifest: Annotated[str, option("ELSEWHERE", "Write the manifest to this path or URL.")] = "",
    force: Annotated[
        bool, switch("--force", "Replace a manifest that says something else.")
    ] = False,
    level: Annotated[LevelChoice, option("", "What to check before sealing.")] = LevelChoice.AUTO,
    integrity: Annotated[
        bool, switch("--integrity", "Write Megatron's integrity.json (SHA-256) too.")
    ] = False,
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Record digests of a checkpoint, so that any later change is found.

    The checkpoint is verified first and a damaged one is not sealed. The manifest is written last
    and at once. Sealing does not prove the checkpoint good: the manifest says which checks passed.
    """
    from ftckpt.manifest.seal import hash_share, locate
    from ftckpt.storage import open_store
    from ftckpt.verification import Level, VerifyOptions, verify
    from ftckpt.workers import Work

    bound_memory(max_memory)
    here = open_store(manifest, invocation.stores).local_path() if manifest else None
    if here is not None:
        check_file("--manifest", here)
    work = Work.of(jobs, limit_rate, invocation.counter)
    checkpoint = open_checkpoint(invocation, path, newest=False)
    place = locate(manifest, checkpoint.source.name, invocation.stores) if manifest else None
    # An old manifest is not evidence here: whether the content still fits it is for `seal` to say.
    options = VerifyOptions(level=Level(level.value), use_manifest=False)
    if integrity:
        from ftckpt.formats.dcp.integrity import require_checked

        require_checked(checkpoint.format)
    if integrity and invocation.options(Machines).asked:
        raise UsageError(
            "--integrity is not divided into parts", hint="seal with --integrity in one process"
        )

    def whole(work: Work) -> Result:
        return _seal(
            invocation, checkpoint, options, place, work, force=force,
            integrity=path if integrity else "",
        )  # fmt: skip

    if not invocation.options(Machines).asked:
        return whole(work)
    from ftckpt.commands.cli.parts import session_of, shown
    from ftckpt.operations.many.run import Divided, errors_of
    from ftckpt.parts.plan import names_of, plan_of

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        report = verify(checkpoint, options, work=work, emit=errors_of(invocation))
        return report.findings, report.bytes_read + hash_share(checkpoint, place=place, work=work)

    plan = plan_of(checkpoint, "seal", {"level": level.value})
    return shown(
        invocation,
        Divided(
            session_of(invocation), checkpoint, plan, names_of(checkpoint), work, share, whole
        ).run(),
    )


def _seal(
    invocation: Invocation,
    checkpoint: Checkpoint,
    options: VerifyOptions,
    place: tuple[Store, str] | None,
    work: Work,
    *,
    force: bool,
    integrity: str,
) -> Result:
    """Check and seal a checkpoint; `integrity` is its path where Megatron's record is wanted."""
    from ftckpt.api.checking import remember_seal
    from ftckpt.manifest import PassedCheck
    from ftckpt.manifest.seal import seal, utc_now
    from ftckpt.verification import verify

    report = verify(checkpoint, options, work=work)
    invocation.report(step=checkpoint.known_step, findings=report.findings)
    if report.code is not ExitCode.OK:
        for found in report.findings:
            invocation.found(found)
        return invocation.fail(
            report.code, f"not sealed: {report.message}", report.hint or "ftckpt verify PATH"
        )
    if integrity:
        from ftckpt.formats.dcp.integrity import write_integrity

        if write_integrity(checkpoint.source, work=work):
            checkpoint = open_checkpoint(invocation, integrity, newest=False)
    checks = [PassedCheck(report.level, report.evidence, utc_now())]
    sealed = seal(checkpoint, place=place, force=force, checks=checks, work=work)
    if place is None and not work.partial:
        remember_seal(checkpoint, options, report, invocation.stores)
    files = sealed.manifest.files
    message = (
        f"sealed {counted(len(files), 'file')}, {human_bytes(sum(f.size for f in files))}"
        if sealed.written
        else "sealed already, with the same content"
    )
    invocation.report(
        manifest=sealed.url,
        written=sealed.written,
        files={"count": len(files), "bytes": sum(f.size for f in files)},
        checks=sealed.manifest.checks,
        bytes_read=sealed.bytes_read,
    )
    invocation.print(render.printable(f"{message}: {sealed.url}"))
    invocation.say(f"checked before: {report.message} in {human_duration(report.seconds)}")
    return Result(ExitCode.OK, message)
