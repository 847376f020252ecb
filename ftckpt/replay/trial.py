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
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ftckpt.errors import RefusedError, UsageError
from ftckpt.findings import counted

from .comparing import compare
from .events import BY_KEY
from .judging import Judgement, Verdict, judge
from .records import Log, read_log
from .running import End, Outcome, run
from .settings import Settings

# Steps before the restart of which whole tensors are read too: a torn save is one step behind.
_BEFORE = 3


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


class FailedRunError(Exception):
    """A run ended in a way that leaves nothing to compare; its sentence is the verdict's."""


def check(trial: Trial) -> None:
    """Refuse what cannot be tried.

    Raises:
        UsageError: the pieces of the trial do not fit together.
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


def carry_out(trial: Trial, say: Callable[[str], None] = lambda text: None) -> Tried:
    """Run what is missing of a trial, and weigh the runs.

    Args:
        trial: what is to be tried.
        say: told in a sentence what begins.

    Raises:
        UsageError: see `check`.
        RefusedError: the directory holds another trial.
        NotFoundError: the command, or the reference log, is not there.
    """
    check(trial)
    _enter(trial)
    runner = _Runner(trial, say)
    try:
        at = trial.at if trial.checkpoint else runner.interrupt()
        first, last = at + 1, at + trial.steps
        if trial.reference:
            baselines = [replace(read_log(Path(trial.reference)), name="the reference log")]
        else:
            baselines = [runner.baseline(n, at, last) for n in range(trial.runs)]
        restarts = [runner.restart(n, at, last) for n in range(trial.runs)]
    except FailedRunError as failure:
        judgement = Judgement(
            Verdict.NOT_COMPARED, str(failure), 0, 0, (), (), problems=(str(failure),)
        )
        return Tried(judgement, trial.at, runner.outcomes, runner.logs)
    before = []
    if not trial.checkpoint:
        before.append(compare(baselines[0], runner.logs["interrupted"], 1, at))
    judgement = judge(baselines, restarts, first, last, before=before)
    if judgement.verdict is Verdict.STATE and trial.every > 1 and not trial.reference:
        judgement = _closer(runner, judgement, at)
    return Tried(judgement, at, runner.outcomes, runner.logs)


def _closer(runner: _Runner, judgement: Judgement, at: int) -> Judgement:
    """Run once more with every step's tensors read, from the last equal step to the first unlike.

    What tensors show may have begun between two steps at which they were read.
    """
    across = judgement.comparisons[-1]
    step = across.differences[0].step
    equal = [s for s, event, _ in across.grid if BY_KEY[event].heavy and s < step]
    if step == at + 1 or (equal and max(equal) == step - 1):
        return judgement
    since = max(equal, default=at + 1)
    try:
        logs = runner.closer(at, since, step)
    except FailedRunError as failure:
        return replace(judgement, notes=(*judgement.notes, f"not looked at closer: {failure}"))
    closer = judge(logs[:1], logs[1:], at + 1, step)
    if closer.verdict is not Verdict.STATE:
        note = "the run that looked closer did not show the difference again"
        return replace(judgement, notes=(*judgement.notes, note))
    return replace(
        judgement, sentence=closer.sentence, causes=closer.causes,
        comparisons=(*judgement.comparisons[:-1], *closer.comparisons, across),
    )  # fmt: skip


def _enter(trial: Trial) -> None:
    """Make the directory, or recognise it as this trial's."""
    spec = {k: v for k, v in asdict(trial).items() if k not in ("directory", "timeout")}
    spec["files"] = {
        word: [status.st_size, status.st_mtime_ns]
        for word in (*trial.command, *trial.baseline)
        if Path(word).is_file() and (status := Path(word).stat())
    }
    text = json.dumps(spec, indent=2)
    file = trial.directory / "trial.json"
    if not file.exists():
        if trial.directory.exists() and any(trial.directory.iterdir()):
            raise RefusedError(f"{trial.directory} is not empty and holds no trial")
        trial.directory.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    elif json.loads(file.read_text()) != json.loads(text):
        raise RefusedError(
            f"{trial.directory} holds a trial of something else, or of files that changed since",
            hint="take another --dir, or remove it",
        )


class _Runner:
    def __init__(self, trial: Trial, say: Callable[[str], None]) -> None:
        self.trial = trial
        self.say = say
        self.outcomes: dict[str, Outcome] = {}
        self.logs: dict[str, Log] = {}

    def interrupt(self) -> int:
        """Run until the command has saved, and kill it; return the step that it had reached."""
        trial = self.trial
        settings = Settings(every=0, stop_at=trial.at, stop_after_save=not trial.at)
        outcome = self._run("interrupted", trial.command, settings, "the interrupted run", trial.at)
        if outcome.end is not End.STOPPED or outcome.stopped_at is None:
            raise FailedRunError(
                f"the interrupted run {outcome.end} before it had "
                + (f"made {counted(trial.at, 'step')}" if trial.at else "saved anything by torch")
                + _quoted(outcome)
            )
        return outcome.stopped_at

    def baseline(self, number: int, at: int, last: int) -> Log:
        """Run the uninterrupted training past the checkpoint."""
        trial = self.trial
        back = min(_BEFORE, (at - trial.baseline_at) // trial.every) if trial.every else 0
        settings = Settings(
            at=trial.baseline_at, last=last, every=trial.every,
            dense_from=at + 1 - back * trial.every,
        )  # fmt: skip
        name = "the uninterrupted run" if number == 0 else _numbered("its repetition", number)
        folder = f"baseline-{number + 1}"
        self._finished(folder, trial.baseline or trial.command, settings, name, at)
        return self.logs[folder]

    def restart(self, number: int, at: int, last: int) -> Log:
        """Run a restart from the checkpoint."""
        trial = self.trial
        settings = Settings(at=at, last=last, every=trial.every, dense_from=at + 1)
        folder = f"restart-{number + 1}"
        name = f"restart {chr(ord('A') + number)}"
        self._finished(folder, trial.command, settings, name, at)
        return self.logs[folder]

    def closer(self, at: int, since: int, last: int) -> list[Log]:
        """Run baseline and restart up to a step, with tensors read in each from `since` on."""
        trial = self.trial
        dense = Settings(at=trial.baseline_at, last=last, every=1, dense_from=since)
        command = trial.baseline or trial.command
        self._finished("baseline-closer", command, dense, "the uninterrupted run, closer", at)
        again = replace(dense, at=at)
        self._finished("restart-closer", trial.command, again, "the restart, closer", at)
        return [self.logs["baseline-closer"], self.logs["restart-closer"]]

    def _finished(
        self, folder: str, command: Sequence[str], settings: Settings, name: str, at: int
    ) -> None:
        outcome = self._run(folder, command, settings, name, at)
        if outcome.end in (End.CRASHED, End.TIMED_OUT):
            code = "" if outcome.code is None else f" with code {outcome.code}"
            made = self.logs[folder].finished() if folder in self.logs else ()
            after = f" after step {made[-1]}" if made else " before its first step ended"
            raise FailedRunError(f"{name} {outcome.end}{code}{after}{_quoted(outcome)}")
        if folder not in self.logs:
            raise FailedRunError(
                f"nothing was recorded of {name}: no torch optimizer made a step in it, "
                "or Python was started without its site module"
            )

    def _run(
        self, folder: str, command: Sequence[str], settings: Settings, name: str, at: int
    ) -> Outcome:
        """Run a command in its folder, unless that was done before."""
        place = self.trial.directory.absolute() / folder
        kept = place / "outcome.json"
        settings = replace(settings, log=str(place / "log"))
        if kept.exists():
            outcome = _read_outcome(kept)
        else:
            self.say(f"running {name}")
            shutil.rmtree(place, ignore_errors=True)
            (place / "log").mkdir(parents=True)
            state, cwd = self._places(place, folder)
            words = _filled(command, state, settings.log, at + self.trial.steps)
            outcome = run(
                words if cwd == Path.cwd() else _absolute(words), settings,
                cwd=cwd, output=place / "output.txt", timeout=self.trial.timeout,
            )  # fmt: skip
            if outcome.end not in (End.CRASHED, End.TIMED_OUT):
                kept.write_text(json.dumps(asdict(outcome)))
        self.outcomes[folder] = outcome
        if any((place / "log").glob("rank-*.jsonl")):
            self.logs[folder] = replace(read_log(place / "log"), name=name)
        return outcome

    def _places(self, place: Path, folder: str) -> tuple[str, Path]:
        """Return the checkpoint and the working directory of a run, ready for it."""
        trial = self.trial
        if trial.checkpoint:
            mine = trial.checkpoint if "restart" in folder else str(place / "state")
            return mine, Path.cwd()
        state = place / "state"
        if "restart" in folder:
            shutil.copytree(trial.directory / "interrupted" / "state", state, symlinks=True)
        else:
            state.mkdir()
        named = any("{checkpoint}" in word for word in trial.command)
        return str(state), Path.cwd() if named else state


def _filled(command: Sequence[str], checkpoint: str, log: str, steps: int) -> list[str]:
    values = {"{checkpoint}": checkpoint, "{steps}": str(steps), "{log}": log}
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def _absolute(words: Sequence[str]) -> list[str]:
    """Make the words that name files mean the same in another working directory."""
    first, *rest = words
    path = str(Path(first).absolute()) if os.sep in first else first
    return [path, *(str(Path(word).absolute()) if Path(word).exists() else word for word in rest)]


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} {number}"


def _quoted(outcome: Outcome) -> str:
    return f"; it last printed: {outcome.last_words}" if outcome.last_words else ""


def _read_outcome(file: Path) -> Outcome:
    body = json.loads(file.read_text())
    return Outcome(**(body | {"end": End(body["end"])}))
