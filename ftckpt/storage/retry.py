"""Try again, for a bounded time, where another attempt can help.

What can be helped is the caller's knowledge (a 503, a reset connection, a stalled read; never a
404, a 403 or a failed condition). How long to wait is this module's: exponential, with jitter so
that thousands of ranks that failed together do not come back together, and bounded in total.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Backoff:
    """The pauses of one operation that is tried again and again.

    Args:
        seconds: total time from now within which another attempt may start.
        first: upper bound of the first pause, in seconds; each later bound is twice as large.
        largest: upper bound of any pause, in seconds.
        clock: seconds that never run backwards.
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
