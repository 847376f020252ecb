"""Simulation of a job with failures against a plain Python event loop, and how soon plans answer.

    python benchmarks/plan.py [--failures 50000] [--rounds 5] [--json]

Everyone simulates the same job through as many failures. A segment is a bulk of work that was
begun: what the loop does one at a time. One core: numpy's functions here use no more.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import side_by_side
from side_by_side import Contestant, compare, run_ftckpt

from ftckpt.planning import simulation
from ftckpt.planning.models import asynchronous, young_daly
from ftckpt.planning.models.spot import CopyTier, Costs, Pattern
from tests.planning.models.plain_loop import background, blocking

MTBF = 7593.75
INTERVAL, COSTS = 1350.0, Costs(120.0, restart=300.0, detect=60.0)
BEHIND = Costs(2.0, restart=120.0, detect=30.0, flush=200.0, slowdown=0.3)
PATTERN = Pattern((CopyTier("near", 1, 5, 0.78), CopyTier("far", 60, 300, 1)), 163.0, (15,))
RUNS = 1000
PLAN = ("plan", "--gpus", "16384", "--gpu-mtbf", "50000h", "--save", "60s", "--restart", "8m")


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=50_000, help="failures to simulate")
    options = parser.parse_args()
    each = max(1, options.failures // RUNS)
    law = simulation.Exponential(MTBF)
    segments: dict[str, int] = {}

    def contestant(name: str, run: Callable[[], int], *, ours: bool = False) -> Contestant:
        def counted() -> int:
            segments[name] = run()
            return 0

        return Contestant(name, counted, ours)

    def loop() -> int:
        draw = random.Random(1).expovariate
        return blocking(INTERVAL, COSTS, each * RUNS, lambda: draw(1 / MTBF)).segments

    def simulated() -> int:
        return simulation.simulate(INTERVAL, COSTS, law, runs=RUNS, failures=each).segments

    def behind() -> int:
        return simulation.simulate(300.0, BEHIND, law, runs=RUNS, failures=each).segments

    def loop_behind() -> int:
        draw = random.Random(1).expovariate
        return background(300.0, BEHIND, each * RUNS, lambda: draw(1 / MTBF)).segments

    def tiers() -> int:
        return simulation.simulate_tiers(PATTERN, law, runs=RUNS, failures=each).segments

    contestants = [
        contestant("ftckpt, blocking", simulated, ours=True),
        contestant("plain Python loop, blocking", loop),
        contestant("ftckpt, background", behind),
        contestant("plain Python loop, background", loop_behind),
        contestant("ftckpt, two tiers", tiers),
        contestant("closed-form sweep, 10,000 points", sweep),
        contestant("the command, one answer", command),
    ]
    rows = compare(contestants, options.rounds)
    rates = {
        f"{row.name}, million segments a second": round(
            segments[row.name] / statistics.median(row.seconds) / 1e6, 2
        )
        for row in rows
        if segments[row.name]
    }
    side_by_side.show("planning", rows, rates, as_json=options.json)


def sweep() -> int:
    """Optimise and divide the time at a hundred costs and a hundred times between failures."""
    import numpy as np

    save, mtbf = (a.ravel() for a in np.meshgrid(np.geomspace(1, 600, 100),
                                                 np.geomspace(600, 1e6, 100)))  # fmt: skip
    best = young_daly.optimum(save, mtbf)
    young_daly.outcome(best, save, mtbf, restart=300.0, detect=60.0)
    asynchronous.outcome(best, 1.0, mtbf, flush=save, restart=300.0, detect=60.0)
    return 0


def command() -> int:
    run_ftckpt(*PLAN)
    return 0


if __name__ == "__main__":
    main()
