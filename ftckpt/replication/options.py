"""Options of making replicas."""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.workers import ALONE, Work


@dataclass(frozen=True)
class ReplicationOptions:
    """How a copy or a repair is carried out.

    Attributes:
        work: a thread for each block in flight; its counter is told of bytes read, carried and
            proven.
        proof: whether what was written is read back and compared before it is visible.
        restart: forget what earlier runs have left at the destination, and build it anew.
        beside: carry the files too that lie in the directory and do not belong to the checkpoint.
    """

    work: Work = ALONE
    proof: bool = True
    restart: bool = False
    beside: bool = False
