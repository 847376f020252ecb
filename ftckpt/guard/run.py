"""The loop of a guard: choose, start, watch, decide, again."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from ftckpt.alerting import AlertHook
from ftckpt.errors import ExitCode, FtckptError, RefusedError, UnavailableError
from ftckpt.planning.quantities import shown_duration
from ftckpt.replay.processes import end_marked

from .alarm import Alarm, stacks
from .decisions import (
    LOOKS,
    STARTING,
    Circumstances,
    CommandEnd,
    Next,
    OnHang,
    attempts,
    ending_of,
    exit_code,
    filled,
    hang_limit,
    suspects,
    unended,
    usual_interval,
    what_next,
)
from .journal import GuardJournal
from .keeper import adopt_orphans, started_at
from .lock import Hold
from .metrics import Standing
from .notices import Notice, NoticeThread, write_notice
from .supervise import MARK, GuardedCommand, Whom
from .terms import Ended, GuardedPlace, GuardSettings, StartPoint, Team
from .watch import CheckedSave, NewSave, SaveWatcher

# Passed on to the command.
FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT")
    if hasattr(signal, name)
)
# These end the guard, too.
_STOPPING = (signal.SIGTERM, signal.SIGINT)
# Seconds between two looks at what has no event: ages, locks.
_TICK = 1.0
# Of the time that a notice leaves, what is kept for ending the command.
_RESERVE_S, _RESERVE_SHARE = 10.0, 0.25
# Verdicts that nobody needs to be told of: the scheduler or a person knows what follows.
_QUIET = (ExitCode.OK, ExitCode.REQUEUE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


_IDLE = "preempted while no command ran: the scheduler is to start the job again"


class _NoticedError(BaseException):
    """A signal announced a preemption while a checkpoint was chosen."""


def _held_before(events: Iterable[Mapping[str, object]]) -> str:
    """Return the newest checkpoint that a guard has started from or seen saved; "" for none."""
    told = [one.get("path") for one in events if one.get("event") in ("start", "saved")]
    return next((str(path) for path in reversed(told) if path), "")


@dataclass
class _Running:
    """What is known of a command while it runs."""

    command: GuardedCommand
    began: float
    fresh_at: float
    before_s: float | None
    saves: list[float] = field(default_factory=list)
    newest: int | None = None
    stopped_by: int = 0
    hung: bool = False
    late: bool = False
    others_ended: bool = False
    term_at: float | None = None
    kill_at: float | None = None
    watcher: SaveWatcher | None = None

    def saved(self, save: NewSave, now: float, settled: float) -> None:
        """Note a save.

        One that is told of again, because it was sealed or has a second name (`last`), is one save:
        too short an interval between saves would soon make a hang of a healthy job.
        """
        self.fresh_at, self.late = now, False
        if not self.saves:
            again = False
        elif save.step is None or self.newest is None:
            again = save.again or now - self.saves[-1] <= settled
        else:
            again = save.step == self.newest
        if not again:
            self.saves.append(now)
        self.newest = save.step


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
        self._journal, self._hold = journal, hold
        self._say, self._warn = say, warn
        self._team = team or Team()
        self._notice_file = os.path.join(folder, "notice.json")
        self._alarm = Alarm(
            AlertHook(settings.on_alert, settings.alert_url), journal.root.url, warn
        )
        self._standing = Standing(settings.metrics, journal.root.url)
        self._events: SimpleQueue[object] = SimpleQueue()
        self._wake, self._ring = os.pipe()
        for descriptor in (self._wake, self._ring):
            os.set_blocking(descriptor, False)
        self._notice: Notice | None = None
        self._starts, self._ran = 0, False
        self._last: CheckedSave | None = None
        self._unseen = ""
        self._choosing = False
        self._before: dict[int, Any] = {}

    def run(self) -> Ended:
        """Guard the command until nothing more is to be done.

        Raises:
            FtckptError: the root could not be read, or the lock was lost; the command has ended.
        """
        asking = NoticeThread(
            self._settings.sources, self._tell, self._say, every=self._settings.notice_every
        )
        code = int(ExitCode.INTERNAL)
        adopt_orphans()  # of a keeper that is killed
        with self._signals():
            asking.start()
            try:
                self._end_leftovers()
                self._team.begin(self._tell)
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
                os.close(self._wake)
                os.close(self._ring)

    def _tell_end(self, own: ExitCode | None, message: str) -> None:
        """Alert of an end that is not as it should be, whatever led to it."""
        if own not in _QUIET:
            self._alarm.raise_("failed" if self._ran else "no-start", message)

    def _attempts(self) -> Ended:
        while True:
            chosen = self._choose()
            stop = self._pause(0.0)  # what came meanwhile
            if stop is not None:
                return stop
            if not chosen.starts:
                self._ran = False
                return Ended(
                    int(chosen.code), chosen.code, chosen.message, chosen.hint, self._restarts
                )
            ending, code, by = self._attempt(chosen)
            after = self._team.conclude(ending, code, partial(self._next, by))
            if not after.again:
                return self._ended(ending, after)
            self._say(f"guard: {after.reason}")
            self._alarm.raise_("restart", after.reason)
            if after.delay:
                self._say(f"guard: waiting {shown_duration(after.delay)} before the restart")
            stop = self._pause(after.delay)
            if stop is not None:
                return stop

    def _next(self, by: int, ending: CommandEnd, code: int) -> Next:
        history = attempts(self._journal.own)
        return what_next(ending, code, history, self._settings.limits, by)

    @property
    def _restarts(self) -> int:
        return max(0, self._starts - 1)

    def _ended(self, ending: CommandEnd, after: Next) -> Ended:
        own: ExitCode | None = None
        last = self._last
        bad = (ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.UNSAFE)
        if after.code == 0 and self._unseen:
            code = ExitCode.UNAVAILABLE
            message = f"the command has finished, and its last save is not verified: {self._unseen}"
            hint = "ftckpt latest ROOT --verify content, when the store answers"
            return Ended(int(code), code, message, hint, self._restarts)
        if after.code == 0 and last is not None and last.code in bad:
            # 0 would say that all is well.
            message = f"the command has finished, and {last.save.path} is not good: {last.message}"
            hint = "ftckpt verify ROOT --all names the damage of each save"
            return Ended(int(last.code), last.code, message, hint, self._restarts)
        if after.code == 0:
            own = ExitCode.OK
        elif after.code == ExitCode.REQUEUE:
            own = ExitCode.REQUEUE
        elif ending is CommandEnd.UNSTARTED and after.code == ExitCode.USAGE:
            own = ExitCode.USAGE
        elif ending is CommandEnd.STOPPED and after.code in (
            ExitCode.INTERRUPTED,
            ExitCode.TERMINATED,
        ):
            own = ExitCode(after.code)
        hint = ""
        if own is ExitCode.USAGE:
            hint = "no checkpoint is to blame: name the program by its path, and install it"
        if own is None:
            hint = "its own output says why; .ftckpt/guard.jsonl of the root says what was tried"
        return Ended(after.code, own, after.reason, hint, self._restarts)

    def _preempted_idle(self) -> Ended:
        return Ended(int(ExitCode.REQUEUE), ExitCode.REQUEUE, _IDLE, "", self._restarts)

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
            self._choosing = True
            try:
                chosen = self._team.agree(lambda: self._place.choose(suspected))
            except _NoticedError:
                return StartPoint(ExitCode.REQUEUE, _IDLE)
            except UnavailableError as error:
                chosen = StartPoint(ExitCode.UNAVAILABLE, error.message, error.hint)
            finally:
                self._choosing = False
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
            for event in self._drain():
                if isinstance(event, signal.Signals) and event in self._settings.notice_signals:
                    self._notice = Notice(event.name, self._settings.notice_seconds, "signal")
                elif isinstance(event, signal.Signals) and event in (*_STOPPING, signal.SIGHUP):
                    interrupted = event is signal.SIGINT
                    code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
                    message = f"stopped by {event.name} while no command ran"
                    return Ended(int(code), code, message, "", self._restarts)
                elif isinstance(event, Notice):
                    self._notice = event
            if self._notice is not None:
                return self._preempted_idle()
            left = until - time.monotonic()
            if left <= 0:
                return None
            select.select([self._wake], [], [], min(left, _TICK))

    # One run of the command.

    def _attempt(self, chosen: StartPoint) -> tuple[CommandEnd, int, int]:
        """Run the command once; return why it ended, its code, and the signal that stopped it."""
        token = secrets.token_hex(8)
        words = filled(self._words, chosen.path)
        self._starts, self._ran = self._starts + 1, True
        before = self._place.listed() if self._team.leads else {}
        self._say(_sentence(chosen, self._starts))
        # The log knows the token before any process has it.
        self._journal.add(
            "start", token=token, host=socket.gethostname(), guard=os.getpid(),
            since=started_at(os.getpid()), attempt=self._starts, path=chosen.path,
            step=chosen.step, source=chosen.source, identity=chosen.identity,
            skipped=list(chosen.skipped),
            repaired=list(chosen.repaired),
        )  # fmt: skip
        verifier = self._place.verifier()
        watcher = None
        if self._team.leads:
            watcher = self._place.watcher(before, verifier, self._watched, chosen.step)
            watcher.note()
        self._hold.check()  # the choice may have taken longer than a lease
        command = GuardedCommand(
            words, self._environment(chosen), token,
            locks=self._hold.descriptors, stdout=self._settings.output,
        )  # fmt: skip
        now = time.monotonic()
        running = _Running(command, now, now, None)
        self._last, self._unseen = None, ""
        try:
            if watcher is not None:
                running.watcher = watcher
                watcher.start()
                threading.Thread(
                    target=self._measure, args=(running,), name="ftckpt-interval", daemon=True
                ).start()
            self._standing.started(chosen.step, self._restarts)
            while command.status is None:
                self._step(running)
            if watcher is not None and command.status == 0 and self._goes_on(running):
                self._finish(watcher, running)
        finally:
            command.end()
            verifier.stop()
            if watcher is not None:
                watcher.stop()
            for event in self._drain():
                self._take(event, running)
        assert command.status is not None
        code = exit_code(command.status)
        what = Circumstances(
            self._notice is not None, running.stopped_by, running.hung,
            self._settings.zero_is_done, bool(running.saves),
        )  # fmt: skip
        ending = ending_of(code, what)
        self._journal.add(
            "ended", token=token, ending=ending, code=code,
            seconds=round(time.monotonic() - running.began, 3),
        )  # fmt: skip
        return ending, code, running.stopped_by

    def _goes_on(self, running: _Running) -> bool:
        return self._notice is None and not running.stopped_by and not running.hung

    def _finish(self, watcher: SaveWatcher, running: _Running) -> None:
        """Wait for the verdict on the last saves of a training that has finished.

        A store that is away is waited for as long as before a start. Saves whose headers cannot be
        read are looked at again, once what is in flight has settled: nobody writes them any more.
        """
        until: float | None = None
        settled = time.monotonic() + self._settings.settled
        watcher.look(ended=True)
        while watcher.busy or watcher.away or watcher.unread:
            for event in self._drain():
                if isinstance(event, (signal.Signals, Notice)):
                    return  # the training is done; its last save stays unverified
                self._take(event, running)
            now = time.monotonic()
            if not watcher.away:
                until = None
            elif until is None:
                until = now + self._settings.patience
            elif now > until:
                self._unseen = watcher.away
                return
            if watcher.away or (watcher.unread and now > settled):
                watcher.look(ended=True, last=now > settled)
            select.select([self._wake], [], [], min(_TICK, self._settings.every))

    def _measure(self, running: _Running) -> None:
        """Find out how often the run saved before, where nothing else says what is late."""
        if self._settings.max_age is None:
            running.before_s = self._place.interval()

    def _environment(self, chosen: StartPoint) -> dict[str, str]:
        theirs = {"FTCKPT_RESUME", "FTCKPT_STEP", "FTCKPT_ELASTIC"}
        kept = {name: value for name, value in os.environ.items() if name not in theirs}
        kept |= chosen.environment
        kept |= {"FTCKPT_NOTICE": self._notice_file, "FTCKPT_ATTEMPT": str(self._starts)}
        if chosen.path is not None:
            kept["FTCKPT_RESUME"] = chosen.path
        if chosen.step is not None:
            kept["FTCKPT_STEP"] = str(chosen.step)
        return kept

    def _step(self, running: _Running) -> None:
        """Wait for the next event of a running command, and act on it."""
        limit = self._hang_limit(running)
        late_at = None if limit is None or running.late else running.fresh_at + limit
        due = [at for at in (running.term_at, running.kill_at, late_at) if at is not None]
        timeout = min([_TICK, *(max(0.0, at - time.monotonic()) for at in due)])
        ready = select.select([running.command.fileno(), self._wake], [], [], timeout)[0]
        if running.command.fileno() in ready:
            running.command.read()
        for event in self._drain():
            self._take(event, running)
        if running.command.status is not None:
            return
        self._hold.check()
        now = time.monotonic()
        if running.kill_at is not None and now >= running.kill_at:
            self._warn(
                f"guard: the command did not end in time, and is killed (pid {running.command.pid})"
            )
            running.command.end()
            return
        if running.term_at is not None and now >= running.term_at:
            self._end_gently(running, "the time that the notice left is over")
            return
        self._look_for_hang(running, now)

    def _end_gently(self, running: _Running, why: str) -> None:
        self._say(f"guard: {why}: SIGTERM, and SIGKILL in {shown_duration(self._settings.grace)}")
        running.term_at = None
        running.command.send(signal.SIGTERM, self._whom)
        running.kill_at = time.monotonic() + self._settings.grace

    @property
    def _whom(self) -> Whom:
        return Whom.GROUP if self._settings.to_group else Whom.COMMAND

    def _take(self, event: object, running: _Running) -> None:
        if isinstance(event, signal.Signals):
            self._take_signal(event, running)
        elif isinstance(event, Notice):
            self._take_notice(event, running)
        elif isinstance(event, NewSave):
            running.saved(event, time.monotonic(), self._settings.settled)
            self._journal.add("saved", token=self._token, path=event.path, step=event.step)
            self._standing.saved(event.step)
            self._write_iteration(event.step)
        elif isinstance(event, CheckedSave):
            self._take_verdict(event)
        elif isinstance(event, CommandEnd) and not running.others_ended:
            running.others_ended = True
            self._end_gently(running, "the command of another node has ended")
        elif callable(event):
            event()

    @property
    def _token(self) -> object:
        starts = [one for one in self._journal.own if one["event"] == "start"]
        return starts[-1].get("token", "") if starts else ""

    def _take_signal(self, number: signal.Signals, running: _Running) -> None:
        if number in self._settings.notice_signals:
            self._take_notice(Notice(number.name, self._settings.notice_seconds, "signal"), running)
            return
        self._say(f"guard: passing {number.name} on")
        running.command.send(number, self._whom)
        if number == signal.SIGCONT:  # it may have slept as long as this process did
            running.fresh_at = time.monotonic()
        if number in _STOPPING and not running.stopped_by:
            running.stopped_by = number
            running.kill_at = time.monotonic() + self._settings.grace

    def _take_notice(self, notice: Notice, running: _Running) -> None:
        if self._notice is not None:
            return
        self._notice = notice
        left = "" if notice.seconds is None else f", {shown_duration(notice.seconds)} left"
        self._warn(f"guard: notice of preemption by {notice.source}: {notice.detail}{left}")
        self._journal.add("notice", token=self._token, **notice._asdict())
        write_notice(self._notice_file, notice)
        running.command.send(self._settings.save_signal, Whom.RANKS)
        if notice.seconds is not None:
            reserve = min(_RESERVE_S, _RESERVE_SHARE * notice.seconds)
            running.term_at = time.monotonic() + notice.seconds - reserve
        self._team.noticed(notice)
        self._standing.write(notice=1)
        self._alarm.raise_("notice", f"{notice.source}: {notice.detail}{left}")

    def _take_verdict(self, checked: CheckedSave) -> None:
        save, code = checked.save, checked.code
        if self._last is None or save.number >= self._last.save.number:
            self._last = checked
        self._journal.add(
            "verified", token=self._token, path=save.path, step=save.step,
            code=int(code), name=code.name, seconds=round(checked.seconds, 3),
        )  # fmt: skip
        if code is ExitCode.OK:
            last = ", and is the last known good" if checked.newest else ""
            self._say(f"guard: {save.path} passes{last}")
            if checked.newest:
                self._standing.good(save.step)
            return
        if code is ExitCode.NOT_FOUND:  # a trainer that keeps few, and a slow verification
            self._say(f"guard: {save.path} went before it was verified")
            return
        self._warn(f"guard: {save.path} does not pass ({code.name}): {checked.message}")
        self._alarm.raise_("damaged", f"{save.path}: {checked.message}")

    def _watched(self, event: NewSave | CheckedSave) -> None:
        """Keep what passes; called in the watcher's thread, where a slow store holds up nothing."""
        if isinstance(event, CheckedSave) and event.newest:
            self._place.keep(event.save.name)
        self._tell(event)

    def _write_iteration(self, step: int | None) -> None:
        path = self._settings.iteration_file
        if not path or step is None:
            return
        try:
            with open(f"{path}.new", "w", encoding="ascii") as file:
                file.write(f"{step}\n")
            os.replace(f"{path}.new", path)
        except OSError as error:
            self._warn(f"guard: {path} could not be written: {error.strerror}")

    def _hang_limit(self, running: _Running) -> float | None:
        usual = usual_interval(running.saves, running.before_s)
        least = LOOKS * self._settings.every if running.saves else STARTING
        return hang_limit(self._settings.max_age, usual, least)

    def _look_for_hang(self, running: _Running, now: float) -> None:
        if self._notice is not None or running.stopped_by or running.late or not self._team.leads:
            return
        limit = self._hang_limit(running)
        age = now - running.fresh_at
        if limit is None or age <= limit:
            return
        if running.watcher is not None and running.watcher.moving:
            running.fresh_at = now - limit + self._settings.every  # it saves: look again
            return
        running.late = True
        policy = self._settings.limits.on_hang
        said = (
            f"no save for {shown_duration(round(age, 1))}, and after "
            f"{shown_duration(round(limit, 1))} that is a hang"
        )
        self._warn(f"guard: {said}")
        self._journal.add("late", token=self._token, age=round(age, 3), limit=limit, action=policy)
        self._standing.write(late=1)
        self._alarm.raise_("hang", said)

        def act() -> None:
            if policy is not OnHang.WARN and running.command.status is None:
                running.hung = True
                self._end_gently(running, said)

        def dump() -> None:
            text = stacks(running.command.keeper)
            if text:
                self._warn(text)
            self._tell(act)

        threading.Thread(target=dump, name="ftckpt-stacks", daemon=True).start()

    # Events and signals.

    def _tell(self, event: object) -> None:
        """Put an event before the main loop; from any thread, or a signal's handler."""
        self._events.put(event)
        with suppress(OSError):  # full: it wakes anyway
            os.write(self._ring, b"x")

    def _drain(self) -> Iterator[object]:
        with suppress(BlockingIOError):
            while len(os.read(self._wake, 4096)) == 4096:
                continue
        while True:
            try:
                yield self._events.get_nowait()
            except Empty:
                return

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals that are passed on; leave those alone that our parent ignores."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in FORWARDED:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._choosing and number in self._settings.notice_signals:
            raise _NoticedError  # what a choice reads may take longer than is left
        if self._choosing and number in _STOPPING:
            if callable(before):
                before(number, frame)
                return
            raise SystemExit(128 + number)
        self._tell(signal.Signals(number))


def _lives(start: Mapping[str, object]) -> bool:
    """Whether the guard of a start still runs: without a lock another one may."""
    pid = start.get("guard")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    since = started_at(pid)
    return since is not None and since == start.get("since")


def _sentence(chosen: StartPoint, attempt: int) -> str:
    again = f"attempt {attempt}: " if attempt > 1 else ""
    if chosen.path is None:
        return f"guard: {again}a fresh start, because {chosen.message}"
    step = "" if chosen.step is None else f" (step {chosen.step})"
    return f"guard: {again}starting from {chosen.path}{step}"
