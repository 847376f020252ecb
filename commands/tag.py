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
    """Print what is tagged."""
    words = ", ".join(given["words"])
    for one in report:
        invocation.print(f"tagged {words}: {one.path}")
    return Result(message=f"tagged {words}")
