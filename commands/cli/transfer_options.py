"""What `reshard` and `convert` share: their flags, and the way from a layout to a result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument, option, switch
from ftckpt.operations.many import Machines, PartReport, Session
from ftckpt.operations.tables import read_rules as read_rules
from ftckpt.reports import document

from .bounds import JobsOption, MemoryOption, RateOption
from .invocation import Invocation, Result
from .parts import shown
from .transfer_report import show_transfer

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.operations.many.transferring import Measures
    from ftckpt.operations.writing import Means
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest


DestinationArgument = Annotated[
    str, argument("DST", "Where the result goes; it must not exist yet.")
]
RulesOption = Annotated[
    str, option("FILE.toml", "Table of how tensors divide over ranks, or a name: llama, …")
]

CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "written, proven and visible",
    ExitCode.CORRUPT: "the source is damaged, or the proof failed; nothing is visible",
    ExitCode.INCOMPLETE: "the source is not committed, or changed meanwhile",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "DST exists or lies in a checkpoint, or another run is writing it",
    ExitCode.NOT_FOUND: "no checkpoint there, or DST looks like a mistyped URL",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "the format cannot hold it, or no rule says how a tensor is divided",
}


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """For which job, and in files of which size."""

    TITLE: ClassVar[str] = "For whom it is laid out"

    tp: Annotated[int | None, option("N", "Tensor-parallel ranks.", min=1)] = None
    pp: Annotated[int | None, option("N", "Pipeline stages.", min=1)] = None
    vp: Annotated[int | None, option("N", "Virtual stages of each pipeline stage.", min=1)] = None
    dp: Annotated[int | None, option("N", "Data-parallel (ZeRO, FSDP) ranks.", min=1)] = None
    ep: Annotated[int | None, option("N", "Expert-parallel ranks.", min=1)] = None
    zero_stage: Annotated[int | None, option("N", "DeepSpeed's ZeRO stage.", min=1, max=3)] = None
    max_shard_size: Annotated[
        str, option("SIZE", "Largest file, if the format allows a choice.")
    ] = ""
    like: Annotated[
        str, option("EXAMPLE", "Use the layout of this checkpoint of the target job.")
    ] = ""

    def request(self, invocation: Invocation, rules: str = "") -> LayoutRequest:
        """Return what is asked of the layout; an example is opened.

        Raises:
            UsageError: a size is none, the table of rules cannot be read, or the example is a root.
            FtckptError: the example cannot be opened.
        """
        from ftckpt.operations.transferring import LayoutFlags, layout_request

        flags = cast(LayoutFlags, asdict(self))
        return layout_request(flags, read_rules(rules), invocation.stores, on=invocation)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How it is carried out."""

    TITLE: ClassVar[str] = "How it is done"

    dry_run: Annotated[
        bool, switch("--dry-run", "Print the files and the cost; write nothing.")
    ] = False
    verbose: Annotated[bool, switch("--verbose", "With --dry-run: print every copy too.", "-v")] = (
        False
    )
    no_proof: Annotated[
        bool, switch("--no-proof", "Skip the checks of the source and of the result.")
    ] = False
    restart: Annotated[bool, switch("--restart", "Discard what another transfer to DST left.")] = (
        False
    )
    device: Annotated[str, option("DEVICE", "cpu, cuda, cuda:N; auto measures and chooses.")] = (
        "cpu"
    )
    jobs: JobsOption = 0
    limit_rate: RateOption = ""
    max_memory: MemoryOption = "1GiB"


def carry_out(
    invocation: Invocation,
    checkpoint: Checkpoint,
    content: Content,
    name: str,
    request: LayoutRequest,
    destination: str,
    run: RunOptions,
    means: Means | None = None,
    *,
    used: Collection[str] = (),
    measures: Sequence[Measures] = (),
) -> Result:
    """Lay out, then either print the plan or write, prove and show the result.

    Args:
        invocation: told of everything.
        checkpoint: the source; its own evidence is checked first, because what is written gets new
            checksums, which would hide damage that the old ones show.
        content: what is written.
        name: of the target format.
        request: what the user asks of the layout.
        destination: where it goes.
        run: how it is done.
        means: by what it is written and proven; by default the format's own writer, and a
            comparison of every bit.
        used: options that the verb itself uses; others that the writer does not use are
            refused.
        measures: what is measured of values that are computed.
    """
    from ftckpt.operations import transferring

    flags: transferring.TransferFlags = {
        "dry_run": run.dry_run, "no_proof": run.no_proof, "restart": run.restart,
        "device": run.device, "jobs": run.jobs, "limit_rate": run.limit_rate,
    }  # fmt: skip
    division = replace(invocation.groups.get(Machines) or Machines(), line=tuple(invocation.words))
    session = Session(invocation.verb, division, invocation.stores, invocation)
    report = transferring.carry_out(
        session, checkpoint, content, name, request, destination, flags, means, used=used,
        measures=measures,
    )  # fmt: skip
    if isinstance(report, PartReport):
        return shown(invocation, report)
    invocation.report(**document(report))
    return show_transfer(invocation, report, verbose=run.verbose)
