"""An opened legacy Megatron checkpoint, and what a writer needs to know of its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from .megatron_ranks import WEIGHTS, Arguments, Coordinate, Grid
from .megatron_stages import Counts
from .rank_checkpoint import RanksCheckpoint
from .rank_reading import read_stream


class Layout(NamedTuple):
    """How the job was laid out.

    Attributes:
        grid: sizes of the groups of ranks.
        chunks: model chunks a pipeline stage; 1 without interleaving.
        args: the job's arguments, inert.
        layers: how many layers each chunk of each stage has.
    """

    grid: Grid
    chunks: int
    args: Arguments
    layers: Counts


@dataclass(kw_only=True)
class MegatronCheckpoint(RanksCheckpoint):
    """An opened legacy Megatron checkpoint; `ranks` numbers its directories in their order.

    Attributes:
        layout: how the job was laid out.
    """

    format: ClassVar[str] = "megatron"

    layout: Layout

    def tree(self, at: Coordinate) -> Mapping[Any, Any]:
        """Return all that one rank's `model_optim_rng.pt` holds, as inert data.

        Its model chunks give the order of the rank's parameters (`megatron_names.parameters`).

        Raises:
            CorruptError, UnsafeError: the file is missing, damaged or hostile.
        """
        path = f"{self.layout.grid.name(at)}/{WEIGHTS}"
        found: Mapping[Any, Any] = read_stream(self.source, path).tree
        return found
