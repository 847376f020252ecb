"""`ftckpt replay compare`: the logs of runs that were made before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import replaying

from .answer import result, text
from .page import PageOptions, draw
from .page import check as check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.replay.compare.verdict import Judgement

operation = replaying.replay_compare
OPTIONS = (PageOptions,)


def render(invocation: Invocation, report: Judgement, _: Mapping[str, Any]) -> Result:
    """Print the verdict, and what differs first."""
    invocation.print(text(report))
    draw(invocation, report)
    return result(report)
