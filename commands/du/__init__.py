"""`ftckpt du`: where the bytes of a checkpoint are."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.bounds import MemoryOption, bound_memory
from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.parameters import option
from ftckpt.commands.cli.render import branch, human_bytes, human_count, table
from ftckpt.commands.cli.target import AlsoOption, PathArgument, open_checkpoint
from ftckpt.errors import ExitCode
from ftckpt.findings import counted

EXAMPLES = (
    ("ftckpt du /ckpt/run7/step-1000", "by component, and by the first two parts of names"),
    ("ftckpt du /ckpt/run7@1000 --depth 3", "by layer, where names are model.layers.N"),
    ("ftckpt du s3://run7/ckpt@1000 --match '*.experts.*'", "the experts alone"),
)
CODES = {
    ExitCode.OK: "summed; the content was not checked",
    ExitCode.CORRUPT: "its headers or metadata are damaged",
    ExitCode.INCOMPLETE: "not committed, or still being written",
    ExitCode.UNSAFE: "its headers or metadata are hostile or ambiguous; nothing was executed",
    ExitCode.NOT_FOUND: "no checkpoint there, or no tensor matches",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metadata needs more than --max-memory",
    ExitCode.UNSUPPORTED: "",
}


def command(
    ctx: typer.Context,
    path: PathArgument,
    depth: Annotated[int, option("N", "Parts of a name to sum by.", "--depth", "-d", min=0)] = 2,
    match: Annotated[str, option("GLOB", "Only tensors of this name, `*` any text.")] = "",
    also: AlsoOption = None,
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Show where a checkpoint's bytes are, by component and layer.

    Sums the logical tensors by the first parts of their names, from headers alone: each element
    once, without replicas and tied copies.
    """
    from ftckpt.inspection.usage import usage

    invocation = invoked(ctx)
    bound_memory(max_memory)
    checkpoint = open_checkpoint(invocation, path, also=also)
    found = usage(checkpoint, depth=depth, match=match)
    invocation.report(
        depth=depth,
        match=match or None,
        sums=found.sums,
        tensors=found.tensors,
        bytes=found.bytes,
        files=found.files,
    )
    rows = [
        [
            human_bytes(one.bytes),
            f"{100 * one.bytes / found.bytes:.1f} %" if found.bytes else "-",
            human_count(one.elements),
            one.tensors,
            branch(one.component, one.prefix, one.depth),
        ]
        for one in found.sums
    ]
    invocation.print(table(["bytes>", "share>", "elements>", "tensors>", "name"], rows))
    message = f"{counted(found.tensors, 'tensor')}, {human_bytes(found.bytes)}"
    invocation.print()
    invocation.print(f"{message}; the files have {human_bytes(found.files)}")
    return Result(ExitCode.OK, message)
