"""Open a legacy checkpoint of Megatron-LM (see `megatron`)."""

from __future__ import annotations

from ftckpt.checkpoint import Topology
from ftckpt.checkpoint.rules import Rules
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.rank_files.merge import Merging
from ftckpt.formats.megatron.rank_files.parse import read_ranks, sizes
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .checkpoint import MegatronCheckpoint, MegatronLayout


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
