"""Read the ranks of a legacy Megatron source for a writer: trees, parameters, names.

The files of one tensor rank show all that is the same on the others: the order of parameters,
the groups of the optimizer, the state that belongs to no rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from ftckpt.formats.torch_files.stream import TorchStream

from .grid import OPTIMIZER, Coordinate
from .tensor_names import LocalTensor, global_name, local_tensors, parameters, tied_to


class NamedTensor(NamedTuple):
    """A tensor of a rank's file and its name in the whole model (the embedding's for a copy)."""

    local: LocalTensor
    weight: str


class FirstRanks:
    """The files of the first tensor rank of each stage and expert rank; each read once."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.layout = checkpoint.layout
        self.tied = not self.layout.args.flag("untie_embeddings_and_output_weights")
        self._streams: dict[tuple[Coordinate, str], TorchStream] = {}

    def coordinates(self) -> list[Coordinate]:
        """Return whose files these are: those of the first expert rank before others."""
        found: dict[tuple[int, int], Coordinate] = {}
        for at in self.layout.grid.directories():  # tensor ranks in their order
            found.setdefault((at.ep, at.pp), at)
        return [found[place] for place in sorted(found)]

    def stream(self, at: Coordinate) -> TorchStream:
        """Return `model_optim_rng.pt` of one of them.

        Raises:
            CorruptError, UnsafeError: it is missing, damaged or hostile.
        """
        if (at, "") not in self._streams:
            self._streams[at, ""] = self.checkpoint.stream(at)
        return self._streams[at, ""]

    def distributed(self, at: Coordinate) -> TorchStream | None:
        """Return `distrib_optim.pt` of one of them; None where there is none.

        Raises:
            CorruptError, UnsafeError: it is damaged or hostile.
        """
        path = f"{self.layout.grid.name(at)}/{OPTIMIZER}"
        if path not in self.checkpoint.source.entries:
            return None
        if (at, OPTIMIZER) not in self._streams:
            self._streams[at, OPTIMIZER] = self.checkpoint.stream(at, OPTIMIZER)
        return self._streams[at, OPTIMIZER]

    def weight(self, at: Coordinate, chunk: int, name: str) -> tuple[str, bool]:
        """Return the name in the whole model of what a file calls `name`.

        Returns:
            For a copy of the embedding on the last stage its own name, and True.
        """
        firsts = self.layout.firsts[Stage(at.pp, chunk)]
        found = global_name(name, firsts, at.ep * self.layout.experts)
        return found, self.tied and at.pp > 0 and tied_to(found) is not None

    def held(self, at: Coordinate) -> Iterator[NamedTensor]:
        """Yield the model's tensors in one file, in order.

        Raises:
            UnsupportedError: a tensor that hides its elements.
        """
        for local in local_tensors(self.stream(at).tree, 0)[0]:
            name, copy = self.weight(at, local.chunk, local.name)
            yield NamedTensor(local, (tied_to(name) or name) if copy else name)

    def locals(self) -> Iterator[LocalTensor]:
        """Yield the model's tensors in all of these files."""
        return (named.local for at in self.coordinates() for named in self.held(at))

    def parameters(self, at: Coordinate) -> list[NamedTensor]:
        """Return the parameters in one file, in the order in which optimizers number them."""
        named = {(n.local.chunk, n.local.name): n for n in self.held(at)}
        found = parameters(n.local for n in named.values())
        return [named[local.chunk, local.name] for local in found]
