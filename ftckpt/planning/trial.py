"""Check a plan by simulating the same job event by event."""

from __future__ import annotations

from dataclasses import replace

from ftckpt.planning.models.spot import Costs
from ftckpt.progress import NULL, Counter

from .choose_model import Latent, Model, Plain, Silent, Spot, Tiered
from .simulation import Law, SilentJob, Simulated, simulate, simulate_silent, simulate_tiers


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
    if isinstance(model, Silent | Latent):
        job = SilentJob(
            interval=interval,
            save=model.save,
            verify=0.0 if isinstance(model, Latent) else model.verify,
            rate=model.silent_rate,
            restart=model.restart,
            detect=model.detect,
            latency=model.latency if isinstance(model, Latent) else None,
            keep_last=model.keep_last if isinstance(model, Latent) else 1,
        )
        return simulate_silent(job, law, runs=runs, failures=failures, seed=seed, counter=counter)
    assert isinstance(model, Plain)
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
