"""`ftckpt delta unpack`: a delta as a checkpoint that needs no base."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.parameters import OneOf
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.commands.cli.transfer_options import CODES as TRANSFER_CODES
from ftckpt.commands.cli.transfer_options import (
    DestinationArgument,
    LayoutOptions,
    PartOptions,
    RunOptions,
    carry_out,
)
from ftckpt.errors import ExitCode, UsageError
from ftckpt.formats.support import WRITTEN

EXAMPLES = (
    ("ftckpt delta unpack deltas/step-1010 restored/step-1010", "in the format it was packed from"),
    ("ftckpt delta unpack deltas/step-1010 out --base s3://b/run/step-1000", "the base has moved"),
    ("ftckpt delta unpack deltas/step-1010 hf --to safetensors", "in another format"),
    (
        "ftckpt convert deltas/step-1010 hf --to safetensors --only model",
        "a part of it: convert and reshard read a delta like anything else",
    ),
)
CODES = dict(TRANSFER_CODES) | {
    ExitCode.CORRUPT: "DELTA is damaged, a base is another, or the proof failed",
    ExitCode.NOT_FOUND: "DELTA, a base, or the directory around DST is not there",
}
OPTIONS = (LayoutOptions, RunOptions)


def command(
    ctx: typer.Context,
    delta: Annotated[
        str, typer.Argument(metavar="DELTA", help="The delta to read: path, URL or ROOT@STEP.")
    ],
    destination: DestinationArgument,
    base: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Where a base of the chain lies now. Repeatable."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FORMAT", help=f"{', '.join(WRITTEN)}; without it what it was."
        ),
        OneOf(WRITTEN),
    ] = "",
) -> Result:
    """Write a delta as a full checkpoint, every tensor proven by its digest.

    The files come back as they were, byte for byte. With --to, or with options for another job, the
    state is laid out anew, and is the same bit for bit. DST becomes visible by one last act; a
    killed run goes on where it was.
    """
    from ftckpt.api.writing import Means
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.formats.delta.original import (
        OriginalWriter,
        format_of,
        has_original,
        same_objects_there,
    )
    from ftckpt.formats.delta.prove_original import OriginalProof
    from ftckpt.formats.state.same_object import SameObject
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.prove.against_digests import DigestProof

    invocation = invoked(ctx)
    request = invocation.options(LayoutOptions).request(invocation, PartOptions())
    if to:
        # What cannot be written under that name is known before the source is opened.
        format_and_writer(to, request.rules, destination)
    checkpoint = open_checkpoint(invocation, delta, newest=False, bases=base or ())
    if not isinstance(checkpoint, DeltaCheckpoint):
        raise UsageError(
            f"{checkpoint.source.url} is not a delta but {checkpoint.format}",
            hint="ftckpt convert writes any checkpoint in another format",
        )
    index = checkpoint.index
    run = invocation.options(RunOptions)
    original = not to and request == LayoutRequest() and has_original(checkpoint)
    invocation.report(original=original)
    if original:
        writer = OriginalWriter(checkpoint)
        means = Means(format_of(checkpoint), writer, OriginalProof(writer), same_objects_there)
    else:
        invocation.say("the files are laid out anew; tensors and other state stay bit for bit")
        name, prover = to or checkpoint.source_format, DigestProof(checkpoint.digests())
        means = Means(*format_and_writer(name, request.rules, destination), prover, SameObject)
    result = carry_out(
        invocation,
        checkpoint,
        Content.of(checkpoint),
        to or checkpoint.source_format,
        request,
        destination,
        run,
        means,
    )
    invocation.report(content=index.content())
    if result.code is ExitCode.OK and not (run.dry_run or run.no_proof):
        files = ", in the same files" if original else ""
        invocation.print(f"content {index.content()}, as it was packed{files}")
    return result
