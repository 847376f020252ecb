"""A whole trial of a restart: the uninterrupted run, its repetition, the restarts, the verdict.

Without a checkpoint the trial makes one as a failure would leave it: the command runs until it has
saved, is killed, and is started again from what lies there. Each run has a place of its own, which
`{checkpoint}` names in the command; where the command does not say `{checkpoint}`, the run's
working directory is that place. With a checkpoint of the user's, the restarts begin from it and
another command, or the log of a run, is the uninterrupted training.

Everything lies in one directory, a folder a run: log, output, outcome. A trial that was interrupted
goes on there with the runs that are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ftckpt.errors import RefusedError, UsageError
from ftckpt.stores.atomic import write_over
from ftckpt.stores.claim import claim
from ftckpt.stores.oserror import translate

from .closer import look_closer
from .comparing import compare
from .idle import idle_streams
from .judging import Judgement, Verdict, judge
from .processes import end_left
from .records import Log, read_log
from .running import Outcome, require_program
from .runs import FailedRunError, Runs

_LOCK = "trial.lock"


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be tried.

    Attributes:
        command: of a restart; `{checkpoint}`, `{steps}` and `{log}` are filled in.
        directory: where everything is kept.
        steps: how many steps after the checkpoint are compared.
        at: number of steps that the checkpoint has; 0: where the command first saves.
        checkpoint: the user's checkpoint; "" lets the command make one.
        baseline: command of the uninterrupted run; () means `command` from the beginning.
        baseline_at: number of steps that the training has when `baseline` begins.
        reference: log of an uninterrupted run, instead of running one.
        runs: how often each is run.
        every: whole tensors are read every so many steps.
        timeout: seconds for one run.
    """

    command: tuple[str, ...]
    directory: Path
    steps: int = 20
    at: int = 0
    checkpoint: str = ""
    baseline: tuple[str, ...] = ()
    baseline_at: int = 0
    reference: str = ""
    runs: int = 2
    every: int = 1
    timeout: float = 3600.0


@dataclass(frozen=True)
class Tried:
    """What a trial has shown.

    Attributes:
        judgement: the verdict.
        at: number of steps that the checkpoint has.
        outcomes: of each run, by its folder, in the order in which they ran.
        logs: those that were read, by the same names.
    """

    judgement: Judgement
    at: int
    outcomes: Mapping[str, Outcome]
    logs: Mapping[str, Log]


def check(trial: Trial) -> None:
    """Refuse what cannot be tried, before a directory is made for it.

    Raises:
        UsageError: the pieces of the trial do not fit together.
        NotFoundError: a command names no program.
    """
    if not trial.command:
        raise UsageError("no command was given", hint="ftckpt replay run -- python train.py")
    if trial.checkpoint and not (trial.baseline or trial.reference):
        raise UsageError(
            "a checkpoint alone does not show the uninterrupted run",
            hint="give --baseline COMMAND or --reference LOG; or let the trial make the checkpoint",
        )
    if trial.checkpoint and not trial.at:
        raise UsageError("the step of the checkpoint is not known", hint="give it: --at 1000")
    if not trial.checkpoint and (trial.baseline or trial.reference):
        raise UsageError("--baseline and --reference belong to --checkpoint")
    words = [*trial.command, *trial.baseline]
    if not trial.at and any("{steps}" in word for word in words):
        raise UsageError(
            "{steps} is the number of all steps, and the step of the save is not known before",
            hint="say after which step the run is stopped: --at 10",
        )
    for command in filter(None, (trial.command, trial.baseline)):
        require_program(command)


def carry_out(trial: Trial, say: Callable[[str], None] = lambda text: None) -> Tried:
    """Run what is missing of a trial, and weigh the runs.

    Args:
        trial: what is to be tried.
        say: told in a sentence what begins.

    Raises:
        UsageError: see `check`.
        RefusedError: the directory holds another trial, or another run is at work there.
        UnsupportedError: its filesystem has no locks.
        NotFoundError: the command, or the reference log, is not there.
    """
    check(trial)
    with _entered(trial, say):
        return _carried_out(trial, Runs(trial, say))


def _carried_out(trial: Trial, runs: Runs) -> Tried:
    at, baselines, restarts = trial.at, list[Log](), list[Log]()
    try:
        at = trial.at if trial.checkpoint else runs.interrupt()
        last = at + trial.steps
        if trial.reference:
            baselines.append(replace(read_log(Path(trial.reference)), name="the reference log"))
        else:
            baselines += (runs.baseline(n, at, last) for n in range(trial.runs))
        restarts += (runs.restart(n, at, last) for n in range(trial.runs))
    except FailedRunError as failure:
        judgement = _before_failure(trial, runs, baselines, at, str(failure))
        return Tried(judgement, at, runs.outcomes, runs.logs)
    judgement = _judged(trial, runs, baselines, restarts, at)
    if judgement.verdict is Verdict.STATE and not trial.reference:
        judgement = look_closer(runs, judgement, at)
    return Tried(judgement, at, runs.outcomes, runs.logs)


def _judged(
    trial: Trial, runs: Runs, baselines: Sequence[Log], restarts: Sequence[Log], at: int
) -> Judgement:
    interrupted = [] if trial.checkpoint else [runs.logs["interrupted"]]
    # With a reference there is one run from the start, and restarts are what was repeated.
    repeated, others = [*baselines, *interrupted], restarts
    if len(repeated) == 1:
        repeated, others = list(others), repeated
    idle = idle_streams(repeated, others)
    before = [compare(baselines[0], run, 1, at, idle) for run in interrupted]
    return judge(baselines, restarts, at + 1, at + trial.steps, before=before, idle=idle)


def _before_failure(
    trial: Trial, runs: Runs, baselines: Sequence[Log], at: int, failure: str
) -> Judgement:
    """Judge what was recorded before a run failed: a difference is one, equal is not yet exact."""
    restarts = [log for folder, log in runs.logs.items() if folder.startswith("restart-")]
    # Against a log alone it takes two restarts to know the streams that nobody seeds.
    if len(baselines) == (1 if trial.reference else trial.runs) and (
        len(restarts) > bool(trial.reference)
    ):
        judgement = _judged(trial, runs, baselines, restarts, at)
        if judgement.verdict not in (Verdict.EXACT, Verdict.NOT_COMPARED):
            return replace(judgement, problems=(failure, *judgement.problems))
    return Judgement(Verdict.NOT_COMPARED, failure, 0, 0, (), (), problems=(failure,))


@contextmanager
def _entered(trial: Trial, say: Callable[[str], None]) -> Iterator[None]:
    """Make the directory, or recognise it as this trial's, and hold it: one run is there at a time.

    Whatever an earlier one has left running there when it was killed is ended before.
    """
    folder, kept = trial.directory, trial.directory / "trial.json"
    if not any((folder / name).exists() for name in (kept.name, _LOCK)):
        if folder.exists() and any(folder.iterdir()):
            raise RefusedError(f"{folder} is not empty and holds no trial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise translate(error, str(folder), "make") from error
    with (folder / _LOCK).open("ab") as lock:
        try:
            claim(lock.fileno(), str(folder), "give another --dir")
        except BlockingIOError as error:
            raise RefusedError(
                f"another run is at work in {folder}", hint="wait for it, or give another --dir"
            ) from error
        if not kept.exists():
            write_over(str(kept), json.dumps(_spec(trial), indent=2).encode())
        elif _read(kept) != json.loads(json.dumps(_spec(trial))):
            raise RefusedError(
                f"{folder} holds a trial of something else, or of files that changed since",
                hint="take another --dir, or remove it",
            )
        if end_left(folder):
            say("ended the training that a killed run had left there")
        yield


def _spec(trial: Trial) -> dict[str, object]:
    """Return what a trial has to be asked again to be the same one."""
    spec = {k: v for k, v in asdict(trial).items() if k not in ("directory", "timeout")}
    spec["files"] = {
        word: [status.st_size, status.st_mtime_ns]
        for word in (*trial.command, *trial.baseline)
        if Path(word).is_file() and (status := Path(word).stat())
    }
    return spec


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None
