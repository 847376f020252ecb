"""`ftckpt delta unpack`: a delta as a checkpoint that needs no base."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.bounds import bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.commands.cli.transfer_options import CODES as TRANSFER_CODES
from ftckpt.commands.cli.transfer_options import (
    DestinationArgument,
    LayoutOptions,
    RunOptions,
    carry_out,
)
from ftckpt.errors import ExitCode
from ftckpt.formats.support import WRITTEN
from ftckpt.operations.definition import argument, option
from ftckpt.operations.many import Machines

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
    ExitCode.NOT_FOUND: "DELTA or a base is not there",
}
OPTIONS = (LayoutOptions, RunOptions, Machines)


def command(
    invocation: Invocation,
    delta: Annotated[str, argument("DELTA", "The delta to read: path, URL or ROOT@STEP.")],
    destination: DestinationArgument,
    base: Annotated[
        list[str] | None, option("PATH", "Where a base of the chain lies now. Repeatable.")
    ] = None,
    to: Annotated[
        str,
        option("FORMAT", f"{', '.join(WRITTEN)}; without it what it was.", words=WRITTEN),
    ] = "",
) -> Result:
    """Write a delta as a full checkpoint, every tensor proven by its digest.

    The files come back as they were, byte for byte. With --to, or with options for another job, the
    state is laid out anew, and is the same bit for bit. DST becomes visible by one last act; a
    killed run goes on where it was.
    """
    from ftckpt.api.deltas import require_delta, restoration
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.content import Content

    request = invocation.options(LayoutOptions).request(invocation)
    if to:
        # What cannot be written under that name is known before the source is opened.
        format_and_writer(to, request.rules, destination)
    run = invocation.options(RunOptions)
    bound_memory(run.max_memory)
    checkpoint = require_delta(
        open_checkpoint(invocation, delta, newest=False, bases=base or ()),
        "ftckpt convert writes any checkpoint in another format",
    )
    restored = restoration(checkpoint, request, to, destination)
    invocation.report(original=restored.original)
    if not restored.original:
        invocation.say("the files are laid out anew; tensors and other state stay bit for bit")
    result = carry_out(
        invocation,
        checkpoint,
        Content.of(checkpoint),
        restored.name,
        request,
        destination,
        run,
        restored.means,
    )
    if "part" in invocation.document:  # a share says nothing of the whole
        return result
    content = checkpoint.index.content()
    invocation.report(content=content)
    if result.code is ExitCode.OK and not (run.dry_run or run.no_proof):
        files = ", in the same files" if restored.original else ""
        invocation.print(f"content {content}, as it was packed{files}")
    return result
