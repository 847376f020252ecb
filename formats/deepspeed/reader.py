"""Open a checkpoint of DeepSpeed's ZeRO and pipelines (see `deepspeed`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import CorruptError, NotFoundError
from ftckpt.formats.deepspeed.zero.stage_zero import PlainOptimizer
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

from .autoep import group_ep
from .checkpoint import DeepSpeedCheckpoint
from .names import DeepSpeedFile, FileRole, deepspeed_files, refuse_unread
from .parse_files import DeepSpeedParser
from .states import OptimizerState, read_expert_optimizer, read_optimizer
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
    plain = PlainOptimizer(weights, opening.grid, opening.experts, opening.found.append)
    for state in opening.models.values():
        plain.add(state)

    def expert_optimizer(file: DeepSpeedFile, stream: TorchStream) -> None:
        state = read_expert_optimizer(file, stream.tree)
        opening.keep_objects(file, stream)
        model = opening.models.get(file.mp)
        if model is not None:  # else its file is missing or damaged, which is reported
            plain.add(replace(model, file=file, storages=stream.storages, optimizer=state))

    opening.read(opening.of_role(FileRole.EXPERT_OPTIMIZER), expert_optimizer)
    made = [*partitions.tensors(), *plain.tensors()]
    made += (rank_tensor(name, flat) for name, flat in (*partitions.extra, *plain.extra))
    steps = [*partitions.steps(), *plain.steps]
    return opening.checkpoint(DeepSpeedCheckpoint, weights, made, steps=steps)


def _partitions(opening: DeepSpeedParser, weights: Weights) -> Partitions:
    grid, experts = opening.grid, opening.experts
    partitions = Partitions(weights.placed, grid, experts, opening.found.append)
    first: OptimizerState | None = None

    def optimizer(file: DeepSpeedFile, stream: TorchStream) -> None:
        state = read_optimizer(file, stream.tree, stream.storages)
        nonlocal first
        first = first or state
        other = first.other_optimizer(state)
        if other:
            raise CorruptError(
                f"{file.path} is of another optimizer than {first.file.path}: {other}",
                kind="bad-metadata",
                file=file.path,
            )
        opening.keep_objects(file, stream)
        model = opening.models.get(file.mp)
        groups = () if model is None or state.stage == 3 else model.groups
        order = experts.ordered(state, groups)
        counts = [experts.partition(groups[n], file.dp or 0).ranks for n in order]
        for has, needs in zip_longest(state.partitions, counts, fillvalue=grid.dp):
            if has != needs:
                raise CorruptError(
                    f"{file.path} is one of {has} partitions, {opening.head.file.path} says"
                    f" {needs}",
                    kind="world-size",
                    file=file.path,
                )
        for group, count in zip(state.groups, counts, strict=False):
            ep = group_ep(group)
            if ep is not None and ep * count != grid.dp:
                raise CorruptError(
                    f"{file.path} says that {ep} ranks share its experts, the parameters that"
                    f" {opening.head.file.path} lists are those of {grid.dp // count}",
                    kind="world-size",
                    file=file.path,
                )
        opening.stage = state.stage
        opening.gaps.setdefault(file.mp, state.gaps)
        if model is not None:  # else its file is missing or damaged, which is reported
            partitions.add(state, model)

    opening.read(opening.of_role(FileRole.OPTIMIZER), optimizer)
    return partitions
