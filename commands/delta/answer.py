"""The answer of the verbs that make deltas, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable, table
from ftckpt.commands.cli.transfer_report import nothing_left, proof_line, taken_over
from ftckpt.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.delta.pack.report import PackedShare, PackReport


def render(invocation: Invocation, report: PackReport, _: Mapping[str, Any]) -> Result:
    """Print what packing did, and when it is worth it."""
    if report.already_there:
        return nothing_left(invocation, report.url)
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
    if report.advice is not None:
        invocation.print(report.advice.sentence)
    elif report.break_even is not None:
        invocation.print(
            f"on storage slower than {human_bytes(int(report.break_even))}/s this saves time too; "
            "--storage-bw RATE says how often to save"
        )
    return Result(ExitCode.OK, f"{message}, {'not ' if report.proof is None else ''}proven")


def share_table(title: str, shares: Mapping[Any, PackedShare]) -> str:
    """Return shares as a table, one a row."""
    rows = [
        [name, human_bytes(share.bytes_in), human_bytes(share.bytes_out),
         "all of it" if share.ratio is None else f"{share.ratio:.2f}"]
        for name, share in shares.items()
    ]  # fmt: skip
    return table([title, "before>", "stored>", "ratio>"], rows)
