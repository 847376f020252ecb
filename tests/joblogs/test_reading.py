"""The words of real programs, and what each says. Kept as they are printed, names changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ftckpt.errors import UsageError
from ftckpt.joblogs import IncidentReport, read_logs, report_of
from ftckpt.joblogs.collect import LogEntryKind
from ftckpt.joblogs.reading.text_log import TrainingLine, training_line
from ftckpt.joblogs.reading.times import Stamps, zone_of
from ftckpt.joblogs.sources import TOGETHER, Read

WRITTEN = 1767312000.0  # 2026-01-02T00:00:00Z


def read(tmp_path: Path, *texts: str, **options: object) -> tuple[IncidentReport, Read]:
    paths = []
    for number, text in enumerate(texts):
        path = tmp_path / f"log-{number}"
        path.write_text(text)
        os.utime(path, (WRITTEN, WRITTEN))
        paths.append(str(path))
    found = read_logs(paths, **options)  # type: ignore[arg-type]
    return report_of(found.collections, TOGETHER), found


# ProcessGroupNCCL.cpp, torch/distributed/elastic, NVRM, slurmstepd, srun, slurmctld, the kernel.
LINES = [
    ("Jan  1 17:59:27 n7 kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.",
     "gpu-lost", "gpu", "n7", "Xid 79"),
    ("[Thu Jan  1 17:59:27 2026] NVRM: Xid (PCI:0000:83:00): 48, pid=7, Double Bit ECC Error",
     "gpu-memory", "hbm", "", "Xid 48"),
    ("2026-01-01T17:59:27+00:00 n7 kernel: NVRM: Xid (PCI:0000:83:00): 74, pid=7, NVLink: fatal error detected on link 4",
     "nvlink", "nvlink", "n7", "Xid 74"),
    ("Jan  1 17:59:27 n7 kernel: NVRM: Xid (PCI:0000:0f:00): 119, pid=9, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
     "gpu-driver", "gpu", "n7", "Xid 119"),
    ("GPU-1: XID: NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, MMU Fault: ENGINE GRAPHICS",
     "gpu-fault", "software", "", "Xid 31"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-memory", "hbm", "",
     "uncorrectable ECC error"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
     "gpu-out-of-memory", "software", "", "CUDA out of memory"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "gpu-fault", "software", "",
     "CUDA error: an illegal memory access was encountered"),
    ("[rank3]:[E0101 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: "
     "WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.",
     "collective-timeout", "unknown", "", "collective operation timeout BROADCAST"),
    ("[rank25]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 25] Heartbeat monitor timed out! Process will be terminated "
     "after dumping debug info. workMetaList_.size()=2", "collective-timeout", "unknown", "", "watchdog got stuck"),
    ("n3:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.7<4791> with status=12 opcode=0 len=0 vendor err 129",
     "network", "network", "n3", "NET/IB: status 12"),
    ("slurmstepd: error: *** JOB 42 ON n7 CANCELLED AT 2026-01-01T12:13:09 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
     "node", "host", "", "cancelled: node failure"),
    ("srun: error: Node failure on gpu-11", "node", "host", "gpu-11", "node failure"),
    ("srun: error: Node failure on gpu-[11,14]", "node", "host", "", "node failure"),
    ("Jan  1 17:59:27 ctl01 slurmctld[812]: requeue job JobId=42 due to node failure", "node", "host", "",
     "requeued: node failure"),
    ("slurmstepd: error: *** JOB 42 ON n7 CANCELLED AT 2026-01-01T10:25:59 DUE TO PREEMPTION ***",
     "preempted", "scheduler", "", "cancelled: preemption"),
    ("3m12s   Warning   NodeNotReady   pod/train-3   Node is not ready", "node", "host", "", "NodeNotReady"),
    ("2m      Normal    NodeNotReady   node/gpu-05   Node gpu-05 status is now: NodeNotReady", "node", "host", "gpu-05",
     "NodeNotReady"),
    ("91s     Warning   Evicted        pod/train-0   The node was low on resource: memory. Threshold quantity: 100Mi",
     "host-memory", "host", "", "Evicted: memory"),
    ("91s     Warning   Evicted        pod/train-0   The node was low on resource: ephemeral-storage.", "disk-full",
     "storage", "", "Evicted: ephemeral-storage"),
    ("5s      Normal    Preempted      pod/train-0   Preempted by pod 1f4c on node gpu-02", "preempted", "scheduler", "",
     "Evicted or preempted"),
    ("12m     Warning   OOMKilling     node/gpu-07   Memory cgroup out of memory: Killed process 4711 (python3)",
     "host-memory", "host", "gpu-07", "OOMKilling"),
    ("      Reason:       OOMKilled", "host-memory", "host", "", "OOMKilled"),
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 13385 got signal: 15", "killed", "unknown",
     "", "torchrun: signal 15"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=42.batch. Some of the step tasks have been OOM Killed.",
     "host-memory", "host", "", "oom_kill event in a step"),
    ("srun: error: n3: task 1: Out Of Memory", "host-memory", "host", "n3", "task: Out Of Memory"),
    ("srun: error: n3: task 7: Exited with exit code 1", "failed", "unknown", "n3", "task exited with 1"),
    ("[2026-01-01T12:13:09.123] error: Nodes n5 not responding, setting DOWN", "node", "host", "n5", "node not responding"),
    ("kernel: Out of memory: Killed process 4242 (python) total-vm:1kB", "host-memory", "host", "",
     "kernel: out of memory"),
    ("OSError: [Errno 28] No space left on device: '/ckpt/secret-name'", "disk-full", "storage", "",
     "No space left on device"),
    ("E0101 20:57:27.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed "
     "(exitcode: -9) local_rank: 5 (pid: 2630) of binary: /root/python", "killed", "unknown", "", "exitcode -9 (SIGKILL)"),
    ("E0101 20:57:27.620000 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) "
     "local_rank: 5 (pid: 2630) of binary: /root/python", "failed", "unknown", "", "exitcode 1"),
    ("  traceback : Signal 11 (SIGSEGV) received by PID 14750", "crashed", "software", "", "signal 11"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "component", "node", "sign"), LINES)
def test_a_line_says_what_failed_and_repeats_no_more(
    tmp_path: Path, line: str, name: str, component: str, node: str, sign: str
) -> None:
    (one,) = read(tmp_path, f"hello\n{line}\n")[0].incidents
    assert (one.fault.name, one.fault.component, one.node) == (name, component, node)
    assert one.signs == (sign,)


OTHERS = [
    ("slurmctld: requeue job JobId=42 due to node failure", "node", ""),
    ("slurmctld: Killing StepId=42.0 due to failed node n5", "node", "n5"),
    ("slurmctld: error: Nodes n[5-7] not responding, setting DOWN", "node", ""),
    ("srun: error: n4: task 3: Segmentation fault (core dumped)", "crashed", "n4"),
    ("srun: error: n4: tasks 0-7: Killed", "killed", "n4"),
    ("slurmstepd: error: Job 8430179 exceeded memory limit (10442128 > 10240000), being killed",
     "host-memory", ""),
    ("OSError: [Errno 122] Disk quota exceeded", "disk-full", ""),
    ("OSError: [Errno 5] Input/output error", "storage", ""),
    ("OSError: [Errno 116] Stale file handle", "storage", ""),
    ("OSError: [Errno 30] Read-only file system: '/ckpt'", "storage", ""),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error", "collective-error", ""),
    ("torch.distributed.DistStoreError: timed out", "collective-error", ""),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "nvlink", ""),
    ("train.sh: line 3: 4242 Segmentation fault      (core dumped) python train.py", "crashed", ""),
    ("Memory cgroup out of memory: Killed process 7 (python)", "host-memory", ""),
    ("kernel: NVRM: GPU at PCI:0000:83:00: GPU has fallen off the bus", "gpu-lost", ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "node"), OTHERS)
def test_other_lines_are_known_too(tmp_path: Path, line: str, name: str, node: str) -> None:
    (one,) = read(tmp_path, f"{line}\n")[0].incidents
    assert (one.fault.name, one.node) == (name, node)


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** JOB 42 ON n7 CANCELLED AT 2026-01-01T00:28:24 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 42 ON n7 CANCELLED AT 2026-01-01T12:13:09 ***",
        "Jan  1 17:59:27 n7 kernel: NVRM: Xid (PCI:0000:01:00): 63, pid=1, Row remapping pending",
        "Jan  1 17:59:27 n7 kernel: NVRM: Xid (PCI:0000:01:00): 45, pid=1, Ch 0000000a",
        "WARNING: no Error in this Exception handler, NCCL version 2.21.5",
        "step: 3 loss: 2.0",
    ],
)
def test_what_is_planned_or_only_a_hint_is_no_incident(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, f"{line}\n")[0].incidents == ()


CRASH = """\
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 7, in <module>
[rank1]:     raise ValueError("token hf_abcdefgh at s3://bucket?X-Amz-Signature=1")
[rank0]: mypkg.errors.DataError: s3://bucket?X-Amz-Signature=secret
[rank1]: ValueError: token hf_abcdefgh
E0101 20:57:27.6 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_20:57:20
  host      : n9.example
  rank      : 17 (local_rank: 1)
  exitcode  : 1 (pid: 14750)
"""


# Of torchrun of torch 2.13 with gloo: rank 1 of 2 died of SIGKILL or SIGSEGV, raised an exception, or
# wrote to a full device; rank 0 lost its connection.
REAL = {
    "kill": ("killed", ("exitcode -9 (SIGKILL)", "connection closed by peer", "ChildFailedError")),
    "segv": ("crashed", ("exitcode -11", "signal 11", "connection closed by peer", "ChildFailedError")),
    "raise": ("exception", ("ValueError", "connection closed by peer", "exitcode 1", "ChildFailedError")),
    "full": ("disk-full", ("No space left on device", "connection closed by peer", "exitcode 1", "ChildFailedError")),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_the_logs_of_real_crashes_name_the_first_cause(name: str) -> None:
    path = Path(__file__).parents[1] / "data" / "job_logs" / f"{name}.log"
    found = read_logs([str(path)])
    report = report_of(found.collections, TOGETHER)
    (one,) = report.incidents
    assert (one.fault.name, one.signs) == REAL[name]
    assert one.time == pytest.approx(1795707113, abs=100)
    assert (one.node, one.rank) == ("localhost", 1)
    assert report.steps is not None
    assert report.steps.p50_s == 1
    assert "secret" not in "".join(one.signs)


def test_an_exception_is_named_by_its_type_alone(tmp_path: Path) -> None:
    (one,) = read(tmp_path, CRASH)[0].incidents
    assert one.fault.name == "exception"
    assert one.signs == ("DataError", "ValueError", "exitcode 1", "ChildFailedError")
    assert (one.node, one.lines, one.ranks) == ("n9.example", 5, 3)


TRACEBACKS = [
    # `kubectl logs --timestamps`: the time of each line is another.
    ("2026-01-01T00:16:40.00000000{0}Z [rank3]: ", "RuntimeError: x", ("RuntimeError",), 3),
    ("2026-01-01T00:16:4{0}Z ", "RuntimeError", ("RuntimeError",), None),
    ("2026-01-01T00:16:4{0}Z 3: ", "mypkg.DataError: x", ("DataError",), 3),
    # Classes that are not called errors.
    ("", "subprocess.TimeoutExpired: Command died", ("TimeoutExpired",), None),
    ("[rank3]: ", "botocore.exceptions.ReadTimeout: x", ("ReadTimeout",), 3),
    ("", "mylib.SaveFailed", ("SaveFailed",), None),
    ("", "SaveFailed:", ("SaveFailed",), None),
    ("", "zlib.error: -3", ("error",), None),
]


@pytest.mark.parametrize(("before", "last", "signs", "rank"), TRACEBACKS)
def test_an_exception_behind_a_time_or_of_any_name_is_one(
    tmp_path: Path, before: str, last: str, signs: tuple[str, ...], rank: int | None
) -> None:
    frames = ("Traceback (most recent call last):", '  File "x.py", line 1', "    save()", last)
    text = "".join(f"{before.format(n)}{line}\n" for n, line in enumerate(frames))
    (one,) = read(tmp_path, text)[0].incidents
    assert (one.fault.name, one.signs, one.rank) == ("exception", signs, rank)


def test_other_lines_in_a_traceback_do_not_end_it(tmp_path: Path) -> None:
    others = (
        "INFO: going on", "loss: 2.0", "2026-01-01 00:00:10 Step: 3  step: 3  loss: 2.0", "WARNING",
        "During handling of the above exception, another exception occurred:", "http://a.b:80",
    )  # fmt: skip
    text = "Traceback (most recent call last):\n  File\n" + "\n".join(others) + "\n"
    assert read(tmp_path, text)[0].incidents == ()
    (one,) = read(tmp_path, text + "a.SaveFailed: x\n")[0].incidents
    assert one.signs == ("SaveFailed",)
    interrupted = "Traceback (most recent call last):\n  File\nKeyboardInterrupt\n"
    assert read(tmp_path, interrupted)[0].incidents == ()


def test_hostile_lines_in_a_traceback_take_no_longer(tmp_path: Path) -> None:
    hostile = ["a." * 30_000, "a" * 60_000, "a" + " " * 60_000 + "x", "1: " * 20_000, "A_" * 30_000]
    text = "Traceback (most recent call last):\n" + "\n".join(hostile * 3) + "\n"
    begun = time.process_time()
    assert read(tmp_path, text)[0].incidents == ()
    assert time.process_time() - begun < 3


def test_numbers_of_the_accounting_that_cannot_be_are_unknown(tmp_path: Path) -> None:
    huge = "1" + "0" * 399
    job = (
        '{"jobs": [{"job_id": %s, "state": ["FAILED"], "time": {"start": 1767225600, "end": %s},'
        ' "exit_code": {"return_code": {"set": true, "number": %s}, "signal": {"id": %s}}}]}'
    )
    for numbers in ((1, 1767235600, huge, 9), (1, 1767235600, f"-{huge}", "1e308")):
        (one,) = read(tmp_path, job % numbers)[0].incidents
        assert one.time == 1767235600
    assert read(tmp_path, job % (huge, huge, 0, huge))[0].incidents == ()


def test_steps_of_each_trainer() -> None:
    step = LogEntryKind.STEP
    for line, shown in (
        (" [2025-04-13 23:41:12] iteration       10/    1000 | consumed samples:          160 | elapsed"
         " time per iteration (ms): 1147.6 | learning rate: 0.0E+00 |", TrainingLine(step, 10, 1.1476, True)),
        ("[rank0]:[titan] 2025-12-13 06:45:34,345 - root - INFO - \x1b[31mstep: 530 \x1b[32m loss:  5.9866",
         TrainingLine(step, 530)),
        ("[2024-04-30 22:06:35,1] [INFO] [logging.py:96] step=10, skipped=0, lr=[0.1]", TrainingLine(step, 10)),
        (" 14%|x| 7/50 [1:14:33<7:38:27, 639.71s/it]", TrainingLine(step, 7, 639.71, bar=True)),
        ("  successfully loaded checkpoint from /c [ t 1/2, p 1/1 ] at iteration 900",
         TrainingLine(LogEntryKind.START, 900)),
        ("  successfully saved checkpoint from iteration     100 to /c", TrainingLine(LogEntryKind.SAVE, 100)),
        ("[titan] 2026-01-01 00:00:00,0 - root - INFO - Training completed", TrainingLine(LogEntryKind.END)),
    ):  # fmt: skip
        assert training_line(line) == shown
    assert training_line("validate step:  1  loss: 1.0") is None


@pytest.mark.parametrize(
    ("line", "time"),
    [
        (b"2026-01-01T00:00:00.5Z x", 1767225600.5),
        (b"[2026-01-01 01:00:00,250 +01:00] x", 1767225600.25),
        (b"2026-01-01_00:00:00", 1767225600.0),
        (b"[E1231 20:00:00.5 ProcessGroupNCCL.cpp:629]", 1767211200.5),
        (b"Jan  1 00:00:00 n3 kernel: x", 1767225600.0),
        (b"[Thu Jan  1 00:00:00 2026] x", 1767225600.0),
        (b"2026-13-01 00:00:00", None),
        (b"[ 1234.5678] NVRM", None),
        (b"9999-01-01 00:00:00", None),
    ],
)
def test_times_in_every_form(line: bytes, time: float | None) -> None:
    assert Stamps(zone_of("UTC"), WRITTEN).of_line(line) == time


def test_a_time_without_zone_is_of_the_zone_that_was_given() -> None:
    stamps = Stamps(zone_of("Europe/Berlin"), WRITTEN)
    assert stamps.of_line(b"2026-07-01 02:00:00") == 1782864000.0
    assert stamps.zoneless
    assert not stamps.yearless
    with pytest.raises(UsageError, match="no such zone"):
        zone_of("Mars/Olympus")


SACCT = """\
JobID|JobName|State|Start|End|NodeList|ExitCode
41|run7|NODE_FAIL|2026-01-01T00:00:00|2026-01-01T06:00:00|n[1-4]|0:0
41.batch|batch|CANCELLED|2026-01-01T00:00:00|2026-01-01T06:00:00|n1|0:9
41|run7|FAILED|2026-01-01T06:10:00|2026-01-01T10:10:00|n2|0:9
42|run7|CANCELLED by 1000|2026-01-01T11:00:00|2026-01-01T12:00:00|n[1-4]|0:0
43|run7|RUNNING|2026-01-01T13:00:00|Unknown|n[1-4]|0:0
44|run7|PENDING|Unknown|Unknown|None assigned|0:0
"""


def test_the_accounting_of_slurm(tmp_path: Path) -> None:
    report, found = read(tmp_path, SACCT, zone=zone_of("+01:00"))
    assert [log.kind for log in found.logs] == ["sacct"]
    assert [(i.fault.name, i.node, i.recovery_s) for i in report.incidents] == [
        ("node", "", 600.0), ("killed", "n2", 3000.0),
    ]  # fmt: skip
    assert report.exposed_s == 11 * 3600
    assert report.began == 1767225600.0 - 3600
    assert report.planned == 1


def test_the_accounting_as_json_of_old_and_new_versions(tmp_path: Path) -> None:
    document = """{"meta": {}, "jobs": [
      {"job_id": 1, "name": "a", "state": {"current": "OUT_OF_MEMORY", "reason": "None"}, "nodes": "n1",
       "time": {"start": 1767225600, "end": 1767229200}, "exit_code": {"return_code": null}},
      {"job_id": 2, "name": "a", "state": {"current": ["FAILED"]}, "nodes": "n[1-2]", "failed_node": "n2",
       "time": {"start": 1767230000, "end": {"set": true, "number": 1767231000}},
       "exit_code": {"status": ["SIGNALED"], "return_code": {"set": false, "number": 0}, "signal": {"id": {"set": true, "number": 11}}}},
      {"job_id": 3, "name": "a", "state": {"current": ["PENDING"]}, "time": {"start": 0, "end": 0}}]}"""
    for text in (document, document.replace("\n", "")):
        report, _ = read(tmp_path, text)
        assert [(i.fault.name, i.node) for i in report.incidents] == [
            ("host-memory", "n1"), ("crashed", "n2"),
        ]  # fmt: skip
        assert report.exposed_s == 4600


def test_jobs_side_by_side_add_up_or_are_chosen(tmp_path: Path) -> None:
    other = SACCT + "50|other|NODE_FAIL|2026-01-01T00:00:00|2026-01-01T05:00:00|n9|0:0\n"
    report, found = read(tmp_path, other)
    assert len(found.collections) == 2
    assert report.exposed_s == 16 * 3600
    assert len(report.incidents) == 3
    assert len(read(tmp_path, other, job="run7")[0].incidents) == 2
    with pytest.raises(UsageError, match="no such job"):
        read(tmp_path, other, job="run8")
    with pytest.raises(UsageError, match="2 jobs side by side"):
        read(tmp_path, other, CRASH)


def test_the_log_of_a_guard(tmp_path: Path) -> None:
    from ftckpt.guard import journal
    from ftckpt.joblogs.reading import records

    assert journal.LOG.schema == records.GUARD
    lines = [
        {"event": "start", "time": 1000.0, "token": "a", "host": "n7", "step": 0},
        {"event": "saved", "time": 2000.0, "token": "a", "step": 100},
        {"event": "ended", "time": 3000.0, "token": "a", "ending": "failed", "code": 137},
        {"event": "start", "time": 3060.0, "token": "b", "host": "n7", "step": 100},
        {"event": "ended", "time": 5060.0, "token": "b", "ending": None, "code": None},
        {"event": "start", "time": 5100.0, "token": "c", "host": "n7", "step": 100},
        {"event": "ended", "time": 6100.0, "token": "c", "ending": "preempted", "code": 0},
        {"event": "start", "time": 6200.0, "token": "d", "host": "n7", "step": 100},
        {"event": "ended", "time": 7200.0, "token": "d", "ending": "done", "code": 0},
    ]
    import json

    text = "".join(json.dumps({"schema": records.GUARD, **line}) + "\n" for line in lines)
    report, found = read(tmp_path, text[:-1] + "\n{torn")
    assert found.logs[0].kind == "guard"
    # The guard that was killed is last heard of at its start.
    assert [(i.fault.name, i.time, i.recovery_s) for i in report.incidents] == [
        ("killed", 3000.0, 60.0), ("node", 3060.0, 2040.0), ("preempted", 6100.0, 100.0),
    ]  # fmt: skip
    assert report.planned == 1
    assert report.wasted is None
    assert report.steps is None
