"""The runs of a trial: each in its own folder, with its own place, made once.

Runs of an interrupted trial are read and not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.findings import counted
from ftckpt.replay.processes import Settings, can_make_read_only
from ftckpt.replay.record.log import Log, read_log
from ftckpt.storage.local.atomic import write_over

from .copies import RunCopy, changed, copy_checkpoint, fingerprint, remove_copy
from .one_run import End, RunOutcome, run

if TYPE_CHECKING:
    from .question import Trial

# In a restart's folder: its copy of the user's checkpoint, which exists only during the run.
COPY = "copy"
# Whole tensors are also read in this many steps before the restart: a torn save is one step behind.
_BEFORE = 3


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest save of the killed run: where restarts begin.

    Attributes:
        step: number of steps before it.
        passes: backward passes of the next step before it: within a window of gradient
            accumulation.
        seen: whether the save was seen; otherwise it counts as one of the step after which the run
            was killed.
        note: for the user; "" for none.
    """

    step: int
    passes: int = 0
    seen: bool = True
    note: str = ""


class FailedRunError(Exception):
    """A run ended without anything to compare; its sentence is the verdict's."""


class Runs:
    """Makes the runs of a trial, each once.

    Args:
        trial: that they belong to.
        say: called with a sentence when something begins.

    Attributes:
        outcomes: of each run, by its folder.
        logs: of the runs, by the same names.
        copies: how each restart got its own copy of the user's checkpoint.
        read_only: whether the system keeps the runs from writing into the user's checkpoint.
    """

    def __init__(self, trial: Trial, say: Callable[[str], None]) -> None:
        self.trial = trial
        self.say = say
        self.outcomes: dict[str, RunOutcome] = {}
        self.logs: dict[str, Log] = {}
        self.copies: list[RunCopy] = []
        self.read_only = bool(trial.checkpoint) and can_make_read_only(trial.checkpoint)

    def interrupt(self) -> Saved:
        """Run until the command has saved, and kill it; return its last save."""
        trial = self.trial
        settings = Settings(every=0, stop_at=trial.at, stop_after_save=not trial.at)
        outcome = self._run("interrupted", trial.command, settings, "the interrupted run", trial.at)
        if outcome.end is not End.STOPPED or outcome.stopped_at is None:
            raise FailedRunError(
                f"the interrupted run {outcome.end} before it had "
                + (f"made {counted(trial.at, 'step')}" if trial.at else "saved anything by torch")
                + _quoted(outcome)
            )
        return self._saved(outcome.stopped_at)

    def _saved(self, killed: int) -> Saved:
        """Return the newest save of the killed run, as its ranks noted it."""
        place = self.folder("interrupted")
        newest = newest_save(place / "log")
        if newest is None:
            made = any(files for _, _, files in os.walk(place / "state"))
            if not made:
                raise FailedRunError(
                    f"the interrupted run had saved nothing by the end of step {killed}: say a "
                    "step by which it has (--at), or leave --at out"
                )
            return Saved(killed, seen=False)
        step, passes = newest
        if not step and not passes:
            raise FailedRunError(
                f"by the end of step {killed} the interrupted run had saved the start of the "
                "training alone: say a later step (--at)"
            )
        note = ""
        if passes:
            note = (f"the save lies within step {step + 1}, after {passes} of its backward passes: "
                    "that step is compared from there on")  # fmt: skip
        elif step != killed and self.trial.at:
            note = f"the run was killed after step {killed}; its newest save is of step {step}"
        return Saved(step, passes, note=note)

    def baseline(self, number: int, at: int, last: int, passes: int = 0) -> Log:
        """Run the uninterrupted training past the checkpoint."""
        trial = self.trial
        back = min(_BEFORE, (at - trial.baseline_at) // trial.every) if trial.every else 0
        settings = Settings(
            at=trial.baseline_at, last=last, every=trial.every,
            dense_from=at + 1 - back * trial.every,
            passes=passes, pass_step=at + 1 if passes else 0,
        )  # fmt: skip
        name = "the uninterrupted run" if number == 0 else _numbered("its repetition", number)
        folder = f"baseline-{number + 1}"
        self._finished(folder, trial.baseline or trial.command, settings, name, at)
        return self.logs[folder]

    def further_back(self, since: int, at: int, passes: int) -> Log:
        """Run the uninterrupted training again, reading tensors from an earlier step on."""
        trial = self.trial
        settings = Settings(at=trial.baseline_at, last=at + 1, dense_from=since,
                            passes=passes, pass_step=at + 1 if passes else 0)  # fmt: skip
        name = "the uninterrupted run, further back"
        self._finished("baseline-back", trial.baseline or trial.command, settings, name, at)
        return self.logs["baseline-back"]

    def restart(self, number: int, at: int, last: int, passes: int = 0) -> Log:
        """Run a restart from the checkpoint."""
        trial = self.trial
        settings = Settings(at=at, last=last, every=trial.every, dense_from=at + 1,
                            passes=passes, pass_step=at + 1 if passes else 0)  # fmt: skip
        folder = f"restart-{number + 1}"
        name = f"restart {chr(ord('A') + number)}"
        self._finished(folder, trial.command, settings, name, at)
        return self.logs[folder]

    def closer(self, folder: str, at: int, settings: Settings, passes: int = 0) -> list[Log]:
        """Repeat baseline and restart with other settings; `folder` ends their names."""
        trial = self.trial
        command = trial.baseline or trial.command
        settings = replace(
            settings, at=trial.baseline_at, passes=passes, pass_step=at + 1 if passes else 0
        )
        self._finished(f"baseline-{folder}", command, settings, "the uninterrupted run, closer", at)
        settings = replace(settings, at=at)
        self._finished(f"restart-{folder}", trial.command, settings, "the restart, closer", at)
        return [self.logs[f"baseline-{folder}"], self.logs[f"restart-{folder}"]]

    def folder(self, name: str) -> Path:
        """Return the directory of a run."""
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
    ) -> RunOutcome:
        """Run a command in its folder, unless that was done before."""
        place = self.folder(folder)
        kept = place / "outcome.json"
        if kept.exists():
            outcome = _read_outcome(kept)
            remove_copy(place / COPY)  # a killed run of ours could not remove it
        else:
            self.say(f"running {name}")
            if place.exists():
                shutil.rmtree(place)
            (place / "log").mkdir(parents=True)
            with self._own_checkpoint(place, folder, name) as state:
                outcome = self._in_folder(place, command, replace(settings, log=str(place / "log")),
                                          state, at)  # fmt: skip
            if outcome.end not in (End.CRASHED, End.TIMED_OUT):
                write_over(str(kept), json.dumps(asdict(outcome)).encode())
        self.outcomes[folder] = outcome
        if any((place / "log").glob("rank-*.jsonl")):
            self.logs[folder] = replace(read_log(place / "log"), name=name)
        return outcome

    def _in_folder(
        self, place: Path, command: Sequence[str], settings: Settings, state: Path, at: int
    ) -> RunOutcome:
        trial = self.trial
        named = trial.checkpoint or any("{checkpoint}" in word for word in trial.command)
        cwd = Path.cwd() if named else state
        words = _filled(command, str(state), settings.log, at + trial.steps)
        return run(
            words if cwd == Path.cwd() else _absolute(words), settings,
            cwd=cwd, output=place / "output.txt", timeout=trial.timeout,
            read_only=trial.checkpoint if self.read_only else "",
        )  # fmt: skip

    @contextmanager
    def _own_checkpoint(self, place: Path, folder: str, name: str) -> Iterator[Path]:
        """Prepare a run's own place for checkpoints.

        Raises:
            FailedRunError: the run wrote into the user's checkpoint.
        """
        trial = self.trial
        if not trial.checkpoint:
            state = place / "state"
            if "restart" in folder:
                copy_checkpoint(trial.directory / "interrupted" / "state", state, folder)
            else:
                state.mkdir()
            yield state
            return
        source = Path(trial.checkpoint)
        before = fingerprint(source)
        try:
            if "restart" in folder:
                # Trainers read the step from the name.
                state = place / COPY / source.name
                report = copy_checkpoint(source, state, folder)
                self.copies.append(report)
                self.say(f"{name} has its own copy of {source}: {report.method}, "
                         f"{counted(report.files, 'file')}, {report.written} bytes written, "
                         f"{report.seconds:.1f} s")  # fmt: skip
            else:
                state = place / "state"
                state.mkdir()
            yield state
        finally:
            remove_copy(place / COPY)
        wrote = changed(before, fingerprint(source))
        if wrote:
            raise FailedRunError(
                f"{source} was written while {name} ran ({', '.join(wrote[:3])}): that run, or "
                "another program, wrote into the checkpoint itself and not into its own copy"
            )


def newest_save(log: Path) -> tuple[int, int] | None:
    """Return the steps and backward passes before the newest save of any rank in a log."""
    found = []
    for file in log.glob("rank-*.saves"):
        for text in file.read_text().splitlines():
            step, _, passes = text.partition(" ")
            if step.isdecimal() and passes.isdecimal():  # otherwise killed while it was written
                found.append((int(step), int(passes)))
    return max(found, default=None)


def _filled(command: Sequence[str], checkpoint: str, log: str, steps: int) -> list[str]:
    values = {"{checkpoint}": checkpoint, "{steps}": str(steps), "{log}": log}
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def _absolute(words: Sequence[str]) -> list[str]:
    """Make words that name files valid in another working directory.

    The working directory itself stays each run's own.
    """
    first, *rest = words
    path = str(Path(first).absolute()) if os.sep in first else first
    named = (Path(word) != Path() and Path(word).exists() for word in rest)
    return [path, *(str(Path(w).absolute()) if n else w for w, n in zip(rest, named, strict=True))]


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} {number}"


def _quoted(outcome: RunOutcome) -> str:
    return f"; it last printed: {outcome.last_words}" if outcome.last_words else ""


def _read_outcome(file: Path) -> RunOutcome:
    body = json.loads(file.read_text())
    return RunOutcome(**(body | {"end": End(body["end"])}))
