"""Keep of a log's entries what an analysis needs: little, however long the log is.

Steps become stretches of progress, saves points in time, repeated lines one sighting with a count.

What a log says, one entry for each thing: the common language of all readers.

The kinds of failure, and what each says about the part that failed.

The names of GPU faults follow NVIDIA's list of Xid errors
(https://docs.nvidia.com/deploy/xid-errors/, and `nverror.h` of its open kernel modules): its
"immediate action" tells a fault of the hardware from one of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from ftckpt.errors import NoResourceError

from .durations import Durations, Mean


class LogEntryKind(StrEnum):
    """What an entry tells."""

    START = "start"
    END = "end"
    SAVE = "save"
    STEP = "step"
    FAILURE = "failure"
    OTHER = "other"


class Weight(IntEnum):
    """How much an entry of kind FAILURE says about the job.

    RECORD: a record of one whole failure (JSONL, sacct, the guard): two of one source are two.
    STOP: the job has ended (torchrun gave up, Slurm cancelled it).
    FATAL: such a thing ends a job, unless the log shows that it went on.
    HINT: accompanies failures, and is none by itself.
    """

    HINT = 0
    FATAL = 1
    STOP = 2
    RECORD = 3


class Fault(NamedTuple):
    """A kind of failure.

    Attributes:
        name: its class: `gpu-lost`.
        component: what failed: `gpu`, `hbm`, `nvlink`, `network`, `host`, `storage`, `software`,
            `scheduler`, `unknown`.
        order: from the cause (low) to its consequences (high): a lost GPU makes others time out.
        meaning: in words.
    """

    name: str
    component: str
    order: int
    meaning: str


class LogEntry(NamedTuple):
    """One thing that a log tells. None and "" mean that the log does not say it.

    Attributes:
        kind: what it is.
        time: seconds since the epoch.
        fault: of a failure.
        weight: of a failure.
        node: where.
        rank: which process.
        step: number of the training step.
        seconds: that a step took, or that training waited for a save.
        snapshot: blocking seconds of a background save.
        flush: its background seconds.
        nbytes: of a save.
        detect: seconds from a failure until it was noticed.
        restart: seconds from there until training continued.
        sign: the words of the log that say so, in a fixed form.
        source: number of the file.
        line: number of the line in it.
        planned: an end that a person or a time limit brought.
        bar: a step of a progress bar, whose count begins anew with each epoch or evaluation.
        noticed: a save that was seen some time after it was written.
    """

    kind: LogEntryKind
    time: float | None = None
    fault: Fault | None = None
    weight: Weight = Weight.RECORD
    node: str = ""
    rank: int | None = None
    step: int | None = None
    seconds: float | None = None
    snapshot: float | None = None
    flush: float | None = None
    nbytes: float | None = None
    detect: float | None = None
    restart: float | None = None
    sign: str = ""
    source: int = 0
    line: int = 0
    planned: bool = False
    bar: bool = False
    noticed: bool = False

    def told_by_another_rank(self, other: LogEntry) -> bool:
        """Return whether two records differ only in their rank, time and line."""
        if self.rank is None or other.rank is None or self.rank == other.rank:
            return False
        return self._replace(rank=0, time=None, line=0) == other._replace(rank=0, time=None, line=0)


# A silence of this long, or of ten times the usual distance of two lines, ends a stretch; an hour
# where that is not known yet.
_SILENCE, _SILENCES, _FIRST = 300.0, 10.0, 3600.0
# After a failure's line, training that goes on within this has not stopped.
_GOES_ON = 60.0
_MOST = 500_000  # sightings, stretches, saves and starts together
_MOST_RANKS = 65_536
_MOST_HELD = 4_000_000  # numbers in the durations of all ranks together
_LONGEST_AVERAGE = 10_000  # steps that one line may speak of
_NAMES = 256


@dataclass(slots=True)
class Stretch:
    """Steps one after the other.

    Attributes:
        began: time of its first step's line.
        ended: of its last.
        first: number of the first step.
        last: of the last.
        stride: steps from line to line.
        source: number of the file.
        rank: that says so; None where the lines name none.
        bar: whether its count begins anew with each epoch or evaluation.
    """

    began: float
    ended: float
    first: int
    last: int
    stride: int
    source: int
    rank: int | None = None
    bar: bool = False
    doubted: bool = False  # a failure's line came after its last step


@dataclass(slots=True)
class Sighting:
    """A failure's line, with those that repeat it.

    Attributes:
        entry: the first of them.
        last: time of the last.
        count: of the lines.
        nodes: that said so.
        ranks: that said so.
    """

    entry: LogEntry
    last: float | None
    count: int = 1
    nodes: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


class SeenSave(NamedTuple):
    """A save; `noticed` as in `LogEntry`."""

    time: float | None
    step: int | None
    noticed: bool


class Collection:
    """What all logs of one run say.

    Args:
        together: seconds within which two lines may be of one failure.

    Attributes:
        sightings: of failures, in the order of reading.
        stretches: of steps.
        saves: of each its time and step, either None where the log does not say it.
        starts: entries of starts.
        ends: entries of ends.
        steps: durations of steps, of all ranks.
        by_rank: the same for each rank that a log names.
        ranks_dropped: whether there were more ranks than are told apart.
        times: the first and the last.
        events: number of entries by kind.
        waited, snapshots, flushes: mean seconds of saves.
        nbytes: of the last save that says it.
        detects, restarts: mean seconds of failures that record them.
        nodes: names of nodes that any entry has.
    """

    def __init__(self, together: float) -> None:
        self._together = together
        self.sightings: list[Sighting] = []
        self.stretches: list[Stretch] = []
        self.saves: list[SeenSave] = []
        self.starts: list[LogEntry] = []
        self.ends: list[LogEntry] = []
        self.steps = Durations()
        self.by_rank: dict[int, Durations] = {}
        self.ranks_dropped = False
        self.times: tuple[float, float] | None = None
        self.events: Counter[LogEntryKind] = Counter()
        self.waited, self.snapshots, self.flushes = Mean(), Mean(), Mean()
        self.nbytes: float | None = None
        self.detects, self.restarts = Mean(), Mean()
        self.nodes: set[str] = set()
        self._open: dict[tuple[str, str, str], Sighting] = {}
        self._running: dict[tuple[int, int | None], Stretch] = {}
        self._usual: dict[tuple[int, int | None], float] = {}  # seconds from line to line
        self._held = 0

    def take(self, entries: Iterable[LogEntry]) -> None:
        """Take the entries of one file, in their order.

        Raises:
            NoResourceError: the log says more than is kept.
        """
        self._open.clear()
        self._running.clear()
        for entry in entries:
            self.events[entry.kind] += 1
            if entry.time is not None:
                first, last = self.times or (entry.time, entry.time)
                self.times = min(first, entry.time), max(last, entry.time)
            if entry.node and len(self.nodes) < _MOST_RANKS:
                self.nodes.add(entry.node)
            match entry.kind:
                case LogEntryKind.FAILURE:
                    self._failure(entry)
                case LogEntryKind.STEP:
                    self._step(entry)
                case LogEntryKind.SAVE:
                    self._save(entry)
                case LogEntryKind.START:
                    self._break()
                    self.starts.append(entry)
                case LogEntryKind.END:
                    self._break()
                    self.ends.append(entry)
            if self._kept > _MOST:
                raise NoResourceError(
                    f"the logs hold more than {_MOST:,} failures, starts, saves and breaks of "
                    "training",
                    hint="name the logs of one run, or fewer of them",
                )

    @property
    def _kept(self) -> int:
        return (
            len(self.sightings) + len(self.stretches) + len(self.saves) + len(self.starts)
            + len(self.ends)
        )  # fmt: skip

    def _break(self) -> None:
        """Note that training stopped here, and that what comes is something else."""
        self._open.clear()
        self._running.clear()

    def _failure(self, entry: LogEntry) -> None:
        if entry.weight >= Weight.STOP:
            self._running.clear()
        elif entry.weight is Weight.FATAL:
            for stretch in self._running.values():
                stretch.doubted = True
        assert entry.fault is not None
        key = (entry.fault.name, entry.node, entry.sign)
        seen = self._open.get(key)
        if seen is None or not (
            seen.entry.told_by_another_rank(entry) and self._repeats(seen, entry)
        ):  # what each rank says of one failure counts once
            self.detects.add(entry.detect)
            self.restarts.add(entry.restart)
        if seen is None or entry.weight is Weight.RECORD or not self._repeats(seen, entry):
            seen = Sighting(entry, entry.time, 0)
            self.sightings.append(seen)
            self._open[key] = seen
        seen.count += 1
        seen.last = seen.last if entry.time is None else max(entry.time, seen.last or entry.time)
        if entry.node and len(seen.nodes) < _NAMES:
            seen.nodes.add(entry.node)
        if entry.rank is not None and len(seen.ranks) < _MOST_RANKS:
            seen.ranks.add(entry.rank)

    def _repeats(self, seen: Sighting, entry: LogEntry) -> bool:
        if seen.last is None or entry.time is None:
            return seen.last is entry.time
        return abs(entry.time - seen.last) <= self._together

    def _save(self, entry: LogEntry) -> None:
        self._open.clear()
        self.waited.add(entry.seconds)
        self.snapshots.add(entry.snapshot)
        self.flushes.add(entry.flush)
        self.nbytes = self.nbytes if entry.nbytes is None else entry.nbytes
        self.saves.append(SeenSave(entry.time, entry.step, entry.noticed))

    def _step(self, entry: LogEntry) -> None:
        self._open.clear()
        key = (entry.source, entry.rank if len(self._running) < _MOST_RANKS else None)
        before = self._running.get(key)
        stretch = None
        took, weight = entry.seconds, 1.0
        if entry.time is not None and entry.step is not None:
            goes_on = before is not None and self._continues(
                before, self._usual.get(key, 0.0), entry.time, entry.step
            )
            if before is None or not goes_on:
                stretch = Stretch(
                    entry.time, entry.time, entry.step, entry.step, 1, *key, bar=entry.bar
                )
                self._running[key] = stretch
                self.stretches.append(stretch)
            else:
                gap, done = entry.time - before.ended, entry.step - before.last
                if done > 0:
                    if took is None:
                        took = gap / done
                    weight = float(min(done, _LONGEST_AVERAGE))
                    before.stride = done
                    usual = self._usual.get(key, gap)
                    self._usual[key] = 0.9 * usual + 0.1 * gap
                before.ended, before.last, before.doubted = entry.time, entry.step, False
        if took is not None:
            self._took(entry.rank, took, weight)

    @staticmethod
    def _continues(before: Stretch, usual: float, time: float, step: int) -> bool:
        gap, done = time - before.ended, step - before.last
        if gap < 0 or done < 0:
            return False
        if before.doubted:
            return gap <= max(_GOES_ON, 5 * usual) and done <= max(1, before.stride)
        return gap <= (max(_SILENCE, _SILENCES * usual) if usual else _FIRST)

    def _took(self, rank: int | None, seconds: float, weight: float) -> None:
        self.steps.add(seconds, weight)
        if rank is None:
            return
        own = self.by_rank.get(rank)
        if own is None:
            if len(self.by_rank) >= _MOST_RANKS or self._held >= _MOST_HELD:
                self.ranks_dropped = True
                return
            own = self.by_rank[rank] = Durations()
        held = own.size
        own.add(seconds, weight)
        self._held += own.size - held


GPU_LOST = Fault("gpu-lost", "gpu", 10, "a GPU has fallen off the bus")
GPU_MEMORY = Fault("gpu-memory", "hbm", 11, "uncorrectable error of a GPU's memory (ECC)")
NVLINK = Fault("nvlink", "nvlink", 12, "error of NVLink or NVSwitch")
GPU_DRIVER = Fault("gpu-driver", "gpu", 13, "the GPU's firmware or driver does not answer")
NODE = Fault("node", "host", 20, "a node failed or does not answer")
HOST_MEMORY = Fault("host-memory", "host", 30, "the host ran out of memory")
DISK_FULL = Fault("disk-full", "storage", 31, "no space left, or a quota is used up")
STORAGE = Fault("storage", "storage", 32, "a file could not be read or written")
PREEMPTED = Fault("preempted", "scheduler", 33, "preempted")
GPU_OUT_OF_MEMORY = Fault("gpu-out-of-memory", "software", 40, "the program asked for more memory")
GPU_FAULT = Fault("gpu-fault", "software", 41, "the program made an invalid access on a GPU")
NETWORK = Fault("network", "network", 45, "a connection between nodes broke")
EXCEPTION = Fault("exception", "software", 50, "a Python exception")
CRASHED = Fault("crashed", "software", 55, "a process died of a fault (SIGSEGV, SIGABRT, SIGBUS)")
# torch's watchdog aborts the process that has waited too long: after it, this is a consequence.
ABORTED = CRASHED._replace(order=56)
KILLED = Fault("killed", "unknown", 60, "a process was killed (SIGKILL) and nothing says by whom")
HUNG = Fault("hung", "unknown", 65, "no progress for too long")
COLLECTIVE_TIMEOUT = Fault(
    "collective-timeout", "unknown", 70, "ranks waited for one that did not come"
)
COLLECTIVE_ERROR = Fault("collective-error", "unknown", 75, "a rank lost the others")
FAILED = Fault("failed", "unknown", 90, "the job ended with an error, and nothing says why")
# Training began anew at an earlier step: a node that loses its power writes no line.
UNSAID = Fault("unknown", "unknown", 95, "steps were done again, and no line says why")

ALL = (
    GPU_LOST, GPU_MEMORY, NVLINK, GPU_DRIVER, NODE, HOST_MEMORY, DISK_FULL, STORAGE, PREEMPTED,
    GPU_OUT_OF_MEMORY, GPU_FAULT, NETWORK, EXCEPTION, CRASHED, KILLED, HUNG, COLLECTIVE_TIMEOUT,
    COLLECTIVE_ERROR, FAILED,
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in ALL}
# Those that report such a failure are the ones that it left alive.
TOLD_BY_OTHERS = frozenset({NODE.name, PREEMPTED.name})

# Xids that say what was wrong with the job's GPU. Others (45 clears up after another error, 63 and
# 92 count corrected ones, 154 names an action) accompany a failure.
_XIDS: dict[int, tuple[Fault, Weight]] = {
    **dict.fromkeys((13, 31, 32, 43, 69), (GPU_FAULT, Weight.FATAL)),
    **dict.fromkeys((48, 64, 94, 95, 140), (GPU_MEMORY, Weight.FATAL)),
    **dict.fromkeys((63, 92, 160), (GPU_MEMORY, Weight.HINT)),
    **dict.fromkeys((61, 62, 109, 119, 120, 143, 158), (GPU_DRIVER, Weight.FATAL)),
    **dict.fromkeys((74, 137, 144, 145, 146, 147, 148, 149, 150), (NVLINK, Weight.FATAL)),
    **dict.fromkeys((38, 46, 54, 79, 110), (GPU_LOST, Weight.FATAL)),
}


def of_xid(number: int) -> tuple[Fault, Weight]:
    """Return what an Xid says; unknown numbers are hints at the GPU."""
    return _XIDS.get(number, (GPU_DRIVER, Weight.HINT))


# Causes of one component are one class in a record that gives only a component.
_OF_COMPONENT = {
    "gpu": GPU_LOST, "hbm": GPU_MEMORY, "nvlink": NVLINK, "host": NODE, "storage": STORAGE,
    "network": NETWORK, "scheduler": PREEMPTED,
}  # fmt: skip
_LONGEST = 60


def of_record(name: str, component: str) -> Fault:
    """Return the fault of a record that names a class, a component, or none of them.

    A name that is not one of ours stays as it is; a part in it (`gpu`, `nic`) is its component.
    """
    name, component = name.strip()[:_LONGEST], component.strip()[:_LONGEST]
    known = BY_NAME.get(name.lower().replace("_", "-").replace(" ", "-"))
    if known is not None:
        return known._replace(component=component or known.component)
    if not name and component in _OF_COMPONENT:
        return Fault(component, component, FAILED.order, f"a failure of {component}")
    return Fault(name or "unknown", component or _part(name), FAILED.order, "as the log names it")


def _part(name: str) -> str:
    """Return the component that a name speaks of."""
    words = name.lower().replace("-", " ").replace("_", " ").split()
    for part, signs in (
        ("hbm", {"hbm", "hbm3", "ecc", "sram"}),
        ("nvlink", {"nvlink", "nvswitch"}),
        ("gpu", {"gpu", "xid", "cuda"}),
        ("network", {"nic", "network", "switch", "cable", "ib", "link", "nccl"}),
        ("storage", {"storage", "disk", "ssd", "nfs", "lustre", "filesystem"}),
        ("host", {"host", "node", "cpu", "psu", "dimm", "oom", "memory"}),
        ("software", {"software", "bug", "exception", "python", "code"}),
        ("scheduler", {"preempted", "preemption", "spot"}),
    ):
        if signs.intersection(words):
            return part
    return "unknown"
