"""The loop of a guard: choose, start, watch, decide, again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ftckpt.alerting import AlertHook
from ftckpt.amounts import shown_duration
from ftckpt.errors import ExitCode, FtckptError, RefusedError, UnavailableError
from ftckpt.replay.processes import end_marked

from . import terms
from .alarm import Alarm
from .attempt import CommandAttempt, GuardTools
from .decisions import CommandEnd, Next, attempts, suspects, unended, what_next
from .journal import GuardJournal, Standing
from .keeper import adopt_orphans, started_at
from .lock import Hold
from .notices import Notice, NoticeThread
from .supervise import MARK, STOPPING, TICK, Events, NoticedError
from .terms import Ended, GuardedPlace, GuardSettings, StartPoint, Team


def _held_before(events: Iterable[Mapping[str, object]]) -> str:
    """Return the newest checkpoint that a guard has started from or seen saved; "" for none."""
    told = [one.get("path") for one in events if one.get("event") in ("start", "saved")]
    return next((str(path) for path in reversed(told) if path), "")


class Guard:
    """Guards one command.

    Args:
        words: the command; `{}` is the checkpoint's path.
        place: what is done with the root.
        settings: how it is guarded.
        journal: the log.
        hold: the lock of the root.
        folder: a folder of this guard's own, for the file of a notice.
        say: is told what happens.
        warn: is told what must be seen.
        team: the guards of other nodes.
    """

    def __init__(
        self,
        words: Sequence[str],
        place: GuardedPlace,
        settings: GuardSettings,
        journal: GuardJournal,
        hold: Hold,
        folder: str,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        team: Team | None = None,
    ) -> None:
        self._words, self._place, self._settings = words, place, settings
        self._journal, self._say, self._warn = journal, say, warn
        self._team = team or Team()
        self._events = Events(settings.notice_signals)
        self._alarm = Alarm(
            AlertHook(settings.on_alert, settings.alert_url), journal.root.url, warn
        )
        self._standing = Standing(settings.metrics, journal.root.url)
        self._tools = GuardTools(
            place, settings, journal, hold, self._team, self._events, self._alarm, self._standing,
            os.path.join(folder, "notice.json"), say, warn,
        )  # fmt: skip
        self._notice: Notice | None = None
        self._starts, self._ran = 0, False
        self._words_of_end = ""

    def run(self) -> Ended:
        """Guard the command until nothing more is to be done.

        Raises:
            FtckptError: the root could not be read, or the lock was lost; the command has ended.
        """
        asking = NoticeThread(
            self._settings.sources, self._events.tell, self._say, every=self._settings.notice_every
        )
        code = int(ExitCode.INTERNAL)
        adopt_orphans()  # of a keeper that is killed
        with self._events.signals():
            asking.start()
            try:
                self._end_leftovers()
                self._team.begin(self._events.tell)
                ended = self._attempts()
                code = ended.code
                self._tell_end(ended.own, ended.message)
                return ended
            except FtckptError as error:
                code = int(error.exit_code)
                self._tell_end(error.exit_code, error.message)
                raise
            except BaseException as error:
                code = int(getattr(error, "code", code) or 0)
                if isinstance(error, Exception):
                    self._tell_end(ExitCode.INTERNAL, f"guard itself failed: {error!r}")
                raise
            finally:
                adopt_orphans(wanted=False)
                asking.stop()
                self._team.close(code)
                self._journal.add("finished", code=code, restarts=self._restarts)
                self._standing.write(up=0)
                self._alarm.close()
                self._events.close()

    def _tell_end(self, own: ExitCode | None, message: str) -> None:
        """Alert of an end that is not as it should be, whatever led to it."""
        if own in terms.QUIET:
            return
        if own is ExitCode.NO_RESOURCE and self._ran:
            self._alarm.raise_("disk-full", f"{message}; {terms.FREE_SPACE}")
        else:
            self._alarm.raise_("failed" if self._ran else "no-start", self._with_words(message))

    def _attempts(self) -> Ended:
        while True:
            chosen = self._choose()
            stop = self._pause(0.0)  # what came meanwhile
            if stop is not None:
                return stop
            if not chosen.starts:
                self._ran = False
                return self._end(chosen.code, chosen.message, chosen.hint)
            self._starts, self._ran = self._starts + 1, True
            attempt = CommandAttempt(self._words, chosen, self._starts, self._tools)
            ending, code = attempt.run()
            self._notice = attempt.notice
            decide = partial(self._next, attempt.stopped_by, attempt.full)
            after = self._team.conclude(ending, code, decide)
            self._words_of_end = attempt.last_words
            if not after.again:
                return terms.ended(ending, after, attempt.last, attempt.unseen, self._restarts)
            self._say(f"guard: {after.reason}")
            self._alarm.raise_("restart", self._with_words(after.reason))
            if after.delay:
                self._say(f"guard: waiting {shown_duration(after.delay)} before the restart")
            stop = self._pause(after.delay)
            if stop is not None:
                return stop

    def _next(self, by: int, full: str, ending: CommandEnd, code: int) -> Next:
        history = attempts(self._journal.own)
        return what_next(ending, code, history, self._settings.limits, by, full)

    def _with_words(self, message: str) -> str:
        said = self._words_of_end
        return f"{message}; it printed last: {said}" if said else message

    @property
    def _restarts(self) -> int:
        return max(0, self._starts - 1)

    def _end(self, code: ExitCode, message: str, hint: str = "") -> Ended:
        return terms.own(code, message, hint, self._restarts)

    # What happens before a start.

    def _end_leftovers(self) -> None:
        """End what a killed guard's command has left on this machine.

        Raises:
            RefusedError: it cannot be ended.
        """
        for start in unended(self._journal.events):
            token = str(start.get("token", ""))
            if not token or start.get("host") != socket.gethostname() or _lives(start):
                continue
            left = end_marked(MARK, token)
            if left:
                raise RefusedError(
                    f"processes of an earlier guard's command still run: {sorted(left)}",
                    hint="end them: two trainings must not write to one root",
                )
            self._journal.add("ended", token=token, ending=None, code=None)

    def _choose(self) -> StartPoint:
        """Choose a checkpoint; wait for a store that is away."""
        until = time.monotonic() + self._settings.patience
        delay = 1.0
        suspected = suspects(attempts(self._journal.events))
        while True:
            try:
                with self._events.interrupted():
                    chosen = self._team.agree(lambda: self._place.choose(suspected))
            except NoticedError:
                return StartPoint(ExitCode.REQUEUE, terms.IDLE)
            except UnavailableError as error:
                chosen = StartPoint(ExitCode.UNAVAILABLE, error.message, error.hint)
            if chosen.code is ExitCode.NOT_FOUND and (held := _held_before(self._journal.events)):
                return StartPoint(
                    ExitCode.CORRUPT,
                    f"the root holds no checkpoint, and its guard's log tells of {held}: all are"
                    " gone",
                    "find them, or begin a new run in another root",
                )
            if chosen.code is not ExitCode.UNAVAILABLE or time.monotonic() + delay > until:
                return chosen
            self._warn(f"{chosen.message}; asking again in {shown_duration(delay)}")
            stop = self._pause(delay)
            if stop is not None:
                code = stop.own or ExitCode.TERMINATED
                return StartPoint(code, stop.message, stop.hint)
            delay = min(2 * delay, 60.0)

    def _pause(self, seconds: float) -> Ended | None:
        """Wait; return how the guard ends if a signal or a notice cuts the wait short."""
        until = time.monotonic() + seconds
        while True:
            for event in self._events.drain():
                if isinstance(event, signal.Signals) and event in self._settings.notice_signals:
                    self._notice = Notice(event.name, self._settings.notice_seconds, "signal")
                elif isinstance(event, signal.Signals) and event in (*STOPPING, signal.SIGHUP):
                    interrupted = event is signal.SIGINT
                    code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
                    return self._end(code, f"stopped by {event.name} while no command ran")
                elif isinstance(event, Notice):
                    self._notice = event
            if self._notice is not None:
                return self._end(ExitCode.REQUEUE, terms.IDLE)
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._events.wait(min(left, TICK))


def _lives(start: Mapping[str, object]) -> bool:
    """Whether the guard of a start still runs: without a lock another one may."""
    pid = start.get("guard")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    since = started_at(pid)
    return since is not None and since == start.get("since")
