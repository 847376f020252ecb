"""Tell each lasting condition once: what was told is remembered until it is over.

The memory is a file of this machine, one for each verb and root. It lies outside the root, because
a root that is away must not make every run of cron tell of it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError, UsageError
from ftckpt.storage.local.atomic import make_directories, write_over
from ftckpt.storage.local.oserror import claim
from ftckpt.storage.local.ownership import open_or_make
from ftckpt.strict_json import JsonError, decode

from .deliver import AlertHook, alert_document, deliver

SCHEMA = "ftckpt.told/1"
_MAX_BYTES = 16 << 20
_READABLE = 40
# Seconds to wait for another run that tells of the same: longer than it has for one alert.
WAIT = 100.0
_LOOK = 0.1
# How many messages of one kind are told; `about` names what each is about.
_MESSAGES = 10


class Condition(NamedTuple):
    """Something to look at.

    Attributes:
        kind: a word that scripts may match.
        message: one sentence; it may change while the condition lasts.
        hint: what to do.
        about: what it is about. A new one is news; empty for the root as a whole.
    """

    kind: str
    message: str
    hint: str = ""
    about: tuple[str, ...] = ()


def state_file(verb: str, target: str) -> str:
    """Return the file in which it is remembered what a verb has told of a target.

    Raises:
        UsageError: nothing names a home directory to put it in.
    """
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        user = os.path.expanduser("~")
        if not os.path.isabs(user):
            raise UsageError(
                "without a home directory it cannot be remembered what was told",
                hint="--alert-state FILE",
            )
        home = os.path.join(user, ".local", "state")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-")[-_READABLE:]
    digest = hashlib.blake2b(target.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return os.path.join(home, "ftckpt", "alerts", f"{verb}-{name}-{digest}.json")


Told = dict[str, dict[str, dict[str, float]]]
"""By who is told (`command`, `webhook`), kind and subject: when."""


class AlertMemory:
    """What was told.

    Args:
        path: of the file.
        warn: is told if it cannot be read or written; every alert is told again then.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn

    def read(self) -> Told:
        """Return what was told; nothing if it is not known."""
        try:
            with open(self.path, "rb") as file:
                body = decode(file.read(_MAX_BYTES))
            if body["schema"] != SCHEMA:
                raise ValueError("its schema is another")
            return {
                str(who): {
                    str(kind): {str(subject): float(then) for subject, then in subjects.items()}
                    for kind, subjects in kinds.items()
                }
                for who, kinds in body["told"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, JsonError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._warn(f"alerts: {self.path} is not read ({error}): what was told is told again")
            return {}

    @contextmanager
    def alone(self, seconds: float) -> Iterator[None]:
        """Keep other runs away that remember here: two at once would both tell what is news.

        Where that is not possible it goes on beside them: told twice is better than never told.

        Args:
            seconds: to wait for another run.
        """
        path = os.path.abspath(self.path)
        try:
            make_directories(os.path.dirname(path))
            lock = open_or_make(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # nor can it be remembered, which is said then
            yield
            return
        try:
            if not self._claim(lock, time.monotonic() + seconds):
                self._warn(
                    f"alerts: another run holds {path}.lock for more than {seconds:g} s: they may"
                    " be told twice"
                )
            yield
        finally:
            os.close(lock)

    def _claim(self, lock: int, until: float) -> bool:
        while True:
            try:
                claim(lock, self.path)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(_LOOK)
            except (OSError, FtckptError):  # a filesystem without locks
                return True
            else:
                return True

    def write(self, told: Told) -> None:
        """Remember; a failure is told, and nothing more."""
        data = json.dumps({"schema": SCHEMA, "told": told}, indent=1).encode() + b"\n"
        try:
            write_over(os.path.abspath(self.path), data)
        except (OSError, FtckptError) as error:
            self._warn(f"alerts: {self.path} is not written ({error}): they will be told again")


class AlertSource(NamedTuple):
    """Who tells of what.

    Attributes:
        verb: which found the conditions.
        target: the root, as typed.
        now: in seconds since the epoch.
    """

    verb: str
    target: str
    now: float


def tell(
    conditions: Sequence[Condition],
    hook: AlertHook,
    memory: AlertMemory,
    source: AlertSource,
    *,
    complete: bool,
    warn: Callable[[str], None],
    deliver: Callable[[AlertHook, Mapping[str, Any]], list[str]] = deliver,
    wait: float = WAIT,
) -> int:
    """Tell what is news, and what is over; return how many alerts were delivered.

    The command and the webhook are told each by itself: what one of them did not take is news to
    it again in the next run, and to it alone.

    Args:
        conditions: all that there are now.
        hook: who is told.
        memory: what was told before.
        source: who tells.
        complete: whether everything was looked at; if not, nothing is known to be over.
        warn: is told what went wrong.
        deliver: hands one document over.
        wait: seconds to wait for another run that tells of the same.
    """
    with memory.alone(wait):
        return _tell(conditions, hook, memory, source, complete, warn, deliver)


def _tell(
    conditions: Sequence[Condition],
    hook: AlertHook,
    memory: AlertMemory,
    source: AlertSource,
    complete: bool,
    warn: Callable[[str], None],
    deliver: Callable[[AlertHook, Mapping[str, Any]], list[str]],
) -> int:
    told = memory.read()
    delivered = 0
    now = _merged(conditions)
    for who, one in (("command", AlertHook(hook.command)), ("webhook", AlertHook(url=hook.url))):
        if not any(one):
            continue
        known = told.setdefault(who, {})

        def hand_over(one: AlertHook = one, **fields: Any) -> bool:
            verb, target, time = source
            document = alert_document(verb=verb, target=target, time=time, **fields)
            problems = deliver(one, document)
            for problem in problems:
                warn(f"alert {fields['kind']} ({fields['event']}): {problem}")
            return not problems

        for kind, condition in now.items():
            subjects = condition.about or ("",)
            before = known.get(kind, {})
            news = [subject for subject in subjects if subject not in before]
            if news and hand_over(
                event="raised", kind=kind, message=condition.message, hint=condition.hint,
                about=[subject for subject in subjects if subject],
                since=min(before.values(), default=source.now),
            ):  # fmt: skip
                delivered += 1
                known[kind] = before | dict.fromkeys(news, source.now)
                memory.write(told)  # a killed run does not tell it twice
        for kind, before in list(known.items()) if complete else ():
            if kind in now:
                subjects = now[kind].about or ("",)
                left = {subject: then for subject, then in before.items() if subject in subjects}
                # Where nothing is left its successor was not delivered: the kind is to be cleared.
                if left and left != before:
                    known[kind] = left
                    memory.write(told)
            elif hand_over(
                event="cleared", kind=kind, message="it is over",
                since=min(before.values(), default=source.now),
            ):  # fmt: skip
                del known[kind]
                memory.write(told)
    return delivered


def _merged(conditions: Sequence[Condition]) -> dict[str, Condition]:
    """Return one condition of each kind."""
    kinds: dict[str, list[Condition]] = {}
    for one in conditions:
        kinds.setdefault(one.kind, []).append(one)
    found = {}
    for kind, same in kinds.items():
        about = dict.fromkeys(subject for one in same for subject in one.about or ("",))
        said = "; ".join(one.message for one in same[:_MESSAGES])
        if len(same) > _MESSAGES:
            said += f"; and {len(same) - _MESSAGES} more"
        found[kind] = Condition(kind, said, same[0].hint, tuple(about))
    return found
