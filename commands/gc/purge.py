"""`ftckpt gc purge`: free the space of what has been in the trash long enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block
from ftckpt.operations import retaining

from .outcome import ended, purged_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.retention.apply.outcome import Purged

operation = retaining.gc_purge


def render(invocation: Invocation, report: Purged, given: Mapping[str, Any]) -> Result:
    """Print what is gone, and what was held."""
    invocation.close()
    lines = list(purged_lines(report)) or [f"nothing in the trash of {given['root']} is due"]
    invocation.print(block(*lines))
    return ended(invocation, lines[0], report)
