"""The outcome of a saving interval: where the wall time goes."""

from __future__ import annotations

from dataclasses import dataclass

from .arithmetic import Real


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of wall time with a save after every `interval` seconds of useful work.

    The six shares add up to 1 in an exact model and in a simulation. A first-order model adds up
    its losses as if they could not coincide, so its `useful` may be negative: it shows the formula,
    not reality.

    Attributes:
        model: the model, and its convention of waste.
        interval: seconds of useful work between two saves, without the save itself.
        useful: goodput: work that was never thrown away.
        save: training paused, or was slowed, for saves that were kept.
        lost: work and saves thrown away because a failure came before they were durable.
        detection: noticing failures and replacing the failed parts.
        restart: reloading, retries included.
        waiting: training paused because an earlier save was still being flushed.
    """

    model: str
    interval: Real
    useful: Real
    save: Real
    lost: Real
    detection: Real
    restart: Real
    waiting: Real = 0.0

    @property
    def waste(self) -> Real:
        """The share of wall time that is not useful work."""
        return 1 - self.useful
