"""The weights in DeepSpeed's files: a state_dict of each model-parallel rank, or one of each layer.

Stage 3 keeps placeholders of no elements where a parameter is partitioned, and the frozen ones in
fragments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.job import DeepSpeedJob
from ftckpt.formats.deepspeed.names import DeepSpeedFile
from ftckpt.formats.deepspeed.zero.flats import RankFlats, fragment
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.write import Call, Global
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor
from ftckpt.transfer.content import Content

from .pipeline_layers import LayerStates

_SIZE = Global("torch", "Size")


def size_of(shape: Shape) -> Call:
    """Return a shape as torch has it; DeepSpeed's own tools ask it for `numel()`."""
    return Call(_SIZE, ((*shape,),))


class Modules:
    """Lays out the weights of every file.

    Args:
        content: what the files hold.
        holdings: of that content.
        job: whose files they are.
        layers: what a pipeline's layers keep beside their weights.
    """

    def __init__(
        self, content: Content, holdings: RankFlats, job: DeepSpeedJob, layers: LayerStates
    ) -> None:
        self._content, self._holdings, self._layers = content, holdings, layers
        self._job, self._checkpoint = job, job.checkpoint

    def weights(self, mp: int) -> Ordered:
        """Return the module's state_dict; tied tensors share a storage."""
        state, made = self._job.states[mp], Ordered()
        known: dict[str, Tensor] = {}
        frozen = set(self._frozen_names(mp))
        for name, ref in state.weights.items():
            key = self._key(name, mp)
            if self._job.stage == 3 and (name in self._job.trained or name in frozen):
                owner = self._job.shared.get(name, name)
                empty = Tensor(Storage(()), ref.dtype, (0,), (1,))
                made[name] = known.setdefault(owner, empty)
            elif key in self._content.tensors:
                owner = self._content.aliases.get(key, key)
                if owner not in known:
                    known[owner] = Tensor.of(self._holdings.local(key, mp))
                made[name] = known[owner]
        return made

    def _key(self, name: str, mp: int) -> str:
        """Return the key of what a state_dict holds: a buffer may be of one slice alone."""
        own = f"extra:tp{mp % self._job.grid.tp}:{name}"
        return own if own in self._content.tensors else name

    def _frozen_names(self, mp: int) -> list[str]:
        """Return the parameters that are not trained; stage 1 lists them nowhere.

        Raises:
            UnsupportedError: nothing says what the optimizer calls them.
        """
        state = self._job.states[mp]
        if self._checkpoint.stage > 1:
            return list(state.frozen)
        tensors, trained = self._content.tensors, self._job.trained
        found = [
            name
            for name in state.weights
            if name not in trained and name in tensors and tensors[name].kind is Kind.PARAM
        ]
        if found and self._job.called and self._job.stage > 1:
            raise UnsupportedError(
                f"modules of this job are in the wrapper of activation checkpointing, and stage"
                f" {self._checkpoint.stage} does not say whether that of {found[0]} is: another"
                " stage lists it under its wrapped name",
                hint="--like EXAMPLE, a checkpoint that the job of the other stage saved",
                tensor=found[0],
            )
        return found

    def frozen(self, mp: int, dp: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a file says of frozen parameters: their shapes, and what it holds of them.

        Args:
            mp: the model-parallel rank.
            dp: the partition.
            weights: the state_dict of the same file.
        """
        names = self._frozen_names(mp)
        listed = self._checkpoint.stage > 1
        kept = self._job.states[mp].keeps_frozen if listed else bool(names)
        if self._job.stage == 1 or not kept:  # the loader wants all that the job has, or None
            return {"frozen_param_shapes": None, "frozen_param_fragments": None}
        shapes, held = Ordered(), Ordered()
        for name in names:
            if name not in self._content.tensors:
                continue
            shard = self._holdings.local(name, mp)
            whole, called = self._job.stage < 3, self._job.called.get(name, name)
            shapes[called] = size_of(shard.shape)
            held[called] = weights[name] if whole else fragment(shard, self._job.grid.dp, dp)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": held}

    @cached_property
    def _at(self) -> Mapping[tuple[str, int], list[str]]:
        """Keys of the tensors that begin at a place of a file."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        for key in self._content.tensors.keys() & self._checkpoint.tensors.keys():
            for piece in self._checkpoint.tensors[key].pieces:
                found[piece.extent.file, piece.extent.offset].append(key)
        return found

    def layer(self, file: DeepSpeedFile) -> CopiedTree:
        """Return the state_dict of a layer of a pipeline.

        Raises:
            UnsupportedError: an example has something there that nothing names.
        """
        tree = self._checkpoint.tree(file.path)
        storages = self._checkpoint.streams[file.path].storages
        made, known = Ordered(), dict[str, Tensor]()
        others = self._layers.fields(file, tree)
        for local, ref in tree.items():
            if not isinstance(ref, TensorRef):
                if local in others:
                    made[local] = others[local]
                continue
            at = self._at.get((file.path, ref.span(storages).offset), ())
            key = next((k for k in at if k == local or k.endswith(f".{local}")), None)
            if key is not None:
                if key not in known:
                    known[key] = Tensor.of(self._holdings.local(key, self._owner(key, file.mp)))
                made[local] = known[key]
            elif self._job.is_example:
                raise UnsupportedError(
                    f"{local} in {file.path} of the example is not a parameter that has a name",
                    file=file.path,
                )
        return CopiedTree(made, storages)

    def _owner(self, key: str, tp: int) -> int:
        """Return a model-parallel rank that holds a layer's tensor, of one tensor slice."""
        placed = self._checkpoint.placed.get(self._content.tensors[key].name)
        stages = (mp // self._job.grid.tp for mp in (placed.parts if placed is not None else ()))
        return min(stages, default=0) * self._job.grid.tp + tp
