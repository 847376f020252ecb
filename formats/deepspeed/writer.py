"""Lay out a DeepSpeed checkpoint for another number of partitions and another stage of ZeRO.

The files are those that the job would have saved on that many ranks: flat partitions in the order
of its parameter groups, padded as its optimizer pads, with the state around them as it was. What
says how the files are cut is made anew. The configuration stays a record of the job that wrote the
source: DeepSpeed reads its own when it loads.

`latest` stands in the directory around a checkpoint and is never written.

Sources: `runtime/engine.py` (`_save_checkpoint`), `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py` and `runtime/bf16_optimizer.py` (`state_dict`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.from_example.layout import ByExample
from ftckpt.formats.deepspeed.job.assign_to_ranks import (
    OtherStateResult,
    RestOfRole,
    stored,
    unplaced,
)
from ftckpt.formats.deepspeed.job.plan import JobPlan
from ftckpt.formats.deepspeed.job.shares import Dealer, PartitionRank
from ftckpt.formats.deepspeed.job.source import DeepSpeedSource
from ftckpt.formats.deepspeed.model.pipeline_layers import RestOfLayers
from ftckpt.formats.deepspeed.model.write import ModelFiles
from ftckpt.formats.deepspeed.zero.flats import RankFlatGroup, RankFlats
from ftckpt.formats.deepspeed.zero.optimizer_tree import OptimizerTree
from ftckpt.formats.state.worlds import world_notes
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile

from .checkpoint import DeepSpeedCheckpoint
from .job import LIKE, Group, wished
from .names import FileRole


class DeepSpeedWriter:
    """The writer of the format `deepspeed` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "deepspeed"
    single = False
    supported_options = ("tp", "pp", "dp", "zero_stage", "rules", "true_vocab_size")

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` partitions of stage `request.zero_stage`.

        Raises:
            UsageError: a wish for an axis that DeepSpeed does not have.
            UnsupportedError: other tensor slices or pipeline stages, tensors that ZeRO cannot hold,
                or nothing that says in which order a job lays its parameters out.
        """
        if isinstance(request.like, DeepSpeedCheckpoint):
            return _Writing(ByExample(content, request.like, request)).layout()
        if not isinstance(content.checkpoint, DeepSpeedCheckpoint):
            raise UnsupportedError(
                f"a {content.checkpoint.format} checkpoint does not say in which groups and order a"
                " DeepSpeed job lays its parameters out: partitions have no names, and a wrong"
                " order would load without an error",
                hint=f"{LIKE}; or --to deepspeed-universal, which DeepSpeed loads by names",
            )
        return _Writing(OfItself(content, content.checkpoint, request)).layout()

    def axes(self, example: Checkpoint) -> Mapping[str, int]:
        """Return the sizes of an example's groups; see `ftckpt.transfer.request.example`."""
        assert isinstance(example, DeepSpeedCheckpoint)
        grid = example.grid
        return {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "zero_stage": example.stage}


class Given(Protocol):
    """What is laid out, and how."""

    @property
    def asked(self) -> Content:
        """What is to be written, as it was given."""

    @property
    def content(self) -> Content:
        """The same, as the result holds it."""

    @property
    def plan(self) -> JobPlan:
        """How it is laid out."""

    @property
    def models(self) -> Dealer:
        """Deals out the state around the weights in the model's files."""

    @property
    def optimizers(self) -> Dealer:
        """Deals out that in the optimizer's files."""

    @property
    def layers(self) -> RestOfLayers:
        """The same in the files of a pipeline's layers."""

    @property
    def rests(self) -> Sequence[OtherStateResult]:
        """All of it."""

    @property
    def unplaced(self) -> Iterable[str]:
        """What has no place, besides state of single ranks; known when all was dealt."""

    @property
    def notes(self) -> Iterable[Finding]:
        """What the user should know; known when all was dealt."""

    def numbers(self, mp: int, number: int) -> Mapping[str, Any]:
        """Return the states of a parameter group that are no tensors."""


class OfItself:
    """A DeepSpeed source, laid out as its own job would be for other partitions or another stage.

    Fits `Given`.
    """

    def __init__(
        self, content: Content, checkpoint: DeepSpeedCheckpoint, request: LayoutRequest
    ) -> None:
        """Take the source apart.

        Raises:
            UsageError, UnsupportedError: see `wished` and `DeepSpeedSource`.
        """
        self.asked = content
        self._source = source = DeepSpeedSource(checkpoint)
        self.plan = JobPlan(checkpoint, source, wished(source.job, request))
        self.content = source.models.content(content, source.job.stage, self.plan.job.stage)
        self.models = RestOfRole.of(self.content, source.files[FileRole.MODEL])
        self.optimizers = RestOfRole.of(self.content, source.files[FileRole.OPTIMIZER])
        self.layers = RestOfLayers(self.content, self.plan)
        self.rests = (self.models, self.optimizers, self.layers)
        self.unplaced: Iterable[str] = ()

    def numbers(self, mp: int, number: int) -> Mapping[str, Any]:
        """Return the states of a parameter group that are no tensors."""
        return self._source.numbers[mp][number]

    @property
    def notes(self) -> Iterator[Finding]:
        """What the user should know."""
        before, job = self._source.job, self.plan.job
        config = self._source.config if isinstance(self._source.config, dict) else {}
        if "train_batch_size" in config and before.grid.dp != job.grid.dp:
            what = (
                "ds_config stays the record of the job that wrote it, train_batch_size for"
                f" {before.grid.dp} partitions: the job that loads has a configuration of its own"
            )
            yield finding("note", what)


class _Writing:
    """One layout, as it grows."""

    def __init__(self, given: Given) -> None:
        self._given, self._plan, self._content = given, given.plan, given.content
        self._job = given.plan.job
        self._holdings = RankFlats(self._content, self._plan.placed)
        self._model = ModelFiles(
            self._content, self._holdings, self._plan, given.models, given.layers
        )
        self._trees = OptimizerTree(self._plan)
        if self._model.pipeline and not self._plan.layers:
            raise UnsupportedError(
                "a universal checkpoint of a pipeline has no weights but the masters, and which"
                " file of a layer holds which is recorded nowhere",
                hint=f"load it with load_universal, which needs no files of layers; or {LIKE}",
            )
        if self._model.pipeline and self._job.stage > 1:
            stage = self._job.stage
            raise UnsupportedError(f"DeepSpeed has no pipelines with stage {stage} of ZeRO")

    def layout(self) -> Layout:
        """Return the files, and what has no place."""
        files = [*self._model.files(), *self._model.layer_files(), *self._optimizer_files()]
        given, rests = self._given, self._given.rests
        renumbered = self._trees.renumbered or self._plan.exact
        return Layout(
            files=files,
            unplaced=sorted({*unplaced(self._content, rests), *given.unplaced}),
            notes=[*self._notes(), *(note for rest in rests for note in rest.notes)],
            content=stored(self._content, rests, renumbered=renumbered),
        )

    def _optimizer_files(self) -> Iterator[OutputFile]:
        grid, dealer = self._job.grid, self._given.optimizers
        for mp in range(grid.mp):
            groups = [
                [self._flat(flat, mp, number) for flat in group]
                for number, group in enumerate(self._plan.flats[mp])
            ]
            for dp in range(grid.dp):
                name = f"{self._job.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states"
                place = PartitionRank(mp, dp)
                share = dealer.deal(place, grid.rank(mp, dp), first=place == (0, 0))
                tree = CopiedTree(self._trees.build(share, groups, dp), share.storages)
                yield OutputFile(f"{name}.pt", save(tree, folder=name))
        dealer.settle()

    def _flat(self, group: Group, mp: int, number: int) -> RankFlatGroup:
        flat = self._holdings.flat(group, mp)
        flat.numbers = self._given.numbers(mp, number)
        if self._job.stage < 3:
            flat.gaps = self._plan.gaps(mp, number, self._itemsize(group))
        return flat

    def _itemsize(self, group: Group) -> int:
        """Return the bytes of an element of a group's weights."""
        weight = self._content.tensors.get(next(iter(group), ""))
        return weight.dtype.itemsize if weight is not None else 4

    def _notes(self) -> Iterator[Finding]:
        own, job = self._given.asked.checkpoint, self._job
        yield finding(
            "note",
            "DeepSpeed finds a checkpoint by the file `latest` in the directory around it, which is"
            " not written: `echo NAME > latest` there, or load_checkpoint(…, tag=NAME)",
        )
        before = own.stage if isinstance(own, DeepSpeedCheckpoint) else None
        if before == 3 and job.stage < 3:
            what = "stage 3 stores no weights: they are the masters, cast to the type of the module"
            yield finding("note", what)
        if before != 3 and job.stage == 3:
            what = "stage 3 stores no trained weights: DeepSpeed makes them from the masters"
            yield finding("note", what)
        yield from self._given.notes
        yield from world_notes(self._given.asked, job.grid.mp * job.grid.dp)
