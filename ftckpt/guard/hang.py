"""Tell from the saves of a command whether it hangs."""

from __future__ import annotations

from typing import NamedTuple

from .decisions import LOOKS, STARTING, hang_limit, usual_interval
from .terms import GuardSettings
from .watch import NewSave


class Silence(NamedTuple):
    """A newest save that is too old: its age, and the limit, in seconds."""

    age: float
    limit: float


class HangWatch:
    """The saves of one running command, by the monotonic clock.

    Attributes:
        fresh_at: when it was last known to be well: it started, saved or was woken up.
        before_s: how often the run saved before; None if nobody knows (yet).
        saves: when each was made.
        late: whether a hang was told of, and no save has come since.
    """

    def __init__(self, settings: GuardSettings, now: float) -> None:
        self._settings = settings
        self.fresh_at = now
        self.before_s: float | None = None
        self.saves: list[float] = []
        self.late = False
        self._newest: int | None = None

    def saved(self, save: NewSave, now: float) -> None:
        """Note a save.

        One that is told of again, because it was sealed or has a second name (`last`), is one save:
        too short an interval between saves would soon make a hang of a healthy job.
        """
        self.fresh_at, self.late = now, False
        if not self.saves:
            again = False
        elif save.step is None or self._newest is None:
            again = save.again or now - self.saves[-1] <= self._settings.settled
        else:
            again = save.step == self._newest
        if not again:
            self.saves.append(now)
        self._newest = save.step

    def _limit(self) -> float | None:
        usual = usual_interval(self.saves, self.before_s)
        least = LOOKS * self._settings.every if self.saves else STARTING
        return hang_limit(self._settings.max_age, usual, least)

    @property
    def due(self) -> float | None:
        """When the next save is late; None if that is not known, or was told."""
        limit = self._limit()
        return None if limit is None or self.late else self.fresh_at + limit

    def look(self, now: float, *, moving: bool) -> Silence | None:
        """Return the silence that has just become a hang.

        Args:
            now: by the monotonic clock.
            moving: whether files of a save are being written: then it is looked at again.
        """
        limit = self._limit()
        age = now - self.fresh_at
        if self.late or limit is None or age <= limit:
            return None
        if moving:
            self.fresh_at = now - limit + self._settings.every
            return None
        self.late = True
        return Silence(age, limit)
