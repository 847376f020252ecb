"""The lines of job logs that tell of a failure, with the words of the programs that write them.

The sources: PyTorch's `ProcessGroupNCCL.cpp` and `torch/distributed/elastic`, NCCL's `net_ib.cc`,
NVIDIA's kernel module ("NVRM: Xid"), the Linux kernel's OOM killer, Slurm 22.05's `slurmstepd`,
`srun` and `slurmctld`, and CUDA's error strings.

`sign` is put together from fixed words and numbers of the match. The rest of a line is never
repeated: it may hold a token, a path or a line of somebody's data.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ftckpt.joblogs import faults
from ftckpt.joblogs.entries import Fault, Weight

# Lines without any of these words hold no failure.
WORDS = (
    b"Xid (", b"atchdog ", b"Heartbeat monitor", b"exitcode", b"Signal ", b"illed", b"illing ", b"CANCELLED AT",
    b"oom_kill", b"oom-kill", b"ut of memory", b"Out Of Memory", b"emory limit", b"No space left", b"quota exceeded",
    b"nput/output error", b"[Errno 5]", b"Stale file", b"Read-only file", b"Traceback (", b"BackendError",
    b"NetworkError", b"StoreError", b"RemoteError", b"SystemError", b"LustreError", b"ChildFailed", b"not responding",
    b"node failure", b"NODE FAILURE", b"failed node", b"egmentation fault", b"Bus error", b"Aborted", b"CUDA error",
    b"HIP error", b"off the bus", b"uncorrectable", b"by peer", b"NET/IB", b"Link ", b"communicator was aborted",
    b"  host  ", b"  time  ", b"  rank  ", b"Exited with", b"Terminated", b"Node failure", b"got signal",
    b"NodeNotReady", b"Evict", b"reempted", b"OOMKill",
)  # fmt: skip
HINT = re.compile(b"|".join(map(re.escape, WORDS)))


class Message(NamedTuple):
    """A kind of line.

    Attributes:
        pattern: finds it; the groups `node`, `rank` and `detail` are taken from it.
        fault: what it tells of.
        weight: what it says of the job.
        sign: its fixed form; `{}` is `detail`.
    """

    pattern: re.Pattern[str]
    fault: Fault
    weight: Weight
    sign: str


def _said(words: str, fault: Fault, weight: Weight, sign: str) -> Message:
    return Message(re.compile(words), fault, weight, sign)


# A host's name as Slurm, torchrun and syslog write it.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"

XID = re.compile(r"NVRM: Xid \((?P<device>PCI:[0-9a-fA-F:.]{4,16})\): (?P<xid>\d{1,4})\b")
SXID = re.compile(r"SXid \(PCI:[0-9a-fA-F:.]{4,16}\): (?P<xid>\d{1,6}), (?P<fatal>Fatal|Non-fatal)")

MESSAGES: tuple[Message, ...] = (
    _said(r"GPU has fallen off the bus", faults.GPU_LOST, Weight.FATAL, "GPU has fallen off the bus"),
    _said(r"uncorrectable (?:NVLink|nvlink) error", faults.NVLINK, Weight.FATAL, "uncorrectable NVLink error"),
    _said(r"uncorrectable ECC error encountered", faults.GPU_MEMORY, Weight.FATAL, "uncorrectable ECC error"),
    # slurmstepd, slurmctld, srun
    # The node after ON is the one that prints the line.
    _said(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
          faults.NODE, Weight.STOP, "cancelled: node failure"),
    _said(rf"error: Node failure on (?:(?P<node>{NAME})(?![\w.,\[-])|\S+)", faults.NODE, Weight.STOP, "node failure"),
    _said(rf"Nodes? (?:(?P<node>{NAME})|\S+) not responding, setting DOWN", faults.NODE, Weight.FATAL, "node not responding"),
    _said(r"requeue (?:job )?JobId=\S+ due to node failure", faults.NODE, Weight.STOP, "requeued: node failure"),
    _said(rf"[Kk]illing .{{0,40}}due to failed node (?P<node>{NAME})", faults.NODE, Weight.STOP, "killed: node failure"),
    _said(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",
          faults.PREEMPTED, Weight.STOP, "cancelled: preemption"),
    _said(r"Detected \d+ oom[_-]kill event", faults.HOST_MEMORY, Weight.FATAL, "oom_kill event in a step"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Out Of Memory", faults.HOST_MEMORY, Weight.FATAL, "task: Out Of Memory"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: (?:Killed|Terminated)", faults.KILLED, Weight.FATAL, "task: Killed"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Aborted", faults.ABORTED, Weight.FATAL, "task: aborted"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: (?:Segmentation fault|Bus error)",
          faults.CRASHED, Weight.FATAL, "task: died of a fault"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Exited with exit code (?P<detail>\d{{1,3}})",
          faults.FAILED, Weight.STOP, "task exited with {}"),
    _said(r"Exceeded job memory limit|exceeded memory limit", faults.HOST_MEMORY, Weight.FATAL, "memory limit exceeded"),
    # Kubernetes: kubectl get events, the kubelet's and node-problem-detector's
    _said(rf"\bNodeNotReady\s+(?:node/(?P<node>{NAME})|\S+)", faults.NODE, Weight.FATAL, "NodeNotReady"),
    _said(rf"Node (?P<node>{NAME}) status is now: NodeNotReady", faults.NODE, Weight.FATAL, "NodeNotReady"),
    _said(r"\b(?:Evicted|Evicting)\b.{0,120}?low on resource: ephemeral-storage", faults.DISK_FULL, Weight.STOP,
          "Evicted: ephemeral-storage"),
    _said(r"\b(?:Evicted|Evicting)\b.{0,120}?low on resource: (?P<detail>memory)", faults.HOST_MEMORY, Weight.STOP,
          "Evicted: {}"),
    _said(r"\bTaintManagerEviction\b", faults.NODE, Weight.HINT, "TaintManagerEviction"),
    _said(r"\b(?:Evicted|Evicting)\s+pod/\S+|\bPreempted\s+pod/\S+|Preempted by \S{0,80} ?pod \S+ on node ",
          faults.PREEMPTED, Weight.STOP, "Evicted or preempted"),
    _said(rf"\bOOMKilling\s+node/(?P<node>{NAME})", faults.HOST_MEMORY, Weight.FATAL, "OOMKilling"),
    _said(r"\bOOMKilled\b", faults.HOST_MEMORY, Weight.STOP, "OOMKilled"),
    # kernel
    _said(r"Out of memory: Kill(?:ed)? process \d+|Memory cgroup out of memory", faults.HOST_MEMORY, Weight.FATAL,
          "kernel: out of memory"),
    _said(r"No space left on device", faults.DISK_FULL, Weight.FATAL, "No space left on device"),
    _said(r"Disk quota exceeded", faults.DISK_FULL, Weight.FATAL, "Disk quota exceeded"),
    _said(r"\[Errno 5\]|Input/output error", faults.STORAGE, Weight.FATAL, "Input/output error"),
    _said(r"Stale file handle", faults.STORAGE, Weight.FATAL, "Stale file handle"),
    _said(r"Read-only file system", faults.STORAGE, Weight.FATAL, "Read-only file system"),
    _said(r"(?:LustreError|nfs: server \S+ not responding)", faults.STORAGE, Weight.HINT, "filesystem does not answer"),
    _said(r"Link (?:is )?[Dd]own", faults.NETWORK, Weight.HINT, "link down"),
    # CUDA and PyTorch's allocator
    _said(r"(?:CUDA|HIP) out of memory|CUDA error: out of memory", faults.GPU_OUT_OF_MEMORY, Weight.FATAL,
          "CUDA out of memory"),
    _said(r"(?:CUDA|HIP) error: (?P<detail>an illegal memory access was encountered|device-side assert triggered"
          r"|unspecified launch failure|misaligned address|an illegal instruction was encountered)",
          faults.GPU_FAULT, Weight.FATAL, "CUDA error: {}"),
    # NCCL, c10d
    _said(r"NET/IB.{0,200}?(?:status=|error )(?P<detail>\d{1,3})", faults.NETWORK, Weight.FATAL, "NET/IB: status {}"),
    _said(r"ncclRemoteError|ncclSystemError", faults.NETWORK, Weight.HINT, "NCCL remote or system error"),
    _said(r"Watchdog caught collective operation timeout:(?:.{0,80}?OpType=(?P<detail>\w{1,40}))?",
          faults.COLLECTIVE_TIMEOUT, Weight.STOP, "collective operation timeout {}"),
    _said(r"watchdog got stuck for \d+ sec|Heartbeat monitor timed out", faults.COLLECTIVE_TIMEOUT, Weight.STOP,
          "watchdog got stuck"),
    _said(r"Connection (?:closed|reset) by peer", faults.COLLECTIVE_ERROR, Weight.FATAL, "connection closed by peer"),
    _said(r"Dist(?:Backend|Network|Store)Error|NCCL communicator was aborted", faults.COLLECTIVE_ERROR, Weight.FATAL, "torch.distributed error"),
    # torchrun
    _said(r"failed \(exitcode: -(?:9|SIGKILL)\)|exitcode  : -9 |Signal 9 \(SIGKILL\) received", faults.KILLED,
          Weight.STOP, "exitcode -9 (SIGKILL)"),
    _said(r"(?:failed \(exitcode: |exitcode  : )-6\b|Signal 6 \(SIGABRT\) received", faults.ABORTED, Weight.STOP,
          "exitcode -6 (SIGABRT)"),
    _said(r"(?:failed \(exitcode: |exitcode  : )-(?P<detail>4|7|8|11)\b", faults.CRASHED, Weight.STOP, "exitcode -{}"),
    _said(r"Signal (?P<detail>\d{1,2}) \(SIG(?:SEGV|BUS|FPE|ILL)\) received", faults.CRASHED, Weight.STOP, "signal {}"),
    # torchrun itself was told to end
    _said(r"SignalException: Process \d+ got signal: (?P<detail>\d{1,2})", faults.KILLED, Weight.STOP, "torchrun: signal {}"),
    _said(r"(?:failed \(exitcode: |exitcode  : )(?P<detail>\d{1,3})\b", faults.FAILED, Weight.STOP, "exitcode {}"),
    _said(r"elastic\.multiprocessing\.errors\.ChildFailedError", faults.FAILED, Weight.STOP, "ChildFailedError"),
    _said(r"Aborted \(core dumped\)", faults.ABORTED, Weight.FATAL, "aborted"),
    _said(r"Segmentation fault|Bus error", faults.CRASHED, Weight.FATAL, "died of a fault"),
)  # fmt: skip

# What ends a job as planned: no failure. A job that exits with 75 (EX_TEMPFAIL) asks to be started
# again, as a guard does after a notice.
PLANNED = re.compile(
    r"CANCELLED AT \S+(?: DUE TO (?:TIME LIMIT|JOB REQUEUE))? \*\*\*"
    r"|error: \S+: tasks? \S+: Exited with exit code 75\b"
    r"|(?:failed \(exitcode: |exitcode  : )75\b"
    r"|SignalException: Process \d+ got signal: 2\b"
)

# The last line of a traceback, which is the first one that is not indented: the type alone is
# repeated. Its name may end in anything (`subprocess.TimeoutExpired`).
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,60}+\.){0,8}+[A-Za-z_]\w{0,60}+)(?::(?!\S)|\s{0,8}$)"
)
# Of a name without a module: `INFO: ` and `loss: ` between the lines of a traceback are none.
CLASS = re.compile(r"[A-Z]\w*[a-z]")
TRACEBACK = "Traceback (most recent call last)"
# A person's Ctrl-C, and exits that a program asks for.
NO_FAILURE = frozenset({"KeyboardInterrupt", "SystemExit", "StopIteration", "GeneratorExit"})

RANK = re.compile(
    r"\[(?:rank|Rank )(?P<rank>\d{1,7})\]|^(?P<task>\d{1,7}): |\[PG [^\]]{0,80}?Rank (?P<pg>\d{1,7})\]"
)
# What launchers and `kubectl logs --timestamps` put before a line.
STAMP = re.compile(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? ")
PREFIX = re.compile(r"^(?:\[(?:rank|default)\d{1,7}\]:\s?|\d{1,7}: )+")
# NCCL puts `host:pid:tid [gpu]` before its lines (debug.cc).
NCCL_HOST = re.compile(rf"(?:^|[\s\]])(?P<node>{NAME}):\d{{1,8}}:\d{{1,8}} \[\d{{1,3}}\] NCCL ")
# Syslog: the host behind the time.
SYSLOG_HOST = re.compile(
    rf"^(?:<\d+>)?(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d\S*|\d{{4}}-\d\d-\d\dT\S+) (?P<node>{NAME}) (?:kernel|slurm\w*)\b"
)
BLOCK = re.compile(r"^  (?P<key>host|time|rank) +: (?P<value>\S+)")
