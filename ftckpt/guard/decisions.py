"""What a guard decides, as functions of what has happened."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from ftckpt.errors import ExitCode

REQUEUE = int(ExitCode.REQUEUE)
# A checkpoint that was started from this often without a newer save is suspected.
SUSPECTED_AFTER = 2
# Starts failed as fast as another if they took at most 10 s, or at most twice its time.
_AS_FAST_S, _AS_FAST = 10.0, 2.0
# Saves are late when the newest is this many intervals old.
LATE = 3.0
LOOKS = 4.0
STARTING = 900.0
# A code above 128 says by which signal a command ended.
_SIGNALLED = 128
# What shells, `env` and the keeper end with where a command cannot be run, or is not found.
_NOT_RUN = (126, 127)
HELD_PLACE = "{}"
# What a shell takes a script after, and an option of a script's command that takes the path.
_SCRIPT = re.compile(r"-[a-zA-Z]*c")
_RESUME = re.compile(r"""(?<!\S)--[\w.-]+(?:=|\s+)(?:\{\}|"\{\}"|'\{\}')(?![^\s;&|)])\s?""")


class CommandEnd(StrEnum):
    """Why a command ended, as far as it matters for what follows."""

    DONE = "done"
    FAILED = "failed"
    PREEMPTED = "preempted"
    HUNG = "hung"
    STOPPED = "stopped"
    UNSTARTED = "unstarted"


class OnHang(StrEnum):
    """What is done about a command whose saves have stopped coming."""

    WARN = "warn"
    KILL = "kill"
    EXIT = "exit"


class GuardAttempt(NamedTuple):
    """One start of the command.

    Attributes:
        identity: of the checkpoint that it started from, as its files were; "" for a fresh start.
        ending: how it ended; None if nobody knows, because the guard was killed.
        saved: whether it made a newer save that passes.
        code: the exit code; None if nobody knows.
        seconds: how long it ran.
        full: whether no disk space was left as it ended.
    """

    identity: str
    ending: CommandEnd | None
    saved: bool
    code: int | None = None
    seconds: float = 0.0
    full: bool = False

    def failed_like(self, other: GuardAttempt) -> bool:
        """Say whether both failed in the same way and as fast, from different checkpoints."""
        shorter, longer = sorted((self.seconds, other.seconds))
        return (
            self.identity != other.identity
            and self.code is not None
            and (self.ending, self.code) == (other.ending, other.code)
            and longer <= max(_AS_FAST_S, _AS_FAST * shorter)
        )


class Circumstances(NamedTuple):
    """What happened while a command ran.

    Attributes:
        noticed: a preemption was announced.
        stopped_by: a signal that told the guard to end; 0 for none.
        hung: it was ended because its saves had stopped coming.
        zero_is_done: a command that ends with 0 after a notice has finished its work.
        saved: it has made a save.
    """

    noticed: bool = False
    stopped_by: int = 0
    hung: bool = False
    zero_is_done: bool = False
    saved: bool = False


class Limits(NamedTuple):
    """How often a command is restarted, and after how many seconds.

    Attributes:
        restarts: at most.
        first: seconds before the first restart; doubled for each further one without a save.
        longest: seconds at most.
        on_hang: what follows a hang that ended the command.
    """

    restarts: int = 3
    first: float = 10.0
    longest: float = 600.0
    on_hang: OnHang = OnHang.WARN


class Next(NamedTuple):
    """What follows the end of a command.

    Attributes:
        again: whether it is started again.
        code: the guard's exit code if not.
        delay: seconds to wait if it is.
        reason: in words.
        full: whether the reason is a full disk.
    """

    again: bool
    code: int
    delay: float
    reason: str
    full: bool = False


def exit_code(status: int) -> int:
    """Return a wait status as a shell shows it: the code, or 128 and the signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _SIGNALLED - code


def ending_of(code: int, what: Circumstances) -> CommandEnd:
    """Say why a command ended.

    Trainers that save and stop because of a notice end with 0, just as they do after the last step.
    So 0 after a notice means preempted: a finished training that is started again ends at once, and
    an unfinished one that counts as finished waits for a person.
    """
    if what.stopped_by == signal.SIGINT:
        return CommandEnd.STOPPED
    if what.noticed:
        return CommandEnd.DONE if code == 0 and what.zero_is_done else CommandEnd.PREEMPTED
    if what.stopped_by:
        return CommandEnd.STOPPED
    if what.hung:
        return CommandEnd.HUNG
    if code == REQUEUE:  # its own word for the same
        return CommandEnd.PREEMPTED
    if code in _NOT_RUN and not what.saved:
        return CommandEnd.UNSTARTED
    return CommandEnd.DONE if code == 0 else CommandEnd.FAILED


def what_next(
    ending: CommandEnd,
    code: int,
    history: Sequence[GuardAttempt],
    limits: Limits,
    by: int,
    full: str = "",
) -> Next:
    """Decide what follows the end of a command.

    A command that cannot be run ends the guard at its first start alone: one that has run before is
    there, and a file system that is away comes back.

    Args:
        ending: why it ended.
        code: its exit code.
        history: the attempts of this guard, the one that ended last.
        limits: how often it is restarted.
        by: the signal that stopped it, if one did.
        full: why nothing more can be written, in words; "" if it can.
    """
    if full and ending in (CommandEnd.FAILED, CommandEnd.HUNG):
        return Next(False, int(ExitCode.NO_RESOURCE), 0.0, full, full=True)
    if ending is CommandEnd.DONE:
        return Next(False, 0, 0.0, "the command has finished")
    if ending is CommandEnd.PREEMPTED:
        return Next(False, REQUEUE, 0.0, "preempted: the scheduler is to start the job again")
    if ending is CommandEnd.STOPPED:
        return Next(False, _SIGNALLED + by, 0.0, f"stopped by {signal.Signals(by).name}")
    if ending is CommandEnd.UNSTARTED and len(history) < 2:
        said = "is not found" if code == _NOT_RUN[1] else "cannot be run"
        return Next(False, int(ExitCode.USAGE), 0.0, f"the command {said} (it ended with {code})")
    if ending is CommandEnd.HUNG and limits.on_hang is OnHang.EXIT:
        return Next(False, REQUEUE, 0.0, "it hung: the scheduler is to start the job elsewhere")
    if len(history) > limits.restarts:
        times = "restart" if limits.restarts == 1 else "restarts"
        return Next(False, code, 0.0, f"it ended with {code} after {limits.restarts} {times}")
    vain = 0
    for attempt in reversed(history):
        if attempt.saved:
            break
        vain += 1
    delay = min(limits.longest, limits.first * 2.0 ** min(max(0, vain - 1), 30))
    said = "it hung" if ending is CommandEnd.HUNG else f"it ended with {code}"
    left = limits.restarts - len(history)
    return Next(True, code, delay, f"{said}; restart {len(history)}, {left} more allowed")


def suspects(history: Iterable[GuardAttempt]) -> frozenset[str]:
    """Return the checkpoints that failed twice without a newer save, by identity.

    Only ends that a checkpoint can be to blame for count: not preemptions, not those of a guard
    that was killed, and not those on a full disk. A start that reached a save clears the
    checkpoint. Where starts from two checkpoints fail alike and as fast, with no save between, the
    command is at fault: both count for neither.
    """
    vain: dict[str, int] = {}
    since: list[GuardAttempt] = []  # those that failed since the last save
    for attempt in history:
        if attempt.saved:
            since.clear()
        if not attempt.identity:
            continue
        if attempt.saved:
            vain[attempt.identity] = 0
        elif attempt.ending in (CommandEnd.FAILED, CommandEnd.HUNG) and not attempt.full:
            alike = [one for one in since if attempt.failed_like(one)]
            since.append(attempt)
            for identity in {one.identity for one in alike}:
                vain[identity] = 0
            vain[attempt.identity] = 0 if alike else vain.get(attempt.identity, 0) + 1
    return frozenset(one for one, times in vain.items() if times >= SUSPECTED_AFTER)


def attempts(events: Iterable[Mapping[str, object]]) -> list[GuardAttempt]:
    """Return the attempts that a guard's log tells of, the earliest first."""
    found: list[GuardAttempt] = []
    open_token, step = "", -1.0
    for event in events:
        kind, token = event.get("event"), str(event.get("token", ""))
        if kind == "start":
            said = event.get("step")
            now = float(said) if isinstance(said, (int, float)) else -1.0
            identity = str(event.get("identity", ""))
            known = any(one.identity == identity for one in found)
            # What it starts from was saved by the one before, and passes.
            if found and now > step and not known:
                found[-1] = found[-1]._replace(saved=True)
            found.append(GuardAttempt(identity, None, False))
            open_token, step = token, now
        elif kind == "cleared":  # a person says that what made them fail is mended
            found.clear()
        elif found and token == open_token:
            if kind == "verified" and event.get("code") == 0:
                found[-1] = found[-1]._replace(saved=True)
            elif kind == "ended" and event.get("ending") in list(CommandEnd):
                code, took = event.get("code"), event.get("seconds")
                found[-1] = found[-1]._replace(
                    ending=CommandEnd(str(event["ending"])),
                    code=code if type(code) is int else None,
                    seconds=float(took) if isinstance(took, (int, float)) else 0.0,
                    full=bool(event.get("full")),
                )
    return found


def unended(events: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the starts that a guard's log never saw end."""
    left: dict[str, Mapping[str, object]] = {}
    for event in events:
        token = str(event.get("token", ""))
        if event.get("event") == "start":
            left[token] = event
        elif event.get("event") == "ended":
            left.pop(token, None)
    return list(left.values())


def hang_limit(max_age: float | None, interval: float | None, least: float) -> float | None:
    """Return the age of the newest save that means a hang; None if nothing says what is usual.

    Args:
        max_age: what the user says.
        interval: seconds between saves, as it is usual.
        least: no shorter time is a hang, unless the user says so: `LOOKS` looks for saves, and
            `STARTING` before the first save, which a job needs to start and to load.
    """
    if max_age is not None:
        return max_age
    return None if interval is None else max(LATE * interval, least)


def usual_interval(times: Sequence[float], before: float | None) -> float | None:
    """Return the seconds between saves: of this run if it made three, else what it was before.

    The mean: several saves may have been seen in one look.
    """
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) >= 3 else before


def filled(words: Sequence[str], path: str | None) -> list[str]:
    """Return the command with the checkpoint's path for `{}`.

    For a fresh start a word with `{}` is left out, and so is an option (`--resume`) right before a
    word that is `{}` alone. A script stays: the text after an option that ends in `c` (`bash -c`),
    or of several words. In it `--resume {}` is left out, and any other `{}` is empty.
    """
    if path is not None:
        return [word.replace(HELD_PLACE, path) for word in words]
    kept: list[str] = []
    for word in words:
        if HELD_PLACE not in word:
            kept.append(word)
        elif word != HELD_PLACE and (" " in word or (kept and _SCRIPT.fullmatch(kept[-1]))):
            kept.append(_RESUME.sub("", word).replace(HELD_PLACE, ""))
        elif word == HELD_PLACE and len(kept) > 1 and kept[-1].startswith("-"):
            kept.pop()
    return kept
