"""A timeline as tables: how far a job has come after a time, for many runs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .timeline import Bulk, Timeline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Places: TypeAlias = npt.NDArray[np.int64]


class Clock:
    """Sums over the bulks of a timeline.

    A place is a number of saves since the beginning of the run. After a restart at a place the job
    goes through the bulks behind it, the first of them without an earlier flush.
    """

    def __init__(self, timeline: Timeline) -> None:
        import numpy as np

        cycle = timeline.cycle
        self.work = timeline.work
        self.length = len(cycle)
        self.ends = np.concatenate(([0.0], np.cumsum([bulk.seconds for bulk in cycle])))
        self._stalls = np.concatenate(([0.0], np.cumsum([bulk.stalled for bulk in cycle])))
        self._waits = np.concatenate(([0.0], np.cumsum([bulk.waiting for bulk in cycle])))
        # The first bulk after a restart is shorter by this.
        self.head = cycle[0].seconds - timeline.first.seconds
        self._head_stall = cycle[0].stalled - timeline.first.stalled
        self._head_wait = cycle[0].waiting - timeline.first.waiting
        self.delay = timeline.delay
        self._first, self._behind = _Course(timeline.first), _Course(cycle[0])

    def durable(self, place: Places, seconds: Floats) -> Places:
        """Return the number of durable saves some seconds after a restart at a place."""
        import numpy as np

        total = self._sum(self.ends, place) + (seconds + (self.head - self.delay))
        rounds = np.floor(total / self.ends[-1])
        saves = rounds.astype(np.int64) * self.length - place
        if self.length > 1:
            saves += np.searchsorted(self.ends[1:], total - rounds * self.ends[-1], side="right")
        found: Places = np.maximum(saves, 0)
        return found

    def seconds(self, place: Places, saves: Places) -> Floats:
        """Return the time of a number of saves after a restart at a place."""
        return self._between(self.ends, place, saves) - self.head * (saves > 0)

    def stalled(self, place: Places, saves: Places) -> Floats:
        """Return the part of `seconds` spent on saving."""
        return self._between(self._stalls, place, saves) - self._head_stall * (saves > 0)

    def waited(self, place: Places, saves: Places) -> Floats:
        """Return the part of `seconds` spent waiting for a flush."""
        return self._between(self._waits, place, saves) - self._head_wait * (saves > 0)

    def progress(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return work done and time waited some seconds after a restart, durable or not.

        For a timeline of one bulk.
        """
        import numpy as np

        begun = np.maximum(np.floor((seconds + self.head) / self.ends[-1]), 0.0)
        since = seconds + self.head - begun * self.ends[-1]
        first = begun < 1
        done = np.where(
            first, self._first.work(seconds), begun * self.work + self._behind.work(since)
        )
        waits = begun * self._waits[-1] - self._head_wait + self._behind.wait(since)
        return done, np.where(first, 0.0, waits)

    def _between(self, table: Floats, place: Places, saves: Places) -> Floats:
        if self.length > 1:
            return self._sum(table, place + saves) - self._sum(table, place)
        total: Floats = table[-1] * saves
        return total

    def _sum(self, table: Floats, place: Places) -> Floats:
        total: Floats = table[-1] * (place // self.length)
        return total + table[place % self.length] if self.length > 1 else total


class _Course:
    """How work and waiting add up within one bulk."""

    def __init__(self, bulk: Bulk) -> None:
        import numpy as np

        seconds = [phase.seconds for phase in bulk.phases]
        work = [phase.seconds * phase.speed for phase in bulk.phases]
        wait = [phase.seconds * (phase.kind == "wait") for phase in bulk.phases]
        self._ends, self._work, self._wait = (
            np.concatenate(([0.0], np.cumsum(each))) for each in (seconds, work, wait)
        )

    def work(self, seconds: Floats) -> Floats:
        """Return the work done a number of seconds after the bulk begins."""
        import numpy as np

        return np.interp(seconds, self._ends, self._work)

    def wait(self, seconds: Floats) -> Floats:
        """Return the time waited a number of seconds after the bulk begins."""
        import numpy as np

        return np.interp(seconds, self._ends, self._wait)
