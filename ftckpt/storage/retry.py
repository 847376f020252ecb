"""Retry for a bounded time.

The caller knows which failures a retry can help (a 503, a reset connection, a stalled read; never a
404, a 403 or a failed condition). This module sets the pauses: exponential, with jitter so that
thousands of ranks that failed together do not retry together, and bounded in total.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Backoff:
    """The pauses of one retried operation.

    Args:
        seconds: total time from now within which another attempt may start.
        first: upper bound of the first pause, in seconds; each later bound is twice as large.
        largest: upper bound of any pause, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        seconds: float,
        *,
        first: float = 0.2,
        largest: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._bound = first
        self._largest = largest
        self.attempts = 1

    def pause(self) -> float | None:
        """Return the seconds to wait before the next attempt, or None when the time is spent."""
        wait = self._bound * random.uniform(0.5, 1.0)
        if self._clock() + wait > self._end:
            return None
        self._bound = min(self._largest, 2 * self._bound)
        self.attempts += 1
        return wait
