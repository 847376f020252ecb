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
from ftckpt.formats.deepspeed.geometry import DeepSpeedGrid
from ftckpt.formats.deepspeed.job.assign_to_ranks import OtherStateResult, RestOfRole
from ftckpt.formats.deepspeed.job.plan import STEP, JobPlan
from ftckpt.formats.deepspeed.job.settings import OfParameters, bare
from ftckpt.formats.deepspeed.job.shares import GROUPS, PartitionRank
from ftckpt.formats.deepspeed.job.source import DeepSpeedSource
from ftckpt.formats.deepspeed.job.state_from_other_format import CarriedState
from ftckpt.formats.deepspeed.model.pipeline_layers import RestOfLayers
from ftckpt.formats.deepspeed.names import FileRole
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest

from .fit import Fitting
from .state import (
    Groups,
    ModelsDealer,
    OptimizersDealer,
    decided,
    leave_modules,
    leave_sizes,
    scales_otherwise,
)


class ByExample:
    """A source and an example, brought together (fits `deepspeed_writer.Given`).

    Attributes:
        asked: what is to be written, as it was given.
        content: the same, as the result holds it.
        plan: of the example.
        models, optimizers: deal out the state around the weights.
        layers: the same in the files of a pipeline's layers.
        rests: the same of the source.
    """

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
        made = DeepSpeedSource(example)
        self.plan = JobPlan(example, made, made.job, exact=True)
        self.layers = RestOfLayers(content, self.plan)
        self._origins = _origins(content)
        self._carried: CarriedState | None = None
        theirs = decided(content, example)
        own = content.checkpoint
        partitioned = isinstance(own, DeepSpeedCheckpoint) and own.stage > 0
        if isinstance(own, DeepSpeedCheckpoint) and partitioned:
            source = DeepSpeedSource(own)
            self._grid: DeepSpeedGrid | None = own.grid
            self._parameters = OfParameters.of(source)
            self._objects = [n for n in content.objects if n.endswith(f"optimizer.{GROUPS}")]
            if not self._objects:  # they were dropped
                self._parameters.settings.clear()
        else:
            others = {n: o for n, o in content.objects.items() if n not in self.layers.claimed}
            self._carried = CarriedState(replace(content, objects=others), theirs)
            self._grid, self._parameters = None, self._carried.parameters
            content = replace(self._carried.content, objects=content.objects)
            self._objects = self._carried.group_objects
        names = (name for group in self.plan.groups() for name in self.plan.members(*group))
        numbers = {name: self._numbers_of(name) for name in names}
        self._fitting = Fitting(content, self.plan, request, numbers)
        self._numbers = OfParameters(numbers=self._fitting.numbers)
        self.content = self._fitting.content
        roles = (FileRole.MODEL, FileRole.OPTIMIZER)
        if self._carried is not None:
            states = self._carried.states
            roles_of = [RestOfRole(self.content, states(role)) for role in roles]
        else:
            roles_of = [RestOfRole.of(self.content, source.files[r], theirs) for r in roles]
        self.rests: list[OtherStateResult] = [*roles_of, self.layers]
        models, optimizers = roles_of
        for state in models.states:
            leave_sizes(state, self.plan)
            if self.plan.pipeline:  # the modules are in files of their own
                models.unplaced += set(leave_modules(state)) - self.layers.claimed
        step = self.asked.checkpoint.step
        self.models = ModelsDealer(self.plan, models, self._place, step, self._group_origins)
        self.optimizers = OptimizersDealer(self.plan, optimizers, self._place, self._groups)
        self._without: set[bool] = set()

    def _source_of(self, name: str) -> Sequence[str]:
        return self._origins.get(name, [name])

    def _numbers_of(self, name: str) -> dict[str, Any]:
        """Return the numbers of a parameter, its step among them where its settings have that."""
        names = self._source_of(name)
        found = self._parameters.numbers_of(names)
        keys = self.asked.tensors.keys()
        apart = tensor_key("optimizer", Kind.OTHER, f"{name}.{STEP}") in keys
        if apart or tensor_key("optimizer", Kind.EXP_AVG, name) not in keys:
            return found
        known = (self._parameters.settings.get(own, {}) for own in names)
        counted = [own[STEP] for own in known if STEP in own]
        return {STEP: counted[0], **found} if counted else found

    def _place(self, place: PartitionRank, rank: int) -> PartitionRank:
        """Return where the state of a rank lies in the source: of equal coordinates."""
        if self._grid is None:
            return PartitionRank(0, rank)
        stage, tp = divmod(place.mp, self.plan.job.grid.tp)
        if stage < self._grid.pp and tp < self._grid.tp:
            return PartitionRank(stage * self._grid.tp + tp, place.dp)
        return PartitionRank(self._grid.mp + place.mp, place.dp)

    def _groups(self, mp: int, example: Groups) -> Groups:
        """Return the settings of a rank's parameter groups, in the order of the example's."""
        made = []
        for number, (group, _) in enumerate(zip(example, self.plan.flats[mp], strict=False)):
            found = self._parameters.of_group(self._members(mp, number), bare(group))
            self._without.add(found is None)
            own = {**group, **(found or {})}
            if self.plan.counts_in_settings(mp, number):
                own[STEP] = self._of_group(mp, number)[STEP]
            made.append(own)
        return made

    def _group_origins(self, mp: int) -> Sequence[int | None]:
        """Return the numbers that a rank's parameter groups had in the source, where known."""
        count, settings = len(self.plan.flats[mp]), self.plan.source.settings[mp]
        known = settings if len(settings) == count else [{}] * count
        return [
            self._parameters.place_of_group(self._members(mp, number), bare(group))
            for number, group in enumerate(known)
        ]

    def _members(self, mp: int, number: int) -> list[str]:
        """Return the parameters of a group, as the source names them."""
        return [own for name in self.plan.members(mp, number) for own in self._source_of(name)]

    def numbers(self, mp: int, number: int) -> Mapping[str, Any]:
        """Return the states of a parameter group that are no tensors."""
        found = self._of_group(mp, number)
        if self.plan.counts_in_settings(mp, number):
            found.pop(STEP)
        return found

    def _of_group(self, mp: int, number: int) -> dict[str, Any]:
        return self._numbers.numbers_of(self.plan.members(mp, number))

    @property
    def unplaced(self) -> Iterator[str]:
        """What has no place, besides state of single ranks; known when all was dealt."""
        yield from self._fitting.unplaced
        if self._carried is not None:
            yield from self._carried.unplaced
        found = self._parameters
        some = any((*found.settings.values(), *(one.settings for one in found.groups)))
        if (self._without != {False} and some) or found.unused:
            yield from self._objects

    @property
    def notes(self) -> Iterator[Finding]:
        """What the user should know; known when all was dealt."""
        what = (
            "ds_config, ds_version and universal_checkpoint_info are the example's, and so are"
            " settings that the source does not have"
        )
        yield finding("note", what)
        if scales_otherwise(self.asked, self.plan.checkpoint):
            what = "the loss scale is the example's: that of one of the jobs moves, and of one not"
            yield finding("note", what)
        yield from self._fitting.notes
        yield from self.models.notes
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
