"""Read the log of a job, a kernel or a scheduler: words for people, with times here and there.

The lines of job logs that tell of a failure, with the words of the programs that write them.

The sources: PyTorch's `ProcessGroupNCCL.cpp` and `torch/distributed/elastic`, NCCL's `net_ib.cc`,
NVIDIA's kernel module ("NVRM: Xid"), the Linux kernel's OOM killer, Slurm 22.05's `slurmstepd`,
`srun` and `slurmctld`, and CUDA's error strings.

`sign` is put together from fixed words and numbers of the match. The rest of a line is never
repeated: it may hold a token, a path or a line of somebody's data.

The lines of trainers' logs that show progress: steps, saves, starts and ends.

Megatron-LM, Megatron-DeepSpeed   iteration 10/ 1000 | ... per iteration (ms): 9.6 |
torchtitan                        step: 530  loss:  5.9866 ... tps: 829
DeepSpeed                         step=10, skipped=0, lr=[...]
tqdm (Trainer, Lightning)         7/50 [1:14:33<7:38:27, 639.71s/it]
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ftckpt.joblogs import collect
from ftckpt.joblogs.collect import Fault, LogEntry, LogEntryKind, Weight

from .times import Stamps

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
    _said(r"GPU has fallen off the bus", collect.GPU_LOST, Weight.FATAL, "GPU has fallen off the bus"),
    _said(r"uncorrectable (?:NVLink|nvlink) error", collect.NVLINK, Weight.FATAL, "uncorrectable NVLink error"),
    _said(r"uncorrectable ECC error encountered", collect.GPU_MEMORY, Weight.FATAL, "uncorrectable ECC error"),
    # slurmstepd, slurmctld, srun
    # The node after ON is the one that prints the line.
    _said(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
          collect.NODE, Weight.STOP, "cancelled: node failure"),
    _said(rf"error: Node failure on (?:(?P<node>{NAME})(?![\w.,\[-])|\S+)", collect.NODE, Weight.STOP, "node failure"),
    _said(rf"Nodes? (?:(?P<node>{NAME})|\S+) not responding, setting DOWN", collect.NODE, Weight.FATAL, "node not responding"),
    _said(r"requeue (?:job )?JobId=\S+ due to node failure", collect.NODE, Weight.STOP, "requeued: node failure"),
    _said(rf"[Kk]illing .{{0,40}}due to failed node (?P<node>{NAME})", collect.NODE, Weight.STOP, "killed: node failure"),
    _said(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",
          collect.PREEMPTED, Weight.STOP, "cancelled: preemption"),
    _said(r"Detected \d+ oom[_-]kill event", collect.HOST_MEMORY, Weight.FATAL, "oom_kill event in a step"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Out Of Memory", collect.HOST_MEMORY, Weight.FATAL, "task: Out Of Memory"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: (?:Killed|Terminated)", collect.KILLED, Weight.FATAL, "task: Killed"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Aborted", collect.ABORTED, Weight.FATAL, "task: aborted"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: (?:Segmentation fault|Bus error)",
          collect.CRASHED, Weight.FATAL, "task: died of a fault"),
    _said(rf"error: (?P<node>{NAME}): tasks? \S+: Exited with exit code (?P<detail>\d{{1,3}})",
          collect.FAILED, Weight.STOP, "task exited with {}"),
    _said(r"Exceeded job memory limit|exceeded memory limit", collect.HOST_MEMORY, Weight.FATAL, "memory limit exceeded"),
    # Kubernetes: kubectl get events, the kubelet's and node-problem-detector's
    _said(rf"\bNodeNotReady\s+(?:node/(?P<node>{NAME})|\S+)", collect.NODE, Weight.FATAL, "NodeNotReady"),
    _said(rf"Node (?P<node>{NAME}) status is now: NodeNotReady", collect.NODE, Weight.FATAL, "NodeNotReady"),
    _said(r"\b(?:Evicted|Evicting)\b.{0,120}?low on resource: ephemeral-storage", collect.DISK_FULL, Weight.STOP,
          "Evicted: ephemeral-storage"),
    _said(r"\b(?:Evicted|Evicting)\b.{0,120}?low on resource: (?P<detail>memory)", collect.HOST_MEMORY, Weight.STOP,
          "Evicted: {}"),
    _said(r"\bTaintManagerEviction\b", collect.NODE, Weight.HINT, "TaintManagerEviction"),
    _said(r"\b(?:Evicted|Evicting)\s+pod/\S+|\bPreempted\s+pod/\S+|Preempted by \S{0,80} ?pod \S+ on node ",
          collect.PREEMPTED, Weight.STOP, "Evicted or preempted"),
    _said(rf"\bOOMKilling\s+node/(?P<node>{NAME})", collect.HOST_MEMORY, Weight.FATAL, "OOMKilling"),
    _said(r"\bOOMKilled\b", collect.HOST_MEMORY, Weight.STOP, "OOMKilled"),
    # kernel
    _said(r"Out of memory: Kill(?:ed)? process \d+|Memory cgroup out of memory", collect.HOST_MEMORY, Weight.FATAL,
          "kernel: out of memory"),
    _said(r"No space left on device", collect.DISK_FULL, Weight.FATAL, "No space left on device"),
    _said(r"Disk quota exceeded", collect.DISK_FULL, Weight.FATAL, "Disk quota exceeded"),
    _said(r"\[Errno 5\]|Input/output error", collect.STORAGE, Weight.FATAL, "Input/output error"),
    _said(r"Stale file handle", collect.STORAGE, Weight.FATAL, "Stale file handle"),
    _said(r"Read-only file system", collect.STORAGE, Weight.FATAL, "Read-only file system"),
    _said(r"(?:LustreError|nfs: server \S+ not responding)", collect.STORAGE, Weight.HINT, "filesystem does not answer"),
    _said(r"Link (?:is )?[Dd]own", collect.NETWORK, Weight.HINT, "link down"),
    # CUDA and PyTorch's allocator
    _said(r"(?:CUDA|HIP) out of memory|CUDA error: out of memory", collect.GPU_OUT_OF_MEMORY, Weight.FATAL,
          "CUDA out of memory"),
    _said(r"(?:CUDA|HIP) error: (?P<detail>an illegal memory access was encountered|device-side assert triggered"
          r"|unspecified launch failure|misaligned address|an illegal instruction was encountered)",
          collect.GPU_FAULT, Weight.FATAL, "CUDA error: {}"),
    # NCCL, c10d
    _said(r"NET/IB.{0,200}?(?:status=|error )(?P<detail>\d{1,3})", collect.NETWORK, Weight.FATAL, "NET/IB: status {}"),
    _said(r"ncclRemoteError|ncclSystemError", collect.NETWORK, Weight.HINT, "NCCL remote or system error"),
    _said(r"Watchdog caught collective operation timeout:(?:.{0,80}?OpType=(?P<detail>\w{1,40}))?",
          collect.COLLECTIVE_TIMEOUT, Weight.STOP, "collective operation timeout {}"),
    _said(r"watchdog got stuck for \d+ sec|Heartbeat monitor timed out", collect.COLLECTIVE_TIMEOUT, Weight.STOP,
          "watchdog got stuck"),
    _said(r"Connection (?:closed|reset) by peer", collect.COLLECTIVE_ERROR, Weight.FATAL, "connection closed by peer"),
    _said(r"Dist(?:Backend|Network|Store)Error|NCCL communicator was aborted", collect.COLLECTIVE_ERROR, Weight.FATAL, "torch.distributed error"),
    # torchrun
    _said(r"failed \(exitcode: -(?:9|SIGKILL)\)|exitcode  : -9 |Signal 9 \(SIGKILL\) received", collect.KILLED,
          Weight.STOP, "exitcode -9 (SIGKILL)"),
    _said(r"(?:failed \(exitcode: |exitcode  : )-6\b|Signal 6 \(SIGABRT\) received", collect.ABORTED, Weight.STOP,
          "exitcode -6 (SIGABRT)"),
    _said(r"(?:failed \(exitcode: |exitcode  : )-(?P<detail>4|7|8|11)\b", collect.CRASHED, Weight.STOP, "exitcode -{}"),
    _said(r"Signal (?P<detail>\d{1,2}) \(SIG(?:SEGV|BUS|FPE|ILL)\) received", collect.CRASHED, Weight.STOP, "signal {}"),
    # torchrun itself was told to end
    _said(r"SignalException: Process \d+ got signal: (?P<detail>\d{1,2})", collect.KILLED, Weight.STOP, "torchrun: signal {}"),
    _said(r"(?:failed \(exitcode: |exitcode  : )(?P<detail>\d{1,3})\b", collect.FAILED, Weight.STOP, "exitcode {}"),
    _said(r"elastic\.multiprocessing\.errors\.ChildFailedError", collect.FAILED, Weight.STOP, "ChildFailedError"),
    _said(r"Aborted \(core dumped\)", collect.ABORTED, Weight.FATAL, "aborted"),
    _said(r"Segmentation fault|Bus error", collect.CRASHED, Weight.FATAL, "died of a fault"),
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


_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
_MEGATRON = re.compile(
    r"iteration\s+(?P<step>\d{1,12})/\s*(?:\d+|infinity) \|(?:.{0,400}?elapsed time per iteration"
    r" \(ms\): (?P<ms>\d{1,12}(?:\.\d{1,6})?))?"
)
_TITAN = re.compile(r"(?<!\w )\bstep:\s*(?P<step>\d{1,12})\s+loss:")
_DEEPSPEED = re.compile(r"\bstep=(?P<step>\d{1,12}), skipped=")
_TQDM = re.compile(
    r"\b(?P<step>\d{1,12})/\d{1,12} \[[\d:]{4,12}<[\d:?]{1,12}, +(?P<each>\d{1,9}(?:\.\d{1,4})?)"
    r"(?P<unit>s/it|it/s)"
)
_SAVED = re.compile(
    r"successfully saved checkpoint from iteration\s+(?P<step>\d{1,12})|[Ss]aved checkpoint"
    r"|Finished saving the checkpoint.{0,60}?in (?P<seconds>\d{1,7}(?:\.\d{1,6})?) seconds"
)
_LOADED = re.compile(
    r"successfully loaded checkpoint from .{0,400}?at iteration (?P<step>\d{1,12})"
)
_STARTED = re.compile(
    r"Rendezvous complete for workers|\[before the start of training step\]"
    r"|Training starts at step (?P<step>\d{1,12})"
)
_ENDED = re.compile(
    r"\[after training is done\]|[Tt]raining completed|\[exiting program (?:at|after)"
)


class TrainingLine(NamedTuple):
    """What a line of a trainer's log shows.

    Attributes:
        kind: STEP, SAVE, START or END.
        step: its number.
        seconds: of a step, or of a save.
        average: whether `seconds` is the mean of all steps since the last such line.
        bar: whether it is a progress bar, whose count begins anew with each epoch or evaluation.
    """

    kind: LogEntryKind
    step: int | None = None
    seconds: float | None = None
    average: bool = False
    bar: bool = False


def may_show(line: bytes) -> bool:
    """Return whether a line has a word of those that show progress; far cheaper than to know."""
    return (
        b"tep" in line
        or b"teration" in line
        or b"heckpoint" in line
        or b"s/it" in line
        or b"it/s" in line
        or b"raining" in line
        or b"endezvous" in line
        or b"exiting program" in line
    )


def training_line(text: str) -> TrainingLine | None:
    """Return what a line shows of the training; None if it shows nothing."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "iteration" in text and (match := _MEGATRON.search(text)):
        seconds = float(match["ms"]) / 1000 if match["ms"] else None
        return TrainingLine(LogEntryKind.STEP, int(match["step"]), seconds, average=True)
    if "step:" in text and (match := _TITAN.search(text)):
        return TrainingLine(LogEntryKind.STEP, int(match["step"]))
    if "step=" in text and (match := _DEEPSPEED.search(text)):
        return TrainingLine(LogEntryKind.STEP, int(match["step"]))
    if match := _STARTED.search(text) or _LOADED.search(text):
        step = match.groupdict().get("step")
        return TrainingLine(LogEntryKind.START, None if step is None else int(step))
    if "heckpoint" in text and (match := _SAVED.search(text)):
        step, seconds_of = match["step"], match["seconds"]
        return TrainingLine(
            LogEntryKind.SAVE,
            None if step is None else int(step),
            None if seconds_of is None else float(seconds_of),
        )
    if _ENDED.search(text):
        return TrainingLine(LogEntryKind.END)
    if ("s/it" in text or "it/s" in text) and (match := _TQDM.search(text)):
        each = float(match["each"])
        if match["unit"] == "it/s":
            each = 1 / each if each else 0.0
        return TrainingLine(LogEntryKind.STEP, int(match["step"]), each or None, bar=True)
    return None


# A line without a time has that of a line above it, at most this many above.
_ABOVE = 64
_BATCH = 1 << 20
# Entries without a time that wait for the first one of their file.
_WAITING = 1000
# Ranks whose tracebacks are followed at once, and lines that one may have.
_TRACEBACKS, _TRACEBACK_LINES = 4096, 2000


class TextLog:
    """One such log, read line by line."""

    def __init__(self, stamps: Stamps, source: int) -> None:
        self._stamps, self._source = stamps, source
        self._time: float | None = None
        self._above: deque[bytes] = deque(maxlen=_ABOVE)
        self._tracebacks: set[str] = set()  # prefixes of the ranks that are in one
        self._block: dict[str, str] = {}  # torchrun's table of a failed process
        self._forget = 0  # line from which no traceback is followed any more

    def entries(self, lines: Iterable[bytes]) -> Iterator[LogEntry]:
        """Yield what the lines tell, in their order; what precedes the first time is given it."""
        waiting: list[LogEntry] = []
        for entry in self._entries(lines):
            dated = entry.time is not None or entry.kind is LogEntryKind.STEP
            if not dated and self._time is None and len(waiting) < _WAITING:
                waiting.append(entry)
                continue
            if self._time is not None:
                yield from (one._replace(time=self._time) for one in waiting)
                waiting.clear()
            yield entry
        yield from waiting

    def _entries(self, lines: Iterable[bytes]) -> Iterator[LogEntry]:
        number = 0
        for batch in _batches(lines):
            # Hardly any line tells of a failure; looking in many at once costs a fifth.
            together = b"\n".join(batch)
            suspicious = any(word in together for word in WORDS)
            for line in batch:
                number += 1
                if self._tracebacks and number > self._forget:
                    self._tracebacks.clear()
                if self._tracebacks or (suspicious and HINT.search(line) is not None):
                    text = STAMP.sub("", line.decode("utf-8", "replace"))
                    entry = self._failure(text, line, number)
                    if entry is not None:
                        yield entry
                        self._above.append(line)
                        continue
                if may_show(line):
                    entry = self._training(line, number)
                    if entry is not None:
                        yield entry
                self._above.append(line)

    def _when(self, line: bytes) -> float | None:
        """Return the time of a line, else that of the nearest line above it."""
        time = self._stamps.of_line(line)
        if time is None:
            for above in reversed(self._above):
                time = self._stamps.of_line(above)
                if time is not None:
                    break
            else:
                return self._time
        self._above.clear()
        self._time = time
        return time

    def _training(self, line: bytes, number: int) -> LogEntry | None:
        text = line.decode("utf-8", "replace")
        found = training_line(text)
        if found is None:
            return None
        rank = RANK.search(text)
        # A step that took the time of a line above it would be done too early.
        if found.kind is LogEntryKind.STEP:
            time = self._stamps.of_line(line)
            self._time = self._time if time is None else time
        else:
            time = self._when(line)
        return LogEntry(
            found.kind,
            time,
            step=found.step,
            seconds=found.seconds,
            bar=found.bar,
            rank=None if rank is None else _rank(rank),
            source=self._source,
            line=number,
        )

    def _failure(self, text: str, line: bytes, number: int) -> LogEntry | None:
        if match := BLOCK.match(text):
            self._block[match["key"]] = match["value"]
            return None
        if PLANNED.search(text):
            return LogEntry(LogEntryKind.END, self._when(line), source=self._source, line=number,
                            planned=True)  # fmt: skip
        if match := XID.search(text):
            fault, weight = collect.of_xid(int(match["xid"]))
            return self._said(text, line, number, fault, weight, f"Xid {int(match['xid'])}")
        if match := SXID.search(text):
            weight = Weight.FATAL if match["fatal"] == "Fatal" else Weight.HINT
            return self._said(text, line, number, collect.NVLINK, weight, f"SXid {match['xid']}")
        for message in MESSAGES:
            if match := message.pattern.search(text):
                groups = match.groupdict()
                if not text[:1].isspace():
                    self._tracebacks.discard(_head(text))
                sign = message.sign.format(groups.get("detail") or "").rstrip()
                return self._said(text, line, number, message.fault, message.weight, sign,
                                  groups.get("node") or "")  # fmt: skip
        return self._exception(text, line, number)

    def _exception(self, text: str, line: bytes, number: int) -> LogEntry | None:
        """Follow the tracebacks of all ranks; the last line of one names the exception."""
        head = _head(text)
        if TRACEBACK in text:
            if len(self._tracebacks) < _TRACEBACKS:
                self._tracebacks.add(head)
                self._forget = number + _TRACEBACK_LINES
            return None
        if head not in self._tracebacks:
            return None
        match = EXCEPTION.match(PREFIX.sub("", text))
        if match is None:
            return None
        module, _, name = match["type"].rpartition(".")
        if not module and not CLASS.match(name):
            return None
        if may_show(line) and training_line(text) is not None:
            return None
        self._tracebacks.discard(head)
        if name in NO_FAILURE:
            return None
        return self._said(text, line, number, collect.EXCEPTION, Weight.FATAL, name)

    def _said(
        self, text: str, line: bytes, number: int, fault: Fault, weight: Weight, sign: str,
        node: str = "",
    ) -> LogEntry:  # fmt: skip
        block, self._block = self._block, {}
        in_block = "exitcode" in text and "exitcode  :" in text
        rank = RANK.search(text)
        host = NCCL_HOST.search(text)
        if host is None and fault.name not in collect.TOLD_BY_OTHERS:
            host = SYSLOG_HOST.match(line.decode("utf-8", "replace"))
        time = self._stamps.of_text(block["time"]) if in_block and "time" in block else None
        return LogEntry(
            LogEntryKind.FAILURE,
            self._when(line) if time is None else time,
            fault,
            weight,
            node=node
            or (host["node"] if host else "")
            or (block.get("host", "") if in_block else ""),
            rank=_block_rank(block) if in_block else (None if rank is None else _rank(rank)),
            sign=sign,
            source=self._source,
            line=number,
        )


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield lines in lists of about a megabyte."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line) + 64  # what an object takes
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _head(text: str) -> str:
    """Return the prefix by which launchers tell the ranks of one log apart."""
    prefix = PREFIX.match(text)
    return "" if prefix is None else prefix[0].strip()


def _rank(match: re.Match[str]) -> int:
    return int(match["rank"] or match["task"] or match["pg"])


def _block_rank(block: dict[str, str]) -> int | None:
    value = block.get("rank", "")
    return int(value) if value.isdecimal() and len(value) < 8 else None
