"""The core's progress counter, drawn: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from typing import IO, TYPE_CHECKING, Any

from .render import human_bytes, human_duration
from .terminal import is_terminal, write

if TYPE_CHECKING:
    from rich.progress import Progress

# A log of a job must not fill with progress.
SECONDS_A_LINE = 30.0
# What is over before the eye has found it needs no bar.
SECONDS_BEFORE_BAR = 0.3


class ProgressCounter:
    """A `ftckpt.progress.Counter` that shows itself on a stream; any thread may count."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task: Any = None
        self._drawn = is_terminal(stream)
        self._label, self._total, self._unit = "", None, "B"  # type: str, int | None, str
        self._done = 0
        self._began = self._last_line = time.monotonic()

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Begin a stage of `total` units."""
        with self._lock:
            self._label, self._total, self._unit, self._done = label, total, unit, 0
            self._began = self._last_line = time.monotonic()
            self._take_away()

    def add(self, amount: int) -> None:
        """Count `amount` more units."""
        with self._lock:
            self._done += amount
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
                return
            now = time.monotonic()
            if self._drawn:
                if now - self._began >= SECONDS_BEFORE_BAR:
                    try:
                        self._start_bar()
                    except ModuleNotFoundError:  # without rich lines do
                        self._drawn = False
                return
            if now - self._last_line < SECONDS_A_LINE:
                return
            self._last_line = now
            text = self.describe(now - self._began)
        write(self._stream, text + "\n")

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._bar is not None:
                # As plain text: rich would read markup into names and wrap what scripts grep.
                self._bar.console.out(text, highlight=False)
                return
        write(self._stream, text + "\n")

    def clear(self) -> None:
        """Take the bar away until more is counted, so that a line can be printed elsewhere."""
        with self._lock:
            self._take_away()

    def close(self) -> None:
        """End the display and take the bar away."""
        with self._lock:
            self._take_away()
            self._drawn = False

    def _take_away(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def describe(self, seconds: float) -> str:
        """Return the state of the stage after `seconds` as one line."""
        parts = [self._amount(self._done)]
        if self._total:
            parts[0] += f" of {self._amount(self._total)} ({100 * self._done / self._total:.0f} %)"
        if seconds > 0 and self._done:
            rate = self._done / seconds
            parts.append(f"{self._amount(int(rate))}/s")
            if self._total and self._total > self._done:
                parts.append(f"{human_duration((self._total - self._done) / rate)} left")
        return f"{self._label}: {', '.join(parts)}"

    def _amount(self, count: int) -> str:
        return human_bytes(count) if self._unit == "B" else f"{count} {self._unit}"

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        columns.append(BarColumn())
        if self._unit == "B":
            columns += [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        else:
            columns.append(MofNCompleteColumn())
        columns.append(TimeRemainingColumn())
        self._bar = Progress(
            *columns,
            console=Console(file=self._stream),
            transient=True,
            redirect_stderr=False,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
        self._bar.start()
