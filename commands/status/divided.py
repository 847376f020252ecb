"""Show how far the parts of divided operations are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.findings import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftckpt.commands.cli.invocation import Invocation
    from ftckpt.parts.finish import DividedState


def show_parts(invocation: Invocation, report: Any) -> Result:
    """Print the state of every divided operation: a `DividedWork`."""
    for one in report.divided:
        for line in _lines(one):
            invocation.print(printable(line))
    if report.code:
        return invocation.fail(report.code, report.message, report.hint)
    return Result(report.code, report.message)


def _lines(state: DividedState) -> Iterator[str]:
    what = f"{state.verb} of {state.target}" if state.verb else "an operation"
    if state.finished is not None and not state.done:
        yield (
            f"{what} {state.plan[:8]}: finished at {state.finished.get('time')} by"
            f" {state.finished.get('host')}: {state.finished.get('message')}"
        )
        return
    read = f", {len(state.proven)} read back" if state.proven else ""
    yield (
        f"{what} {state.plan[:8]}: {len(state.done)} of {counted(state.of, 'part')} done{read},"
        f" {len(state.running)} running, {len(state.lost)} lost"
    )
    if state.dead:
        yield "  nobody went on with it for a week: gc of the root removes its records"
        return
    for one in state.lost:
        yield f"  lost: part {one.number} on {one.host}, silent for {human_duration(one.silent)}"
    if state.waiting:
        yield f"  to run: --array={state.waiting} with --part auto/{state.of}"
    for one_node in state.nodes:
        slow = ", slow" if one_node.slow else ""
        yield (
            f"  {one_node.host}: {counted(one_node.parts, 'part')},"
            f" {human_bytes(one_node.nbytes)}, {human_bytes(int(one_node.rate))}/s{slow}"
        )
    if state.left is not None:
        yield f"  about {human_duration(state.left)} left"
