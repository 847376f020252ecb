"""`ftckpt reshard`: the same format for another number of ranks."""

from __future__ import annotations

from ftckpt.commands.cli.bounds import bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import AlsoOption, open_checkpoint
from ftckpt.commands.cli.transfer_options import CODES as CODES
from ftckpt.commands.cli.transfer_options import (
    DestinationArgument,
    LayoutOptions,
    OnlyChoice,
    PartOptions,
    RunOptions,
    SourceArgument,
    carry_out,
    narrowed,
)
from ftckpt.operations.many import Machines

EXAMPLES = (
    ("ftckpt reshard run/step-1000 run-64/step-1000 --dp 64", "DCP: a file for each of 64 ranks"),
    (
        "ftckpt reshard ckpt/iter_0001000 out/iter_0001000 --tp 4 --pp 1",
        "Megatron, other TP and PP",
    ),
    ("ftckpt reshard run/global_step900 new/global_step900 --dp 2", "DeepSpeed ZeRO on 2 ranks"),
    (
        "ftckpt reshard run/global_step900 new/global_step900 --like new/global_step0",
        "DeepSpeed for the ranks and stages of a job that has saved once",
    ),
    (
        "ftckpt reshard run/step-900 tp4/step-900 --tp 4 --rules mine.toml",
        "shards that a trainer saved by hand, cut by a table of rules",
    ),
    ("ftckpt reshard SRC DST --tp 4 --dry-run", "print the files and what it costs"),
    ("srun ftckpt reshard SRC DST --dp 64 --part auto --finish-last", "by all nodes of a job"),
)
OPTIONS = (PartOptions, LayoutOptions, RunOptions, Machines)


def command(
    invocation: Invocation,
    source: SourceArgument,
    destination: DestinationArgument,
    also: AlsoOption = None,
) -> Result:
    """Write a checkpoint for another number of ranks, optimizer included.

    The result is built beside DST, read back, compared with the source bit for bit, and shown by
    one last act. Killed at any instant, DST is absent or whole; the same command goes on where it
    was. The source is never written.
    """
    from ftckpt.errors import UsageError
    from ftckpt.transfer.content import Content

    part = invocation.options(PartOptions)
    if part.only is OnlyChoice.ADAPTER:
        raise UsageError("an adapter is taken out by convert", hint="ftckpt convert --only adapter")
    request = invocation.options(LayoutOptions).request(invocation, part)
    run = invocation.options(RunOptions)
    bound_memory(run.max_memory)
    checkpoint = open_checkpoint(invocation, source, newest=False, rules=request.rules, also=also)
    content = narrowed(Content.of(checkpoint), part)
    name = checkpoint.source_format
    return carry_out(invocation, checkpoint, content, name, request, destination, run)
