"""The answers of verbs that write and prove: what was written, or what would be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import switch

from .invocation import Invocation, Result
from .render import human_bytes, human_duration, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.transfer.prove.against_source import Proof
    from ftckpt.transfer.request.dry_run import BoxCopy, Planned
    from ftckpt.transfer.run import TransferReport


_SHOWN = 20  # files of a plan
# What is read beside the writing, as a share of the result and in bytes.
_WORTH_SAYING, _LEAST_SAID = 0.03, 16 << 20


def _copies(count: int) -> str:
    return counted(count, "copy", "copies")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How much is shown of what would be written."""

    TITLE: ClassVar[str] = "How it is done"

    verbose: Annotated[bool, switch("--verbose", "With --dry-run: print every copy too.", "-v")] = (
        False
    )


def show_transfer(invocation: Invocation, report: TransferReport) -> Result:
    """Print what a transfer did, or would do."""
    if report.plan is not None:
        full = invocation.options(PlanOptions).verbose
        return _show_plan(invocation, report.plan, report.copies, verbose=full)
    if report.already_there:
        return nothing_left(invocation, report.url)
    merged = " merged with its adapters" if "adapters" in invocation.document else ""
    taking = report.seconds["write"]
    message = f"wrote {counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    speed = f"in {human_duration(taking)} ({human_bytes(int(report.nbytes / taking))}/s)"
    speed += taken_over(report.taken_over)
    invocation.print(printable(f"{message} as {report.format} {speed}: {report.url}"))
    invocation.print(proof_line(report.proof, f"equal the source{merged}", report.seconds))
    if report.extra_read > max(_LEAST_SAID, _WORTH_SAYING * report.nbytes):
        invocation.say(f"check and proof read {human_bytes(report.extra_read)} of the source alone")
    proven = "not proven" if report.proof is None else "proven"
    return Result(ExitCode.OK, f"{message}, {proven}")


def nothing_left(invocation: Invocation, url: str) -> Result:
    """Answer that an earlier run had made all of it."""
    message = "an earlier run had finished: nothing was left to do"
    invocation.print(printable(f"ok: {message}: {url}"))
    return Result(ExitCode.OK, message)


def taken_over(nbytes: int) -> str:
    """Return how a sentence ends about a run that went on where another was killed."""
    return f", {human_bytes(nbytes)} of it taken over from a run before" if nbytes else ""


def proof_line(proof: Proof | None, held: str, seconds: Mapping[str, float]) -> str:
    """Return what was proven.

    Args:
        proof: None where the user wanted none.
        held: what was found of the tensors and objects.
        seconds: how long each stage took.
    """
    if proof is None:
        return "not proven: --no-proof"
    took = f"(in {human_duration(seconds['prove'])})"
    objects, cast = counted(proof.objects, "object"), proof.cast
    if cast is None:
        return (
            f"proven: {counted(proof.tensors, 'tensor')}, {human_bytes(proof.nbytes)}, and "
            f"{objects} {held} bit for bit {took}"
        )
    infinite = f", {cast.infinite:,} from finite to infinite" if cast.infinite else ""
    return (
        f"proven: {counted(cast.tensors, 'tensor')} {held} cast to {' and '.join(cast.dtypes)} "
        f"({cast.changed:,} of {cast.values:,} values changed{infinite}); "
        f"{counted(proof.tensors - cast.tensors, 'tensor')} and {objects} {held} bit for bit; "
        f"{human_bytes(proof.nbytes)} compared {took}"
    )


def _show_plan(
    invocation: Invocation, plan: Planned, copies: Sequence[BoxCopy], *, verbose: bool
) -> Result:
    """Print the files and the cost, and every copy where that is asked for."""
    from ftckpt.checkpoint.coverage import show

    for copy in copies if verbose else ():
        cast = f" as {copy.cast}" if copy.cast else ""
        invocation.print(
            f"{copy.file}: {show(copy.local)} <- {copy.key} {show(copy.source)}"
            f" {human_bytes(copy.nbytes)}{cast}"
        )
    into = Counter(copy.file for copy in copies)
    shown = plan.files if verbose else plan.files[:_SHOWN]
    for file in shown:
        parts = f", {_copies(into[file.path])}" if into[file.path] else ""
        invocation.print(f"{file.path}: {human_bytes(file.nbytes)}{parts}")
    if len(shown) < len(plan.files):
        rest = sum(file.nbytes for file in plan.files[_SHOWN:])
        invocation.print(f"and {len(plan.files) - _SHOWN} more files, {human_bytes(rest)}")
    if copies and not verbose:
        invocation.say("--verbose lists every copy")
    took = "" if plan.seconds is None else f", about {human_duration(plan.seconds)}"
    message = (
        f"would write {counted(len(plan.files), 'file')}, {human_bytes(plan.nbytes)}, with "
        f"{_copies(len(copies))}, "
        f"at most {human_bytes(plan.memory)} of memory{took}"
    )
    invocation.print(message)
    return Result(ExitCode.OK, message)
