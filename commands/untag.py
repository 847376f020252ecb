"""`ftckpt untag`: remove tags from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import marking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.marking import Tagged

operation = marking.untag


def render(invocation: Invocation, report: Sequence[Tagged], given: Mapping[str, Any]) -> Result:
    """Print which tags were removed."""
    for one in report:
        for word in one.tags:
            invocation.print(f"no longer tagged {word}: {one.path}")
    return Result(message=f"untagged {', '.join(given['words'])}")
