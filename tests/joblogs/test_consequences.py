"""A line that follows from another is no failure of its own, whichever program prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.joblogs.test_grouping import WATCHDOG, steps
from tests.joblogs.test_reading import read

BEFORE, AFTER = steps(10, 140, 0), steps(140, 300, 3600)
SECOND = "2026-01-01 00:20:{:02d},000 "


def classes(tmp_path: Path, *texts: str) -> list[tuple[str, str]]:
    report, _ = read(tmp_path, *texts)
    return [(one.fault.name, one.node) for one in report.incidents]


def gave_up(second: int, code: int, node: str = "gpu-00") -> str:
    """Return what torchrun says as it ends, with its table."""
    return (
        f"E0101 00:20:{second:02d}.6 26 torch/elastic/api.py:869] failed (exitcode: {code}) 0\n"
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : 2026-01-01_00:20:{second:02d}\n  host      : {node}\n"
        f"  rank      : 3 (local_rank: 3)\n  exitcode  : {code} (pid: 5)\n"
    )


def test_what_a_watchdog_ends_was_waiting(tmp_path: Path) -> None:
    aborted = "srun: error: gpu-01: task 3: Aborted (core dumped)\n"
    text = BEFORE + WATCHDOG.format(3, 1) + gave_up(11, -6) + aborted + gave_up(12, -9) + AFTER
    assert [name for name, _ in classes(tmp_path, text)] == ["collective-timeout"]


@pytest.mark.parametrize("code", [-4, -7, -8, -11])
def test_a_fault_of_the_program_is_a_cause_beside_a_watchdog(tmp_path: Path, code: int) -> None:
    text = BEFORE + WATCHDOG.format(3, 1) + gave_up(11, code) + AFTER
    assert [name for name, _ in classes(tmp_path, text)] == ["crashed"]


@pytest.mark.parametrize(("code", "name"), [(-6, "crashed"), (-9, "killed")])
def test_what_died_before_a_watchdog_spoke_let_the_others_wait(
    tmp_path: Path, code: int, name: str
) -> None:
    text = BEFORE + gave_up(0, code) + WATCHDOG.format(3, 5) + AFTER
    assert [one for one, _ in classes(tmp_path, text)] == [name]


def test_a_dead_node_is_the_one_that_is_named_not_the_one_that_prints(tmp_path: Path) -> None:
    text = (
        BEFORE
        + "srun: error: Node failure on gpu-11\n"
        + "slurmstepd: error: *** JOB 4711 ON gpu-00 CANCELLED AT 2026-01-01T00:20:00 "
        + "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
        + gave_up(9, -9)
    )
    assert classes(tmp_path, text + AFTER) == [("node", "gpu-11")]
    # Nothing names it: the survivors that print are not to blame.
    unnamed = text.replace("srun: error: Node failure on gpu-11\n", "")
    assert classes(tmp_path, unnamed + AFTER) == [("node", "")]


PLANNED = {
    "time limit": "slurmstepd: error: *** STEP 4711.0 ON gpu-00 CANCELLED AT 2026-01-01T00:20:00 "
    "DUE TO TIME LIMIT ***\n",
    "scancel": "slurmstepd: error: *** JOB 4711 ON gpu-00 CANCELLED AT 2026-01-01T00:20:00 ***\n",
    "exit 75": "2026-01-01 00:20:00 srun: error: gpu-00: task 0: Exited with exit code 75\n",
}
FAREWELLS = (
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    "srun: error: gpu-04: tasks 32-39: Terminated\nsrun: error: gpu-05: task 5: Killed\n"
    "W0101 00:20:04.6 13385 torch/elastic/api.py:753] Received 15 death signal, shutting down\n"
    'Traceback (most recent call last):\n  File "/opt/conda/bin/torchrun", line 8, in <module>\n'
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 13385 got signal: 15\n"
    + gave_up(5, -15)
    + gave_up(6, 1)
)


@pytest.mark.parametrize("end", PLANNED)
def test_what_a_planned_end_ends_has_not_failed(tmp_path: Path, end: str) -> None:
    assert classes(tmp_path, BEFORE + PLANNED[end] + FAREWELLS + AFTER) == []
    # The launcher of another node writes a log of its own.
    assert classes(tmp_path, BEFORE + PLANNED[end], SECOND.format(3) + FAREWELLS + AFTER) == []


@pytest.mark.parametrize("end", PLANNED)
def test_a_failure_near_a_planned_end_is_told(tmp_path: Path, end: str) -> None:
    xid = "Jan  1 00:20:02 gpu-07 kernel: NVRM: Xid (PCI:0000:83:00): 79, pid=1, off the bus.\n"
    assert classes(tmp_path, BEFORE + PLANNED[end] + FAREWELLS, xid) == [("gpu-lost", "gpu-07")]
    early = gave_up(0, -11).replace("00:20:", "00:19:")
    assert [name for name, _ in classes(tmp_path, BEFORE + early + PLANNED[end])] == ["crashed"]
    # The next attempt fails by itself, a minute after it went on.
    later = BEFORE + PLANNED[end] + FAREWELLS + steps(140, 300, 1260)
    again = later + gave_up(59, -11).replace("00:20:", "00:32:")
    assert [name for name, _ in classes(tmp_path, again)] == ["crashed"]


def test_sacct_counts_a_job_that_asked_to_be_started_again_as_ended(tmp_path: Path) -> None:
    rows = (
        "JobID|JobName|State|Start|End|NodeList|ExitCode\n"
        "1|r|FAILED|2026-01-01T00:00:00|2026-01-01T01:00:00|n1|75:0\n"
        "2|r|FAILED|2026-01-01T01:10:00|2026-01-01T02:00:00|n1|1:0\n"
        "3|r|RUNNING|2026-01-01T03:00:00|Unknown|n1|0:0\n"
    )
    report, _ = read(tmp_path, rows)
    assert [(one.fault.name, one.signs) for one in report.incidents] == [
        ("failed", ("FAILED 1:0",))
    ]
    assert report.planned == 1


def test_a_save_that_a_guard_saw_late_divides_no_failure(tmp_path: Path) -> None:
    day = 1767225600

    def event(kind: str, second: int, **fields: object) -> str:
        row = {"schema": "ftckpt.guard-log/1", "token": "t", "event": kind, "time": day + second}
        return json.dumps(row | fields) + "\n"

    guard = (
        event("start", 0, host="gpu-00", step=None)
        + event("saved", 1212, step=140)  # torchrun gave up 12 s before
        + event("ended", 1216, ending="failed", code=1)
        + event("start", 1226, host="gpu-00", step=140)
    )
    report, _ = read(tmp_path, BEFORE + gave_up(0, -9) + AFTER, guard)
    assert [(one.fault.name, one.lines) for one in report.incidents] == [("killed", 3)]
