"""Models of a job that saves, with one interface: the best interval, and an interval's outcome.

All times are in seconds. Only the interval of `outcome` may be an array, for curves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from ftckpt.planning.models.arithmetic import Real
from ftckpt.planning.models.spot import CopyTier, Pattern, Preemption
from ftckpt.planning.models.tiers import optimum as best_pattern
from ftckpt.planning.models.tiers import outcome as outcome_of_pattern
from ftckpt.planning.models.young_daly import Outcome

from .models import asynchronous, silent, spot, young_daly


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A job that fails and saves.

    Attributes:
        mtbf: mean time between failures.
        detect: from a failure until it is noticed and the failed part is replaced.
    """

    mtbf: float
    detect: float = 0.0

    @property
    @abstractmethod
    def stall(self) -> float:
        """The delay of training by one save: the C of Young's rule."""

    @property
    def rollback_mtbf(self) -> float:
        """Mean time between losses of work: the M of Young's rule."""
        return self.mtbf

    @property
    @abstractmethod
    def reload(self) -> float:
        """The longest time from the replacement until training continues."""

    @property
    def durable(self) -> float:
        """The time from the beginning of a save until a restart can use its copy."""
        return self.stall

    @property
    def writing(self) -> float:
        """The time during which a save is written."""
        return self.durable

    @property
    def least_interval(self) -> float:
        """The work between two saves below which a save waits for the one before it."""
        return 0.0

    @abstractmethod
    def optimum(self) -> float:
        """Return the work between two saves with the largest goodput."""

    @abstractmethod
    def outcome(self, interval: Real) -> Outcome:
        """Return where the wall time goes with a save after every `interval` of work."""

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        yield "failures half as often", self.scaled_mtbf(2.0)
        if self.detect:
            yield (
                "detection and replacement in half the time",
                replace(self, detect=self.detect / 2),
            )

    def scaled_mtbf(self, factor: float) -> Self:
        """Return the job with its mean time between failures multiplied."""
        return replace(self, mtbf=self.mtbf * factor)


@dataclass(frozen=True, kw_only=True)
class OnePlace(Model):
    """Saves to one place.

    Attributes:
        save: pause of training for a save; for a background save, for its snapshot.
        restart: from the replacement until training continues.
    """

    save: float
    restart: float = 0.0

    @property
    def stall(self) -> float:
        """The save."""
        return self.save

    @property
    def reload(self) -> float:
        """The restart."""
        return self.restart

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        yield from super().improvements()
        if self.restart:
            yield "restarts in half the time", replace(self, restart=self.restart / 2)


@dataclass(frozen=True, kw_only=True)
class Plain(OnePlace):
    """Exponential failures, saves to one place, blocking or in the background.

    Attributes:
        flush: time of the background write; 0 for a blocking save.
        slowdown: slowdown of training meanwhile, as a fraction.
    """

    flush: float = 0.0
    slowdown: float = 0.0

    @property
    def stall(self) -> float:
        """The delay of training by one save."""
        return self.save + self.slowdown * self.flush

    @property
    def durable(self) -> float:
        """Snapshot and flush."""
        return self.save + self.flush

    @property
    def writing(self) -> float:
        """The flush; all of a blocking save."""
        return self.flush or self.save

    @property
    def least_interval(self) -> float:
        """The work done during one flush."""
        return float(asynchronous.least_interval(self.flush, self.slowdown))

    def optimum(self) -> float:
        """See `ftckpt.planning.models.asynchronous.optimum` and `young_daly.optimum`."""
        if not self.flush:
            return float(young_daly.optimum(self.save, self.mtbf))
        return float(
            asynchronous.optimum(self.save, self.mtbf, flush=self.flush, slowdown=self.slowdown)
        )

    def outcome(self, interval: Real) -> Outcome:
        """See `ftckpt.planning.models.asynchronous.outcome` and `young_daly.outcome`."""
        if not self.flush:
            return young_daly.outcome(
                interval, self.save, self.mtbf, restart=self.restart, detect=self.detect
            )
        return asynchronous.outcome(
            interval,
            self.save,
            self.mtbf,
            flush=self.flush,
            slowdown=self.slowdown,
            restart=self.restart,
            detect=self.detect,
        )

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        if self.flush:
            faster = replace(self, save=self.save / 2, flush=self.flush / 2)
            yield "snapshot and flush in half the time", faster
            if self.slowdown:
                yield "no slowdown while flushing", replace(self, slowdown=0.0)
        else:
            yield "saves in half the time", replace(self, save=self.save / 2)
            # The limit of asynchronous saves: the same writing, without any pause.
            behind = replace(self, save=0.0, flush=self.save)
            yield "asynchronous saves, at best (no stall at all)", behind
        yield from super().improvements()


@dataclass(frozen=True, kw_only=True)
class Spot(Plain):
    """Machines that are preempted with notice, beside failures."""

    preemption: Preemption

    @cached_property
    def interruptions(self) -> spot.Interruptions:
        """Interruptions per second, by whether there is time for a save."""
        return spot.classify(1 / self.mtbf, self.preemption, self.durable)

    @property
    def rollback_mtbf(self) -> float:
        """Mean time between failures and preemptions without enough notice."""
        return float(1 / self.interruptions.unannounced)

    def optimum(self) -> float:
        """See `ftckpt.planning.models.spot.optimum`."""
        found = spot.optimum(
            self.save,
            *self.interruptions,
            flush=self.flush,
            slowdown=self.slowdown,
            restart=self.restart,
            detect=self.detect,
        )
        return float(found)

    def outcome(self, interval: Real) -> Outcome:
        """See `ftckpt.planning.models.spot.outcome`."""
        return spot.outcome(
            interval,
            self.save,
            *self.interruptions,
            flush=self.flush,
            slowdown=self.slowdown,
            restart=self.restart,
            detect=self.detect,
        )

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        yield from super().improvements()
        fewer = replace(self.preemption, rate=self.preemption.rate / 2)
        yield "preemptions half as often", replace(self, preemption=fewer)
        if not self.interruptions.announced and self.preemption.reliability:
            longer = replace(self.preemption, notice=self.durable)
            yield "saves that fit into the notice", replace(self, preemption=longer)


@dataclass(frozen=True, kw_only=True)
class Silent(OnePlace):
    """Failures and silent errors; every save is verified first, so every copy is good.

    Attributes:
        verify: pause to look for errors.
        silent_rate: silent errors per second.
    """

    verify: float
    silent_rate: float

    @property
    def stall(self) -> float:
        """Verification and save."""
        return self.save + self.verify

    @property
    def writing(self) -> float:
        """The save, without the verification before it."""
        return self.save

    def optimum(self) -> float:
        """See `ftckpt.planning.models.silent.optimum`."""
        found = silent.optimum(
            self.verify,
            self.save,
            self.silent_rate,
            1 / self.mtbf,
            restart=self.restart,
            detect=self.detect,
        )
        return float(found)

    def outcome(self, interval: Real) -> Outcome:
        """See `ftckpt.planning.models.silent.outcome`."""
        return silent.outcome(
            interval,
            self.verify,
            self.save,
            self.silent_rate,
            1 / self.mtbf,
            restart=self.restart,
            detect=self.detect,
        )

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        yield "saves in half the time", replace(self, save=self.save / 2)
        yield "verification in half the time", replace(self, verify=self.verify / 2)
        yield "silent errors half as often", replace(self, silent_rate=self.silent_rate / 2)
        yield from super().improvements()


@dataclass(frozen=True, kw_only=True)
class Latent(OnePlace):
    """Failures, and silent errors that are noticed some time after they struck.

    Attributes:
        silent_rate: silent errors per second of work.
        latency: mean time until one is noticed.
        keep_last: number of kept copies.
    """

    silent_rate: float
    latency: float
    keep_last: int = 1

    @property
    def rollback_mtbf(self) -> float:
        """Mean time between failures and errors."""
        return 1 / (1 / self.mtbf + self.silent_rate)

    def optimum(self) -> float:
        """See `ftckpt.planning.models.latent.optimum`."""
        from .models import latent

        return latent.optimum(
            self.save,
            self.silent_rate,
            1 / self.mtbf,
            self.latency,
            restart=self.restart,
            detect=self.detect,
        )

    def outcome(self, interval: Real) -> Outcome:
        """See `ftckpt.planning.models.latent.outcome`."""
        from .models import latent

        return latent.outcome(
            interval,
            self.save,
            self.silent_rate,
            1 / self.mtbf,
            self.latency,
            restart=self.restart,
            detect=self.detect,
        )

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        yield "saves in half the time", replace(self, save=self.save / 2)
        yield "silent errors noticed in half the time", replace(self, latency=self.latency / 2)
        yield "silent errors half as often", replace(self, silent_rate=self.silent_rate / 2)
        yield from super().improvements()


@dataclass(frozen=True, kw_only=True)
class Tiered(Model):
    """Saves to several places, the cheap ones more often than the durable ones.

    Attributes:
        tiers: from the one that survives least to the one that survives everything.
    """

    tiers: tuple[CopyTier, ...]

    @cached_property
    def pattern(self) -> Pattern:
        """The best pattern of saves."""
        return best_pattern(self.tiers, self.mtbf, detect=self.detect)

    @property
    def stall(self) -> float:
        """The cost of a save to the last tier alone, for Young's rule."""
        return self.tiers[-1].cost

    @property
    def reload(self) -> float:
        """The restart from the slowest tier."""
        return max(tier.restart for tier in self.tiers)

    def optimum(self) -> float:
        """Return the work between two saves to the first tier in use."""
        return float(self.pattern.interval)

    def outcome(self, interval: Real) -> Outcome:
        """Return where the wall time goes with this interval and the best pattern's counts."""
        pattern = replace(self.pattern, interval=interval)
        return outcome_of_pattern(pattern, self.mtbf, detect=self.detect)

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield possible improvements, each with the improved job."""
        for place, tier in enumerate(self.tiers):
            faster = replace(tier, cost=tier.cost / 2)
            changed = (*self.tiers[:place], faster, *self.tiers[place + 1 :])
            yield f"saves to {tier.name} in half the time", replace(self, tiers=changed)
        for place, tier in enumerate(self.tiers):
            if tier.restart:
                faster = replace(tier, restart=tier.restart / 2)
                changed = (*self.tiers[:place], faster, *self.tiers[place + 1 :])
                yield f"restarts from {tier.name} in half the time", replace(self, tiers=changed)
        yield from super().improvements()
