"""What `reshard` and `convert` share: their flags, and the way from a layout to a result."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import typer

from ftckpt.errors import ExitCode

from . import render
from .bounds import JobsOption, MemoryOption, RateOption, bound_memory, job_count, rate_limit
from .invocation import Invocation, Result
from .target import open_other
from .transferred import show_plan, show_report

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.discovery.recognise import Format
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest, Writer
    from ftckpt.transfer.prove.elements import Prover, SameObjects
    from ftckpt.verification import VerifyReport

SourceArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="The checkpoint to read: path, URL or ROOT@STEP.")
]
DestinationArgument = Annotated[
    str, typer.Argument(metavar="DST", help="Where the result goes; it must not exist yet.")
]
RulesOption = Annotated[
    str,
    typer.Option(
        metavar="FILE.toml", help="Table of how tensors divide over ranks, or a name: llama, …"
    ),
]

CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "written, proven and visible",
    ExitCode.CORRUPT: "the source is damaged, or the proof failed; nothing is visible",
    ExitCode.INCOMPLETE: "the source is not committed, or changed meanwhile",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "DST exists or lies in a checkpoint, or another run is writing it",
    ExitCode.NOT_FOUND: "no checkpoint there, or the directory around DST does not exist",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "the format cannot hold it, or no rule says how a tensor is divided",
}


class OnlyChoice(StrEnum):
    """Which part is wanted; the core's `Only`, spelled here so that help needs no core."""

    MODEL = "model"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """Which part of the source is written."""

    TITLE: ClassVar[str] = "What is written"

    only: Annotated[
        OnlyChoice | None, typer.Option(help="The weights alone, or the optimizer's state alone.")
    ] = None
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave out state by name or pattern. Repeatable."),
    ] = None
    rules: RulesOption = ""
    true_vocab_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows of the vocabulary without padding.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """For which job, and in files of which size."""

    TITLE: ClassVar[str] = "For whom it is laid out"

    tp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tensor-parallel ranks.")] = (
        None
    )
    pp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Pipeline stages.")] = None
    vp: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Virtual stages of each pipeline stage."),
    ] = None
    dp: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Data-parallel (ZeRO, FSDP) ranks.")
    ] = None
    ep: Annotated[int | None, typer.Option(metavar="N", min=1, help="Expert-parallel ranks.")] = (
        None
    )
    zero_stage: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=3, help="DeepSpeed's ZeRO stage.")
    ] = None
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file, if the format allows a choice.")
    ] = ""
    like: Annotated[
        str,
        typer.Option(
            metavar="EXAMPLE", help="Use the layout of this checkpoint of the target job."
        ),
    ] = ""

    def wishes(self, invocation: Invocation, part: PartOptions) -> LayoutRequest:
        """Return what is asked of the layout; an example is opened.

        Raises:
            UsageError: a size is none, the table of rules cannot be read, or the example is a root.
            FtckptError: the example cannot be opened.
        """
        from ftckpt.transfer.layout import LayoutRequest
        from ftckpt.workers.limits import parse_bytes

        rules = read_rules(part.rules)
        example = open_other(invocation, self.like, rules=rules) if self.like else None
        if example is not None:
            invocation.report(like=example.source.url)
        return LayoutRequest(
            tp=self.tp,
            pp=self.pp,
            vp=self.vp,
            dp=self.dp,
            ep=self.ep,
            zero_stage=self.zero_stage,
            max_shard_size=parse_bytes(self.max_shard_size) if self.max_shard_size else None,
            rules=rules,
            true_vocab_size=part.true_vocab_size,
            like=example,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is carried out."""

    TITLE: ClassVar[str] = "How it is done"

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every copy and its cost; write nothing.")
    ] = False
    no_proof: Annotated[
        bool,
        typer.Option("--no-proof", help="Skip the checks of the source and of the result."),
    ] = False
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what another transfer to DST left.")
    ] = False
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:N; auto measures and chooses.")
    ] = "cpu"
    jobs: JobsOption = 0
    limit_rate: RateOption = ""
    max_memory: MemoryOption = "1GiB"


def read_rules(path: str) -> Rules | None:
    """Return the user's table of split rules, or None where none was given.

    A built-in table is given by its name, unless a file has that name.

    Raises:
        UsageError: the file cannot be read, or is not such a table.
    """
    if not path:
        return None
    from ftckpt.checkpoint.rules import parse_rules
    from ftckpt.formats.state.rule_tables import built_in, families

    # Megatron's rules depend on the job's arguments, which its own readers know.
    if path in families() and "megatron" not in path and not os.path.exists(path):
        return built_in(path)
    return parse_rules(read_text(path), path)


def read_text(path: str) -> str:
    """Return a small text file that the user named.

    Raises:
        UsageError: it cannot be read.
    """
    from ftckpt.errors import UsageError

    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: {error}") from error


def narrowed(content: Content, options: PartOptions) -> Content:
    """Return the part of a content that the user wants.

    Raises:
        NotFoundError: it has nothing of that part.
        UsageError: a name to drop matches nothing.
    """
    from ftckpt.transfer.request.narrowing import Only, drop, only

    if options.only is not None:
        content = only(content, Only(options.only.value))
    return drop(content, options.drop) if options.drop else content


class Means(NamedTuple):
    """By what a result is written and proven.

    Attributes:
        target: reads it.
        writer: lays it out.
        prover: compares it with a content that the layout does not change.
        same_objects: how objects are compared.
    """

    target: Format
    writer: Writer
    prover: Prover
    same_objects: SameObjects


def carry_out(
    invocation: Invocation,
    checkpoint: Checkpoint,
    content: Content,
    name: str,
    wishes: LayoutRequest,
    destination: str,
    run: RunOptions,
    means: Means | None = None,
    *,
    used: Collection[str] = (),
) -> Result:
    """Lay out, then either print the plan or write, prove and show the result.

    Args:
        invocation: told of everything.
        checkpoint: the source; its own evidence is checked first, because what is written gets new
            checksums, which would hide damage that the old ones show.
        content: what is written.
        name: of the target format.
        wishes: what the user asks of the layout.
        destination: where it goes.
        run: how it is done.
        means: by what it is written and proven; by default the format's own writer, and a
            comparison of every bit.
        used: wishes that the verb itself has a use for; others that the writer has none for are
            refused.
    """
    from ftckpt.formats.catalog import reads_by_rules
    from ftckpt.formats.state.same_object import SameObject
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.storage import open_store
    from ftckpt.transfer.prove.elements import prove
    from ftckpt.transfer.request.dry_run import affordable_forks, affordable_jobs, planned
    from ftckpt.transfer.request.example import lay_out
    from ftckpt.transfer.run import TransferOptions, require_place, transfer
    from ftckpt.verification import VerifyOptions, verify

    bound_memory(run.max_memory)
    store = open_store(destination, invocation.stores)
    local = store.traits.local
    jobs = affordable_jobs(job_count(run.jobs), local=local, source=checkpoint.source.store)
    means = means or Means(*format_and_writer(name, wishes.rules, destination), prove, SameObject)
    target, writer, prover, same_objects = means
    if reads_by_rules(checkpoint.source_format):
        used = (*used, "rules")
    layout = lay_out(writer, content, wishes, store, used=used)
    require_place(layout)
    invocation.report(
        destination=destination,
        to=name,
        dropped=content.dropped,
        notes=[note.message for note in layout.notes],
        bytes=layout.nbytes,
    )
    for gone in content.dropped:
        invocation.say(f"left out: {gone}")
    for note in layout.notes:
        invocation.say(f"note: {note.message}")
    if run.dry_run:
        if prover is prove and not run.no_proof:
            from ftckpt.transfer.prove.rehearsal import rehearse

            rehearse(content, layout, target, same_objects, single=writer.single)
        plan = planned(layout, checkpoint, jobs=jobs, proof=not run.no_proof, local=local)
        return show_plan(invocation, layout, checkpoint, plan)
    limiter = rate_limit(run.limit_rate)

    def check() -> VerifyReport:
        options = VerifyOptions(jobs=jobs, forks=jobs, limiter=limiter)
        found = verify(checkpoint, options, counter=invocation.counter)
        invocation.report(evidence=found.evidence, findings=found.findings)
        if found.code is ExitCode.OK:
            invocation.say(f"the source: {found.message}")
        else:
            for one in found.findings:
                invocation.print(render.finding_line(one))
        return found

    report = transfer(
        content,
        layout,
        destination,
        target,
        single=writer.single,
        same_objects=same_objects,
        options=TransferOptions(
            jobs=jobs,
            forks=affordable_forks(jobs, checkpoint) if local and limiter is None else 0,
            limiter=limiter,
            proof=not run.no_proof,
            device=run.device,
            restart=run.restart,
        ),
        store_options=invocation.stores,
        check=None if run.no_proof else check,
        prover=prover if layout.content is None else prove,
        counter=invocation.counter,
    )
    return show_report(invocation, report)
