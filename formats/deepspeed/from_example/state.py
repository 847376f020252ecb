"""Put the source's values into the places of the state in an example.

What belongs to the job and not to its progress stays the example's: the configuration, the version,
how parameters are cut, a loss scale that does not move. So do settings that the source does not
know of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.job.assign_to_ranks import RestOfRole
from ftckpt.formats.deepspeed.job.plan import JobPlan
from ftckpt.formats.deepspeed.job.schedules import SCHEDULER, regrouped
from ftckpt.formats.deepspeed.job.shares import GROUPS, FileShare, FileState, PartitionRank
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole
from ftckpt.formats.deepspeed.states import BASES, INFO, MODULE, OPTIMIZER
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content

_CONFIGURED = ("ds_config", "ds_version")
# Labels of state that the example decides.
DECIDED = frozenset({
    INFO, *_CONFIGURED, *(f"optimizer.{key}" for key in _CONFIGURED), f"optimizer.{GROUPS}",
})  # fmt: skip
_MOVES = "optimizer.dynamic_loss_scale"
_SCALING = frozenset({_MOVES, "optimizer.loss_scaler", "optimizer.overflow"})
# What the engine asks a model's file for, whatever its trainer has.
_COUNTERS = ("skipped_steps", "global_steps")

# What Megatron-DeepSpeed's arguments say of the ranks; it stops where that is not the job's.
_ARGUMENTS = "args"
_SIZES = frozenset({
    "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "data_parallel_size", "sequence_parallel_size",
    "ds_sequence_parallel_size", "world_size", "rank", "local_rank", "padded_vocab_size",
})  # fmt: skip
Groups = list[dict[str, Any]]


def decided(content: Content, example: Checkpoint) -> frozenset[str]:
    """Return the labels of state that the example decides.

    A loss scale that moves goes on where the source's was. One that does not is a setting: that of
    a bf16 job would let the gradients of an fp16 job vanish.
    """
    return DECIDED if all(_scales_move(content, example)) else DECIDED | _SCALING


def scales_otherwise(content: Content, example: Checkpoint) -> bool:
    """Say whether the loss scale of one of two moves, and the other's does not."""
    own, its = _scales_move(content, example)
    return _MOVES in content.objects and _MOVES in example.objects and own is not its


def _scales_move(content: Content, example: Checkpoint) -> tuple[bool, bool]:
    given = (content.objects, content.checkpoint), (example.objects, example)
    own, its = (_MOVES in held and of.load_object(_MOVES) is True for held, of in given)
    return own, its


class ModelsDealer:
    """Deals out the other state of the model's files (fits `deepspeed_shares.Dealer`).

    Args:
        plan: of the example.
        rest: of the source.
        source: where a file's place lies in the source, given that and its rank.
        step: of the source.
        origins: for a model-parallel rank, the numbers that its parameter groups had in the source.
    """

    def __init__(
        self,
        plan: JobPlan,
        rest: RestOfRole,
        source: Callable[[PartitionRank, int], PartitionRank],
        step: int | None,
        origins: Callable[[int], Sequence[int | None]],
    ) -> None:
        self._plan, self._rest, self._source, self._origins = plan, rest, source, origins
        self._files = _by_place(plan, FileRole.MODEL)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        if step is not None:
            self._counters["global_steps"] = step
        self.notes: list[Finding] = []

    def deal(self, place: PartitionRank, rank: int, *, first: bool) -> FileShare:
        """Return what the file of one place of the result holds; see `Dealer`."""
        share = self._rest.deal(self._source(place, rank), rank, first=first)
        example = FileState.of(self._files[place], self._plan.checkpoint)
        fields: dict[Path, Any] = {(key,): value for key, value in self._counters.items()}
        fields |= {path: None for path, value in example.fields.items() if value is None}
        fields |= share.fields
        fields |= {
            p: _plain(p, v) for p, v in example.fields.items() if example.labels[p] in DECIDED
        }
        arguments = _arguments(example.fields.get((_ARGUMENTS,)), fields.get((_ARGUMENTS,)))
        if arguments is not None:
            fields[_ARGUMENTS,] = arguments
            self._rest.same.discard(_ARGUMENTS if first else f"rank_{rank}.{_ARGUMENTS}")
        scheduler = (SCHEDULER,)
        if scheduler in share.fields:
            made = regrouped(share.fields[scheduler], self._origins(place.mp))
            if made is not share.fields[scheduler]:
                fields[scheduler] = made
                self._rest.same.discard(SCHEDULER if first else f"rank_{rank}.{SCHEDULER}")
        if first and example.fields.get(scheduler) and not fields.get(scheduler):
            fields.pop(scheduler, None)
            what = f"the source has no {SCHEDULER}: load with load_lr_scheduler_states=False"
            self.notes.append(finding("note", what))
        if first:
            self._remark({example.labels[path] for path in example.fields.keys() - fields.keys()})
        return FileShare(fields, share.storages, (), example.layout)

    def _remark(self, lacking: Set[str]) -> None:
        if more := sorted(lacking - {SCHEDULER}):
            what = f"the source has no {', '.join(more)}, which the example's model files have"
            self.notes.append(finding("note", what))

    def settle(self) -> None:
        """Say what has no place, after everything was dealt."""
        self._rest.settle()


class OptimizersDealer:
    """Deals out the other state of the optimizer's files (fits `deepspeed_shares.Dealer`).

    Args:
        plan: of the example.
        rest: of the source.
        source: where a file's place lies in the source, given that and its rank.
        groups: the settings of the parameter groups of a model-parallel rank, given the example's.
    """

    def __init__(
        self,
        plan: JobPlan,
        rest: RestOfRole,
        source: Callable[[PartitionRank, int], PartitionRank],
        groups: Callable[[int, Groups], Groups],
    ) -> None:
        self._plan, self._rest, self._source, self._groups = plan, rest, source, groups
        self._files = _by_place(plan, FileRole.OPTIMIZER)

    def deal(self, place: PartitionRank, rank: int, *, first: bool) -> FileShare:
        """Return what the file of one place of the result holds; see `Dealer`."""
        share = self._rest.deal(self._source(place, rank), rank, first=first)
        state = FileState.of(self._files[place], self._plan.checkpoint)
        example = FileShare(state.fields, {}, state.at)
        fields: dict[Path, Any] = {}
        for at, own, theirs in (
            ((), example.outer, share.outer),
            ((OPTIMIZER,), example.inner, share.inner),
            ((OPTIMIZER, BASES[0]), example.base, share.base),
        ):
            kept = {key: _plain((key,), own[key]) for key in own if key not in theirs}
            fields |= {(*at, key): value for key, value in {**kept, **theirs}.items()}
        groups: Path = (OPTIMIZER, BASES[0], GROUPS)
        if groups in fields:
            fields[groups] = self._groups(place.mp, fields[groups])
        return FileShare(fields, share.storages, (OPTIMIZER,))

    def settle(self) -> None:
        """Say what has no place, after everything was dealt."""
        self._rest.settle()


def leave_sizes(state: FileState, plan: JobPlan) -> None:
    """Take from a state of the source what the example's arguments say in place of its own."""
    record = _record(state.fields.get((_ARGUMENTS,)))
    if record is not None and _ARGUMENTS in plan.checkpoint.objects:
        record.state = {key: value for key, value in record.state.items() if key not in _SIZES}


def leave_modules(state: FileState) -> list[str]:
    """Take a module's extra state from a state of the source; return the names of what it was."""
    paths = [path for path in state.fields if path[0] == MODULE and path in state.names]
    names = [state.names[path] for path in paths]
    for path in paths:
        state.forget(path)
    return names


def _record(value: Any) -> Inert | None:
    """Return arguments as the record that they are; None where they are none."""
    found = value.value if isinstance(value, CopiedTree) else value
    return found if isinstance(found, Inert) and isinstance(found.state, dict) else None


def _arguments(example: Any, source: Any) -> Inert | None:
    """Return the source's arguments with the example's sizes; None where one has none.

    The example's record is changed in place: its file is read anew for every use.
    """
    ours, theirs = _record(source), _record(example)
    if ours is None or theirs is None:
        return None
    sizes = {key: value for key, value in theirs.state.items() if key in _SIZES}
    theirs.state = {**ours.state, **sizes}
    return theirs


def _by_place(plan: JobPlan, role: FileRole) -> Mapping[PartitionRank, DeepSpeedFile]:
    return {PartitionRank(file.mp, file.dp or 0): file for file in plan.source.files[role]}


def _plain(path: Path, value: Any) -> Any:
    """Return a value of the example, which holds no tensor.

    Raises:
        UnsupportedError: it does.
    """
    if any(isinstance(leaf, TensorRef) for _, leaf in leaves(value)):
        raise UnsupportedError(
            f"{'.'.join(map(str, path))} of the example holds a tensor, of which the source has"
            " no values"
        )
    return value
