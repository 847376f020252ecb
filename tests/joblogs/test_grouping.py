"""What lines of one failure have in common, and what each failure cost."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from ftckpt.errors import NotFoundError, RefusedError, UsageError
from ftckpt.joblogs import read_logs, report_of
from ftckpt.joblogs.durations import Durations
from ftckpt.joblogs.reading.records import LONGEST, LineTally, lines_of
from ftckpt.joblogs.sources import TOGETHER
from tests.campaign import examples
from tests.joblogs.test_reading import read


def titan(clock: str, step: int, rank: int = 0) -> str:
    return f"[rank{rank}]:[titan] 2026-01-01 {clock},000 - root - INFO - step: {step}  loss: 2.0\n"


def steps(first: int, last: int, begun: int, rank: int = 0, each: int = 4) -> str:
    """Lines of every tenth step; `begun` is the second of the day of the first."""
    lines = []
    for step in range(first, last + 1, 10):
        now = begun + (step - first) * each
        clock = f"{now // 3600:02d}:{now // 60 % 60:02d}:{now % 60:02d}"
        lines.append(titan(clock, step, rank))
    return "".join(lines)


XID = (
    "Jan  1 00:10:00 n7 kernel: NVRM: Xid (PCI:0000:83:00): 79, pid=1, "
    "GPU has fallen off the bus.\n"
)
WATCHDOG = (
    "[rank{0}]:[E0101 00:20:0{1}.4 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600081 milliseconds\n"
)
GAVE_UP = "E0101 00:20:3{0}.6 2606 torch/elastic/api.py:869] failed (exitcode: -6) local_rank: 0\n"
FAILED = "".join(WATCHDOG.format(rank, rank % 9) for rank in range(64)) + GAVE_UP.format(1)


def test_lines_of_many_ranks_and_files_are_one_incident_of_its_cause(tmp_path: Path) -> None:
    training = steps(10, 140, 0) + FAILED + steps(110, 200, 2000)
    report, _ = read(tmp_path, training, XID, GAVE_UP.format(5))
    (one,) = report.incidents
    assert (one.fault.name, one.node, one.lines, one.ranks) == ("gpu-lost", "n7", 67, 64)
    assert one.signs == (
        "Xid 79",
        "collective operation timeout ALLREDUCE",
        "exitcode -6 (SIGABRT)",
    )
    # From the lost GPU to the first of the ten steps whose line was the first again.
    assert (one.time, one.recovery_s) == (1767225600.0 + 600, 1360.0)
    assert one.rewound == 40  # 101 to 140
    assert report.wasted is not None
    assert (report.wasted.steps, report.wasted.seconds) == (40, 160.0)
    assert report.exposed_s == 600 + 400


def test_what_training_survives_is_none(tmp_path: Path) -> None:
    report, _ = read(tmp_path, steps(10, 1000, 0), XID)
    assert report.incidents == ()
    assert [one.fault.name for one in report.survived] == ["gpu-lost"]
    caught = "Traceback (most recent call last):\n  File x\nOSError: retry\n"
    report, _ = read(tmp_path, steps(10, 500, 0) + caught + steps(510, 1000, 2000))
    assert report.incidents == ()


def test_the_same_failure_again_after_progress_is_another(tmp_path: Path) -> None:
    again = FAILED.replace("00:20:", "00:31:")
    report, _ = read(tmp_path, steps(10, 300, 0) + FAILED + steps(300, 350, 1600) + again)
    first, second = report.incidents
    assert first.recovery_s == pytest.approx(359.6)
    assert second.recovery_s is None
    start = "[default0] INFO 2026-01-01 00:25:00 Rendezvous complete for workers. Result:\n"
    assert len(read(tmp_path, FAILED + start + again)[0].incidents) == 2
    assert len(read(tmp_path, FAILED + again)[0].incidents) == 1


def test_a_failure_of_a_restart_is_no_failure_of_training(tmp_path: Path) -> None:
    start = "INFO 2026-01-01 00:{0}:00 Rendezvous complete for workers. Result:\n"
    crash = "E0101 00:{0}:30.6 2606 torch/distributed/elastic/api.py:869] failed (exitcode: 1) x\n"
    loop = "".join(start.format(m) + crash.format(m) for m in (30, 35, 40))
    report, _ = read(tmp_path, steps(10, 300, 0) + FAILED + loop + steps(300, 600, 3600))
    assert len(report.incidents) == 4
    assert [one.exposed for one in report.incidents] == [True, False, False, False]


def test_files_in_any_order_and_times_out_of_order(tmp_path: Path) -> None:
    later = steps(110, 200, 2000)
    before = steps(10, 140, 0)
    one = read(tmp_path, before + FAILED + later, XID)[0]
    other = read(tmp_path, XID, later, before + FAILED)[0]
    mixed = read(tmp_path, later + FAILED + before, XID)[0]
    assert one.incidents == other.incidents == mixed.incidents


def test_zones_that_are_mixed_are_one_time(tmp_path: Path) -> None:
    early = XID.replace("Jan  1 00:10:00", "2026-01-01T08:10:00+08:00")
    report, _ = read(tmp_path, steps(10, 140, 0) + FAILED, early)
    assert [(one.fault.name, one.time) for one in report.incidents] == [
        ("gpu-lost", 1767225600.0 + 600)
    ]


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    logs = [steps(10, 500, 0, rank, each=5 if rank == 3 else 4) for rank in range(8)]
    report, _ = read(tmp_path, *logs)
    assert report.steps is not None
    assert [one.rank for one in report.steps.stragglers] == [3]
    assert (report.steps.p50_s, report.steps.p99_s) == (4.0, 5.0)
    assert len(report.steps.ranks) == 8


def test_a_node_that_fails_too_often_is_named(tmp_path: Path) -> None:
    failure = '{{"event": "failure", "time": {0}, "class": "gpu", "node": "n{1}"}}\n'
    lines = [failure.format(1e9 + n * 1e5, n % 10 if n % 3 else 99) for n in range(30)]
    report, _ = read(tmp_path, "".join(lines))
    assert [one.node for one in report.lemons] == ["n99"]


def test_a_failure_that_each_rank_records_is_one(tmp_path: Path) -> None:
    def failure(rank: int | None, time: int = 0, **more: object) -> str:
        record = {"event": "failure", "time": 1767230000 + time, "class": "gpu", "node": "n7"}
        return json.dumps({**record, "rank": rank, "detect": 90, **more}) + "\n"

    eight = "".join(failure(rank, rank) for rank in range(8))
    report, found = read(tmp_path, eight + failure(None, 2000, detect=10))
    assert [(one.ranks, one.lines, one.detect_s) for one in report.incidents] == [
        (8, 8, 90), (0, 1, 10),
    ]  # fmt: skip
    assert found.collections[0].detects.value == 50
    save = '{"event": "save", "time": 1767230010}\n'
    for others in (
        failure(0) + failure(0, 1),  # twice
        failure(None) + failure(None, 1),
        failure(0) + failure(1, 1, node="n8"),
        failure(0) + failure(1, 1, **{"class": "nic"}),
        failure(0) + failure(1, 901),
        failure(0) + save + failure(1, 20),
    ):
        assert len(read(tmp_path, others)[0].incidents) == 2
    assert len(read(tmp_path, failure(0) + failure(1, 20), save)[0].incidents) == 2


def test_nothing_known_is_unknown_and_not_zero(tmp_path: Path) -> None:
    report, found = read(tmp_path, "hello\nworld\n", "")
    assert [log.entries for log in found.logs] == [0, 0]
    assert (report.exposed_s, report.total.per_second, report.steps) == (None, None, None)
    assert (report.wasted, report.recovery, report.nodes_known) == (None, None, None)
    report, _ = read(tmp_path, "slurmstepd: error: Detected 1 oom_kill event in StepId=42.batch\n")
    assert report.incidents[0].time is None
    assert (report.exposed_s, report.total.low) == (None, None)


def test_a_log_without_a_failure_bounds_the_rate(tmp_path: Path) -> None:
    report, _ = read(tmp_path, steps(10, 1000, 0))
    assert report.exposed_s == 3960
    assert (report.total.per_second, report.total.low) == (0, 0)
    assert report.total.high == pytest.approx(3.6889 / 3960, rel=1e-4)


# Hostile input.


def test_a_line_of_a_gigabyte_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    with open(path, "wb") as file:
        file.write(XID.encode())
        file.write(b"x")
        file.truncate(examples(64, 1024) << 20)  # a hole: one line of zeros
        file.seek(0, 2)
        file.write(b"\n" + GAVE_UP.format(1).encode())
    tally = LineTally()
    tracemalloc.start()
    read_ones = [len(line) for line in lines_of(str(path), tally)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read_ones == [len(XID) - 1, LONGEST, len(GAVE_UP.format(1)) - 1]
    assert (tally.lines, tally.long) == (3, 1)
    assert peak < 8 << 20


def test_rubbish_says_nothing_and_does_no_harm(tmp_path: Path) -> None:
    rubbish = random.Random(1).randbytes(1 << 20)
    (tmp_path / "b").write_bytes(rubbish + b"\n" + XID.encode() + rubbish)
    found = read_logs([str(tmp_path / "b")])
    report = report_of(found.collections, TOGETHER)
    assert [one.fault.name for one in report.incidents] == ["gpu-lost"]


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_gzip_is_read_and_a_cut_one_is_told(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "log.gz"
    text = gzip.compress(XID.encode()) + gzip.compress(random.Random(2).randbytes(5000))
    path.write_bytes(text[: int(len(text) * kept)])
    found = read_logs([str(path)])
    assert (found.logs[0].cut == "") == (kept == 1.0)
    assert len(report_of(found.collections, TOGETHER).incidents) == 1


def test_a_bomb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(24 << 20)))
    tracemalloc.start()
    found = read_logs([str(path)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.logs[0].nbytes == 24 << 20
    assert peak < 8 << 20


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_logs([str(tmp_path / "absent")])
    with pytest.raises(RefusedError, match="is a directory"):
        read_logs([str(tmp_path)])
    with pytest.raises(UsageError, match="no column"):
        read(tmp_path, "JobID|State|NodeList\n1|FAILED|n1\n")


def test_quantiles_are_right_to_one_percent() -> None:
    durations, random_ = Durations(), random.Random(3)
    values = sorted(random_.lognormvariate(1, 1) for _ in range(50_000))
    for value in values:
        durations.add(value)
    for share in (0.01, 0.5, 0.99):
        exact = values[int(share * len(values))]
        assert durations.quantile(share) == pytest.approx(exact, rel=0.011)
    for odd in (0.0, -1.0, float("nan"), float("inf")):
        durations.add(odd)
    assert durations.count == 50_000
