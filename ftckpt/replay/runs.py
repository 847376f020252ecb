"""The runs of a trial: each in a folder of its own, with a place of its own, made once.

A run that was made before, in a trial that was interrupted, is read and not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.findings import counted
from ftckpt.stores.atomic import write_over

from .records import Log, read_log
from .running import End, Outcome, run
from .settings import Settings

if TYPE_CHECKING:
    from .trial import Trial

# Steps before the restart of which whole tensors are read too: a torn save is one step behind.
_BEFORE = 3


class FailedRunError(Exception):
    """A run ended in a way that leaves nothing to compare; its sentence is the verdict's."""


class Runs:
    """Makes the runs of a trial, each once.

    Args:
        trial: that they belong to.
        say: told in a sentence what begins.

    Attributes:
        outcomes: of each run that was made, by its folder.
        logs: that the runs left, by the same names.
    """

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

    def closer(self, folder: str, at: int, settings: Settings) -> list[Log]:
        """Run baseline and restart once more with other settings; `folder` ends their names."""
        trial = self.trial
        command = trial.baseline or trial.command
        settings = replace(settings, at=trial.baseline_at)
        self._finished(f"baseline-{folder}", command, settings, "the uninterrupted run, closer", at)
        settings = replace(settings, at=at)
        self._finished(f"restart-{folder}", trial.command, settings, "the restart, closer", at)
        return [self.logs[f"baseline-{folder}"], self.logs[f"restart-{folder}"]]

    def folder(self, name: str) -> Path:
        """Return the directory that holds all of a run."""
        return self.trial.directory.absolute() / name

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
        place = self.folder(folder)
        kept = place / "outcome.json"
        settings = replace(settings, log=str(place / "log"))
        if kept.exists():
            outcome = _read_outcome(kept)
        else:
            self.say(f"running {name}")
            if place.exists():
                shutil.rmtree(place)
            (place / "log").mkdir(parents=True)
            state, cwd = self._places(place, folder)
            words = _filled(command, state, settings.log, at + self.trial.steps)
            outcome = run(
                words if cwd == Path.cwd() else _absolute(words), settings,
                cwd=cwd, output=place / "output.txt", timeout=self.trial.timeout,
            )  # fmt: skip
            if outcome.end not in (End.CRASHED, End.TIMED_OUT):
                write_over(str(kept), json.dumps(asdict(outcome)).encode())
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
    """Make the words that name files mean the same in another working directory.

    The working directory itself stays each run's own.
    """
    first, *rest = words
    path = str(Path(first).absolute()) if os.sep in first else first
    named = (Path(word) != Path() and Path(word).exists() for word in rest)
    return [path, *(str(Path(w).absolute()) if n else w for w, n in zip(rest, named, strict=True))]


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} {number}"


def _quoted(outcome: Outcome) -> str:
    return f"; it last printed: {outcome.last_words}" if outcome.last_words else ""


def _read_outcome(file: Path) -> Outcome:
    body = json.loads(file.read_text())
    return Outcome(**(body | {"end": End(body["end"])}))
