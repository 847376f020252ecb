"""Steps that are done again show a restart, whatever else the logs say of it."""

from __future__ import annotations

import json
from pathlib import Path

from ftckpt.joblogs.sources import TOGETHER
from tests.builders.run_logs import read_log
from tests.joblogs.test_grouping import FAILED, steps
from tests.joblogs.test_reading import read

SACCT = "JobID|JobName|State|Start|End|NodeList|ExitCode\n"


def found(tmp_path: Path, *texts: str) -> list[tuple[str, float | None, int | None, float | None]]:
    report, _ = read(tmp_path, *texts)
    return [
        (one.fault.name, one.time and one.time - 1767225600, one.rewound, one.recovery_s)
        for one in report.incidents
    ]


def test_a_restart_that_no_line_tells_of_is_an_incident(tmp_path: Path) -> None:
    # Nothing is written by a node without power: 140 is followed by 110, hours or minutes later.
    silent = steps(10, 140, 0) + steps(110, 200, 2000) + steps(150, 300, 2500)
    assert found(tmp_path, silent) == [
        ("unknown", 520, 40, 1440.0),
        ("unknown", 2360, 60, 100.0),
    ]
    report, _ = read(tmp_path, silent)
    assert (report.total.exposed, report.exposed_s) == (2, 520 + 400 + 640)


def test_a_step_back_that_a_line_explains_is_not_counted_twice(tmp_path: Path) -> None:
    before, later = steps(10, 140, 0), steps(110, 200, 2000)
    assert [one[0] for one in found(tmp_path, before + FAILED + later)] == ["collective-timeout"]
    # Failed before: that says nothing about the second time.
    again = before + FAILED + later + steps(150, 300, 4000)
    assert [one[0] for one in found(tmp_path, again)] == ["collective-timeout", "unknown"]
    # Somebody or the time limit ended it.
    job = "42|a|{}|2026-01-01T00:00:00|2026-01-01T00:09:00|n[1-4]|0:0\n"
    assert found(tmp_path, before + later, SACCT + job.format("TIMEOUT")) == []
    names = [one[0] for one in found(tmp_path, before + later, SACCT + job.format("NODE_FAIL"))]
    assert names == ["node"]
    limit = (
        "slurmstepd: error: *** JOB 42 ON n7 CANCELLED AT 2026-01-01T00:08:50 DUE TO TIME LIMIT "
        "***\n"
    )
    assert found(tmp_path, before + limit + later) == []
    # A failure without a time may be this one.
    untimed = '{"event": "failure", "class": "gpu"}\n'
    assert [one[0] for one in found(tmp_path, before + later, untimed)] == ["gpu"]


def test_a_restart_is_one_incident_for_all_ranks(tmp_path: Path) -> None:
    ranks = [steps(10, 140, 0, rank) + steps(110, 200, 2000, rank) for rank in range(4)]
    assert [one[:3] for one in found(tmp_path, *ranks)] == [("unknown", 520, 40)]
    assert [one[:3] for one in found(tmp_path, "".join(ranks))] == [("unknown", 520, 40)]


def test_what_only_looks_like_a_step_back_is_none(tmp_path: Path) -> None:
    # Two ranks that are not told apart, one of them a line behind, or with a clock of its own.
    step = '{{"event": "step", "time": {}, "step": {}}}\n'
    behind = "".join(
        step.format(1e9 + 10 * n, n) + step.format(1e9 + 10 * n + 1, n - 1) for n in range(1, 40)
    )
    assert found(tmp_path, behind) == []
    skewed = "".join(
        step.format(1e9 + 4 * n, n) + step.format(1e9 + 4 * n - 30, n) for n in range(1, 40)
    )
    assert found(tmp_path, skewed) == []
    # Two files of one job, and a bar that begins anew with each epoch.
    assert found(tmp_path, steps(10, 200, 0), steps(10, 200, 900)) == []
    bar = "2026-01-01T0{}:{:02d}:00Z  {}/50 [12:33<38:27, 60.0s/it]\n"
    epochs = "".join(bar.format(hour, n, n + 1) for hour in range(3) for n in range(50))
    assert found(tmp_path, epochs) == []


def test_a_plan_does_not_take_silence_for_safety(tmp_path: Path) -> None:
    lines = [
        json.dumps({"event": "step", "time": 1e9 + begun + 10 * n, "step": first + n})
        for begun, first in ((0, 1), (TOGETHER * 2, 51), (TOGETHER * 4, 101))
        for n in range(100)
    ]
    log = read_log(lines, "run.jsonl")
    assert (log.failures, log.exposed_failures, log.classes) == (2, 2, {"": 2})
