"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, tensor parallelism.

The unit is one tag (`global_step1000`). Weights in the compute type are the model's; the flat fp32
partitions are its masters, the moments lie beside them. Stage 3 stores no weights of their own: the
masters are what there is. Nothing marks the end of a save, so a missing file is a defect of the set
and no proof of a crash.

Names are those of the module's `state_dict`, to which DeepSpeed adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.checkpoint import CommitState
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.registry import Listing, Recognition
from ftckpt.rules import Rules
from ftckpt.source import Source

from .deepspeed_checkpoint import DeepSpeedCheckpoint
from .deepspeed_files import ZERO, DeepSpeedFile, Role, deepspeed_files, refuse_unread
from .deepspeed_opening import Opening
from .deepspeed_plain import PlainOptimizer
from .deepspeed_states import read_optimizer
from .deepspeed_tensors import Partitions, rank_tensor
from .deepspeed_weights import Weights
from .torch_stream import TorchStream
from .unpickle import no_gc


@dataclass(frozen=True)
class DeepSpeed:
    """The format `deepspeed` (see the module's docstring).

    Attributes:
        rules: how parameters are cut over tensor-parallel ranks; asked before what the checkpoint
            records and before the names of Megatron-DeepSpeed.
    """

    rules: Rules | None = None
    name = "deepspeed"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by the names of its files; a universal checkpoint has some of them too."""
        if listing.single or ZERO in listing.directories:
            return None
        files = deepspeed_files(listing.files)
        if not files:
            return None
        return Recognition(self.name, f"has {files[0].path}", CommitState.NO_MARKER)

    def open(self, source: Source) -> DeepSpeedCheckpoint:
        """Parse the pickles of all files and put their tensors together.

        Raises:
            NotFoundError: none of DeepSpeed's files is there.
            CorruptError: no file says which parameters there are; other damage is a finding.
            UnsafeError: a file is hostile.
            UnsupportedError: experts, offloaded tensors, or a cut that no rule explains.
        """
        if not deepspeed_files(source.entries):
            raise NotFoundError(f"{source.url} holds none of DeepSpeed's files")
        refuse_unread(source.entries)
        with no_gc():  # many small records live until the end: collecting them costs triple
            return _open(Opening(source, self.rules, tuple(Role)))


def _open(opening: Opening) -> DeepSpeedCheckpoint:
    weights = opening.weights()
    partitions = _partitions(opening, weights)
    plain = PlainOptimizer(weights.placed, opening.grid, opening.found.append)
    for state in opening.models.values():
        plain.add(state)
    made = [*partitions.tensors(), *plain.tensors()]
    made += (rank_tensor(name, flat) for name, flat in (*partitions.extra, *plain.extra))
    steps = [*partitions.steps(), *plain.steps]
    return opening.checkpoint(DeepSpeedCheckpoint, weights, made, steps=steps)


def _partitions(opening: Opening, weights: Weights) -> Partitions:
    grid = opening.grid
    partitions = Partitions(weights.placed, grid, opening.found.append)

    def optimizer(file: DeepSpeedFile, stream: TorchStream) -> None:
        state = read_optimizer(file, stream.tree, stream.storages)
        opening.keep_rest(file, stream)
        odd = [n for n in state.partitions if n != grid.dp]
        if odd:
            raise CorruptError(
                f"{file.path} is one of {odd[0]} partitions, {opening.head.file.path} says"
                f" {grid.dp}",
                kind="world-size",
                file=file.path,
            )
        opening.stage = state.stage
        opening.gaps.setdefault(file.mp, state.gaps)
        model = opening.models.get(file.mp)
        if model is not None:  # else its file is missing or damaged, which is reported
            partitions.add(state, model)

    opening.read(opening.of_role(Role.OPTIMIZER), optimizer)
    return partitions
