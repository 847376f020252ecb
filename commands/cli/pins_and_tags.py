"""What the verbs that keep and drop share: the runs of a place, who we are, and the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.errors import ExitCode, UsageError
from ftckpt.retention.records.who import actor as actor
from ftckpt.retention.records.who import login_name as login_name

if TYPE_CHECKING:
    from ftckpt.discovery.resolve import Place
    from ftckpt.discovery.roots import Root
    from ftckpt.retention.policy.select import Chosen

    from .invocation import Invocation

RootArgument = Annotated[
    str, typer.Argument(metavar="ROOT", help="Directory or URL that holds the checkpoints.")
]
StepArgument = Annotated[
    str, typer.Argument(metavar="STEP", help="A step, a name in the root, or latest.")
]

CODES = {
    ExitCode.UNSAFE: "the root's .ftckpt is a link",
    ExitCode.NOT_FOUND: "no such root or checkpoint",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the root cannot be written",
    ExitCode.NO_RESOURCE: "",
}


def open_place(invocation: Invocation, path: str) -> Place:
    """Return the place of a root, and report it as the target.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    from ftckpt.discovery import resolve as opening

    invocation.report(target=path)
    place = opening.locate(path, invocation.stores)
    if place.which:
        raise UsageError(f"{path} selects one checkpoint of a root", hint="name the root alone")
    return place


def open_roots(invocation: Invocation, path: str) -> list[Root]:
    """Return the roots of the runs at a path, and report the path as the target.

    Raises:
        NotFoundError: nothing is there.
        UsageError: it is not a root.
    """
    from ftckpt.discovery import resolve as opening
    from ftckpt.formats.catalog import FORMATS

    return opening.open_runs(open_place(invocation, path), FORMATS)


def record(chosen: Sequence[Chosen], event: str, **fields: str) -> None:
    """Append an event about entries to the log of their root."""
    from ftckpt.retention.records import log

    for entry in chosen:
        log.append(entry.root, event, time.time(), {"entry": entry.name, **fields})
