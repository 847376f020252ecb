"""The options of verbs whose work several machines can share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ftckpt.operations.definition import option, switch


@dataclass(frozen=True, kw_only=True)
class ManyOptions:
    """Which share is done here, and who finishes."""

    TITLE: ClassVar[str] = "Many machines"

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

    @property
    def asked(self) -> bool:
        """Whether the work is divided at all."""
        return bool(self.part or self.finish or self.finish_last or self.cluster or self.shares)
