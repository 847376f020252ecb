"""The answer of the verbs that make deltas, as JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable, table
from ftckpt.commands.cli.transfer_report import nothing_left, proof_line, taken_over
from ftckpt.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.delta.pack.report import PackedShare, PackReport

_ANY_STORAGE = 1e9  # bytes a second; what pays below which bandwidth does not depend on it


def show(invocation: Invocation, report: PackReport, storage: float | None) -> Result:
    """Report and print what packing did.

    Args:
        invocation: told of it.
        report: what was done.
        storage: bytes a second that the storage takes in, for the advice; None where not known.
    """
    invocation.report(
        destination=report.url,
        base=report.base,
        already_there=report.already_there,
        taken_over=report.taken_over,
        proof=report.proof,
        seconds=report.seconds,
    )
    if report.already_there:
        return nothing_left(invocation, report.url)
    invocation.report(
        tensors=report.tensors,
        objects=report.objects,
        files=report.files,
        bytes_in=report.bytes_in,
        bytes_out=report.bytes_out,
        ratio=report.ratio,
        components=report.components,
        methods=report.methods,
        index_bytes=report.index_bytes,
        content=report.content,
    )
    if not invocation.json:
        invocation.print(share_table("component", report.components))
        invocation.print()
        invocation.print(share_table("method", report.methods))
        invocation.print()
    against = "" if report.base is None else f" against {report.base}"
    message = (
        f"packed {human_bytes(report.bytes_in)} into {human_bytes(report.bytes_out)}, "
        f"{human_bytes(report.index_bytes)} of it the index: {report.ratio:.2f} to 1"
    )
    speed = f"in {human_duration(report.seconds['encode'])}{taken_over(report.taken_over)}"
    invocation.print(printable(f"{message}{against} {speed}: {report.url}"))
    if report.base is not None and not any(method.reads_the_base for method in report.methods):
        invocation.say(
            f"warning: nothing in it is told by {report.base}, and it needs that all the same: is "
            "it of another run? Packed without a base it is as small"
        )
    invocation.print(f"content {report.content}")
    invocation.print(proof_line(report.proof, "decode to the source", report.seconds))
    if report.proof is None:
        return Result(ExitCode.OK, f"{message}, not proven")
    _advise(invocation, report, storage)
    return Result(ExitCode.OK, f"{message}, proven")


def share_table(title: str, shares: Mapping[Any, PackedShare]) -> str:
    """Return shares as a table, one a row."""
    rows = [
        [name, human_bytes(share.bytes_in), human_bytes(share.bytes_out),
         "all of it" if share.ratio is None else f"{share.ratio:.2f}"]
        for name, share in shares.items()
    ]  # fmt: skip
    return table([title, "before>", "stored>", "ratio>"], rows)


def _advise(invocation: Invocation, report: PackReport, storage: float | None) -> None:
    """Say when it is worth it, by what was just measured."""
    from ftckpt.delta.pack.advice import advise

    if not report.ratio:
        return
    advice = advise(
        ratio=report.ratio,
        encode_rate=report.bytes_in / report.seconds["encode"],
        decode_rate=report.bytes_in / report.seconds["prove"],
        storage_write=storage or _ANY_STORAGE,
    )
    if storage is not None:
        invocation.report(advice=advice)
        invocation.print(advice.sentence)
    elif advice.break_even:
        invocation.report(break_even=advice.break_even)
        invocation.print(
            f"on storage slower than {human_bytes(int(advice.break_even))}/s this saves time too; "
            "--storage-rate RATE says how often to save"
        )
