"""`ftckpt tag`: put tags on a checkpoint, for `gc --keep-tag`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import marking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.marking import Tagged

operation = marking.tag


def render(invocation: Invocation, report: Sequence[Tagged], given: Mapping[str, Any]) -> Result:
    """Print what is tagged, or no longer."""
    did = "no longer tagged" if given["remove"] else "tagged"
    for one in report:
        invocation.print(f"{did} {', '.join(one.tags)}: {one.path}")
    return Result(message=f"{did} {', '.join(given['words'])}")
