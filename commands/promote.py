"""`ftckpt promote`: point a root at a checkpoint that was verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import JobsOption, MemoryOption, RateOption, bound_memory
from ftckpt.commands.cli.choose_checkpoint import CheckLevel
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import finding_line, printable
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option, switch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.verification import VerifyReport

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
    invocation: Invocation,
    checkpoint: Annotated[str, argument("CHECKPOINT", "A checkpoint, ROOT@STEP or ROOT@latest.")],
    pointer: Annotated[
        list[str] | None,
        option("NAME", "latest, a tracker, last-known-good, or a link that is there. Repeatable."),
    ] = None,
    verify: Annotated[
        CheckLevel, option("", "Check names and sizes, every byte, or the numbers too.")
    ] = CheckLevel.CONTENT,
    backwards: Annotated[
        bool, switch("--backwards", "Also move a pointer that names a later step.")
    ] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be moved, without verifying; write nothing.")
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
    from ftckpt.api.promoting import promote

    bound_memory(max_memory)
    invocation.report(target=checkpoint)

    def found(url: str, name: str) -> None:
        invocation.report(target=url, format=name, dry_run=dry_run)

    done = promote(
        checkpoint, pointer=pointer or (), verify=verify.value, backwards=backwards,
        dry_run=dry_run, jobs=jobs, limit_rate=limit_rate, stores=invocation.stores,
        counter=invocation.counter, found=found,
    )  # fmt: skip
    invocation.close()
    if done.reports:
        last, evidence = done.reports[-1], [one.evidence for one in done.reports]
        invocation.report(findings=last.findings, level=verify, evidence=evidence)
        if last.code is not ExitCode.OK:
            return _not_passed(invocation, done.url, last)
    moved = () if dry_run else [one.name for one in done.moves if one.changes]
    _report(invocation, done.moves, done.step, moved)
    would = "would move" if dry_run else "moved"
    for one in done.moves:
        invocation.print(printable(f"{would} {_line(one)}" if one.changes else _line(one)))
    changing = sum(one.changes for one in done.moves)
    if dry_run:
        return Result(ExitCode.OK, f"{counted(changing, 'pointer')} to move")
    message = f"{counted(changing, 'pointer')} moved to {done.url}"
    return Result(ExitCode.OK, message if moved else f"every pointer says {done.url} already")


def _not_passed(invocation: Invocation, url: str, report: VerifyReport) -> Result:
    for one in report.findings:
        invocation.say(finding_line(one))
    hint = "no pointer was moved"
    if report.code is ExitCode.UNVERIFIED:
        hint = "ftckpt seal records digests; --verify structure moves it without them"
    return invocation.fail(report.code, f"{url} does not pass: {report.message}", hint)


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
