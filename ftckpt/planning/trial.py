"""Check a plan by simulating the same job event by event."""

from __future__ import annotations

from dataclasses import replace

from ftckpt.errors import UnsupportedError
from ftckpt.planning.models.inputs import Costs
from ftckpt.progress import NULL, Counter

from .choose_model import Model, Plain, Spot, Tiered
from .simulation import Law, Simulated, simulate, simulate_tiers


def simulated(
    model: Model,
    interval: float,
    law: Law,
    *,
    runs: int,
    failures: int,
    seed: int,
    counter: Counter = NULL,
) -> Simulated:
    """Simulate a job that saves after every `interval` seconds of work.

    `law` replaces the model's mean time between failures; for the others see `simulation.simulate`.

    Raises:
        UnsupportedError: silent errors are not simulated.
        UsageError: a number is out of range.
    """
    if isinstance(model, Tiered):
        pattern = replace(model.pattern, interval=interval)
        return simulate_tiers(
            pattern,
            law,
            detect=model.detect,
            runs=runs,
            failures=failures,
            seed=seed,
            counter=counter,
        )
    if not isinstance(model, Plain):
        raise UnsupportedError("silent errors are not simulated", hint="leave out --simulate")
    costs = Costs(
        save=model.save,
        restart=model.restart,
        detect=model.detect,
        flush=model.flush,
        slowdown=model.slowdown,
    )
    return simulate(
        interval,
        costs,
        law,
        preemption=model.preemption if isinstance(model, Spot) else None,
        runs=runs,
        failures=failures,
        seed=seed,
        counter=counter,
    )
