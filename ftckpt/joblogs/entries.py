"""What a log says, one entry for each thing: the common language of all readers."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple


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
