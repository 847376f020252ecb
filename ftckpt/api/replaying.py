"""Whether a restart is exact: `replay run`, `replay compare`, `replay audit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnverifiedError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions

from .opening import STORES, opened, seconds

if TYPE_CHECKING:
    from ftckpt.replay.audit import Audit
    from ftckpt.replay.compare.verdict import Judgement
    from ftckpt.replay.record.log import Log
    from ftckpt.replay.run.trial import Tried


def _unsaid(_: str) -> None:
    pass


def replay_run(
    command: Sequence[str],
    *,
    directory: str | Path,
    steps: int = 20,
    at: int = 0,
    runs: int = 2,
    checkpoint: str = "",
    baseline: Sequence[str] = (),
    baseline_at: int = 0,
    reference: str = "",
    every: int = 1,
    timeout: float | str = "1h",
    say: Callable[[str], None] = _unsaid,
) -> Tried:
    """Run a training and its restart, and compare them bit by bit.

    Args:
        command: the training, a word an item; {checkpoint}, {steps} and {log} are filled in.
        directory: for logs and output; a repeated call goes on there.
        steps: compared after the checkpoint.
        at: kill it after this step, not its first save; with `checkpoint`, the step of that.
        runs: repetitions of each run; 1 proves less.
        checkpoint: restart from copies of this directory, never from it.
        baseline: with `checkpoint`, the command of the uninterrupted training.
        baseline_at: steps that `baseline` begins with.
        reference: instead of `baseline`, the log of such a run.
        every: how many steps from one read of whole tensors to the next.
        timeout: of each run, seconds or a text such as "1h".
        say: is told what happens.

    Returns:
        The runs and the judgement; one that says "different" is not an error.

    Raises:
        UsageError: what is asked contradicts itself.
        NotFoundError: the command, the checkpoint or the log is not there.
        RefusedError: the directory holds something else, or another run is at work there.
        CorruptError: a log is damaged.
    """
    from ftckpt.replay.run.question import Trial
    from ftckpt.replay.run.trial import carry_out

    trial = Trial(
        command=tuple(command),
        directory=Path(directory),
        steps=steps,
        at=at,
        checkpoint=str(Path(checkpoint).absolute()) if checkpoint else "",
        baseline=tuple(baseline),
        baseline_at=baseline_at,
        reference=reference,
        runs=runs,
        every=every,
        timeout=seconds(timeout, "--timeout"),
    )
    return carry_out(trial, say)


def replay_compare(
    log_a: str | Path,
    log_b: str | Path,
    *,
    reference: str | Path = "",
    pattern: str = "",
    first: int = 0,
    last: int = 0,
) -> Judgement:
    """Compare the logs of runs, and name the first event that differs.

    Args:
        log_a: a directory, JSON lines, or text; the uninterrupted run without a reference.
        log_b: the log of another run.
        reference: the log of the uninterrupted run; A and B are restarts of it.
        pattern: a regular expression for the step and the numbers in a line of text.
        first: the first step to compare (`--from`); 0 for the first that they have in common.
        last: the last step to compare (`--to`); 0 for the last that any of them has: what a
            shorter one lacks is not equal.

    Raises:
        NotFoundError: a log is not there.
        UnsupportedError: none of its lines shows a step.
        CorruptError: a log of ftckpt's is damaged.
        UnverifiedError: they have no finished step in common, or a restart counts its steps from 1.
    """
    from ftckpt.replay.compare.import_logs import read_any
    from ftckpt.replay.compare.unused_rng import idle_streams
    from ftckpt.replay.compare.verdict import judge

    a, b = (read_any(Path(log), pattern, str(log)) for log in (log_a, log_b))
    u = read_any(Path(reference), pattern, str(reference)) if reference else None
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


def replay_audit(
    checkpoint: Checkpoint | str,
    *,
    against: Checkpoint | str = "",
    environment: Mapping[str, str] | None = None,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> Audit:
    """Return what a restart from a checkpoint would lack, without running it.

    Args:
        checkpoint: opened, or a path.
        against: the next checkpoint of the same run, opened or a path.
        environment: variables of the shell that restarts; None for this process's own.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        FtckptError: a checkpoint cannot be opened or read.
    """
    from ftckpt.formats.state.fields import state_contents, state_fields
    from ftckpt.replay.audit import audit

    audited = opened(checkpoint, stores)
    following = opened(against, stores) if against else None
    variables = os.environ if environment is None else environment
    fields = state_fields(audited)
    return audit(audited, following, variables, counter, fields, state_contents)
