"""What a guard is given and returns: settings, the root, the team, where to start, how it ended.

How a guard ends, as a code and a sentence.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple, Protocol

from ftckpt.errors import ExitCode

from .decisions import CommandEnd, Limits, Next
from .notices import Notice, NoticeSource
from .watch import CheckedSave, NewSave, SaveWatcher, Shown, Verifier


class StartPoint(NamedTuple):
    """What the command is to start from.

    Attributes:
        code: OK, NOT_FOUND for a fresh start, or why there is nothing to start from.
        message: one sentence.
        hint: what to do next.
        path: of the checkpoint; None for a fresh start.
        step: of it.
        source: the checkpoint that `path` was resharded from; else `path` itself.
        identity: of the source's files.
        entry: the source's name in the root; "" if it lies elsewhere.
        skipped: newer ones that were not taken, and why.
        repaired: damaged ones that were mended.
        environment: more variables for the command.
    """

    code: ExitCode
    message: str = ""
    hint: str = ""
    path: str | None = None
    step: int | None = None
    source: str = ""
    identity: str = ""
    entry: str = ""
    skipped: Sequence[str] = ()
    repaired: Sequence[str] = ()
    environment: Mapping[str, str] = {}

    @property
    def starts(self) -> bool:
        """Whether the command may be started."""
        return self.code in (ExitCode.OK, ExitCode.NOT_FOUND)


class Ended(NamedTuple):
    """How a guard ended.

    Attributes:
        code: the exit code.
        own: the verdict that it is; None if it is the command's own code.
        message: one sentence.
        hint: what to do next.
        restarts: how often the command was restarted.
    """

    code: int
    own: ExitCode | None
    message: str
    hint: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class GuardSettings:
    """How a command is guarded.

    Attributes:
        limits: how often it is restarted.
        grace: seconds between SIGTERM and SIGKILL.
        patience: seconds to wait for a store that is away.
        every: seconds between looks for new saves.
        settled: see `SaveWatcher`.
        max_age: of the newest save; None for three of the usual intervals.
        save_signal: asks the trainer to save.
        notice_signals: announce a preemption.
        notice_seconds: that such a signal leaves; None if not known.
        sources: what else announces one.
        notice_every: seconds between asking those.
        to_group: pass signals on to the whole process group of the command.
        zero_is_done: see `decisions.Circumstances`.
        iteration_file: where the step of the newest save is written; "" for nowhere.
        on_alert: a command of the user's.
        alert_url: a webhook.
        metrics: where Prometheus metrics are written; "" for nowhere.
        output: where the command's stdout goes; None for ours.
    """

    limits: Limits = field(default_factory=Limits)
    grace: float = 30.0
    patience: float = 600.0
    every: float = 15.0
    settled: float = 30.0
    max_age: float | None = None
    save_signal: int = signal.SIGUSR1
    notice_signals: Sequence[int] = ()
    notice_seconds: float | None = None
    sources: Sequence[NoticeSource] = ()
    notice_every: float = 5.0
    to_group: bool = False
    zero_is_done: bool = False
    iteration_file: str = ""
    on_alert: str = ""
    alert_url: str = ""
    metrics: str = ""
    output: IO[bytes] | int | None = None


class GuardedPlace(Protocol):
    """What a guard does with the root; who implements it knows formats and stores."""

    def choose(self, suspected: frozenset[str]) -> StartPoint:
        """Return what the command starts from, which is none of the suspected checkpoints."""

    def begun(self) -> Shown:
        """Return what the root showed when the command began, which is now."""

    def watcher(
        self,
        before: Shown,
        verifier: Verifier,
        tell: Callable[[NewSave | CheckedSave], None],
        since: int | None,
    ) -> SaveWatcher:
        """Return the thread that looks for saves, made of what the root showed and the step."""

    def verifier(self) -> Verifier:
        """Return what verifies a save beside the training."""

    def keep(self, name: str) -> None:
        """Pin an entry as the last known good one."""

    def full(self) -> str:
        """Return in words why the root's filesystem takes no more bytes; "" if it takes some."""

    def interval(self) -> float | None:
        """Return the usual seconds between saves; None if too few show."""


class Team:
    """The guards of one job on several nodes; this one is alone, and decides."""

    leads = True

    def agree(self, choose: Callable[[], StartPoint]) -> StartPoint:
        """Return what every node starts from."""
        return choose()

    def begin(self, tell: Callable[[object], None]) -> None:
        """Begin to watch the other nodes: `tell` gets a Notice, or an CommandEnd."""

    def conclude(
        self, ending: CommandEnd, code: int, decide: Callable[[CommandEnd, int], Next]
    ) -> Next:
        """Return what follows on every node, after this one's command has ended."""
        return decide(ending, code)

    def noticed(self, notice: Notice) -> None:
        """Tell the others of a notice."""

    def close(self, code: int) -> None:
        """Leave the job."""


IDLE = "preempted while no command ran: the scheduler is to start the job again"
# Verdicts that nobody needs to be told of: the scheduler or a person knows what follows.
QUIET = (ExitCode.OK, ExitCode.REQUEUE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
FREE_SPACE = (
    "no checkpoint is to blame; make room (ftckpt gc ROOT --keep-last 2 --free 500GB --apply"
    " --purge-now --yes), and start again"
)
_STOPPED = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_BAD = (ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.UNSAFE)


def ended(
    ending: CommandEnd, after: Next, last: CheckedSave | None, unseen: str, restarts: int
) -> Ended:
    """Return how a guard ends after its command did.

    0 would say that all is well: it takes a last save that passes.

    Args:
        ending: why the command ended.
        after: what follows; no restart.
        last: the verdict on its newest save; None if there is none.
        unseen: why that save could not be verified; "" if it could.
        restarts: how often the command was restarted.
    """
    if after.code == 0 and unseen:
        return own(
            ExitCode.UNAVAILABLE,
            f"the command has finished, and its last save is not verified: {unseen}",
            "ftckpt latest ROOT --level content, when the store answers",
            restarts,
        )
    if after.code == 0 and last is not None and last.code in _BAD:
        return own(
            last.code,
            f"the command has finished, and {last.save.path} is not good: {last.message}",
            "ftckpt verify ROOT --all names the damage of each save",
            restarts,
        )
    if after.code in (ExitCode.OK, ExitCode.REQUEUE) or (
        ending is CommandEnd.STOPPED and after.code in _STOPPED
    ):
        return own(ExitCode(after.code), after.reason, "", restarts)
    if ending is CommandEnd.UNSTARTED and after.code == ExitCode.USAGE:
        hint = "no checkpoint is to blame: name the program by its path, and install it"
        return own(ExitCode.USAGE, after.reason, hint, restarts)
    if after.full:
        return own(ExitCode.NO_RESOURCE, after.reason, FREE_SPACE, restarts)
    hint = "its own output says why; .ftckpt/guard.jsonl of the root says what was tried"
    return Ended(after.code, None, after.reason, hint, restarts)


def own(code: ExitCode, message: str, hint: str, restarts: int) -> Ended:
    """Return an end whose code is the guard's own verdict."""
    return Ended(int(code), code, message, hint, restarts)
