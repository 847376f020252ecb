"""Run a whole trial: the uninterrupted run, its repetition, the restarts, the verdict.

Without a checkpoint the trial makes one as a failure would leave it: the command runs until it has
saved, is killed, and is started again from its files. Each run has its own place, which
`{checkpoint}` names in the command; without `{checkpoint}` the run's working directory is that
place. With the user's checkpoint, the restarts begin from it, and another command, or the log of a
run, is the uninterrupted training.

All files lie in one directory, a folder per run: log, output, outcome. An interrupted trial
continues there with the missing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ftckpt.errors import ExitCode, FtckptError, RefusedError, UsageError
from ftckpt.replay.compare.logs import compare, idle_streams
from ftckpt.replay.compare.narrow import look_closer
from ftckpt.replay.compare.verdict import Judgement, Verdict, judge
from ftckpt.replay.processes import end_left
from ftckpt.replay.record.log import Log, read_log
from ftckpt.reports import INLINE, UNSAID
from ftckpt.storage.local.atomic import write_over
from ftckpt.storage.local.oserror import claim, translate

from .copies import RunCopy, fingerprint, remove_copy, require_room
from .folders import COPY, FailedRunError, Runs, Saved
from .one_run import RunOutcome, require_program
from .question import Trial

_LOCK = "trial.lock"


@dataclass(frozen=True)
class Tried:
    """The result of a trial.

    Attributes:
        judgement: the verdict.
        at: number of steps that the checkpoint has.
        outcomes: of each run, by its folder, in the order in which they ran.
        logs: those that were read, by the same names.
        copies: how each restart got its own copy of the user's checkpoint.
        read_only: whether the system kept the runs from writing into the user's checkpoint.
    """

    SAID = ("runs",)

    judgement: Judgement = field(metadata=INLINE)
    at: int
    outcomes: Mapping[str, RunOutcome] = field(metadata=UNSAID)
    logs: Mapping[str, Log] = field(metadata=UNSAID)
    copies: tuple[RunCopy, ...] = ()
    read_only: bool = False

    @property
    def runs(self) -> list[dict[str, object]]:
        """The outcomes with the names of their folders."""
        return [{"name": name, **asdict(one)} for name, one in self.outcomes.items()]

    @property
    def code(self) -> ExitCode:
        """Of the judgement."""
        return self.judgement.code

    @property
    def message(self) -> str:
        """Of the judgement."""
        return self.judgement.sentence


def check(trial: Trial) -> None:
    """Refuse an impossible trial, before a directory is made for it.

    Raises:
        UsageError: the pieces of the trial do not fit together.
        NotFoundError: a command names a missing program.
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
    if trial.checkpoint:
        _check_copy(trial)
    words = [*trial.command, *trial.baseline]
    if not trial.at and any("{steps}" in word for word in words):
        raise UsageError(
            "{steps} is the number of all steps, and the step of the save is not known before",
            hint="say after which step the run is stopped: --at 10",
        )
    for command in filter(None, (trial.command, trial.baseline)):
        require_program(command)


def _check_copy(trial: Trial) -> None:
    """Refuse a trial in which a run would use the user's checkpoint itself."""
    if not any("{checkpoint}" in word for word in trial.command):
        raise UsageError(
            "the command does not say where it resumes from",
            hint="write {checkpoint}: each restart finds its own copy of the checkpoint there",
        )
    own = Path(trial.checkpoint).resolve()
    for word in (*trial.command, *trial.baseline):
        if _names(word, own):
            raise UsageError(
                f"the command names the checkpoint itself ({word}), into which a run may save",
                hint="write {checkpoint}: each restart finds its own copy of the checkpoint there",
            )
    if trial.directory.resolve().is_relative_to(own):
        raise UsageError(
            f"{trial.directory} lies in the checkpoint", hint="give another place: --dir PATH"
        )


def _names(word: str, own: Path) -> bool:
    """Whether a word of a command, or the part after its `=`, is a path in the checkpoint."""
    parts = {word, word.partition("=")[2]}
    return any(part and Path(part).resolve().is_relative_to(own) for part in parts)


def carry_out(trial: Trial, say: Callable[[str], None] = lambda text: None) -> Tried:
    """Make the missing runs of a trial, and compare all of them.

    `say` is called with a sentence when something begins.

    Raises:
        UsageError: see `check`.
        RefusedError: the directory holds another trial, or another run is active there.
        UnsupportedError: its filesystem has no locks.
        NotFoundError: the command, the checkpoint or the reference log does not exist.
        NoResourceError: no room for a restart's copy of the checkpoint.
    """
    check(trial)
    with _entered(trial, say):
        if trial.checkpoint:
            require_room(Path(trial.checkpoint), trial.directory)
        return _carried_out(trial, Runs(trial, say))


def _carried_out(trial: Trial, runs: Runs) -> Tried:
    saved, baselines, restarts = Saved(trial.at), list[Log](), list[Log]()
    try:
        saved = saved if trial.checkpoint else runs.interrupt()
        at, passes = saved.step, saved.passes
        last = at + trial.steps
        if trial.reference:
            baselines.append(replace(read_log(Path(trial.reference)), name="the reference log"))
        else:
            baselines += (runs.baseline(n, at, last, passes) for n in range(trial.runs))
        restarts += (runs.restart(n, at, last, passes) for n in range(trial.runs))
    except FailedRunError as failure:
        judgement = _before_failure(trial, runs, baselines, saved, str(failure))
        return _tried(runs, _noted(judgement, saved.note), saved.step)
    judgement = _judged(trial, runs, baselines, restarts, saved)
    if judgement.verdict is Verdict.STATE and not trial.reference:
        if judgement.causes[0].held and not judgement.causes[0].seen:
            judgement = _further_back(trial, runs, baselines, restarts, saved, judgement)
        if not saved.seen:
            judgement, saved = _found_at(trial, runs, baselines, restarts, saved, judgement)
    if judgement.verdict is Verdict.STATE and not trial.reference:
        judgement = look_closer(runs, judgement, saved.step, saved.passes)
    return _tried(runs, _noted(judgement, saved.note), saved.step)


def _noted(judgement: Judgement, note: str) -> Judgement:
    return replace(judgement, notes=(*judgement.notes, note)) if note else judgement


def _tried(runs: Runs, judgement: Judgement, at: int) -> Tried:
    return Tried(judgement, at, runs.outcomes, runs.logs, tuple(runs.copies), runs.read_only)


def _judged(
    trial: Trial, runs: Runs, baselines: Sequence[Log], restarts: Sequence[Log], saved: Saved,
    *, ends: bool = True,
) -> Judgement:  # fmt: skip
    at = saved.step
    interrupted = [] if trial.checkpoint else [runs.logs["interrupted"]]
    if saved.passes:  # it recorded the next step from its beginning
        interrupted = [log.until(at) for log in interrupted]
    # With a reference there is one run from the start, and the restarts are the repetitions.
    repeated, others = [*baselines, *interrupted], restarts
    if len(repeated) == 1:
        repeated, others = list(others), repeated
    idle = idle_streams(repeated, others)
    before = [compare(baselines[0], run, 1, at, idle) for run in interrupted]
    return judge(
        baselines, restarts, at + 1, at + trial.steps, before=before, idle=idle,
        ends=ends and not trial.checkpoint,
    )  # fmt: skip


def _further_back(
    trial: Trial, runs: Runs, baselines: list[Log], restarts: Sequence[Log], saved: Saved,
    judgement: Judgement,
) -> Judgement:  # fmt: skip
    """Read tensors at the step that a stale checkpoint seems to hold, and judge again."""
    try:
        log = runs.further_back(judgement.causes[0].held or 0, saved.step, saved.passes)
    except FailedRunError as failure:
        return _noted(judgement, f"its tensors were not read at that step: {failure}")
    baselines[0] = baselines[0].with_steps_of(log, saved.step)
    return _judged(trial, runs, baselines, restarts, saved)


def _found_at(
    trial: Trial, runs: Runs, baselines: Sequence[Log], restarts: Sequence[Log], saved: Saved,
    judgement: Judgement,
) -> tuple[Judgement, Saved]:  # fmt: skip
    """Judge again if no save was seen and the restart began, as a whole, with an earlier step.

    The step of the script's save is unknown then: `--at` says where it was killed.
    """
    held = judgement.causes[0].held
    if held is None or judgement.causes[0].reason.startswith("torn"):
        return judgement, saved
    note = (f"no save was seen, so it was made by a library that is not known; the run was killed "
            f"after step {saved.step}, and the restart began after step {held - 1}")  # fmt: skip
    earlier = Saved(held - 1, note=note)
    moved = [log.renumbered(earlier.step - saved.step) for log in restarts]
    steps = trial.steps - (saved.step - earlier.step)
    if steps < 1:
        return judgement, saved
    again = _judged(replace(trial, steps=steps), runs, baselines, moved, earlier)
    return (again, earlier) if again.verdict is Verdict.EXACT else (judgement, saved)


def _before_failure(
    trial: Trial, runs: Runs, baselines: Sequence[Log], saved: Saved, failure: str
) -> Judgement:
    """Judge the records before a failure: a difference counts, equality is not yet exactness."""
    restarts = [log for folder, log in runs.logs.items() if folder.startswith("restart-")]
    # With only a log, two restarts are needed to find the unseeded streams.
    if len(baselines) == (1 if trial.reference else trial.runs) and (
        len(restarts) > bool(trial.reference)
    ):
        # The end of a failed run says nothing about its counter.
        judgement = _judged(trial, runs, baselines, restarts, saved, ends=False)
        if judgement.verdict not in (Verdict.EXACT, Verdict.NOT_COMPARED):
            return replace(judgement, problems=(failure, *judgement.problems))
    return Judgement(Verdict.NOT_COMPARED, failure, 0, 0, (), (), problems=(failure,))


@contextmanager
def _entered(trial: Trial, say: Callable[[str], None]) -> Iterator[None]:
    """Make the directory, or recognise it as this trial's, and lock it.

    Ends the processes that an earlier killed trial left running there.
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
    """Return the identity of a trial."""
    spec = {k: v for k, v in asdict(trial).items() if k not in ("directory", "timeout")}
    spec["files"] = {
        word: [status.st_size, status.st_mtime_ns]
        for word in (*trial.command, *trial.baseline)
        if Path(word).is_file() and (status := Path(word).stat())
    }
    if trial.checkpoint:
        places = {k: list(v[:2]) for k, v in fingerprint(Path(trial.checkpoint)).items()}
        spec["checkpoint_files"] = dict(sorted(places.items()))
    return spec


def remove_left_copies(around: Path) -> list[Path]:
    """Remove copies of checkpoints that killed runs left in `ftckpt-replay-*` below `around`.

    Returns the trials that held one; a trial with an active run is left alone.
    """
    freed = []
    for kept in sorted(around.glob("ftckpt-replay-*/trial.json")):
        copies = [place for place in kept.parent.glob(f"*/{COPY}") if not place.is_symlink()]
        spec = _read(kept)
        if not copies or not isinstance(spec, dict) or not spec.get("checkpoint"):
            continue
        with suppress(OSError, FtckptError), (kept.parent / _LOCK).open("ab") as lock:
            claim(lock.fileno(), str(kept.parent))
            end_left(kept.parent)
            for place in copies:
                remove_copy(place)
            freed.append(kept.parent)
    return freed


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None
