"""The answers of `reshard` and `convert`: what was written, or what would be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.errors import ExitCode
from ftckpt.findings import counted

from .invocation import Invocation, Result
from .render import human_bytes, human_duration, printable

if TYPE_CHECKING:
    from ftckpt.checkpoint import Box, Checkpoint
    from ftckpt.transfer.carrying import TransferReport
    from ftckpt.transfer.layout import Layout
    from ftckpt.transfer.planned import Planned


def show_report(invocation: Invocation, report: TransferReport) -> Result:
    """Report and print what a transfer did."""
    invocation.report(
        files=report.files,
        bytes=report.nbytes,
        taken_over=report.taken_over,
        already_there=report.already_there,
        proof=report.proof,
        seconds=report.seconds,
    )
    if report.already_there:
        message = "an earlier run had finished: nothing was left to do"
        invocation.print(printable(f"ok: {message}: {report.url}"))
        return Result(ExitCode.OK, message)
    taking = report.seconds["write"]
    message = f"wrote {counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    speed = f"in {human_duration(taking)} ({human_bytes(int(report.nbytes / taking))}/s)"
    if report.taken_over:
        speed += f", {human_bytes(report.taken_over)} of it taken over from a run before"
    invocation.print(printable(f"{message} as {report.format} {speed}: {report.url}"))
    if report.proof is None:
        invocation.print("not proven: --no-proof")
        return Result(ExitCode.OK, f"{message}, not proven")
    proof = report.proof
    invocation.print(
        f"proven: {counted(proof.tensors, 'tensor')}, {human_bytes(proof.nbytes)}, and "
        f"{counted(proof.objects, 'object')} equal the source bit for bit"
        f" (in {human_duration(report.seconds['prove'])})"
    )
    return Result(ExitCode.OK, f"{message}, proven")


def show_plan(
    invocation: Invocation, layout: Layout, checkpoint: Checkpoint, plan: Planned
) -> Result:
    """Print every copy, the files, and the cost."""
    from ftckpt.transfer.planned import box_copies

    copies = list(box_copies(layout, checkpoint))
    for copy in copies:
        cast = f" as {copy.cast}" if copy.cast else ""
        invocation.print(
            f"{copy.file}: {_show(copy.local)} <- {copy.key} {_show(copy.source)}"
            f" {human_bytes(copy.nbytes)}{cast}"
        )
    for file in plan.files:
        invocation.print(f"{file.path}: {human_bytes(file.nbytes)}")
    took = "" if plan.seconds is None else f", about {human_duration(plan.seconds)}"
    message = (
        f"would write {counted(len(plan.files), 'file')}, {human_bytes(plan.nbytes)}, with "
        f"{counted(len(copies), 'copy') if len(copies) == 1 else f'{len(copies)} copies'}, "
        f"at most {human_bytes(plan.memory)} of memory{took}"
    )
    invocation.print(message)
    invocation.report(plan=plan, copies=copies)
    return Result(ExitCode.OK, message)


def _show(box: Box) -> str:
    spans = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True))
    return f"[{spans}]"
