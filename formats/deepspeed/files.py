"""Lay out all files of a DeepSpeed job.

Sources: `runtime/engine.py` (`_save_checkpoint`), `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py` and `runtime/bf16_optimizer.py` (`state_dict`) of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.job import LIKE, DeepSpeedJob
from ftckpt.formats.deepspeed.job.rank_states import (
    PartitionRank,
    RoleStates,
    renamed_content,
    unplaced,
)
from ftckpt.formats.deepspeed.model.files import LayerStates, ModelFiles
from ftckpt.formats.deepspeed.zero.flat_buffers import Group, RankFlatGroup, RankFlats
from ftckpt.formats.deepspeed.zero.optimizer_tree import OptimizerTree, PartitionedGroup
from ftckpt.formats.state.world_size import world_notes
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, OutputFile

from .checkpoint import DeepSpeedCheckpoint

# Model-parallel rank, parameter group, flat group in it, expert-parallel rank -> what is held.
_Flats = dict[tuple[int, int, int, int], RankFlatGroup]


class JobFiles:
    """The files of a job.

    Args:
        asked: what is to be written, as it was given.
        content: the same, as the result holds it.
        job: whose files are laid out.
        models: the state around the weights in the model's files.
        optimizers: the state around the partitions in the optimizer's files.
        layers: the state in the files of a pipeline's layers.
    """

    def __init__(
        self,
        asked: Content,
        content: Content,
        job: DeepSpeedJob,
        models: RoleStates,
        optimizers: RoleStates,
        layers: LayerStates,
    ) -> None:
        self.asked, self.content, self.job = asked, content, job
        self._models, self._optimizers, self._layers = models, optimizers, layers
        self._flats = RankFlats(content, job.placed)
        self._trees = OptimizerTree(job)

    def numbers(self, mp: int, number: int) -> Mapping[str, Any]:
        """Return the states of a parameter group that are not tensors."""
        return self.job.numbers[mp][number]

    def remarks(self) -> Iterable[Finding]:
        """Return what the user should know, when all files were laid out."""
        raise NotImplementedError

    def left_out(self) -> Iterable[str]:
        """Return what has no place besides `OtherState.unplaced`, when all files were laid out."""
        return ()

    def layout(self) -> Layout:
        """Return the files, and what has no place.

        Raises:
            UnsupportedError: a pipeline with no files of layers, or of a stage that has none.
        """
        if self.job.pipeline and not self.job.layers:
            raise UnsupportedError(
                "a universal checkpoint of a pipeline has no weights but the masters, and which"
                " file of a layer holds which is recorded nowhere",
                hint=f"load it with load_universal, which needs no files of layers; or {LIKE}",
            )
        if self.job.pipeline and self.job.stage > 1:
            stage = self.job.stage
            raise UnsupportedError(f"DeepSpeed has no pipelines with stage {stage} of ZeRO")
        model = ModelFiles(self.content, self._flats, self.job, self._models, self._layers)
        files = [
            *model.files(),
            *model.expert_files(),
            *model.layer_files(),
            *self._optimizer_files(),
        ]
        states = (self._models, self._optimizers, self._layers)
        renumbered = self._trees.renumbered or self.job.is_example
        return Layout(
            files=files,
            unplaced=sorted({*unplaced(self.content, states), *self.left_out()}),
            notes=[*self._notes(), *(note for state in states for note in state.notes)],
            content=renamed_content(
                self.content, states, renumbered=renumbered, rewritten=model.rewritten
            ),
        )

    def _optimizer_files(self) -> Iterator[OutputFile]:
        grid = self.job.grid
        for mp in range(grid.mp):
            made: _Flats = {}
            for dp in range(grid.dp):
                groups = [
                    [self._partitioned(flat, (mp, number, n), dp, made) for n, flat in enumerate(g)]
                    for number, g in enumerate(self.job.flats[mp])
                ]
                name = f"{self.job.zero.prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states"
                place = PartitionRank(mp, dp)
                state = self._optimizers.assign(place, grid.rank(mp, dp), first=place == (0, 0))
                tree = CopiedTree(self._trees.build(state, groups, dp), state.storages)
                yield OutputFile(f"{name}.pt", save(tree, folder=name))
        self._optimizers.finish()

    def _partitioned(
        self, listed: Group, place: tuple[int, int, int], dp: int, made: _Flats
    ) -> PartitionedGroup:
        """Return what one of a group's partitions is cut from, and which partition it is."""
        ep, group, ranks, rank = self.job.zero.experts.partition(listed, dp)
        mp, number, _ = place
        if (*place, ep) not in made:
            made[*place, ep] = self._flat(group, mp, number, ranks)
        return made[*place, ep], rank

    def _flat(self, group: Group, mp: int, number: int, ranks: int) -> RankFlatGroup:
        flat = self._flats.flat(group, mp)
        flat.ranks = ranks
        flat.numbers = self.numbers(mp, number)
        if self.job.stage < 3:
            weight = self.content.tensors.get(self._flats.owner(next(iter(group), "")))
            itemsize = weight.dtype.itemsize if weight is not None else 4
            flat.gaps = self.job.gaps(mp, number, itemsize)
        return flat

    def _notes(self) -> Iterator[Finding]:
        own, job = self.asked.checkpoint, self.job
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
        yield from self.remarks()
        yield from world_notes(self.asked, job.grid.mp * job.grid.dp)
