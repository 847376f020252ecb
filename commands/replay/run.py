"""`ftckpt replay run`: run a training and its restart, and say whether they are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes
from ftckpt.operations import replaying

from .answer import result, text
from .page import PageOptions, draw
from .page import check as check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.replay.run.trial import Tried

operation = replaying.replay_run
OPTIONS = (PageOptions,)


def render(invocation: Invocation, report: Tried, given: Mapping[str, Any]) -> Result:
    """Print the verdict, what differs first, and where logs and output are."""
    invocation.print(text(report.judgement))
    if report.copies:
        invocation.print()
        invocation.print(_copies_text(given["checkpoint"], report))
    invocation.print()
    invocation.print(f"logs and output: {invocation.document['target']}")
    draw(invocation, report.judgement)
    return result(report.judgement)


def _copies_text(checkpoint: str, tried: Tried) -> str:
    """Say how the restarts got their copies, what these cost, and how the original was kept."""
    copies = tried.copies
    method = {"reflink": "cloned (its blocks are shared)", "copy": "copied", "mixed": "copied"}
    kept = "was read-only to every run" if tried.read_only else "was checked after every run"
    return (
        f"{checkpoint} {kept}; each restart had its own copy, {method[copies[0].method]}: "
        f"{human_bytes(sum(copy.written for copy in copies))} written in "
        f"{sum(copy.seconds for copy in copies):.1f} s, removed since"
    )
