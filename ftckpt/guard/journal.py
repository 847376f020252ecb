"""The log of a guard, `.ftckpt/guard.jsonl` below the root: what was started from what, and why.

A line is appended in one write and flushed to the disk; a torn last line is passed over by readers
and ended by the next writer (`ftckpt.retention.records.log`). A log that cannot be written (a full
disk, a store that is away) never ends a training: what it would hold stays in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError
from ftckpt.own_files import FOLDER
from ftckpt.retention.records import log
from ftckpt.storage.local.ownership import belongs_to, is_believed
from ftckpt.storage.store import join

_SCHEMA = "ftckpt.guard-log/1"
LOG = log.LogName("guard.jsonl", "guard-log", _SCHEMA)


# Decisions are a few of the last events of a bucket's log.
_LATEST = 64


def log_of(rank: int) -> log.LogName:
    """Return the log of a node: the leader's is the job's."""
    return log.LogName(f"guard-{rank}.jsonl", f"guard-log-{rank}", _SCHEMA) if rank else LOG


@dataclass
class GuardJournal:
    """The events of a root's guards, and those of this one.

    Attributes:
        root: whose; its `base` is the place that the user named.
        warn: is told why an event could not be written.
        name: which log.
        events: of earlier guards as the log had them, and this one's.
        own: this one's.
    """

    root: Root
    warn: Callable[[str], None]
    name: log.LogName = LOG
    events: list[Mapping[str, object]] = field(default_factory=list)
    own: list[Mapping[str, object]] = field(default_factory=list)
    _failing: bool = False

    def load(self) -> None:
        """Read what earlier guards wrote; a stranger, who may suspect any checkpoint, is not heard.

        Raises:
            UnavailableError, DeniedError, UnsafeError: it could not be read.
        """
        store, base = self.root.store, self.root.base
        local = store.local_path(join(base, f"{FOLDER}/{self.name.file}"))
        plain = local is not None and os.path.isfile(local) and not os.path.islink(local)
        if local is not None and plain and not is_believed(local, store.local_path(base) or local):
            self.warn(f"the guard's log does not count: {belongs_to(local)}")
            self.events = [*self.own]
            return
        self.events = [*log.read(self.root, self.name), *self.own]

    def add(self, event: str, **fields: object) -> Mapping[str, object]:
        """Append an event; a failure is a warning, once until one succeeds again."""
        now = time.time()
        said: Mapping[str, object] = {"time": now, "event": event, **fields}
        self.events.append(said)
        self.own.append(said)
        try:
            log.append(self.root, event, now, fields, self.name)
            self._failing = False
        except FtckptError as error:
            if not self._failing:
                self.warn(f"the guard's log is not written: {error.message}")
            self._failing = True
        return said


def of_place(root: Root) -> Root:
    """Return the root as the user named it: its own files lie there, wherever the steps are."""
    return replace(root, base="", candidates=(), pointers=(), foreign=(), tombs={})


def last_decision(root: Root) -> Mapping[str, object] | None:
    """Return the last event that says what a guard did; None without a log.

    Raises:
        UnavailableError, DeniedError, UnsafeError: the log could not be read.
    """
    told = log.read(of_place(root), LOG, _LATEST)
    said = [event for event in told if event.get("event") in ("start", "finished")]
    return said[-1] if said else None


def sentence(event: Mapping[str, object]) -> str:
    """Return what a decision says, in words."""
    if event.get("event") == "finished":
        return f"ended with {event.get('code')}, {event.get('restarts')} restarts"
    path, number = event.get("path"), event.get("attempt")
    source = "a fresh start" if path is None else f"started from {path}"
    return f"{source}, attempt {number}, on {event.get('host')}"
