"""Open a checkpoint of DeepSpeed's ZeRO and pipelines (see `deepspeed`)."""

from __future__ import annotations

from ftckpt.checkpoint.rules import Rules
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.formats.deepspeed.zero.stage_zero import PlainOptimizer
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .checkpoint import DeepSpeedCheckpoint
from .names import DeepSpeedFile, FileRole, deepspeed_files, refuse_unread
from .parse_files import DeepSpeedParser
from .states import read_optimizer
from .tensors import Partitions, rank_tensor
from .weights import Weights


def open_deepspeed(source: Source, rules: Rules | None) -> DeepSpeedCheckpoint:
    """Parse the pickles of all files and put their tensors together (see `DeepSpeed.open`)."""
    if not deepspeed_files(source.entries):
        raise NotFoundError(f"{source.url} holds none of DeepSpeed's files")
    refuse_unread(source.entries)
    with no_gc():  # many small records live until the end: collecting them costs triple
        return _open(DeepSpeedParser(source, rules, tuple(FileRole)))


def _open(opening: DeepSpeedParser) -> DeepSpeedCheckpoint:
    weights = opening.weights()
    partitions = _partitions(opening, weights)
    plain = PlainOptimizer(weights.placed, opening.grid, opening.found.append)
    for state in opening.models.values():
        plain.add(state)
    made = [*partitions.tensors(), *plain.tensors()]
    made += (rank_tensor(name, flat) for name, flat in (*partitions.extra, *plain.extra))
    steps = [*partitions.steps(), *plain.steps]
    return opening.checkpoint(DeepSpeedCheckpoint, weights, made, steps=steps)


def _partitions(opening: DeepSpeedParser, weights: Weights) -> Partitions:
    grid = opening.grid
    partitions = Partitions(weights.placed, grid, opening.found.append)

    def optimizer(file: DeepSpeedFile, stream: TorchStream) -> None:
        state = read_optimizer(file, stream.tree, stream.storages)
        opening.keep_objects(file, stream)
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

    opening.read(opening.of_role(FileRole.OPTIMIZER), optimizer)
    return partitions
