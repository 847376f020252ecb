"""The log of a guard, `.ftckpt/guard.jsonl` below the root: what was started from what, and why.

A line is appended in one write and flushed to the disk; a torn last line is passed over by readers
and ended by the next writer (`ftckpt.retention.records.log`). A log that cannot be written (a full
disk, a store that is away) never ends a training: what it would hold stays in memory.

A guard as metrics in Prometheus' text format, for node_exporter's textfile collector.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError
from ftckpt.health.prometheus import Gauge, text_of
from ftckpt.own_files import FOLDER
from ftckpt.retention.records import log
from ftckpt.storage.local.atomic import write_over
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


GAUGES = {
    "up": Gauge("ftckpt_guard_up", "1 while the guard runs."),
    "restarts": Gauge("ftckpt_guard_restarts", "Restarts of the command by this guard."),
    "started": Gauge("ftckpt_guard_started_timestamp_seconds", "When the command last began."),
    "step": Gauge("ftckpt_guard_started_step", "Step that it was started from."),
    "saved_step": Gauge("ftckpt_guard_saved_step", "Step of the newest save since."),
    "saved": Gauge("ftckpt_guard_saved_timestamp_seconds", "When that was seen."),
    "good_step": Gauge("ftckpt_guard_good_step", "Step of the newest save that was verified."),
    "late": Gauge("ftckpt_guard_late", "1 where saves have stopped coming."),
    "notice": Gauge("ftckpt_guard_notice", "1 after a notice of preemption."),
}  # fmt: skip


class Standing:
    """The metrics of one guard; each change rewrites the file.

    Args:
        path: of the file; "" for none.
        root: the label.
    """

    def __init__(self, path: str, root: str) -> None:
        self._path, self._root = path, root
        self._values: dict[str, float] = {"up": 1.0, "restarts": 0.0, "late": 0.0, "notice": 0.0}

    def started(self, step: int | None, restarts: int) -> None:
        """Note a start of the command."""
        self.write(started=time.time(), restarts=restarts, step=step, late=0)

    def saved(self, step: int | None) -> None:
        """Note a new save."""
        self.write(saved=time.time(), saved_step=step, late=0)

    def good(self, step: int | None) -> None:
        """Note a save that passed."""
        self.write(good_step=step)

    def write(self, **values: float | None) -> None:
        """Change values and rewrite the file; what cannot be written is left."""
        self._values |= {name: value for name, value in values.items() if value is not None}
        if not self._path:
            return
        labels = {"root": self._root}
        samples = [(gauge, labels, self._values.get(name)) for name, gauge in GAUGES.items()]
        with suppress(FtckptError, OSError):  # monitoring never ends a training
            write_over(self._path, text_of(samples, tuple(GAUGES.values())).encode())
