"""A guard as metrics in Prometheus' text format, for node_exporter's textfile collector."""

from __future__ import annotations

import time
from contextlib import suppress

from ftckpt.errors import FtckptError
from ftckpt.health.prometheus import Gauge, text_of
from ftckpt.storage.local.atomic import write_over

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
