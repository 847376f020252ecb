"""Lay out a source of any format as an example of a DeepSpeed job is laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.files import JobFiles
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid
from ftckpt.formats.deepspeed.job import STEP
from ftckpt.formats.deepspeed.job.file_state import GROUPS, FileState, PartitionRank
from ftckpt.formats.deepspeed.job.rank_states import read_states
from ftckpt.formats.deepspeed.job.read import read_job
from ftckpt.formats.deepspeed.job.settings import ParameterSettings, without_params
from ftckpt.formats.deepspeed.job.state_from_other_format import OtherFormatState
from ftckpt.formats.deepspeed.model.pipeline_layers import LayerStates
from ftckpt.formats.deepspeed.names import FileRole
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest

from .fit import FittedContent
from .state import Groups, ModelStates, OptimizerStates, example_labels, scales_otherwise


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
