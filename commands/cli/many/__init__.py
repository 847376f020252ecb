"""The options of verbs whose work several machines can share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class ManyOptions:
    """Which share is done here, and who finishes."""

    TITLE: ClassVar[str] = "Many machines"

    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="I/N",
            help="Do part I of N, from 0; auto, or auto/N: as Slurm, Kubernetes, torchrun or MPI"
            " number this process.",
        ),
    ] = ""
    parts: Annotated[
        str,
        typer.Option(
            "--parts",
            metavar="PLACE",
            help="Where parts leave their records; else .ftckpt/parts beside the checkpoint.",
        ),
    ] = ""
    finish: Annotated[
        bool, typer.Option("--finish", help="Give the answer of the whole, from all records.")
    ] = False
    finish_last: Annotated[
        bool, typer.Option("--finish-last", help="After its part, the last one finishes.")
    ] = False

    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="WHERE",
            help="Do all parts by a cluster: ADDRESS of a Dask scheduler, local:N, slurm:jobs=4,…,"
            " ray://…",
        ),
    ] = ""
    shares: Annotated[
        int,
        typer.Option(
            "--shares", metavar="N", min=0, help="Parts of --cluster; 0: some for each worker."
        ),
    ] = 0

    @property
    def asked(self) -> bool:
        """Whether the work is divided at all."""
        return bool(self.part or self.finish or self.finish_last or self.cluster or self.shares)
