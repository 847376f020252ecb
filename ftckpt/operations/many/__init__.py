"""Divide an operation's work among machines: which share is done here, and who finishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from ftckpt.errors import ExitCode
from ftckpt.observer import Observer
from ftckpt.operations.definition import option, switch
from ftckpt.reports import IF_ANY, UNSAID
from ftckpt.storage import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.parts.plan import ShareRecord


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Which share of the work is done here, and who finishes; by default all of it.

    Attributes:
        line: the command line of the whole, without the program, for the machines of a cluster.
    """

    TITLE: ClassVar[str] = "Many machines"
    RARE: ClassVar[bool] = True

    part: Annotated[
        str,
        option(
            "I/N",
            "Do part I of N, from 0; auto, or auto/N: as Slurm, Kubernetes, torchrun or MPI"
            " number this process.",
        ),
    ] = ""
    parts: Annotated[
        str,
        option(
            "PLACE",
            "Where parts leave their records; else .ftckpt/parts beside the checkpoint.",
        ),
    ] = ""
    finish: Annotated[
        bool, switch("--finish", "Give the answer of the whole, from all records.")
    ] = False
    finish_last: Annotated[
        bool, switch("--finish-last", "After its part, the last one finishes.")
    ] = False

    cluster: Annotated[
        str,
        option(
            "WHERE",
            "Do all parts by a cluster: ADDRESS of a Dask scheduler, local:N, slurm:jobs=4,…,"
            " ray://…",
        ),
    ] = ""
    shares: Annotated[int, option("N", "Parts of --cluster; 0: some for each worker.", min=0)] = 0
    line: tuple[str, ...] = ()

    @property
    def asked(self) -> bool:
        """Whether the work is divided at all."""
        return bool(self.part or self.finish or self.finish_last or self.cluster or self.shares)


ALONE = Machines()


class Session(NamedTuple):
    """One run of an operation that is divided.

    Attributes:
        verb: of the operation.
        division: what is done here.
        stores: how to reach object stores.
        on: is told of the work.
    """

    verb: str
    division: Machines
    stores: StoreOptions
    on: Observer


class PartDone(NamedTuple):
    """What a part did.

    Attributes:
        number: of the part, from 0.
        of: how many there are.
        plan: digest of what is divided.
        record: where it is written what was done.
        tasks: number of them.
        errors: that were found.
        host: that did it.
        done_before: whether it was done before this run.
    """

    number: int
    of: int
    plan: str
    record: str
    tasks: int
    errors: int
    host: str
    done_before: bool


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What this process did of an operation that is divided: nothing is said of the whole.

    Attributes:
        part: what it did.
        bytes_read: by it.
        bytes: that it wrote, where it writes.
        seconds: that it took; by stage where it writes.
        code: what its findings cause.
        made: the record.
    """

    part: PartDone
    bytes_read: int | None = field(default=None, metadata=IF_ANY)
    bytes: int | None = field(default=None, metadata=IF_ANY)
    seconds: float | Mapping[str, float]
    code: ExitCode = field(metadata=UNSAID)
    made: ShareRecord = field(metadata=UNSAID)


# What an operation returns of the whole; the operations know its class.
Whole = Any
