"""`ftckpt delta info`: what a chain of deltas is made of, and what it costs to restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import JobsOption, MemoryOption, bound_memory, job_count
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, table
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option, switch

from .answer import share_table

if TYPE_CHECKING:
    from ftckpt.delta.pack.advice import Advice
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.formats.delta.rates import DecodeRates
    from ftckpt.formats.delta.survey import ChainSurvey, Link

EXAMPLES = (
    ("ftckpt delta info deltas/step-1030", "the chain, where each base is, the cost of a restore"),
    (
        "ftckpt delta info deltas/step-1030 --advise --storage-rate 2GB/s",
        "whether deltas pay there, and how many to put on a full checkpoint",
    ),
    ("ftckpt delta info deltas/step-1030 --base s3://b/run/step-1000", "where a base has moved"),
)
CODES = {
    ExitCode.OK: "the chain is whole, as far as can be told without reading tensors",
    ExitCode.CORRUPT: "an index is damaged, or a base holds other content",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.NOT_FOUND: "DELTA or a base of the chain is not there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "decoding so long a chain needs more than --max-memory",
    ExitCode.UNSUPPORTED: "the chain is too long, or of another version",
}


def command(
    invocation: Invocation,
    delta: Annotated[str, argument("DELTA", "The delta: path, URL or ROOT@STEP.")],
    base: Annotated[
        list[str] | None, option("PATH", "Where a base of the chain lies now. Repeatable.")
    ] = None,
    advise: Annotated[bool, switch("--advise", "Measure rates, and say when deltas pay.")] = False,
    storage_rate: Annotated[str, option("RATE", "Write rate of the storage: 2GB/s.")] = "",
    jobs: JobsOption = 0,
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Show a delta's content, its chain of bases, and the cost of a restore.

    Each checkpoint of the chain with its size and how it is known to be the right one; the ratio by
    component and by method; bytes that a restore reads and blocks that it decodes. Reads indexes
    and lists of files alone, but with --advise, which reads, decodes and encodes a sample.
    """
    from ftckpt.api.deltas import delta_info, require_delta

    bound_memory(max_memory)
    if storage_rate and not advise:
        raise UsageError("--storage-rate is for the advice", hint="add --advise")
    opened = require_delta(
        open_checkpoint(invocation, delta, bases=base or ()), "ftckpt inspect shows any checkpoint"
    )
    workers = job_count(jobs)
    answer = delta_info(opened, advise=advise, storage_rate=storage_rate, jobs=workers)
    found = answer.chain
    _report(invocation, opened, found)
    if not invocation.json:
        _print(invocation, found)
    if found.broken is not None:
        hint = "ftckpt verify says more" if found.followed else _HINT
        return invocation.fail(found.broken.code, found.broken.message, hint)
    if answer.rates is not None and answer.advice is not None:
        _print_advice(invocation, answer.rates, answer.advice, workers)
        if not storage_rate:
            invocation.say("the storage is taken to be as fast as it was just read; --storage-rate")
    deltas = sum(link.blocks > 0 or link.base is not None for link in found.links)
    return Result(
        ExitCode.OK,
        f"{counted(deltas, 'delta')} in the chain; a restore reads {human_bytes(found.read)} and "
        f"decodes {counted(found.blocks, 'block')}",
    )


_HINT = "bring the base back, or say where it is: --base PATH"


def _report(invocation: Invocation, delta: DeltaCheckpoint, found: ChainSurvey) -> None:
    index = delta.index
    own = found.links[0]
    invocation.report(
        step=index.step,
        source_format=index.source_format,
        created=index.created,
        content=index.content(),
        base=None if index.base is None else index.base._asdict(),
        chain=found.links,
        broken=found.broken,
        ratio=own.ratio,
        components=found.components,
        methods=found.methods,
        restore={"bytes_read": found.read, "blocks": found.blocks},
    )


def _print(invocation: Invocation, found: ChainSurvey) -> None:
    rows = [_row(link) for link in found.links]
    columns = ["step>", "stored>", "ratio>", "restore reads>", "blocks>", "known by", "checkpoint"]
    invocation.print(table(columns, rows))
    invocation.print()
    invocation.print(share_table("component", found.components))
    invocation.print()
    invocation.print(share_table("method", found.methods))
    if found.broken is None:
        invocation.print()
        links, blocks = counted(len(found.links), "checkpoint"), counted(found.blocks, "block")
        invocation.print(
            f"a restore reads {human_bytes(found.read)} of {links} and decodes {blocks}"
        )


def _row(link: Link) -> list[object]:
    return [
        "" if link.step is None else link.step,
        human_bytes(link.stored),
        "" if link.ratio is None else f"{link.ratio:.2f}",
        human_bytes(link.read),
        link.blocks or "",
        link.identity,
        f"{link.url} ({link.format})",
    ]


def _print_advice(invocation: Invocation, rates: DecodeRates, advice: Advice, workers: int) -> None:
    """Say when deltas pay, by rates that were measured here."""
    invocation.report(rates=rates, advice=advice)
    invocation.print()
    invocation.print(
        f"measured with {counted(workers, 'worker')}: encodes {human_bytes(int(rates.encode))}/s, "
        f"decodes {human_bytes(int(rates.decode))}/s, reads {human_bytes(int(rates.read))}/s"
    )
    invocation.print(advice.sentence)
