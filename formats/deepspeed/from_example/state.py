"""Put the source's values into the places of the state in an example.

What belongs to the job and not to its progress stays the example's: the configuration, the version,
how parameters are cut, a loss scale that does not move. So do settings that the source does not
know of.

Lay out a source of any format as an example of a DeepSpeed job is laid out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ftckpt.checkpoint import Checkpoint, Kind, tensor_key
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.files import JobFiles
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid
from ftckpt.formats.deepspeed.job import STEP, DeepSpeedJob
from ftckpt.formats.deepspeed.job.rank_states import (
    GROUPS,
    FileState,
    PartitionRank,
    RoleStates,
    read_states,
)
from ftckpt.formats.deepspeed.job.read import ParameterSettings, read_job, without_params
from ftckpt.formats.deepspeed.job.state_from_other_format import OtherFormatState
from ftckpt.formats.deepspeed.model.files import LayerStates
from ftckpt.formats.deepspeed.names import FileRole
from ftckpt.formats.deepspeed.states import BASES, INFO, MODULE, OPTIMIZER
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest

from .fit import FittedContent

_CONFIGURED = ("ds_config", "ds_version")
# Labels of state that the example decides.
OF_EXAMPLE = frozenset({
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

# torch's schedulers have lists of one value a group, which no name ties to a group: in another
# order each group would get another's learning rate, without an error (`optim/lr_scheduler.py` of
# torch 2.13). DeepSpeed's own schedulers keep no such list.
SCHEDULER = "lr_scheduler"
_OF_GROUPS = frozenset({
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
})  # fmt: skip
_INNER = "_schedulers"


def example_labels(content: Content, example: Checkpoint) -> frozenset[str]:
    """Return the labels of state that the example decides.

    A loss scale that moves goes on where the source's was. One that does not is a setting: that of
    a bf16 job would let the gradients of an fp16 job vanish.
    """
    return OF_EXAMPLE if all(_scales_move(content, example)) else OF_EXAMPLE | _SCALING


def scales_otherwise(content: Content, example: Checkpoint) -> bool:
    """Say whether the loss scale of one of two moves, and the other's does not."""
    own, its = _scales_move(content, example)
    return _MOVES in content.objects and _MOVES in example.objects and own is not its


def _scales_move(content: Content, example: Checkpoint) -> tuple[bool, bool]:
    given = (content.objects, content.checkpoint), (example.objects, example)
    own, its = (_MOVES in held and of.load_object(_MOVES) is True for held, of in given)
    return own, its


class ExampleStates(RoleStates):
    """State of the source, in files laid out as an example's of one role.

    Args:
        content: what the result holds.
        states: of the source.
        job: of the example.
        source_place: where a file's place lies in the source, given that and its rank.
    """

    role: ClassVar[FileRole]

    def __init__(
        self,
        content: Content,
        states: Iterable[FileState],
        job: DeepSpeedJob,
        source_place: Callable[[PartitionRank, int], PartitionRank],
    ) -> None:
        super().__init__(content, states)
        self._job, self._source_place = job, source_place
        self._files = {PartitionRank(f.mp, f.dp or 0): f for f in job.files[self.role]}

    def of_source(self, place: PartitionRank, rank: int, *, first: bool) -> FileState:
        """Return what the source has for a file of the result."""
        return super().assign(self._source_place(place, rank), rank, first=first)

    def of_example(self, place: PartitionRank) -> FileState:
        """Read the same file of the example."""
        return FileState.read(self._files[place], self._job.checkpoint)


class ModelStates(ExampleStates):
    """The state around the weights in the model's files.

    Args:
        args: of `ExampleStates`.
        step: of the source.
        origins: for a model-parallel rank, the numbers that its parameter groups had in the source.

    Attributes:
        remarks: what the user should know; it precedes `notes`.
    """

    role = FileRole.MODEL

    def __init__(
        self, *args: Any, step: int | None, origins: Callable[[int], Sequence[int | None]]
    ) -> None:
        super().__init__(*args)
        self._origins = origins
        self._counters = {**dict.fromkeys(_COUNTERS, 0), "global_steps": step or 0}
        self.remarks: list[Finding] = []
        for state in self.states.values():
            _leave_sizes(state, self._job)

    def leave_modules(self, claimed: Collection[str]) -> None:
        """Leave the modules' extra state out; what is not `claimed` elsewhere has no place."""
        names: set[str] = set()
        for state in self.states.values():
            for path in [path for path in state.fields if path[0] == MODULE]:
                if path in state.names:
                    names.add(state.names[path])
                    state.forget(path)
        self.unplaced += names - set(claimed)

    def assign(self, place: PartitionRank, rank: int, *, first: bool) -> FileState:
        """Return what the file of one place of the result holds; see `RoleStates.assign`."""
        state, example = self.of_source(place, rank, first=first), self.of_example(place)
        fields: dict[Path, Any] = {(key,): value for key, value in self._counters.items()}
        fields |= {path: None for path, value in example.fields.items() if value is None}
        fields |= state.fields
        fields |= {
            p: _without_tensors(p, v)
            for p, v in example.fields.items()
            if example.labels[p] in OF_EXAMPLE
        }
        arguments = _arguments(example.fields.get((_ARGUMENTS,)), fields.get((_ARGUMENTS,)))
        if arguments is not None:
            fields[_ARGUMENTS,] = arguments
            self.same.discard(_ARGUMENTS if first else f"rank_{rank}.{_ARGUMENTS}")
        scheduler = (SCHEDULER,)
        if scheduler in state.fields:
            made = regrouped(state.fields[scheduler], self._origins(place.mp))
            if made is not state.fields[scheduler]:
                fields[scheduler] = made
                self.same.discard(SCHEDULER if first else f"rank_{rank}.{SCHEDULER}")
        if first and example.fields.get(scheduler) and not fields.get(scheduler):
            fields.pop(scheduler, None)
            what = f"the source has no {SCHEDULER}: load with load_lr_scheduler_states=False"
            self.remarks.append(finding("note", what))
        if first:
            lacking = {example.labels[path] for path in example.fields.keys() - fields.keys()}
            if more := sorted(lacking - {SCHEDULER}):
                what = f"the source has no {', '.join(more)}, which the example's model files have"
                self.remarks.append(finding("note", what))
        return replace(state, fields=fields, at=(), layout=example.layout)


class OptimizerStates(ExampleStates):
    """The state around the partitions in the optimizer's files.

    Args:
        args: of `ExampleStates`.
        settings: gives those of a model-parallel rank's parameter groups, given the example's.
    """

    role = FileRole.OPTIMIZER

    def __init__(self, *args: Any, settings: Callable[[int, Groups], Groups]) -> None:
        super().__init__(*args)
        self._settings = settings

    def assign(self, place: PartitionRank, rank: int, *, first: bool) -> FileState:
        """Return what the file of one place of the result holds; see `RoleStates.assign`."""
        state, example = self.of_source(place, rank, first=first), self.of_example(place)
        fields: dict[Path, Any] = {}
        for at, its, own in (
            ((), example.outer, state.outer),
            ((OPTIMIZER,), example.inner, state.inner),
            ((OPTIMIZER, BASES[0]), example.base, state.base),
        ):
            kept = {key: _without_tensors((key,), its[key]) for key in its if key not in own}
            fields |= {(*at, key): value for key, value in {**kept, **own}.items()}
        groups: Path = (OPTIMIZER, BASES[0], GROUPS)
        if groups in fields:
            fields[groups] = self._settings(place.mp, fields[groups])
        return replace(state, fields=fields, at=(OPTIMIZER,))


def _leave_sizes(state: FileState, job: DeepSpeedJob) -> None:
    """Take from a state of the source what the example's arguments say in place of its own."""
    record = _record(state.fields.get((_ARGUMENTS,)))
    if record is not None and _ARGUMENTS in job.checkpoint.objects:
        record.state = {key: value for key, value in record.state.items() if key not in _SIZES}


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


def _without_tensors(path: Path, value: Any) -> Any:
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


def regrouped(state: Any, origins: Sequence[int | None]) -> Any:
    """Return a scheduler's state for other parameter groups; the same object where nothing changes.

    Args:
        state: as it was saved.
        origins: for each group of the job, the number that it had in the source, where it is known.

    Raises:
        UnsupportedError: the groups had different values, and nothing says which were whose.
    """
    if isinstance(state, CopiedTree):
        made = regrouped(state.value, origins)
        return state if made is state.value else CopiedTree(made, state.storages)
    if not isinstance(state, dict):
        return state
    found = {key: _regrouped_member(key, value, origins) for key, value in state.items()}
    same = all(found[key] is value for key, value in state.items())
    return state if same else type(state)(found)


def _regrouped_member(key: Any, value: Any, origins: Sequence[int | None]) -> Any:
    if isinstance(value, CopiedTree):
        made = _regrouped_member(key, value.value, origins)
        return value if made is value.value else CopiedTree(made, value.storages)
    if not isinstance(value, list):
        return value
    if key in _OF_GROUPS:
        return _regrouped_list(key, value, origins)
    if key != _INNER:
        return value
    inner = [regrouped(one, origins) for one in value]
    return value if all(a is b for a, b in zip(inner, value, strict=True)) else inner


def _regrouped_list(key: str, values: list[Any], origins: Sequence[int | None]) -> list[Any]:
    if not values or (len(values) == len(origins) and list(origins) == [*range(len(values))]):
        return values
    if all(value == values[0] for value in values):
        return values if len(values) == len(origins) else [values[0]] * len(origins)
    known = [origin for origin in origins if origin is not None and origin < len(values)]
    if len(known) < len(origins):
        raise UnsupportedError(
            f"{SCHEDULER} has other {key} for each parameter group of the source, and nothing says"
            " which of them the groups of the example had",
            hint=f"--drop {SCHEDULER}: load with load_lr_scheduler_states=False",
        )
    return [values[origin] for origin in known]


class ExampleJobFiles(JobFiles):
    """A source of any format, laid out as an example's job would have saved it."""

    def __init__(
        self, content: Content, example: DeepSpeedCheckpoint, request: LayoutRequest
    ) -> None:
        """Fit the source into the example.

        Raises:
            UnsupportedError: they are not of one model, or the example has no partitions.
        """
        if not example.stage:
            raise UnsupportedError(
                "ZeRO is off in the example: it has no partitions",
                hint="an example that a job with ZeRO saved",
            )
        self.asked = content
        self.job = job = replace(read_job(example), is_example=True)
        layers = LayerStates(content, job)
        self._origins = _origins(content)
        self._other_format: OtherFormatState | None = None
        if example.experts.layers:
            raise UnsupportedError(
                "an example with layers of experts: other sources are not fitted into one",
                hint="reshard a checkpoint of the same job with --dp N --ep N",
            )
        its_own = example_labels(content, example)
        own = content.checkpoint
        if isinstance(own, DeepSpeedCheckpoint) and own.stage > 0:
            source = read_job(own)
            self._grid: DeepSpeedGrid | None = own.grid
            self._settings = ParameterSettings.of(source)
            self._objects = [n for n in content.objects if n.endswith(f"optimizer.{GROUPS}")]
            if not self._objects:  # they were dropped
                self._settings.settings.clear()
        else:
            others = {n: o for n, o in content.objects.items() if n not in layers.claimed}
            self._other_format = OtherFormatState(replace(content, objects=others), its_own)
            self._grid, self._settings = None, self._other_format.parameters
            content = replace(self._other_format.content, objects=content.objects)
            self._objects = self._other_format.group_objects
        names = (name for group in job.param_groups() for name in job.members(*group))
        numbers = {name: self._numbers_of(name) for name in names}
        self._fitted = FittedContent(content, job, request, numbers)
        self._numbers = ParameterSettings(numbers=self._fitted.numbers)
        self._without: set[bool] = set()

        def states(role: FileRole) -> Iterator[FileState]:
            if self._other_format is not None:
                return self._other_format.states(role)
            assert isinstance(own, DeepSpeedCheckpoint)
            return read_states(own, source.files[role], its_own)

        fitted = self._fitted.content
        self._example_models = ModelStates(
            fitted, states(FileRole.MODEL), job, self._source_place,
            step=content.checkpoint.step, origins=self._group_origins,
        )  # fmt: skip
        if job.pipeline:  # the modules are in files of their own
            self._example_models.leave_modules(layers.claimed)
        optimizers = OptimizerStates(
            fitted, states(FileRole.OPTIMIZER), job, self._source_place,
            settings=self._groups,
        )  # fmt: skip
        super().__init__(self.asked, fitted, job, self._example_models, optimizers, layers)

    def _source_of(self, name: str) -> Sequence[str]:
        return self._origins.get(name, [name])

    def _numbers_of(self, name: str) -> dict[str, Any]:
        """Return the numbers of a parameter, its step among them where its settings have that."""
        names = self._source_of(name)
        found = self._settings.numbers_of(names)
        keys = self.asked.tensors.keys()
        apart = tensor_key("optimizer", Kind.OTHER, f"{name}.{STEP}") in keys
        if apart or tensor_key("optimizer", Kind.EXP_AVG, name) not in keys:
            return found
        known = (self._settings.settings.get(own, {}) for own in names)
        counted = [own[STEP] for own in known if STEP in own]
        return {STEP: counted[0], **found} if counted else found

    def _source_place(self, place: PartitionRank, rank: int) -> PartitionRank:
        """Return where the state of a rank lies in the source: of equal coordinates."""
        if self._grid is None:
            return PartitionRank(0, rank)
        stage, tp = divmod(place.mp, self.job.grid.tp)
        if stage < self._grid.pp and tp < self._grid.tp:
            return PartitionRank(stage * self._grid.tp + tp, place.dp)
        return PartitionRank(self._grid.mp + place.mp, place.dp)

    def _groups(self, mp: int, example: Groups) -> Groups:
        """Return the settings of a rank's parameter groups, in the order of the example's."""
        made = []
        for number, (group, _) in enumerate(zip(example, self.job.flats[mp], strict=False)):
            found = self._settings.of_group(self._members(mp, number), without_params(group))
            self._without.add(found is None)
            own = {**group, **(found or {})}
            if self.job.counts_in_settings(mp, number):
                own[STEP] = self._of_group(mp, number)[STEP]
            made.append(own)
        return made

    def _group_origins(self, mp: int) -> Sequence[int | None]:
        """Return the numbers that a rank's parameter groups had in the source, where known."""
        count, settings = len(self.job.flats[mp]), self.job.settings[mp]
        known = settings if len(settings) == count else [{}] * count
        return [
            self._settings.place_of_group(self._members(mp, number), without_params(group))
            for number, group in enumerate(known)
        ]

    def _members(self, mp: int, number: int) -> list[str]:
        """Return the parameters of a group, as the source names them."""
        return [own for name in self.job.members(mp, number) for own in self._source_of(name)]

    def numbers(self, mp: int, number: int) -> Mapping[str, Any]:
        """Return the states of a parameter group that are no tensors."""
        found = self._of_group(mp, number)
        if self.job.counts_in_settings(mp, number):
            found.pop(STEP)
        return found

    def _of_group(self, mp: int, number: int) -> dict[str, Any]:
        return self._numbers.numbers_of(self.job.members(mp, number))

    def left_out(self) -> Iterator[str]:
        """Yield what has no place besides `OtherState.unplaced`, when all files were laid out."""
        yield from self._fitted.unplaced
        if self._other_format is not None:
            yield from self._other_format.unplaced
        found = self._settings
        some = any((*found.settings.values(), *(one.settings for one in found.groups)))
        if (self._without != {False} and some) or found.unused:
            yield from self._objects

    def remarks(self) -> Iterator[Finding]:
        """Yield what the user should know, when all files were laid out."""
        what = (
            "ds_config, ds_version and universal_checkpoint_info are the example's, and so are"
            " settings that the source does not have"
        )
        yield finding("note", what)
        if scales_otherwise(self.asked, self.job.checkpoint):
            what = "the loss scale is the example's: that of one of the jobs moves, and of one not"
            yield finding("note", what)
        yield from self._fitted.notes
        yield from self._example_models.remarks
        if self._without and not self._objects:
            what = "the source has no settings of parameter groups (lr, …): the example's are kept"
            yield finding("note", what)


def _origins(content: Content) -> Mapping[str, list[str]]:
    """Return the parameters of the source that each parameter is made of."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    tensors = content.checkpoint.tensors
    for wanted in content.tensors.values():
        if wanted.component in ("model", "optimizer") and wanted.kind is not Kind.OTHER:
            names = (tensors[copy.key].name for copy in wanted.copies)
            found[wanted.name].update(dict.fromkeys(names))
    return {name: list(names) for name, names in found.items()}
