"""Simulate silent errors: found by a check before each save, or noticed late by the loss.

An event at a time for all runs side by side: a fail-stop failure, an error that strikes, an error
that is noticed. Failures of any law strike running and restarts; errors are exponential in work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftckpt.progress import Counter

from .laws import Law
from .timeline import TimeLedger

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .laws import Floats

    Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SilentJob:
    """A job with silent errors, in seconds.

    Attributes:
        interval: work between two saves.
        save: pause for a save.
        verify: pause before it that finds every error; without `latency`.
        rate: silent errors per second of work.
        restart: from the replacement until training continues.
        detect: after a fail-stop failure, in which nothing fails.
        latency: mean running time until an error is noticed; None: it is verified before a save.
        keep_last: number of kept copies.
    """

    interval: float
    save: float
    verify: float
    rate: float
    restart: float
    detect: float
    latency: float | None = None
    keep_last: int = 1


class _Failures:
    """Times between failures, taken by each run at its own pace."""

    def __init__(self, law: Law, rng: np.random.Generator, runs: int) -> None:
        import numpy as np

        self._draw = law.sampler(rng, runs)
        self._rows = self._draw(64)
        self._at = np.zeros(runs, dtype=np.int64)

    def take(self, which: Flags) -> Floats:
        """Return the next time of each run, and take it from those that need it."""
        import numpy as np

        if int(self._at.max()) == len(self._rows):
            oldest = int(self._at.min())
            self._rows = np.concatenate((self._rows[oldest:], self._draw(64)))
            self._at -= oldest
        found: Floats = self._rows[self._at, np.arange(len(self._at))]
        self._at += which
        return found


def run(
    job: SilentJob,
    law: Law,
    runs: int,
    failures: int,
    rng: np.random.Generator,
    counter: Counter,
) -> tuple[TimeLedger, float | None]:
    """Run each run until it has gone back so often; return where the time went.

    The second value is the share of errors that were noticed when every kept copy had them; None
    for verified saves, and without any error.
    """
    import numpy as np

    ledger, gaps = TimeLedger(runs), _Failures(law, rng, runs)
    everyone = np.ones(runs, dtype=bool)
    left = gaps.take(everyone)  # running time until the next failure
    states = _Verified(job, rng, runs) if job.latency is None else _Latent(job, rng, runs)
    returns = np.zeros(runs, dtype=np.int64)
    needs = everyone.copy()  # begins with a restart, as it ends after a failure
    while (active := returns < failures).any():
        restarting = active & needs
        broken = restarting & (left < job.restart)
        ledger.restart += np.where(restarting, np.minimum(left, job.restart), 0.0)
        ledger.wall += np.where(restarting, np.minimum(left, job.restart), 0.0)
        left = np.where(restarting & ~broken, left - job.restart, left)
        needs &= ~(restarting & ~broken)
        going = active & ~needs
        ran, failed, back = states.event(left, going, ledger)
        ledger.wall += np.where(going, ran, 0.0)
        left = np.where(going, left - ran, left)
        failed = (failed & going) | broken
        ledger.detection += job.detect * failed
        ledger.wall += job.detect * failed
        if failed.any():
            left = np.where(failed, gaps.take(failed), left)
        back = (back & going) | failed
        needs |= back
        before = int(np.minimum(returns, failures).sum())
        returns += back
        counter.add(int(np.minimum(returns, failures).sum()) - before)
    states.close(ledger)
    ledger.segments = states.bulks
    ledger.check()
    return ledger, states.unreached


class _Verified:
    """Every save is verified first: an error costs its bulk."""

    unreached: float | None = None

    def __init__(self, job: SilentJob, rng: np.random.Generator, runs: int) -> None:
        self._job, self._rng, self._runs = job, rng, runs
        self.bulks = 0

    def event(self, left: Floats, going: Flags, ledger: TimeLedger) -> tuple[Floats, Flags, Flags]:
        """Run to the next failure or error: seconds, whether it failed, whether it goes back."""
        import numpy as np

        job = self._job
        length = job.interval + job.verify + job.save
        strikes = np.floor(_until(self._rng, job.rate, self._runs) / job.interval)
        fails = np.floor(left / length)
        bulks = np.minimum(strikes, fails)
        rest = left - bulks * length
        wrong = strikes <= fails
        checked = job.interval + job.verify
        failed = rest < np.where(wrong, checked, length)
        lost = np.where(failed, rest, checked)
        kept = np.where(going, bulks, 0.0)
        ledger.useful += kept * job.interval
        ledger.save += kept * (job.verify + job.save)
        ledger.lost += np.where(going, lost, 0.0)
        self.bulks += int(kept.sum()) + int(np.count_nonzero(going))
        return bulks * length + lost, failed, np.ones(self._runs, dtype=bool)

    def close(self, ledger: TimeLedger) -> None:
        """Nothing is left open: every event ends a bulk."""


class _Latent:
    """An error is noticed late; what was saved since it struck holds it."""

    def __init__(self, job: SilentJob, rng: np.random.Generator, runs: int) -> None:
        import numpy as np

        self._job, self._rng, self._runs = job, rng, runs
        self._phase = np.zeros(runs)  # running time into the bulk
        self._dirty = np.zeros(runs, dtype=bool)
        self._doubtful = np.zeros(runs)  # saves since the error
        self._until = self._strikes()
        self._noticed = self._lost = 0
        self.bulks = 0

    @property
    def unreached(self) -> float | None:
        """Share of errors that every kept copy had when they were noticed."""
        return self._lost / self._noticed if self._noticed else None

    def _strikes(self) -> Floats:
        """Return work until the next error of each run."""
        return _until(self._rng, self._job.rate, self._runs)

    def event(self, left: Floats, going: Flags, ledger: TimeLedger) -> tuple[Floats, Flags, Flags]:
        """Run to the next failure, error, or notice; `until` is in work, or in running if dirty."""
        import numpy as np

        job = self._job
        length = job.interval + job.save
        worked = np.minimum(self._phase, job.interval) + self._until
        whole = np.floor(worked / job.interval)
        strike = whole * length + (worked - whole * job.interval) - self._phase
        ahead = np.where(self._dirty, self._until, strike)
        ran = np.minimum(left, ahead)
        failed = left < ahead
        saves = np.floor((self._phase + ran) / length)
        phase = self._phase + ran - saves * length
        clean, dirty = going & ~self._dirty, going & self._dirty
        ledger.useful += np.where(clean, saves, 0.0) * job.interval
        ledger.save += np.where(clean, saves, 0.0) * job.save
        self.bulks += int(np.where(going, saves, 0.0).sum()) + int(np.count_nonzero(going))
        doubtful = self._doubtful + np.where(dirty, saves, 0.0)
        noticed = dirty & ~failed
        # What was done in work, of a clean run that failed before its error.
        done = np.minimum(phase, job.interval) + saves * job.interval
        done -= np.minimum(self._phase, job.interval)
        until = np.where(self._dirty, self._until - ran, self._until - done)
        self._noticed += int(np.count_nonzero(noticed))
        self._lost += int(np.count_nonzero(noticed & (doubtful >= job.keep_last)))
        ledger.lost += np.where(noticed, doubtful * length + phase, 0.0)
        ledger.lost += np.where(going & failed, phase, 0.0)
        struck = clean & ~failed
        phase = np.where(failed | noticed, 0.0, phase)
        until = np.where(noticed, self._strikes(), until)
        until = np.where(
            struck, self._rng.exponential(max(job.latency or 0.0, 1e-9), self._runs), until
        )
        self._phase = np.where(going, phase, self._phase)
        self._until = np.where(going, np.maximum(until, 0.0), self._until)
        self._doubtful = np.where(going, np.where(noticed, 0.0, doubtful), self._doubtful)
        self._dirty = (self._dirty | struck) & ~noticed
        return ran, failed, failed | noticed

    def close(self, ledger: TimeLedger) -> None:
        """What is in doubt at the end is lost."""
        job = self._job
        ledger.lost += self._doubtful * (job.interval + job.save) + self._phase


def _until(rng: np.random.Generator, rate: float, runs: int) -> Floats:
    import numpy as np

    return rng.exponential(1 / rate, runs) if rate > 0 else np.full(runs, np.inf)
