"""What a log says about the failure rate is right as often as its limits promise."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import NamedTuple

import pytest

from ftckpt.planning import Counted
from ftckpt.planning.exposure import Exposure, LogEvent, exposure, mean_limits
from tests.builders.failure_logs import Run
from tests.builders.run_logs import read_log
from tests.campaign import examples

HOUR = 3600.0
MTBF = 3 * HOUR
# Limits that hold in 95 % of cases do so in 95 +- 2 % of 1000 logs, in all but 4 of 1,000 seeds.
LOGS = examples(200, 1000)
NEAR = examples(45, 20) / 1000

limits = cache(mean_limits)


class Down(NamedTuple):
    detect: float
    restart: float
    fragile: bool = False


def covered(run: Run, seed: int, *, wall: bool = False) -> float:
    """Return in what share of the logs of a run the limits enclose the truth."""
    random = Random(seed)
    hits = 0
    for _ in range(LOGS):
        log = read_log(run.log(random), "run.jsonl")
        if wall:  # as `--failures N/T --detect D` reads the same log
            assert log.span_s is not None
            count = Counted("counted", log.failures, log.span_s, log.detect_s or 0.0)
            failures, seconds = count.failures, count.exposed
        else:
            assert log.exposed_s is not None
            failures, seconds = log.exposed_failures, log.exposed_s
        low, high = limits(failures)
        hits += low <= seconds / run.mtbf <= high
    return hits / LOGS


DOWN = {
    "nothing": Down(0, 0),
    "detect-10m": Down(600, 0),
    "detect-30m": Down(1800, 0),
    "restart": Down(0, 480),
    "both": Down(1800, 480),
    "both-fragile": Down(1800, 480, fragile=True),
}
BOUNDS = [(True, True), (False, False), (True, False), (False, True)]
CASES = [(name, *bounds) for name in DOWN for bounds in BOUNDS]
SHORT = [("nothing", True, True), ("detect-30m", False, False), ("both", True, False),
         ("both-fragile", True, True)]  # fmt: skip


@pytest.mark.parametrize(("name", "start", "end"), CASES if examples(0, 1) else SHORT)
def test_limits_from_a_log_hold_as_often_as_they_promise(name: str, start: bool, end: bool) -> None:
    down = DOWN[name]
    run = Run(mtbf=MTBF, length=240 * HOUR, interval=2 * HOUR, detect=down.detect,
              restart=down.restart, fragile=down.fragile, start=start, end=end)  # fmt: skip
    assert covered(run, seed=29) == pytest.approx(0.95, abs=NEAR)


@pytest.mark.parametrize("name", ["detect-10m", "detect-30m"] if examples(0, 1) else ["detect-30m"])
def test_limits_from_a_count_less_detection_hold_too(name: str) -> None:
    run = Run(mtbf=MTBF, length=240 * HOUR, interval=4 * HOUR, detect=DOWN[name].detect)
    assert covered(run, seed=30, wall=True) == pytest.approx(0.95, abs=NEAR)


def at(
    kind: str, time: float, detect: float | None = None, restart: float | None = None
) -> LogEvent:
    return LogEvent(kind, time, detect, restart)


@pytest.mark.parametrize(
    ("events", "seconds", "failures"),
    [
        ([], 0, 0),
        ([at("save", 5)], 0, 0),
        ([at("start", 0), at("failure", 100, 10, 20), at("end", 1000)], 970, 1),
        # Those that record nothing are taken to have been down as long as the others.
        ([at("start", 0), at("failure", 100, 10, 20), at("failure", 500), at("end", 1000)], 940, 2),
        # The second strikes the restart of the first, at its end too, where seconds are whole.
        ([at("start", 0), at("failure", 100, 10, 20), at("failure", 120, 10, 20), at("end", 200)],
         150, 1),
        ([at("start", 0), at("failure", 100, 10, 20), at("failure", 131, 10, 20), at("end", 200)],
         139, 1),
        # Down from an end to the next start, and from a failure to the start after it.
        ([at("start", 0), at("end", 100), at("start", 900), at("end", 1000)], 200, 0),
        ([at("start", 0), at("failure", 100), at("start", 600), at("end", 1000)], 500, 1),
        ([at("start", 0), at("failure", 100, 9, 1), at("start", 105), at("end", 1000)], 990, 1),
        # A start without an end before it: nobody knows since when it had been down.
        ([at("start", 0), at("save", 100), at("start", 600), at("end", 1000)], 500, 0),
        # A dying process may write its end before the failure is logged; later ones are others.
        ([at("start", 0), at("end", 100), at("failure", 100)], 100, 1),
        ([at("start", 0), at("end", 100), at("failure", 300)], 100, 0),
        # A failure that opens the log, and one that closes it.
        ([at("failure", 0, 10, 0), at("save", 50), at("failure", 100, 10, 0)], 90, 1),
        ([at("end", 1000), at("failure", 100, 10, 20), at("start", 0)], 970, 1),
        ([at("start", 0), LogEvent("failure", None, 10, 20), at("end", 1000)], 990, 1),
    ],
)  # fmt: skip
def test_time_in_which_nothing_can_fail_does_not_count(
    events: list[LogEvent], seconds: float, failures: int
) -> None:
    assert exposure(events)[0] == Exposure(seconds, failures)


def test_what_is_given_stands_in_for_what_no_failure_records() -> None:
    events = [at("start", 0), at("failure", 100, 10), at("failure", 500), at("end", 1000)]
    assert exposure(events, detect=50, restart=5)[0].seconds == 1000 - 10 - 50 - 2 * 5
