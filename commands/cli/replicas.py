"""What `copy` and `repair` share: how a replica is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt.operations.definition import option, switch

from .bounds import MemoryOption, RateOption, bound_memory

if TYPE_CHECKING:
    from ftckpt.api.opening import RunFlags
    from ftckpt.progress import Counter
    from ftckpt.replication.options import ReplicationOptions


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How it is carried out."""

    TITLE: ClassVar[str] = "How it is done"

    no_proof: Annotated[bool, switch("--no-proof", "Skip reading back the result.")] = False
    restart: Annotated[bool, switch("--restart", "Discard what another run to DST left.")] = False
    jobs: Annotated[
        int,
        option(
            "N",
            "Blocks in flight; 0: one a processor, 8 to or from an object store.",
            "--jobs",
            "-j",
            "--concurrency",
            min=0,
        ),
    ] = 0
    limit_rate: RateOption = ""
    max_memory: MemoryOption = "1GiB"

    def bound(self) -> None:
        """Set the memory budget of the process; before anything is opened.

        Raises:
            UsageError: it is not a size.
        """
        bound_memory(self.max_memory)

    @property
    def flags(self) -> RunFlags:
        """The flags of the Python API."""
        return {
            "no_proof": self.no_proof, "restart": self.restart, "jobs": self.jobs,
            "limit_rate": self.limit_rate,
        }  # fmt: skip

    def replication(
        self, *, reads_local: bool, writes_local: bool, counter: Counter, beside: bool = False
    ) -> ReplicationOptions:
        """Return the options of the core, with as many blocks in flight as memory allows.

        Args:
            reads_local: whether everything that is read is on this machine.
            writes_local: whether the replica is.
            counter: is told of the work.
            beside: whether files that do not belong to the checkpoint are carried too.

        Raises:
            UsageError: a rate that is none.
            NoResourceError: the memory budget does not hold one block.
        """
        from ftckpt.api.replicating import replication_options

        return replication_options(
            self.flags, near=reads_local, writes_local=writes_local, beside=beside, counter=counter
        )
