"""Whether a restart is exact: `replay run`, `replay compare`, `replay audit`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ftckpt import amounts
from ftckpt.errors import ExitCode, UnsupportedError, UnverifiedError
from ftckpt.findings import counted
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import UNSAID
from ftckpt.storage import StoreOptions

from .definition import argument, operation, option, switch
from .opening import STORES, Memory, Opened, opened

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.inspection.resume import ResumeItem
    from ftckpt.replay.audit import Remark
    from ftckpt.replay.compare.verdict import Judgement
    from ftckpt.replay.record.log import Log
    from ftckpt.replay.run.trial import Tried

_Next = Annotated["Checkpoint | str", option("NEXT", "The next checkpoint of the same run.")]


@operation(
    examples=(
        (
            "ftckpt replay run -- python train.py",
            "a script that saves and resumes by itself: run, killed after its first save,"
            " restarted",
        ),
        (
            "ftckpt replay run --at 100 --steps 50 -- python train.py --steps {steps}",
            "killed after step 100, and 50 steps compared",
        ),
        (
            "ftckpt replay run --html proof.html -- python train.py",
            "the timeline as a page, for the review",
        ),
        (
            "ftckpt replay run --at 100 --steps 50 -- torchrun --nproc-per-node 2 train.py "
            "--ckpt {checkpoint} --steps {steps}",
            "two ranks, killed after step 100, 50 steps compared",
        ),
        (
            "ftckpt replay run --checkpoint /ckpt/run7/step-1000 --reference logs/run7 "
            "-- ./train.sh --resume {checkpoint}",
            "restarts from a checkpoint of a real run, against the log that the run left",
        ),
    ),
    codes={
        ExitCode.OK: "the restart is exact for the steps that were compared",
        ExitCode.DIFFERENT: "it is not, or the training does not repeat itself; the verdict says"
        " which",
        ExitCode.CORRUPT: "a log is damaged",
        ExitCode.UNVERIFIED: "nothing could be compared: a run crashed, hung, or logged too little",
        ExitCode.REFUSED: "--dir holds something else, or another run is at work there",
        ExitCode.NOT_FOUND: "the command, the checkpoint or the log is not there",
        ExitCode.DENIED: "--dir cannot be made or written",
        ExitCode.UNSAFE: "the checkpoint holds a device, a fifo or a circle of links",
        ExitCode.NO_RESOURCE: "no room for a restart's own copy of --checkpoint, or for logs",
        ExitCode.UNSUPPORTED: "the filesystem of --dir has no locks",
    },
    everyday=(
        "--steps",
        "--at",
        "--checkpoint",
        "--reference",
        "--baseline",
        "--timeout",
        "--html",
    ),
)
def replay_run(
    command: Annotated[
        Sequence[str],
        argument("-- COMMAND...", "The training; {checkpoint}, {steps}, {log} are filled in."),
    ],
    *,
    steps: Annotated[int, option("K", "Steps to compare after the checkpoint.", min=1)] = 20,
    at: Annotated[
        int,
        option(
            "N", "Kill it after step N, not its first save; with --checkpoint, its step.", min=0
        ),
    ] = 0,
    runs: Annotated[int, option("N", "Repetitions of each run; 1 proves less.", min=1)] = 2,
    checkpoint: Annotated[
        str, option("DIR", "Restart from copies of this one, never from it.")
    ] = "",
    baseline: Annotated[
        str | Sequence[str], option("COMMAND", "With --checkpoint: the uninterrupted training.")
    ] = "",
    baseline_at: Annotated[int, option("N", "Steps that --baseline begins with.", min=0)] = 0,
    reference: Annotated[str, option("LOG", "Instead of --baseline: the log of such a run.")] = "",
    every: Annotated[int, option("N", "Read whole tensors every N steps.", min=1)] = 1,
    timeout: Annotated[amounts.Duration, option("T", "Time limit of each run.")] = "1h",
    directory: Annotated[
        str, option("DIR", "Keep logs and output here; a repeated command continues.", "--dir")
    ] = "",
    on: Observer = SILENT,
) -> Tried:
    """Run a training and its restart, and compare them bit by bit.

    Runs the command without interruption, again, and twice from a checkpoint, each in fresh
    processes with the same environment, and compares state, batches, losses and gradients bit by
    bit. Nothing in the training has to change: torch is instrumented as Python starts.

    Returns:
        The runs and the judgement; one that says "different" is not an error.

    Raises:
        UsageError: what is asked contradicts itself.
        NotFoundError: the command, the checkpoint or the log is not there.
        RefusedError: the directory holds something else, or another run is at work there.
        CorruptError: a log is damaged.
    """
    from ftckpt.replay.run.one_run import PINNED
    from ftckpt.replay.run.question import Trial
    from ftckpt.replay.run.trial import carry_out, remove_left_copies

    if checkpoint and not at:
        at = _step_of(checkpoint, on)
    folder = Path(directory or f"ftckpt-replay-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    if not directory:
        for place in remove_left_copies(Path()):
            on.note(f"removed the copy of a checkpoint that a killed run left in {place}")
    trial = Trial(
        command=tuple(command),
        directory=folder,
        steps=steps,
        at=at,
        checkpoint=str(Path(checkpoint).absolute()) if checkpoint else "",
        baseline=tuple(shlex.split(baseline) if isinstance(baseline, str) else baseline),
        baseline_at=baseline_at,
        reference=reference,
        runs=runs,
        every=every,
        timeout=amounts.seconds(timeout, "--timeout"),
    )
    tried = carry_out(trial, on.note)
    on.report(
        target=str(folder), directory=str(folder.absolute()),
        pinned={name: os.environ.get(name, value) for name, value in PINNED.items()},
    )  # fmt: skip
    return tried


def _step_of(checkpoint: str, on: Observer) -> int:
    """Return the step that the user's checkpoint shows; 0 where it shows none.

    Raises:
        NotFoundError: the checkpoint does not exist.
    """
    try:
        step = opened(checkpoint, STORES, on).step
    except UnsupportedError:
        step = None
    return step or 0


@operation(
    examples=(
        ("ftckpt replay compare run-a/log run-b/log", "logs that ftckpt.hook left, bit by bit"),
        (
            "ftckpt replay compare a.log b.log --from 100 --to 150",
            "what a console printed, to the digits that it printed, of some steps",
        ),
        (
            "ftckpt replay compare ftckpt-replay-1/baseline-1/log ftckpt-replay-1/restart-1/log",
            "logs that ftckpt.hook or replay run left, bit by bit",
        ),
        (
            "ftckpt replay compare restart-a.log restart-b.log --reference run7.log",
            "what a console printed, to the digits that it printed",
        ),
        (
            r"ftckpt replay compare a.txt b.txt --pattern 'it=(?P<step>\d+) l=(?P<loss>\S+)'",
            "lines of your own form: a group for the step, and one for each number",
        ),
    ),
    codes={
        ExitCode.OK: "the logs are equal, as far as they can show it",
        ExitCode.DIFFERENT: "they differ; the first event that does is named",
        ExitCode.CORRUPT: "a log of ftckpt's is damaged",
        ExitCode.UNVERIFIED: "they have no steps in common, lack some, or log NaN",
        ExitCode.NOT_FOUND: "the log does not exist",
        ExitCode.UNSUPPORTED: "no line of a log shows a step",
    },
)
def replay_compare(
    log_a: Annotated[str, argument("LOG_A", "Directory, JSON lines, or text.")],
    log_b: Annotated[str, argument("LOG_B", "The log of another run.")],
    *,
    reference: Annotated[
        str, option("LOG", "The uninterrupted run; A and B are restarts of it.")
    ] = "",
    pattern: Annotated[
        str, option("REGEX", "Pattern for the step and the numbers in a line.")
    ] = "",
    first: Annotated[int, option("STEP", "First step to compare.", "--from", min=0)] = 0,
    last: Annotated[int, option("STEP", "Last step to compare.", "--to", min=0)] = 0,
    on: Observer = SILENT,
) -> Judgement:
    """Compare the logs of runs, and name the first difference.

    Without --reference, A is taken for the uninterrupted run and B for the restart. Logs of other
    programs hold rounded numbers and no state: what they cannot show is said.

    Returns:
        The judgement. Without `first` it begins at the first step that they have in common, without
        `last` it ends at the last that any of them has: what a shorter one lacks is not equal.

    Raises:
        NotFoundError: a log is not there.
        UnsupportedError: none of its lines shows a step.
        CorruptError: a log of ftckpt's is damaged.
        UnverifiedError: they have no finished step in common, or a restart counts its steps from 1.
    """
    from ftckpt.replay.compare.import_logs import read_any
    from ftckpt.replay.compare.logs import idle_streams
    from ftckpt.replay.compare.verdict import judge

    on.report(target=log_a)
    a, b = (read_any(Path(log), pattern, log) for log in (log_a, log_b))
    u = read_any(Path(reference), pattern, reference) if reference else None
    for restart in (a, b) if u is not None else ():
        if restart.numbered == "counted":
            raise UnverifiedError(
                f"{restart.name} counts its steps from 1, and a restart begins later: which steps"
                " of the reference they are is not known",
                hint="record it again with ftckpt.hook.step(step=...), or with"
                " FTCKPT_REPLAY_AT=STEP, the step of its checkpoint",
            )
    begin, end = _common([a, b] if u is None else [u, a, b])
    first, last = first or begin, last or end
    if u is None:
        return judge([a], [b], first, last)
    return judge([u], [a, b], first, last, idle=idle_streams([a, b], [u]))


def _common(logs: list[Log]) -> tuple[int, int]:
    """Return the first step that all logs have, and the last that any of them has.

    Raises:
        UnverifiedError: there is none.
    """
    spans = [log.finished() for log in logs]
    begin = max((span[0] for span in spans if span), default=0)
    shortest = min((span[-1] for span in spans if span), default=-1)
    if not all(spans) or begin > shortest:
        raise UnverifiedError("the logs have no finished step in common")
    return begin, max(span[-1] for span in spans)


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What a restart from a checkpoint would lack.

    Attributes:
        step: of the checkpoint; None where nothing shows it.
        resume: one verdict per component, as `ftckpt inspect` shows them.
        remarks: evidence against an exact restart, in the order of its weight.
        strict: whether an absent component is a verdict.
    """

    step: int | None
    resume: Sequence[ResumeItem]
    remarks: Sequence[Remark]
    strict: bool = field(default=False, metadata=UNSAID)

    @property
    def absent(self) -> list[ResumeItem]:
        """The components that are needed and not there."""
        return [one for one in self.resume if one.presence == "absent" and one.needed]

    @property
    def contradictions(self) -> list[Remark]:
        """The remarks that no exact restart allows."""
        return [one for one in self.remarks if one.weight == "contradiction"]

    @property
    def code(self) -> ExitCode:
        """Whether the checkpoint contradicts itself, or something is absent and that counts."""
        different = self.contradictions or (self.strict and self.absent)
        return ExitCode.DIFFERENT if different else ExitCode.OK

    @property
    def message(self) -> str:
        """The answer in one sentence."""
        found = self.contradictions
        said = found[0].message if found else "no contradiction"
        return f"{counted(len(self.absent), 'component')} absent, {said}"


@operation(
    examples=(
        (
            "ftckpt replay audit /ckpt/run7/step-1000",
            "what it lacks, and where it contradicts itself",
        ),
        (
            "ftckpt replay audit /ckpt/run7@1000 --against /ckpt/run7@1100",
            "and whether the next save wrote anything new",
        ),
        (
            "ftckpt replay audit /ckpt/run7@1000 --strict",
            "absent components too make it exit 3",
        ),
    ),
    codes={
        ExitCode.OK: "nothing contradicts an exact restart; absent components are listed",
        ExitCode.DIFFERENT: "the checkpoint contradicts itself, or --strict and something is"
        " absent",
        ExitCode.CORRUPT: "the checkpoint is damaged",
        ExitCode.INCOMPLETE: "not committed, or still being written",
        ExitCode.UNSAFE: "its headers or metadata are hostile or ambiguous; nothing was executed",
        ExitCode.NOT_FOUND: "no checkpoint there",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "the metadata needs more than --max-memory",
        ExitCode.UNSUPPORTED: "",
    },
)
def replay_audit(
    checkpoint: Opened,
    *,
    against: _Next = "",
    strict: Annotated[bool, switch("--strict", "Treat an absent component as a verdict.")] = False,
    max_memory: Memory = "1GiB",
    environment: Mapping[str, str] | None = None,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> AuditReport:
    """Report what a restart from a checkpoint would lack.

    Presence of each component, random streams against ranks, optimizer and schedule against the
    step, the environment of this shell, and with --against whether the next save was stale.
    Presence is judged by names and by content; "cannot tell" names what is not understood.
    `ftckpt replay run` is the proof.

    Returns:
        What it lacks. `environment` has the variables of the shell that restarts; None for those of
        this process.

    Raises:
        FtckptError: a checkpoint cannot be opened or read.
    """
    from ftckpt.formats.state.fields import state_contents, state_fields
    from ftckpt.replay.audit import audit

    audited = opened(checkpoint, stores, on, newest=True)
    following = opened(against, stores) if against else None
    variables = os.environ if environment is None else environment
    fields = state_fields(audited)
    found = audit(audited, following, variables, on.counter, fields, state_contents)
    return AuditReport(step=audited.step, resume=found.resume, remarks=found.remarks, strict=strict)
