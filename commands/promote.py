"""`ftckpt promote`: point a root at a checkpoint that was verified."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
    job_count,
    rate_limit,
)
from ftckpt.commands.cli.choosing import CheckLevel
from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.marking import actor
from ftckpt.commands.cli.render import finding_line, printable
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.discovery.roots import Child, Root

EXAMPLES = (
    ("ftckpt promote /ckpt/run7/step-1000", "verify every byte, then move the root's pointers"),
    (
        'ftckpt promote "$ROOT@latest" --pointer last-known-good && '
        'ftckpt latest "$ROOT" --pointer last-known-good',
        "a pointer of ftckpt's own, which no trainer moves",
    ),
    (
        "ftckpt promote s3://run7/ckpt@900 --pointer latest --backwards",
        "go back to before a loss spike, by one conditional PUT",
    ),
)
CODES = {
    ExitCode.OK: "every pointer says the checkpoint, which passed",
    ExitCode.CORRUPT: "the checkpoint is damaged; no pointer was moved",
    ExitCode.INCOMPLETE: "the checkpoint is not committed; no pointer was moved",
    ExitCode.UNVERIFIED: "it has no evidence for --verify content: ftckpt seal it after the save",
    ExitCode.UNSAFE: "the checkpoint is hostile or ambiguous; no pointer was moved",
    ExitCode.REFUSED: "a pointer says a later step (--backwards), or was changed meanwhile",
    ExitCode.NOT_FOUND: "no such checkpoint",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the root cannot be written",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "",
}


def command(
    ctx: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, ROOT@STEP or ROOT@latest.")
    ],
    pointer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="latest, a tracker, last-known-good, or a link that is there. Repeatable.",
        ),
    ] = None,
    verify: Annotated[
        CheckLevel, typer.Option(help="Check names and sizes, every byte, or the numbers too.")
    ] = CheckLevel.CONTENT,
    backwards: Annotated[
        bool, typer.Option("--backwards", help="Move a pointer that says a later step.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be moved; read and write no more.")
    ] = False,
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Point a root at a checkpoint, after verifying it.

    Without --pointer all pointers that the root has are moved, and where it has none,
    last-known-good is made. Each is written in the form that its framework reads, by one act. What
    it said before is in the root's log. gc keeps what a pointer names.
    """
    from ftckpt.discovery.open_part import open_child
    from ftckpt.discovery.promotion import find_in_root, held, move, moves
    from ftckpt.replication.sync.lock import leased

    invocation = invoked(ctx)
    bound_memory(max_memory)
    invocation.report(target=checkpoint)
    root, child = _resolve(invocation, checkpoint)
    name, asked = child.candidate.path, tuple(pointer or ())
    url = root.url_of(child.candidate)
    invocation.report(target=url, format=child.parts[0].format.name, dry_run=dry_run)
    step = child.candidate.step
    # Before terabytes are read: by the name, which the content has to confirm.
    wanted = moves(root, name, step, asked, backwards=backwards)
    if dry_run:
        _report(invocation, wanted, step, ())
        for one in wanted:
            invocation.print(printable(f"would move {_line(one)}" if one.changes else _line(one)))
        return Result(ExitCode.OK, f"{counted(sum(m.changes for m in wanted), 'pointer')} to move")
    with leased(root, name, actor()):
        opened = open_child(root, child)
        failed = _verify(invocation, url, opened, verify, job_count(jobs), limit_rate)
        if failed is not None:
            return failed
        step = opened[0].step if opened[0].step is not None else step
        moved: list[str] = []
        with held(root, actor()) as now:
            find_in_root(now, name)
            wanted = moves(now, name, step, asked, backwards=backwards)
            for one in wanted:
                if one.changes:
                    fields = {"entry": name, "step": step, "verified": verify.value}
                    move(now, one, actor=actor(), now=time.time(), fields=fields)
                    moved.append(one.name)
    _report(invocation, wanted, step, moved)
    for one in wanted:
        invocation.print(printable(f"moved {_line(one)}" if one.changes else _line(one)))
    message = f"{counted(len(moved), 'pointer')} moved to {url}"
    return Result(ExitCode.OK, message if moved else f"every pointer says {url} already")


def _resolve(invocation: Invocation, path: str) -> tuple[Root, Child]:
    """Return the root around a checkpoint, and the checkpoint as the root has it.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
    """
    from ftckpt.commands.cli.target import choose
    from ftckpt.discovery import resolve as opening
    from ftckpt.discovery.promotion import find_in_root
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage.remotes import split

    target = opening.open_target(path, FORMATS, invocation.stores)
    place = target.place
    if target.root is not None:
        if not place.which:
            raise UsageError(
                f"{path} is a root, not one checkpoint",
                hint=f"{place.url.rstrip('/')}@latest is its newest; ftckpt inspect lists them",
            )
        return target.root, choose(target.root, place.which)
    local = place.store.local_path(place.entry.path)
    whole = place.url.rstrip("/") if local is None else os.path.realpath(local)
    parent, name = split(whole)
    around = opening.locate(parent, invocation.stores)
    root = opening.open_root(around, FORMATS)
    if root.base:
        raise UsageError(f"{path} does not lie in a root", hint="name ROOT@STEP")
    return root, find_in_root(root, name)


def _verify(
    invocation: Invocation,
    url: str,
    opened: Sequence[object],
    level: CheckLevel,
    jobs: int,
    limit_rate: str,
) -> Result | None:
    """Verify every part of a checkpoint; return how the verb ends where one does not pass."""
    from ftckpt import verification
    from ftckpt.checkpoint import Checkpoint

    options = verification.VerifyOptions(
        verification.Level(level.value), jobs=jobs, limiter=rate_limit(limit_rate)
    )
    evidence = []
    for checkpoint in opened:
        assert isinstance(checkpoint, Checkpoint)
        report = verification.verify(checkpoint, options, counter=invocation.counter)
        invocation.close()
        evidence.append(report.evidence)
        if report.code is not ExitCode.OK:
            invocation.report(findings=report.findings, level=level, evidence=evidence)
            for one in report.findings:
                invocation.say(finding_line(one))
            hint = "no pointer was moved"
            if report.code is ExitCode.UNVERIFIED:
                hint = "ftckpt seal records digests; --verify structure moves it without them"
            return invocation.fail(report.code, f"{url} does not pass: {report.message}", hint)
    invocation.report(findings=[], level=level, evidence=evidence)
    return None


def _report(
    invocation: Invocation, wanted: Sequence[PointerMove], step: int | None, moved: Sequence[str]
) -> None:
    invocation.report(
        step=step,
        pointers=[
            {"name": m.name, "before": m.before, "after": m.after, "moved": m.name in moved}
            for m in wanted
        ],
    )


def _line(one: PointerMove) -> str:
    if not one.changes:
        return f"{one.name} says {one.after} already"
    before = "new" if one.before is None else f"was {one.before}"
    return f"{one.name} to {one.after} ({before})"
