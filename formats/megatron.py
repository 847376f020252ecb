"""Megatron-LM's legacy checkpoints: one directory a tensor, pipeline and expert rank.

    iter_0000100/mp_rank_00_000/model_optim_rng.pt     weights, optimizer, RNG, arguments
                                distrib_optim.pt       the distributed optimizer's state

Every tensor is read as the whole model's: layers and experts have the model's numbers, and each
rank's part is boxes of the whole tensor. Nothing in the directory marks the end of a save; the
root's `latest_checkpointed_iteration.txt` points to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.checkpoint import CommitState, Topology
from ftckpt.registry import Listing, Recognition
from ftckpt.rules import Rules
from ftckpt.source import Source

from .megatron_checkpoint import Layout, MegatronCheckpoint
from .megatron_merging import Merging
from .megatron_ranks import directory_ranks
from .megatron_reading import read_ranks, sizes
from .megatron_rules import rules_of
from .unpickle import no_gc


@dataclass(frozen=True)
class Megatron:
    """Legacy Megatron (fits `ftckpt.registry.Format`).

    Attributes:
        rules: how tensors are cut; asked before the built-in table.
    """

    rules: Rules | None = None
    name: str = "megatron"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether directories of ranks lie in the listing."""
        if listing.single:
            return None
        first = min((d for d in listing.directories if directory_ranks(d)), default="")
        if not first:
            return None
        return Recognition(self.name, f"has {first}/", CommitState.NO_MARKER)

    def open(self, source: Source) -> MegatronCheckpoint:
        """Parse the pickles of all ranks and put their tensors together.

        Raises:
            IncompleteError: no rank has a file.
            CorruptError: no rank's file can be parsed; damage of some is a finding of `check`.
            UnsafeError: a file is hostile.
            UnsupportedError: a checkpoint_version below 2.0, names of ranks that no arguments
                explain, quantised weights, or tensors that are cut and that no rule knows.
        """
        with no_gc():  # many small records live until the end: collecting them costs triple
            read = read_ranks(source)
            built_in = rules_of(read.args, (local for rank in read.ranks for local in rank.held))
            merging = Merging(read, self.rules.before(built_in) if self.rules else built_in)
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
                found=read.found + merging.found,
                counters=merging.counters,
                streams=read.streams,
                ranks=read.numbers,
                elsewhere=merging.elsewhere,
                layout=Layout(
                    grid=read.grid,
                    chunks=merging.chunks,
                    args=read.args,
                    layers=merging.counts,
                    firsts=merging.firsts,
                    experts=merging.experts,
                ),
            )
