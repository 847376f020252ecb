"""The core's progress counter, shown: a bar on a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import IO, Any

from .render import human_bytes, human_duration
from .terminal import ClosedPipeError, write

# A log of a job must not fill with progress.
SECONDS_A_LINE = 30.0
# What is over before the eye has found it needs no bar.
SECONDS_BEFORE_BAR = 0.3
_SECONDS_A_FRAME = 0.1
_SECONDS_A_RECORD = 1.0
# The rate is that of the last seconds, so that a stall shows and what was taken over does not.
_WINDOW = 20.0
_FEWEST, _MOST = 5, 30  # columns of the bar
_CLEAR = "\r\x1b[K"


# Draws a share of a bar in a number of columns.
Draw = Callable[[float, int], str]


def _plain(share: float, columns: int) -> str:
    full = int(share * (columns - 2))
    return f"[{'#' * full}{'.' * (columns - 2 - full)}]"


def _drawing(stream: IO[str]) -> Draw:
    """Return how bars are drawn on a terminal: by rich, as its colours and characters allow."""
    try:
        from rich.console import Console
        from rich.progress_bar import ProgressBar
    except ImportError:  # the light install may do without
        return _plain
    console = Console(file=stream)

    def draw(share: float, columns: int) -> str:
        with console.capture() as drawn:
            console.print(ProgressBar(1.0, share, width=columns), end="")
        return drawn.get()

    return draw


class ProgressForm(StrEnum):
    """How progress is shown."""

    BAR = "bar"
    LINES = "lines"
    JSON = "json"
    SILENT = "silent"


class ProgressCounter:
    """A `ftckpt.progress.Counter` that shows itself on a stream; any thread may count.

    Bars and JSON are written by a thread, so that a stall shows. It begins with the first amount of
    a stage and ends with the stage: copies of this process are made in between, and a copy has only
    the thread that made it.

    Args:
        stream: where to.
        form: how.
        verb: whose progress it is.
        errors: returns how many errors were found so far.
    """

    def __init__(
        self,
        stream: IO[str],
        form: ProgressForm = ProgressForm.LINES,
        *,
        verb: str = "",
        errors: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stream, self._form, self._verb, self._errors = stream, form, verb, errors
        # A signal may be answered while the same thread counts.
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None
        self._ended = threading.Event()
        self._drawn = False  # whether a bar stands on the screen
        self._draw: Draw | None = None
        self._files: int | None = None
        self._last_line = 0.0
        self._reset("", None, "B")

    @property
    def started(self) -> bool:
        """Whether a stage was begun."""
        return bool(self._label)

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Begin a stage of `total` units."""
        self._stop()
        if self._form is ProgressForm.JSON and self._label:
            self._show()  # how the last stage ended
        with self._lock:
            self._reset(label, total, unit)
        if self._form is ProgressForm.JSON:
            self._show()

    def add(self, amount: int) -> None:
        """Count `amount` more units."""
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._samples[-1][0] >= _SECONDS_A_RECORD:
                self._sample(now)
            if self._form in (ProgressForm.BAR, ProgressForm.JSON):
                if self._ticker is None:
                    self._begin()
                return
            if self._form is ProgressForm.SILENT or now - self._last_line < SECONDS_A_LINE:
                return
            self._last_line = now
            text = self.describe(now)
        write(self._stream, text + "\n")

    def files(self, total: int) -> None:
        """Say of how many files the stage is."""
        with self._lock:
            self._files = total

    def file_done(self) -> None:
        """Count one more file."""
        with self._lock:
            self._files_done += 1

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            self.clear()
            write(self._stream, text + "\n")

    def clear(self) -> None:
        """Take the bar away until it is drawn again, so that a line can be printed elsewhere."""
        with self._lock:
            if self._drawn:
                self._drawn = False
                write(self._stream, _CLEAR)

    def close(self) -> None:
        """End the display and take the bar away."""
        self._stop()
        if self._form is ProgressForm.JSON and self._label:
            self._show()
        self._form = ProgressForm.SILENT

    def describe(self, now: float) -> str:
        """Return the state of the stage as one line of words."""
        amounts, rate, left = self._words(now)
        percent = f" ({self._percent()} %)" if self._total else ""
        parts = [f"{amounts}{percent}", *filter(None, (rate, left))]
        if self._files is not None:
            parts.append(f"{self._files_done} of {self._files} file{'s' * (self._files != 1)}")
        if self._errors():
            parts.append(f"{self._errors()} error{'s' * (self._errors() > 1)}")
        return f"{self._label}: {', '.join(parts)}"

    def answer(self) -> str:
        """Return one line about the state now, in the form that the stream has."""
        now = time.monotonic()
        if self._form is ProgressForm.JSON:
            return json.dumps(self.record(now))
        return _CLEAR * self._drawn + self.describe(now)

    def record(self, now: float) -> dict[str, Any]:
        """Return the state of the stage as a record; docs/json.md explains its fields."""
        rate = self._rate(now)
        return {
            "schema": "ftckpt.progress/1",
            "verb": self._verb,
            "phase": self._label,
            "unit": "bytes" if self._unit == "B" else self._unit,
            "done": self._done,
            "total": self._total,
            "rate": None if rate is None else round(rate, 3),
            "eta": None if (left := self._left(rate)) is None else round(left, 1),
            "files_done": self._files_done if self._files is not None else None,
            "files": self._files,
            "errors": self._errors(),
            "seconds": round(now - self._began, 3),
        }

    def bar(self, now: float, width: int, draw: Draw = _plain) -> str:
        """Return the state of the stage as one line of at most `width` columns.

        `draw` draws the bar itself. What has no room goes, in this order: the bar, the amounts,
        the rate. The phase is cut last, and the time that is left stays.
        """
        amounts, rate, left = self._words(now)
        percent = f"{self._percent():3} %" if self._total else ""
        for shown in ((amounts, rate), (rate,), ()):
            words = "  ".join(filter(None, (percent, *shown, left)))
            room = width - len(self._label) - len(words) - 2
            if room >= 0 or not shown:
                break
        if self._total and room >= _FEWEST + 1:
            size = min(_MOST, room - 1)
            share = min(1.0, self._done / self._total)
            return f"{self._label}  {draw(share, size)} {words}"
        return f"{self._label[: max(0, len(self._label) + min(0, room))]}  {words}"[:width]

    def _words(self, now: float) -> tuple[str, str, str]:
        """Return the amounts, the rate and the time that is left; "" for what nobody knows."""
        rate = self._rate(now)
        left = self._left(rate)
        return (
            self._amount(self._done) + (f" of {self._amount(self._total)}" if self._total else ""),
            "" if rate is None else f"{self._amount(int(rate))}/s",
            "" if left is None else f"{human_duration(left)} left",
        )

    def _percent(self) -> int:
        return min(100, 100 * self._done // self._total) if self._total else 0

    def _rate(self, now: float) -> float | None:
        """Return units a second in the last seconds; None before there is anything to divide."""
        since, before = self._samples[0]
        return (self._done - before) / (now - since) if now > since and self._done else None

    def _left(self, rate: float | None) -> float | None:
        if not rate or not self._total:
            return None
        return max(0, self._total - self._done) / rate

    def _amount(self, count: int) -> str:
        return human_bytes(count) if self._unit == "B" else f"{count} {self._unit}"

    def _reset(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._files, self._files_done = None, 0
        self._began = self._last_line = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._began, 0)])

    def _sample(self, now: float) -> None:
        self._samples.append((now, self._done))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW:
            self._samples.popleft()

    def _begin(self) -> None:
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, args=(self._ended,), daemon=True)
        try:
            self._ticker.start()
        except RuntimeError:  # the system starts no more threads: the work does not need this one
            self._form = ProgressForm.SILENT

    def _tick(self, ended: threading.Event) -> None:
        bar = self._form is ProgressForm.BAR
        # Nobody is there to catch what a stream that is gone raises.
        with suppress(ClosedPipeError, ValueError):
            if ended.wait(SECONDS_BEFORE_BAR if bar else _SECONDS_A_RECORD):
                return
            self._show()
            while not ended.wait(_SECONDS_A_FRAME if bar else _SECONDS_A_RECORD):
                self._show()

    def _show(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._samples[-1][0] >= _SECONDS_A_RECORD:
                self._sample(now)
            if self._form is ProgressForm.JSON:
                write(self._stream, json.dumps(self.record(now)) + "\n")
            elif self._form is ProgressForm.BAR:
                self._drawn = True
                draw = self._draw = self._draw or _drawing(self._stream)
                write(self._stream, _CLEAR + self.bar(now, _columns(self._stream) - 1, draw))

    def _stop(self) -> None:
        """End the thread, and take the bar away."""
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            self._ended.set()
            if ticker is not threading.current_thread():
                ticker.join(_SECONDS_A_RECORD)
        self.clear()


def _columns(stream: IO[str]) -> int:
    """Return the width of the terminal that the stream is."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80
