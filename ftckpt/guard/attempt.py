"""One run of a guarded command: start it, act on what happens, and say how it ended.

Tell from the saves of a command whether it hangs.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.amounts import shown_duration
from ftckpt.errors import ExitCode

from .alarm import Alarm, stacks
from .decisions import (
    LOOKS,
    STARTING,
    Circumstances,
    CommandEnd,
    OnHang,
    ending_of,
    exit_code,
    filled,
    hang_limit,
    usual_interval,
)
from .journal import GuardJournal, Standing
from .keeper import started_at
from .lock import Hold
from .notices import Notice, write_notice
from .supervise import (
    STOPPING,
    TICK,
    Events,
    GuardedCommand,
    LastWords,
    Whom,
    last_lines,
    tells_of_a_full_disk,
)
from .terms import GuardedPlace, GuardSettings, StartPoint, Team
from .watch import CheckedSave, NewSave, SaveWatcher


class Silence(NamedTuple):
    """A newest save that is too old: its age, and the limit, in seconds."""

    age: float
    limit: float


class HangWatch:
    """The saves of one running command, by the monotonic clock.

    Attributes:
        fresh_at: when it was last known to be well: it started, saved or was woken up.
        before_s: how often the run saved before; None if nobody knows (yet).
        saves: when each was made.
        late: whether a hang was told of, and no save has come since.
    """

    def __init__(self, settings: GuardSettings, now: float) -> None:
        self._settings = settings
        self.fresh_at = now
        self.before_s: float | None = None
        self.saves: list[float] = []
        self.late = False
        self._newest: int | None = None

    def saved(self, save: NewSave, now: float) -> None:
        """Note a save.

        One that is told of again, because it was sealed or has a second name (`last`), is one save:
        too short an interval between saves would soon make a hang of a healthy job.
        """
        self.fresh_at, self.late = now, False
        if not self.saves:
            again = False
        elif save.step is None or self._newest is None:
            again = save.again or now - self.saves[-1] <= self._settings.settled
        else:
            again = save.step == self._newest
        if not again:
            self.saves.append(now)
        self._newest = save.step

    def _limit(self) -> float | None:
        usual = usual_interval(self.saves, self.before_s)
        least = LOOKS * self._settings.every if self.saves else STARTING
        return hang_limit(self._settings.max_age, usual, least)

    @property
    def due(self) -> float | None:
        """When the next save is late; None if that is not known, or was told."""
        limit = self._limit()
        return None if limit is None or self.late else self.fresh_at + limit

    def look(self, now: float, *, moving: bool) -> Silence | None:
        """Return the silence that has just become a hang.

        Args:
            now: by the monotonic clock.
            moving: whether files of a save are being written: then it is looked at again.
        """
        limit = self._limit()
        age = now - self.fresh_at
        if self.late or limit is None or age <= limit:
            return None
        if moving:
            self.fresh_at = now - limit + self._settings.every
            return None
        self.late = True
        return Silence(age, limit)


# Of the time that a notice leaves, what is kept for ending the command.
_RESERVE_S, _RESERVE_SHARE = 10.0, 0.25


@dataclass(frozen=True)
class GuardTools:
    """What every run of a command is guarded with; for the others see `Guard`.

    Attributes:
        events: signals, and what threads tell.
        alarm: tells the user.
        standing: the metrics.
        notice_file: where a notice is written for the command.
    """

    place: GuardedPlace
    settings: GuardSettings
    journal: GuardJournal
    hold: Hold
    team: Team
    events: Events
    alarm: Alarm
    standing: Standing
    notice_file: str
    say: Callable[[str], None]
    warn: Callable[[str], None]


class CommandAttempt:
    """One run of the command.

    Args:
        words: the command; `{}` is the checkpoint's path.
        chosen: what it starts from.
        number: counts the starts, from 1.
        tools: what it is guarded with.

    Attributes:
        notice: of a preemption, if one came.
        stopped_by: the signal that told the guard to end; 0 for none.
        last: the verdict on its newest save.
        unseen: why that save could not be verified; "" if it could.
        last_words: what the command printed last on stderr, if it failed; "" if nobody kept it.
        full: why nothing more could be written as it failed; "" if it could.
    """

    def __init__(
        self, words: Sequence[str], chosen: StartPoint, number: int, tools: GuardTools
    ) -> None:
        self._words, self._chosen, self._number, self._tools = words, chosen, number, tools
        self._place, self._settings, self._journal = tools.place, tools.settings, tools.journal
        self._events, self._standing, self._alarm = tools.events, tools.standing, tools.alarm
        self._say, self._warn = tools.say, tools.warn
        self._token = secrets.token_hex(8)
        self._hang = HangWatch(tools.settings, time.monotonic())
        self.notice: Notice | None = None
        self.stopped_by = 0
        self.last: CheckedSave | None = None
        self.unseen = self.last_words = self.full = ""
        self._hung = self._others_ended = False
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._watcher: SaveWatcher | None = None

    def run(self) -> tuple[CommandEnd, int]:
        """Run the command; return why it ended, and its code.

        Raises:
            FtckptError: the root could not be read, or the lock was lost; the command has ended.
        """
        chosen, hold, leads = self._chosen, self._tools.hold, self._tools.team.leads
        before = self._place.begun() if leads else {}
        self._say(_sentence(chosen, self._number))
        # The log knows the token before any process has it.
        self._journal.add(
            "start", token=self._token, host=socket.gethostname(), guard=os.getpid(),
            since=started_at(os.getpid()), attempt=self._number, path=chosen.path,
            step=chosen.step, source=chosen.source, identity=chosen.identity,
            skipped=list(chosen.skipped),
            repaired=list(chosen.repaired),
        )  # fmt: skip
        verifier = self._place.verifier()
        if leads:
            self._watcher = self._place.watcher(before, verifier, self._watched, chosen.step)
            self._watcher.note()
        hold.check()  # the choice may have taken longer than a lease
        words = LastWords()
        command = self._command = GuardedCommand(
            filled(self._words, chosen.path), self._environment(), self._token,
            locks=hold.descriptors, stdout=self._settings.output, stderr=words.descriptor,
        )  # fmt: skip
        words.started()
        began = self._hang.fresh_at = time.monotonic()
        try:
            if self._watcher is not None:
                self._watcher.start()
                threading.Thread(target=self._measure, name="ftckpt-interval", daemon=True).start()
            self._standing.started(chosen.step, self._number - 1)
            while command.status is None:
                self._step()
            if self._watcher is not None and command.status == 0 and self._undisturbed:
                self._finish(self._watcher)
        finally:
            command.end()
            verifier.stop()
            if self._watcher is not None:
                self._watcher.stop()
            for event in self._events.drain():
                self._take(event)
        assert command.status is not None
        code = exit_code(command.status)
        what = Circumstances(
            self.notice is not None, self.stopped_by, self._hung, self._settings.zero_is_done,
            bool(self._hang.saves),
        )  # fmt: skip
        ending = ending_of(code, what)
        seconds = round(time.monotonic() - began, 3)
        if ending in (CommandEnd.FAILED, CommandEnd.HUNG):
            text = words.text()
            self.last_words, self.full = last_lines(text), self._place.full()
            if not self.full and tells_of_a_full_disk(text):
                self.full = f"the command found no space left on a disk: {self.last_words}"
        self._journal.add(
            "ended", token=self._token, ending=ending, code=code, seconds=seconds,
            full=bool(self.full),
        )  # fmt: skip
        return ending, code

    @property
    def _undisturbed(self) -> bool:
        return self.notice is None and not self.stopped_by and not self._hung

    @property
    def _whom(self) -> Whom:
        return Whom.GROUP if self._tools.settings.to_group else Whom.COMMAND

    def _finish(self, watcher: SaveWatcher) -> None:
        """Wait for the verdict on the last saves of a training that has finished.

        A store that is away is waited for as long as before a start. Saves whose headers cannot be
        read are looked at again, once what is in flight has settled: nobody writes them any more.
        """
        until: float | None = None
        settled = time.monotonic() + self._settings.settled
        watcher.look(ended=True)
        while watcher.busy or watcher.away or watcher.unread:
            for event in self._events.drain():
                if isinstance(event, (signal.Signals, Notice)):
                    return  # the training is done; its last save stays unverified
                self._take(event)
            now = time.monotonic()
            if not watcher.away:
                until = None
            elif until is None:
                until = now + self._settings.patience
            elif now > until:
                self.unseen = watcher.away
                return
            if watcher.away or (watcher.unread and now > settled):
                watcher.look(ended=True, last=now > settled)
            self._events.wait(min(TICK, self._settings.every))

    def _measure(self) -> None:
        """Find out how often the run saved before, where nothing else says what is late."""
        if self._settings.max_age is None:
            self._hang.before_s = self._place.interval()

    def _environment(self) -> dict[str, str]:
        chosen = self._chosen
        theirs = {"FTCKPT_RESUME", "FTCKPT_STEP", "FTCKPT_ELASTIC"}
        kept = {name: value for name, value in os.environ.items() if name not in theirs}
        kept |= chosen.environment
        kept |= {"FTCKPT_NOTICE": self._tools.notice_file, "FTCKPT_ATTEMPT": str(self._number)}
        if chosen.path is not None:
            kept["FTCKPT_RESUME"] = chosen.path
        if chosen.step is not None:
            kept["FTCKPT_STEP"] = str(chosen.step)
        return kept

    def _step(self) -> None:
        """Wait for the next event of a running command, and act on it."""
        late_at = self._hang.due if self._looks_for_hang else None
        due = [at for at in (self._term_at, self._kill_at, late_at) if at is not None]
        timeout = min([TICK, *(max(0.0, at - time.monotonic()) for at in due)])
        if self._events.wait(timeout, self._command.fileno()):
            self._command.read()
        for event in self._events.drain():
            self._take(event)
        if self._command.status is not None:
            return
        self._tools.hold.check()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._warn(
                f"guard: the command did not end in time, and is killed (pid {self._command.pid})"
            )
            self._command.end()
            return
        if self._term_at is not None and now >= self._term_at:
            self._end_gently("the time that the notice left is over")
            return
        self._look_for_hang(now)

    def _end_gently(self, why: str) -> None:
        self._say(f"guard: {why}: SIGTERM, and SIGKILL in {shown_duration(self._settings.grace)}")
        self._term_at = None
        self._command.send(signal.SIGTERM, self._whom)
        self._kill_at = time.monotonic() + self._settings.grace

    def _take(self, event: object) -> None:
        if isinstance(event, signal.Signals):
            self._take_signal(event)
        elif isinstance(event, Notice):
            self._take_notice(event)
        elif isinstance(event, NewSave):
            self._hang.saved(event, time.monotonic())
            self._journal.add("saved", token=self._token, path=event.path, step=event.step)
            self._standing.saved(event.step)
            self._write_iteration(event.step)
        elif isinstance(event, CheckedSave):
            self._take_verdict(event)
        elif isinstance(event, CommandEnd) and not self._others_ended:
            self._others_ended = True
            self._end_gently("the command of another node has ended")
        elif callable(event):
            event()

    def _take_signal(self, number: signal.Signals) -> None:
        if number in self._settings.notice_signals:
            self._take_notice(Notice(number.name, self._settings.notice_seconds, "signal"))
            return
        self._say(f"guard: passing {number.name} on")
        self._command.send(number, self._whom)
        if number == signal.SIGCONT:  # it may have slept as long as this process did
            self._hang.fresh_at = time.monotonic()
        if number in STOPPING and not self.stopped_by:
            self.stopped_by = number
            self._kill_at = time.monotonic() + self._settings.grace

    def _take_notice(self, notice: Notice) -> None:
        if self.notice is not None:
            return
        self.notice = notice
        left = "" if notice.seconds is None else f", {shown_duration(notice.seconds)} left"
        self._warn(f"guard: notice of preemption by {notice.source}: {notice.detail}{left}")
        self._journal.add("notice", token=self._token, **notice._asdict())
        write_notice(self._tools.notice_file, notice)
        self._command.send(self._settings.save_signal, Whom.RANKS)
        if notice.seconds is not None:
            reserve = min(_RESERVE_S, _RESERVE_SHARE * notice.seconds)
            self._term_at = time.monotonic() + notice.seconds - reserve
        self._tools.team.noticed(notice)
        self._standing.write(notice=1)
        self._alarm.raise_("notice", f"{notice.source}: {notice.detail}{left}")

    def _take_verdict(self, checked: CheckedSave) -> None:
        save, code = checked.save, checked.code
        if self.last is None or save.number >= self.last.save.number:
            self.last = checked
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
        self._events.tell(event)

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

    @property
    def _looks_for_hang(self) -> bool:
        return self.notice is None and not self.stopped_by and self._tools.team.leads

    def _look_for_hang(self, now: float) -> None:
        moving = self._watcher is not None and self._watcher.moving
        silence = self._hang.look(now, moving=moving) if self._looks_for_hang else None
        if silence is not None:
            self._take_hang(*silence)

    def _take_hang(self, age: float, limit: float) -> None:
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
            if policy is not OnHang.WARN and self._command.status is None:
                self._hung = True
                self._end_gently(said)

        def dump() -> None:
            text = stacks(self._command.keeper)
            if text:
                self._warn(text)
            self._events.tell(act)

        threading.Thread(target=dump, name="ftckpt-stacks", daemon=True).start()


def _sentence(chosen: StartPoint, attempt: int) -> str:
    again = f"attempt {attempt}: " if attempt > 1 else ""
    if chosen.path is None:
        return f"guard: {again}a fresh start, because {chosen.message}"
    step = "" if chosen.step is None else f" (step {chosen.step})"
    return f"guard: {again}starting from {chosen.path}{step}"
