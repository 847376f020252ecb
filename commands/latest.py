"""`ftckpt latest`: the checkpoint to restart from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.errors import ExitCode, UsageError

from .invocation import Invocation, Result, invoked, write_bytes
from .render import finding_line, printable
from .units import parse_duration

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.roots import Root
    from ftckpt.selection import Selection

EXAMPLES = (
    ("ftckpt latest /ckpt/run7", "the newest whose names, sizes and coverage are right"),
    (
        'CKPT=$(ftckpt latest "$ROOT" --verify content) || exit $?',
        "in a job script: every byte checked before the restart",
    ),
    (
        "ftckpt latest s3://run7/ckpt --wait --timeout 10m",
        "let the save in flight finish first",
    ),
    ("ftckpt latest /ckpt/run7 --not-newer-than 12000", "go back to before a loss spike"),
)
CODES = {
    ExitCode.OK: "one path on stdout: the newest checkpoint that passes",
    ExitCode.CORRUPT: "there are checkpoints, and all are damaged",
    ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
    ExitCode.UNVERIFIED: "the newest has no evidence for --verify content",
    ExitCode.UNSAFE: "the newest is hostile or ambiguous",
    ExitCode.NOT_FOUND: "no such root, or no checkpoint in it",
    ExitCode.UNAVAILABLE: "storage failed; nothing older was taken instead",
    ExitCode.DENIED: "credentials or permissions; nothing older was taken instead",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "the newest is of a format that this version does not read",
}


class Level(StrEnum):
    """How much of a checkpoint is checked."""

    STRUCTURE = "structure"
    CONTENT = "content"


def command(
    ctx: typer.Context,
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="Directory or URL that holds the checkpoints.")
    ],
    verify: Annotated[
        Level,
        typer.Option(help="Check names, sizes and coverage, or every byte by digest or CRC."),
    ] = Level.STRUCTURE,
    not_newer_than: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="Take no step above this one.")
    ] = None,
    max_fallback: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Walk back over at most N checkpoints.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a save in flight that is newer.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="T", help="How long --wait waits: 90s, 5m, 1h.")
    ] = "10m",
    skip_unverified: Annotated[
        bool, typer.Option("--skip-unverified", help="Walk back over those without evidence.")
    ] = False,
    skip_unsafe: Annotated[
        bool, typer.Option("--skip-unsafe", help="Walk back over hostile ones.")
    ] = False,
) -> Result:
    """Print the newest checkpoint that passes.

    Newest is the largest step in the content. Damaged and uncommitted checkpoints are walked over,
    with the reason on stderr; a storage error stops the search with its own code, because an older
    checkpoint must not be taken while the newest could not be reached. Pointers (latest, tracker
    files, links) are compared with what is there, and never believed.
    """
    from ftckpt.selection import Rules, select
    from ftckpt.waiting import select_waiting

    invocation = invoked(ctx)
    invocation.report(target=root, path=None, step=None, level=verify, skipped=[], pointers=[])
    seconds = parse_duration(timeout, "--timeout")
    rules = Rules(not_newer_than, max_fallback, skip_unverified, skip_unsafe)
    check = _check(invocation, verify)

    # That a newer one is not taken can cost hours of training: also --quiet says so.
    def note(line: str) -> None:
        invocation.warn(printable(line))

    if wait:
        read = partial(_read, invocation, root)
        found = select_waiting(read, check, rules, seconds, note, say=invocation.say)
    else:
        found = select(_read(invocation, root), check, rules, note)
    _report(invocation, found)
    invocation.close()
    _warn(invocation, found)
    if found.path is None:
        return invocation.fail(found.code, printable(found.message), printable(found.hint))
    if not invocation.json:
        # The bytes of the path, whatever the locale: the shell hands them on to the trainer.
        write_bytes(sys.stdout, os.fsencode(found.path) + b"\n")
    return Result(ExitCode.OK, f"{found.path} passes", "")


def _warn(invocation: Invocation, found: Selection) -> None:
    """Print what disagrees; of names that say another step, only the chosen one's.

    Some trainers number saves or epochs, so that every name of a root disagrees.
    """
    names = 0
    for one in found.findings:
        chosen = found.path is not None and found.path.endswith("/" + (one.file or ""))
        if one.kind == "step-name" and not chosen:
            names += 1
        else:
            invocation.warn(finding_line(one))
    if names:
        invocation.say(f"note: {names} other names say another step than their content (--json)")


def _read(invocation: Invocation, path: str) -> Root:
    from ftckpt import opening
    from ftckpt.formats.catalog import FORMATS

    place = opening.locate(path, invocation.stores)
    if place.which:
        raise UsageError(f"latest wants the root, not one step of it: {path}")
    return opening.open_root(place, FORMATS)


def _check(invocation: Invocation, level: Level) -> Callable[[Checkpoint], tuple[ExitCode, str]]:
    from ftckpt import verification
    from ftckpt.limits import jobs

    options = verification.VerifyOptions(verification.Level(level.value), jobs=jobs())

    def check(checkpoint: Checkpoint) -> tuple[ExitCode, str]:
        report = verification.verify(checkpoint, options, counter=invocation.counter)
        return report.code, report.message

    return check


def _report(invocation: Invocation, found: Selection) -> None:
    data = replace(found, pending=())
    invocation.report(
        format=data.format,
        path=data.path,
        step=data.step,
        skipped=[s._asdict() | {"code": int(s.code), "name": s.code.name} for s in data.skipped],
        pointers=data.pointers,
        findings=data.findings,
        foreign=data.foreign,
    )
