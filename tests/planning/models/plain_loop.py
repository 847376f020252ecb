"""A job with failures as the simplest loop that one would write: one event at a time.

The judge of the simulation in numpy, and what it is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ftckpt.planning.models.spot import Costs, Pattern, shares


@dataclass
class Account:
    """Seconds by what they were spent on, and bulks begun."""

    useful: float = 0.0
    save: float = 0.0
    lost: float = 0.0
    detection: float = 0.0
    restart: float = 0.0
    waiting: float = 0.0
    segments: int = 0

    @property
    def wall(self) -> float:
        return math.fsum(
            (self.useful, self.save, self.lost, self.detection, self.restart, self.waiting)
        )


def blocking(
    interval: float, costs: Costs, failures: int, next_gap: Callable[[], float]
) -> Account:
    """Run a job with blocking saves through so many failures."""
    account = Account()
    save, restart, bulk = costs.save, costs.restart, interval + costs.save
    for _ in range(failures):
        left = next_gap()
        if left <= restart:
            account.restart += left
        else:
            account.restart += restart
            left -= restart
            while True:
                account.segments += 1
                if left < bulk:
                    account.lost += left
                    break
                left -= bulk
                account.useful += interval
                account.save += save
        account.detection += costs.detect
    return account


def background(
    interval: float, costs: Costs, failures: int, next_gap: Callable[[], float]
) -> Account:
    """Run a job that flushes in the background, with one buffer, in steps from event to event."""
    account = Account()
    for _ in range(failures):
        left = next_gap()
        first = min(left, costs.restart)
        account.restart += first
        left -= first
        if left > 0:
            _run_background(interval, costs, left, account)
        account.detection += costs.detect
    return account


def _run_background(interval: float, costs: Costs, left: float, account: Account) -> None:
    """Go on until a failure in `left` seconds; what is not durable by then is lost."""
    pending = Account()  # since the newest durable copy
    work, saving, flush, flushed = interval, 0.0, 0.0, Account()
    account.segments += 1
    while left > 0:
        speed = 0.0 if saving or not work else 1 - costs.slowdown * (flush > 0)
        steps = [left]
        if flush:
            steps.append(flush)
        if saving:
            steps.append(saving)
        elif work and speed:
            steps.append(work / speed)
        step = min(steps)
        left -= step
        pending.useful += step * speed
        if not work and not saving:
            pending.waiting += step
        else:
            pending.save += step * (1 - speed)
        if flush:
            flush = 0.0 if step == flush else flush - step
            if not flush:
                _move(flushed, account, pending)
        if saving:
            saving = 0.0 if step == saving else saving - step
            if not saving:
                flushed, flush, work = _copy(pending), costs.flush, interval
                account.segments += 1
                if not flush:
                    _move(flushed, account, pending)
        elif work:
            work = 0.0 if speed and step == work / speed else work - step * speed
        if not work and not saving and not flush:
            saving = costs.save
    account.lost += pending.wall


def _copy(account: Account) -> Account:
    return Account(useful=account.useful, save=account.save, waiting=account.waiting)


def _move(what: Account, to: Account, out_of: Account) -> None:
    for name in ("useful", "save", "waiting"):
        setattr(to, name, getattr(to, name) + getattr(what, name))
        setattr(out_of, name, getattr(out_of, name) - getattr(what, name))


def tiered(
    pattern: Pattern,
    detect: float,
    failures: int,
    next_gap: Callable[[], float],
    next_cause: Callable[[], int],
) -> Account:
    """Run a job that saves to several tiers, remembering the newest copy that each tier has."""
    account = Account()
    work, counts = float(pattern.interval), [int(count) for count in pattern.counts]
    every = [math.prod(counts[:n]) for n in range(len(pattern.tiers))]
    assert len(shares(pattern.tiers)) == len(every)
    copies = [0] * len(every)  # number of the newest save in each tier
    when = {0: (0.0, 0.0)}  # useful and saving seconds up to each save that may be needed
    tier = 0
    for _ in range(failures):
        left, cause = next_gap(), next_cause()
        need = pattern.tiers[tier].restart
        if left <= need:
            account.restart += left
            tier = max(tier, cause)
        else:
            account.restart += need
            left -= need
            tier = cause
            number = copies[0]
            while True:
                account.segments += 1
                ends = [n for n, span in enumerate(every) if (number + 1) % span == 0]
                save = math.fsum(pattern.tiers[n].cost for n in ends)
                if left < work + save:
                    account.lost += left
                    break
                left -= work + save
                account.useful += work
                account.save += save
                number += 1
                for n in ends:
                    copies[n] = number
                when[number] = (account.useful, account.save)
        back = copies[tier]
        useful, saved = when[back]
        account.lost += account.useful - useful + account.save - saved
        account.useful, account.save = useful, saved
        copies = [min(copy, back) if n < tier else copy for n, copy in enumerate(copies)]
        copies[:tier] = [back] * tier
        account.detection += detect
    return account
