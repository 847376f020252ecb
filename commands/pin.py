"""`ftckpt pin`: keep a checkpoint, whatever the rules say, or no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import marking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.marking import Pinned

operation = marking.pin


def render(invocation: Invocation, report: Sequence[Pinned], given: Mapping[str, Any]) -> Result:
    """Print what is pinned, or whose pins were taken away."""
    if given["remove"]:
        for one in report:
            invocation.print(f"no longer pinned {one.pin.who}: {one.path}")
        return Result(message="no longer pinned")
    who = report[0].pin.owner
    for one in report:
        invocation.print(f"pinned for {who}: {one.path}")
    return Result(message=f"pinned for {who}")
