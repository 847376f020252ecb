"""A job with failures, simulated step by step, and the logs that real programs write of it.

Plain Python that shares nothing with ftckpt: parts fail at exponential times while the job runs or
restarts; every failure throws away the work since the last save; recovery takes a drawn time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random

ORIGIN = 1767225600.0
_EVERY = 100  # steps from line to line


@dataclass
class Year:
    """What happened, and the logs.

    Attributes:
        useful: seconds of steps that were never done again.
        wall: seconds in all.
        running: seconds until each failure from the restart before it.
        struck: failures by component, without those in a recovery.
        nodes: the same by node.
        rewound: steps that were done again.
        job, kernel, records: the logs.
    """

    useful: float = 0.0
    wall: float = 0.0
    running: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    rewound: int = 0
    job: list[str] = field(default_factory=list)
    kernel: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)


def simulate(
    random: Random,
    mtbf: Mapping[str, float],
    *,
    days: float,
    steps: int,
    save: float,
    recovery: float,
    step: float = 4.0,
    nodes: int = 16,
    worst: float = 1.0,
) -> Year:
    """Simulate a job.

    Args:
        random: numbers.
        mtbf: seconds between failures of each component: `gpu`, `host`, `software`.
        days: on the wall clock.
        steps: between two saves.
        save: seconds of a save.
        recovery: mean seconds from a failure until training continues.
        step: seconds of one.
        nodes: of the job.
        worst: how much more often than the others node 0 fails.
    """
    year = Year()
    names = list(mtbf)
    rates = [1 / mtbf[name] for name in names]
    now, end = 0.0, days * 86400
    saved = done = most = 0
    year.records.append(json.dumps({"event": "start", "time": ORIGIN, "step": 0}))
    while now < end:
        left = random.expovariate(sum(rates))
        what = random.choices(names, rates)[0]
        number = random.choices(range(nodes), [worst, *[1.0] * (nodes - 1)])[0]
        done, begun = saved, now
        while True:  # step by step, until the failure
            at_save = done > saved and done % steps == 0
            length = save if at_save else step
            if now + length > begun + left or now >= end:
                break
            now += length
            if at_save:
                saved = done
                event = {"event": "save", "time": ORIGIN + now, "step": done, "seconds": save}
                year.records.append(json.dumps(event))
                continue
            done += 1
            most = max(most, done)
            if done % _EVERY == 0:
                year.job.append(
                    f"[rank0]:[titan] {_iso(now)} - root - INFO - step: {done}  loss: 2"
                )
        if now >= end:
            break
        now = begun + left
        year.running += left
        year.struck[what] += 1
        year.nodes[f"n{number}"] += 1
        year.rewound += done - saved
        away = random.expovariate(2 / recovery) + recovery / 2
        _write(year, what, f"n{number}", now, away)
        now += away
    year.records.append(json.dumps({"event": "end", "time": ORIGIN + now}))
    year.useful, year.wall = saved * step, now
    return year


def _write(year: Year, what: str, node: str, now: float, away: float) -> None:
    clock = _iso(now)
    slurm = clock.replace(" ", "T")[:19]
    if what == "gpu":
        stamp = datetime.fromtimestamp(ORIGIN + now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f+00:00")
        year.kernel.append(f"{stamp} {node} kernel: NVRM: Xid (PCI:0000:83:00): 79, pid=7, lost")
    elif what == "host":
        year.job.append(
            f"slurmstepd: error: *** STEP 42.0 ON {node} CANCELLED AT {slurm} DUE TO NODE FAILURE, "
            "SEE SLURMCTLD LOG FOR DETAILS ***"
        )
    else:
        year.job += [
            f"[rank3]: Traceback (most recent call last): {clock}",
            "[rank3]: ValueError: x",
        ]
    if what != "host":
        for rank in range(4):
            year.job.append(
                f"[rank{rank}]:[E {clock} ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
                "collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)"
            )
    record = {"event": "failure", "time": ORIGIN + now, "component": what, "node": node}
    year.records.append(json.dumps({**record, "detect": away / 4, "restart": 3 * away / 4}))


def _iso(now: float) -> str:
    return datetime.fromtimestamp(ORIGIN + now, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")
