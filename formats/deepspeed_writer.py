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

from collections.abc import Iterator

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, OutputFile, Wishes

from .deepspeed_checkpoint import DeepSpeedCheckpoint
from .deepspeed_files import Role
from .deepspeed_flats import Flat, Holdings
from .deepspeed_job import Group, Job, wished
from .deepspeed_model_files import ModelFiles
from .deepspeed_optimizer_tree import OptimizerTree
from .deepspeed_rest import Place, RestOfRole, stored, unplaced
from .deepspeed_source import Source
from .torch_tree import Carried, save
from .worlds import world_notes


class DeepSpeedWriter:
    """The writer of the format `deepspeed` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "deepspeed"
    single = False

    def layout(self, content: Content, wishes: Wishes) -> Layout:
        """Lay out `content` for `wishes.dp` partitions of stage `wishes.zero_stage`.

        Raises:
            UsageError: a wish for an axis that DeepSpeed does not have.
            UnsupportedError: other tensor slices or pipeline stages, tensors that ZeRO cannot hold,
                or nothing that says in which order a job lays its parameters out.
        """
        if not isinstance(content.checkpoint, DeepSpeedCheckpoint):
            raise UnsupportedError(
                f"a {content.checkpoint.format} checkpoint does not say in which groups and order a"
                " DeepSpeed job lays its parameters out: partitions have no names, and a wrong"
                " order would load without an error",
                hint="ftckpt convert --to deepspeed-universal: DeepSpeed loads that by names",
            )
        source = Source(content.checkpoint)
        return _Writing(content, source, wished(source.job, wishes)).layout()


class _Writing:
    """One layout, as it grows."""

    def __init__(self, content: Content, source: Source, job: Job) -> None:
        checkpoint = content.checkpoint
        assert isinstance(checkpoint, DeepSpeedCheckpoint)
        self._source, self._job, self._asked = source, job, content
        self._content = source.models.content(content, source.job.stage, job.stage)
        self._holdings = Holdings(self._content, checkpoint.placed)
        self._model = ModelFiles(self._content, self._holdings, source, job)
        self._optimizer = RestOfRole(self._content, source.files[Role.OPTIMIZER], Role.OPTIMIZER)
        self._trees = OptimizerTree(source, job)
        if self._model.pipeline and not source.files[Role.LAYER]:
            raise UnsupportedError(
                "a universal checkpoint of a pipeline has no weights but the masters, and which"
                " file of a layer holds which is recorded nowhere",
                hint="load it with load_universal, which needs no files of layers",
            )
        if self._model.pipeline and job.stage > 1:
            raise UnsupportedError(f"DeepSpeed has no pipelines with stage {job.stage} of ZeRO")

    def layout(self) -> Layout:
        """Return the files, and what has no place."""
        files = [*self._model.files(), *self._model.layer_files(), *self._optimizer_files()]
        rests = (self._model.rest, self._optimizer)
        return Layout(
            files=files,
            unplaced=unplaced(self._content, rests),
            notes=[*self._notes(), *(note for rest in rests for note in rest.notes)],
            content=stored(self._content, rests, renumbered=self._trees.renumbered),
        )

    def _optimizer_files(self) -> Iterator[OutputFile]:
        grid = self._job.grid
        for mp in range(grid.mp):
            groups = [
                [self._flat(flat, mp, number) for flat in self._job.partitioned(group)]
                for number, group in enumerate(self._source.groups[mp])
            ]
            for dp in range(grid.dp):
                name = f"{self._job.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states"
                place = Place(mp, dp)
                share = self._optimizer.deal(place, grid.rank(mp, dp), first=place == (0, 0))
                tree = Carried(self._trees.build(share, groups, dp), share.storages)
                yield OutputFile(f"{name}.pt", save(tree, folder=name))
        self._optimizer.settle()

    def _flat(self, group: Group, mp: int, number: int) -> Flat:
        flat = self._holdings.flat(group, mp)
        flat.numbers = self._source.numbers[mp][number]
        if self._job.stage < 3:
            flat.gaps = self._job.gaps(group, self._itemsize(group))
        return flat

    def _itemsize(self, group: Group) -> int:
        """Return the bytes of an element of a group's weights."""
        weight = self._content.tensors.get(next(iter(group), ""))
        return weight.dtype.itemsize if weight is not None else 4

    def _notes(self) -> Iterator[Finding]:
        before, job = self._source.job, self._job
        yield finding(
            "note",
            "DeepSpeed finds a checkpoint by the file `latest` in the directory around it, which is"
            " not written: `echo NAME > latest` there, or load_checkpoint(…, tag=NAME)",
        )
        if before.stage == 3 and job.stage < 3:
            what = "stage 3 stores no weights: they are the masters, cast to the type of the module"
            yield finding("note", what)
        if before.stage < 3 and job.stage == 3:
            what = "stage 3 stores no trained weights: DeepSpeed makes them from the masters"
            yield finding("note", what)
        config = self._source.config if isinstance(self._source.config, dict) else {}
        if "train_batch_size" in config and before.grid.dp != job.grid.dp:
            what = (
                "ds_config stays the record of the job that wrote it, train_batch_size for"
                f" {before.grid.dp} partitions: the job that loads has a configuration of its own"
            )
            yield finding("note", what)
        yield from world_notes(self._asked, job.grid.mp * job.grid.dp)
