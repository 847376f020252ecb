"""`ftckpt unpin`: give a pinned checkpoint back to the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import marking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.marking import Pinned

operation = marking.unpin


def render(invocation: Invocation, report: Sequence[Pinned], _: Mapping[str, Any]) -> Result:
    """Print whose pins were taken away."""
    for one in report:
        was = f"was pinned by {one.pin.owner} ({one.pin.reason})"
        invocation.print(f"unpinned, {was}: {one.path}")
    return Result(message="unpinned")
