"""Lay out the model's files of a DeepSpeed checkpoint: weights, and the state of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftckpt.formats.deepspeed.job import DeepSpeedJob
from ftckpt.formats.deepspeed.job.file_state import FileState, PartitionRank
from ftckpt.formats.deepspeed.job.rank_states import RoleStates
from ftckpt.formats.deepspeed.states import MODULE
from ftckpt.formats.deepspeed.zero.flats import RankFlats
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import OutputFile

from .modules import Modules, size_of
from .pipeline_layers import LayerStates


class ModelFiles:
    """The model's files of a job.

    Args:
        content: what they hold.
        holdings: of that content.
        job: whose files they are.
        states: the state around the weights.
        layers: the same in the files of a pipeline's layers.
    """

    def __init__(
        self,
        content: Content,
        holdings: RankFlats,
        job: DeepSpeedJob,
        states: RoleStates,
        layers: LayerStates,
    ) -> None:
        self._job, self._states, self._layers = job, states, layers
        self._modules = Modules(content, holdings, job, layers)

    def files(self) -> Iterator[OutputFile]:
        """Yield the files of all ranks; stage 3 has one a partition."""
        grid = self._job.grid
        for mp in range(grid.mp):
            for dp in range(grid.dp) if self._job.stage == 3 else [None]:
                name = f"mp_rank_{mp:02d}_model_states"
                if dp is not None:
                    name = f"zero_pp_rank_{dp}_{name}"
                place = PartitionRank(mp, dp or 0)
                state = self._states.assign(place, grid.rank(mp, dp), first=place == (0, 0))
                tree = CopiedTree(self._tree(state, place), state.storages)
                yield OutputFile(f"{name}.pt", save(tree, folder=name))
        self._states.finish()

    def _tree(self, state: FileState, place: PartitionRank) -> dict[str, Any]:
        mp, dp = place
        weights, called = self._modules.weights(mp), self._job.called
        tree = {**state.layout, "optimizer": None, **state.below()}
        tree[MODULE] = None if self._job.pipeline else Ordered({**weights, **state.below(MODULE)})
        tree["param_shapes"] = [
            Ordered((called.get(name, name), size_of(shape)) for name, shape in flat.items())
            for group in self._job.flats[mp]
            for flat in group
        ]
        tree |= self._modules.frozen(mp, dp, weights)
        if dp:
            tree["shared_params"] = {}  # only rank 0 lists them
        tree["dp_world_size"] = self._job.grid.dp
        return tree

    def layer_files(self) -> Iterator[OutputFile]:
        """Yield the files of a pipeline's layers."""
        for file in self._job.layers:
            stem = file.path.removesuffix(".pt")
            yield OutputFile(file.path, save(self._modules.layer(file), folder=stem))
        self._layers.finish()
