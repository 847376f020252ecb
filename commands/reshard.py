"""`ftckpt reshard`: the same format for another number of ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from .invocation import Result, invoked
from .target import open_checkpoint
from .transfers import (
    CODES as CODES,
)
from .transfers import (
    DestinationArgument,
    PartOptions,
    RunOptions,
    SourceArgument,
    carry_out,
    narrowed,
    read_rules,
)

EXAMPLES = (
    ("ftckpt reshard run/step-1000 run-64/step-1000 --dp 64", "DCP: a file for each of 64 ranks"),
    (
        "ftckpt reshard ckpt/iter_0001000 out/iter_0001000 --tp 4 --pp 1",
        "Megatron, other TP and PP",
    ),
    ("ftckpt reshard run/global_step900 new/global_step900 --dp 2", "DeepSpeed ZeRO on 2 ranks"),
    ("ftckpt reshard SRC DST --tp 4 --dry-run", "print every copy and what it costs"),
)
OPTIONS = (PartOptions, RunOptions)

_Ranks = int | None


def command(
    ctx: typer.Context,
    source: SourceArgument,
    destination: DestinationArgument,
    tp: Annotated[_Ranks, typer.Option(metavar="N", min=1, help="Tensor-parallel ranks.")] = None,
    pp: Annotated[_Ranks, typer.Option(metavar="N", min=1, help="Pipeline stages.")] = None,
    vp: Annotated[
        _Ranks, typer.Option(metavar="N", min=1, help="Virtual stages of each pipeline stage.")
    ] = None,
    dp: Annotated[
        _Ranks, typer.Option(metavar="N", min=1, help="Data-parallel (ZeRO, FSDP) ranks.")
    ] = None,
    ep: Annotated[_Ranks, typer.Option(metavar="N", min=1, help="Expert-parallel ranks.")] = None,
    zero_stage: Annotated[
        _Ranks, typer.Option(metavar="N", min=1, max=3, help="DeepSpeed's ZeRO stage.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file, where the format lets us choose.")
    ] = "",
) -> Result:
    """Write a checkpoint for another number of ranks, optimizer included.

    The result is built beside DST, read back, compared with the source bit for bit, and shown by
    one last act. Killed at any instant, DST is absent or whole; the same command goes on where it
    was. The source is never written.
    """
    from ftckpt.limits import parse_bytes
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import Wishes

    invocation = invoked(ctx)
    part = invocation.options(PartOptions)
    wishes = Wishes(
        tp=tp,
        pp=pp,
        vp=vp,
        dp=dp,
        ep=ep,
        zero_stage=zero_stage,
        max_shard_size=parse_bytes(max_shard_size) if max_shard_size else None,
        rules=read_rules(part.rules),
        true_vocab_size=part.true_vocab_size,
    )
    checkpoint = open_checkpoint(invocation, source, newest=False, rules=wishes.rules)
    content = narrowed(Content.of(checkpoint), part)
    run = invocation.options(RunOptions)
    return carry_out(invocation, checkpoint, content, checkpoint.format, wishes, destination, run)
