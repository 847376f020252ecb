"""Open a legacy checkpoint of Megatron-LM (see `megatron`).

An opened legacy Megatron checkpoint, and what a writer needs to know of its job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Topology
from ftckpt.checkpoint.sharding import Rules
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.stages import Counts, Stage
from ftckpt.formats.megatron.rank_files.grid import WEIGHTS, Arguments, Coordinate, MegatronGrid
from ftckpt.formats.megatron.rank_files.parse import read_ranks, sizes
from ftckpt.formats.megatron.rank_files.tensors import Merging
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.formats.ranks.parse_files import read_stream
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc


class MegatronLayout(NamedTuple):
    """How the job was laid out."""

    grid: MegatronGrid  # sizes of the groups of ranks
    chunks: int  # model chunks a pipeline stage; 1 without interleaving
    args: Arguments  # the job's arguments, inert
    layers: Counts  # how many layers each chunk of each stage has
    # the number in the model of the first layer of each stack on each stage
    firsts: Mapping[Stage, Mapping[str, int]]
    experts: int  # how many experts each expert-parallel rank holds; 0 without experts


@dataclass(kw_only=True, repr=False)
class MegatronCheckpoint(RanksCheckpoint):
    """An opened legacy Megatron checkpoint; `ranks` numbers its directories in their order."""

    format: ClassVar[str] = "megatron"
    groups_number_states: ClassVar[bool] = False

    layout: MegatronLayout  # how the job was laid out

    @property
    def saving_ranks(self) -> int:
        """Ranks that save a state of their own: the first data-parallel one of each model part."""
        return len(self.layout.grid.directories())

    def stream(self, at: Coordinate, file: str = WEIGHTS) -> TorchStream:
        """Parse one file of one rank again: trees are not kept.

        Args:
            at: the rank.
            file: its name in the rank's directory.

        Raises:
            CorruptError, UnsafeError: the file is missing, damaged or hostile.
        """
        return read_stream(self.source, f"{self.layout.grid.name(at)}/{file}")

    def tree(self, at: Coordinate) -> Mapping[Any, Any]:
        """Return all that one rank's `model_optim_rng.pt` holds, as inert data.

        Its model chunks give the order of the rank's parameters (`tensor_names.parameters`).

        Raises:
            CorruptError, UnsafeError: the file is missing, damaged or hostile.
        """
        found: Mapping[Any, Any] = self.stream(at).tree
        return found


def open_megatron(source: Source, rules: Rules | None) -> MegatronCheckpoint:
    """Parse the pickles of all ranks and put their tensors together (see `Megatron.open`)."""
    with no_gc():  # many small records live until the end: collecting them costs triple
        read = read_ranks(source)
        held = (local for rank in read.ranks for local in rank.held)
        merging = Merging(read, rules_of(read.args, held, rules))
        return MegatronCheckpoint(
            source=source,
            tensors=merging.tensors,
            objects=merging.objects,
            aliases=merging.aliases,
            topology=Topology(
                world_size=read.args.count("world_size") or None,
                tp=read.grid.tp,
                pp=read.grid.pp,
                dp=read.grid.dp,
                ep=read.grid.ep,
                evidence=f"the pickled arguments ({sizes(read.grid)})",
            ),
            notes=read.notes + merging.notes,
            files=sorted(read.members),
            names=merging.names,
            open_findings=read.found + merging.found,
            counters=merging.counters,
            streams=read.streams,
            ranks=read.numbers,
            elsewhere=merging.elsewhere,
            layout=MegatronLayout(
                grid=read.grid,
                chunks=merging.chunks,
                args=read.args,
                layers=merging.counts,
                firsts=merging.firsts,
                experts=merging.experts,
            ),
        )
