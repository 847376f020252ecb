"""The models of a job that saves, behind one face: the best interval, and what one leads to.

Every time is in seconds. Only the interval of `outcome` may be an array, for curves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from ftckpt.planning.models.arithmetic import Real
from ftckpt.planning.models.inputs import CopyTier, Pattern, Preemption
from ftckpt.planning.models.outcome import Outcome
from ftckpt.planning.models.tiers import optimum as best_pattern
from ftckpt.planning.models.tiers import outcome as outcome_of_pattern

from .models import asynchronous, exact, silent, spot


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A job that fails and saves.

    Attributes:
        mtbf: mean time between failures.
        detect: from a failure until it was noticed and what failed was replaced.
    """

    mtbf: float
    detect: float = 0.0

    @property
    @abstractmethod
    def stall(self) -> float:
        """By how much one save delays training: the C of Young's rule."""

    @property
    def rollback_mtbf(self) -> float:
        """Mean time between what throws work away: the M of Young's rule."""
        return self.mtbf

    @property
    @abstractmethod
    def reload(self) -> float:
        """From the replacement until training goes on, at most."""

    @property
    def durable(self) -> float:
        """From the beginning of a save until its copy can be restarted from."""
        return self.stall

    @property
    def writing(self) -> float:
        """For how long a save is being written."""
        return self.durable

    @property
    def least_interval(self) -> float:
        """The work between two saves below which a save waits for the one before it."""
        return 0.0

    @abstractmethod
    def optimum(self) -> float:
        """Return the work between two saves that gives the largest goodput."""

    @abstractmethod
    def outcome(self, interval: Real) -> Outcome:
        """Return where the wall time goes when one saves after every `interval` of work."""

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield what could be better and the job for which it is."""
        yield "failures half as often", self.scaled_mtbf(2.0)
        if self.detect:
            yield (
                "detection and replacement in half the time",
                replace(self, detect=self.detect / 2),
            )

    def scaled_mtbf(self, factor: float) -> Self:
        """Return the job with the time between its failures multiplied."""
        return replace(self, mtbf=self.mtbf * factor)


@dataclass(frozen=True, kw_only=True)
class Plain(Model):
    """Exponential failures, saves to one place, blocking or in the background.

    Attributes:
        save: how long training stands still for a save; of a save in the background, its snapshot.
        flush: how long the copy is written in the background; 0 for a blocking save.
        slowdown: how much slower training is meanwhile, as a fraction.
        restart: from the replacement until training goes on.
    """

    save: float
    flush: float = 0.0
    slowdown: float = 0.0
    restart: float = 0.0

    @property
    def stall(self) -> float:
        """By how much one save delays training."""
        return self.save + self.slowdown * self.flush

    @property
    def reload(self) -> float:
        """From the replacement until training goes on."""
        return self.restart

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
        """The work that is done during one flush."""
        return float(asynchronous.least_interval(self.flush, self.slowdown))

    def optimum(self) -> float:
        """See `ftckpt.planning.models.asynchronous.optimum` and `exact.optimum`."""
        if not self.flush:
            return float(exact.optimum(self.save, self.mtbf))
        return float(
            asynchronous.optimum(self.save, self.mtbf, flush=self.flush, slowdown=self.slowdown)
        )

    def outcome(self, interval: Real) -> Outcome:
        """See `ftckpt.planning.models.asynchronous.outcome` and `exact.outcome`."""
        if not self.flush:
            return exact.outcome(
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
        """Yield what could be better and the job for which it is."""
        if self.flush:
            faster = replace(self, save=self.save / 2, flush=self.flush / 2)
            yield "snapshot and flush in half the time", faster
            if self.slowdown:
                yield "no slowdown while flushing", replace(self, slowdown=0.0)
        else:
            yield "saves in half the time", replace(self, save=self.save / 2)
            # What asynchronous saves could give at best: the same writing, and no waiting for it.
            behind = replace(self, save=0.0, flush=self.save)
            yield "asynchronous saves, at best (no stall at all)", behind
        yield from super().improvements()
        if self.restart:
            yield "restarts in half the time", replace(self, restart=self.restart / 2)


@dataclass(frozen=True, kw_only=True)
class Spot(Plain):
    """Machines that are taken away with notice, beside failures.

    Attributes:
        preemption: how often, with what notice.
    """

    preemption: Preemption

    @cached_property
    def interruptions(self) -> spot.Interruptions:
        """Interruptions a second, by whether there is time for a save."""
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
        """Yield what could be better and the job for which it is."""
        yield from super().improvements()
        fewer = replace(self.preemption, rate=self.preemption.rate / 2)
        yield "preemptions half as often", replace(self, preemption=fewer)
        if not self.interruptions.announced and self.preemption.reliability:
            longer = replace(self.preemption, notice=self.durable)
            yield "saves that fit into the notice", replace(self, preemption=longer)


@dataclass(frozen=True, kw_only=True)
class Silent(Model):
    """Failures and silent errors; every save is verified first, so that each copy is good.

    Attributes:
        save: how long training stands still for a save.
        verify: how long it stands still to look for errors.
        silent_rate: silent errors a second.
        restart: from the replacement until training goes on.
    """

    save: float
    verify: float
    silent_rate: float
    restart: float = 0.0

    @property
    def stall(self) -> float:
        """Verification and save."""
        return self.save + self.verify

    @property
    def writing(self) -> float:
        """The save, without the verification before it."""
        return self.save

    @property
    def reload(self) -> float:
        """From the replacement until training goes on."""
        return self.restart

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
        """Yield what could be better and the job for which it is."""
        yield "saves in half the time", replace(self, save=self.save / 2)
        yield "verification in half the time", replace(self, verify=self.verify / 2)
        yield "silent errors half as often", replace(self, silent_rate=self.silent_rate / 2)
        yield from super().improvements()
        if self.restart:
            yield "restarts in half the time", replace(self, restart=self.restart / 2)


@dataclass(frozen=True, kw_only=True)
class Tiered(Model):
    """Saves to several places, the cheap ones more often than those that survive everything.

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
        """What a save to the last tier costs alone: for what Young's rule knows of."""
        return self.tiers[-1].cost

    @property
    def reload(self) -> float:
        """From the tier that is slowest to restart from."""
        return max(tier.restart for tier in self.tiers)

    def optimum(self) -> float:
        """Return the work between two saves to the first tier in use."""
        return float(self.pattern.interval)

    def outcome(self, interval: Real) -> Outcome:
        """Return where the wall time goes with this interval and the best pattern's counts."""
        pattern = replace(self.pattern, interval=interval)
        return outcome_of_pattern(pattern, self.mtbf, detect=self.detect)

    def improvements(self) -> Iterator[tuple[str, Model]]:
        """Yield what could be better and the job for which it is."""
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
