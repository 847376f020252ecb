"""`ftckpt seal`: record digests, so that any later change is found."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
)
from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.option_values import check_file
from ftckpt.commands.cli.render import human_bytes, human_duration
from ftckpt.commands.cli.target import PathArgument, open_checkpoint
from ftckpt.errors import ExitCode
from ftckpt.findings import counted

from .cli import render
from .verify import LevelChoice

EXAMPLES = (
    ("ftckpt seal /ckpt/run7/step-1000", "check it, then write ftckpt.manifest.json beside it"),
    ("ftckpt seal s3://run7/ckpt/step-1000", "the same on object storage"),
    ("ftckpt seal /ro/step-9 --manifest /var/seals/step-9.json", "keep the manifest elsewhere"),
)
CODES = {
    ExitCode.OK: "sealed, or sealed before with the same content",
    ExitCode.CORRUPT: "the check before sealing found damage; nothing was written",
    ExitCode.INCOMPLETE: "not committed, or a file changed meanwhile; nothing was written",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was written",
    ExitCode.REFUSED: "another manifest stands there: the content has changed since",
    ExitCode.NOT_FOUND: "no checkpoint there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the place cannot be written; --manifest names another",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "",
}


def command(
    ctx: typer.Context,
    path: PathArgument,
    manifest: Annotated[
        str, typer.Option(metavar="ELSEWHERE", help="Write the manifest to this path or URL.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a manifest that says something else.")
    ] = False,
    level: Annotated[
        LevelChoice, typer.Option(help="What to check before sealing.")
    ] = LevelChoice.AUTO,
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Record digests of a checkpoint, so that any later change is found.

    The checkpoint is verified first and a damaged one is not sealed. The manifest is written last
    and at once. Sealing does not prove the checkpoint good: the manifest says which checks passed.
    """
    from ftckpt.manifest import PassedCheck
    from ftckpt.manifest.seal import locate, seal, utc_now
    from ftckpt.storage import open_store
    from ftckpt.verification import Level, VerifyOptions, verify
    from ftckpt.workers import Work

    invocation = invoked(ctx)
    bound_memory(max_memory)
    here = open_store(manifest, invocation.stores).local_path() if manifest else None
    if here is not None:
        check_file("--manifest", here)
    work = Work.of(jobs, limit_rate, invocation.counter)
    checkpoint = open_checkpoint(invocation, path, newest=False)
    place = locate(manifest, checkpoint.source.name, invocation.stores) if manifest else None
    # An old manifest is not evidence here: whether the content still fits it is for `seal` to say.
    options = VerifyOptions(level=Level(level.value), use_manifest=False)
    report = verify(checkpoint, options, work=work)
    invocation.report(step=checkpoint.known_step, findings=report.findings)
    if report.code is not ExitCode.OK:
        for found in report.findings:
            invocation.find(found)
        return invocation.fail(
            report.code, f"not sealed: {report.message}", report.hint or "ftckpt verify PATH"
        )
    checks = [PassedCheck(report.level, report.evidence, utc_now())]
    sealed = seal(checkpoint, place=place, force=force, checks=checks, work=work)
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
