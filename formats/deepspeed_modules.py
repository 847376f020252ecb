"""The weights in DeepSpeed's files: a state_dict of each model-parallel rank, or one of each layer.

Stage 3 keeps placeholders of no elements where a parameter is partitioned, and the frozen ones in
fragments. A job that goes from stage 3 to a lower one gets weights: its masters in the compute type
of the placeholders, which is how DeepSpeed makes its weights from masters after every step. One
that goes to stage 3 has no place for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.transfer.content import Content, Wanted

from .deepspeed_checkpoint import DeepSpeedCheckpoint
from .deepspeed_files import DeepSpeedFile
from .deepspeed_flats import Holdings, fragment
from .deepspeed_job import Job
from .deepspeed_partition import Shape
from .deepspeed_states import ModelState
from .inert import Ordered
from .pickling import Call, Global
from .torch_tree import Carried, Storage, Tensor
from .torch_values import TensorRef

# What DeepSpeed's converter makes of buffers, of frozen and of shared parameters.
COPIES = "extra:universal"
_SIZE = Global("torch", "Size")


def size_of(shape: Shape) -> Call:
    """Return a shape as torch has it; DeepSpeed's own tools ask it for `numel()`."""
    return Call(_SIZE, ((*shape,),))


class Models:
    """The parameters of the source's model, by name, and what becomes of them at another stage.

    Attributes:
        states: what the first file of each model-parallel rank says.
        shared: name that is not stored -> name of the same parameter that is.
        trained: names that the optimizer knows, and those that are shared with one of them.
    """

    def __init__(self, checkpoint: DeepSpeedCheckpoint, states: Mapping[int, ModelState]) -> None:
        self._checkpoint = checkpoint
        self.states = states
        self.shared = {a: b for state in states.values() for a, b in state.shared.items()}
        known = {n for rank in checkpoint.groups.values() for group in rank for n in group}
        self.trained = known | {name for name, owner in self.shared.items() if owner in known}

    def content(self, content: Content, before: int, after: int) -> Content:
        """Return the content that a job of another stage stores.

        Args:
            content: what is to be written.
            before: stage of the source.
            after: stage of the result.
        """
        content = content.with_tensors(self._whole(content))
        if after == 3:
            kept = [w for w in content.tensors.values() if not self._is_trained_weight(w)]
            return content.with_tensors(kept)
        if before != 3:
            return content
        made = {wanted.key: wanted for wanted in self._cast_masters(content)}
        tied = {n: owner for n, owner in self.shared.items() if {n, owner} <= made.keys()}
        return replace(
            content, tensors={**made, **content.tensors}, aliases={**content.aliases, **tied}
        )

    def _whole(self, content: Content) -> Iterable[Wanted]:
        """Yield the tensors of a job's own files, which a universal checkpoint has otherwise.

        There a vocabulary has lost its padding, which is zeros, and there are copies of weights.
        """
        for wanted in content.tensors.values():
            placed = self._checkpoint.placed.get(wanted.name)
            short = placed is not None and wanted.shape[1:] == placed.shape[1:] != ()
            if placed is not None and short and wanted.component == "optimizer":
                yield wanted._replace(shape=placed.shape)
            elif wanted.component != COPIES:
                yield wanted

    def _is_trained_weight(self, wanted: Wanted) -> bool:
        weight = wanted.component == "model" and wanted.kind is Kind.PARAM
        return weight and wanted.name in self.trained

    def _cast_masters(self, content: Content) -> Iterable[Wanted]:
        for state in self.states.values():
            for name, ref in state.weights.items():
                key = tensor_key("optimizer", Kind.MASTER, self.shared.get(name, name))
                master = content.tensors.get(key)
                if name in self.trained and name not in content.tensors and master is not None:
                    yield master._replace(
                        component="model", kind=Kind.PARAM, name=name, dtype=ref.dtype
                    )


class Modules:
    """Lays out the weights of every file.

    Args:
        content: what the files hold.
        holdings: of that content.
        job: whose files they are.
        models: of the source.
    """

    def __init__(self, content: Content, holdings: Holdings, job: Job, models: Models) -> None:
        assert isinstance(content.checkpoint, DeepSpeedCheckpoint)
        self._content, self._holdings = content, holdings
        self._job, self._models = job, models
        self._checkpoint = content.checkpoint

    def weights(self, mp: int) -> Ordered:
        """Return the module's state_dict; tied tensors share a storage."""
        state, made = self._models.states[mp], Ordered()
        known: dict[str, Tensor] = {}
        frozen = set(self._frozen_names(mp))
        for name, ref in state.weights.items():
            key = self._key(name, mp)
            if self._job.stage == 3 and (name in self._models.trained or name in frozen):
                owner = self._models.shared.get(name, name)
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
        """Return the parameters that are not trained; stage 1 lists them nowhere."""
        state = self._models.states[mp]
        if self._checkpoint.stage > 1:
            return list(state.frozen)
        tensors, trained = self._content.tensors, self._models.trained
        return [
            name
            for name in state.weights
            if name not in trained and name in tensors and tensors[name].kind is Kind.PARAM
        ]

    def frozen(self, mp: int, dp: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a file says of frozen parameters: their shapes, and what it holds of them.

        Args:
            mp: the model-parallel rank.
            dp: the partition.
            weights: the state_dict of the same file.
        """
        if self._job.stage == 1:
            return {"frozen_param_shapes": None, "frozen_param_fragments": None}
        shapes, held = Ordered(), Ordered()
        for name in self._frozen_names(mp):
            if name not in self._content.tensors:
                continue
            shard = self._holdings.local(name, mp)
            shapes[name] = size_of(shard.shape)
            whole = self._job.stage < 3
            held[name] = weights[name] if whole else fragment(shard, self._job.grid.dp, dp)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": held}

    @cached_property
    def _at(self) -> Mapping[tuple[str, int], list[str]]:
        """Keys of the tensors that begin at a place of a file."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        for key in self._content.tensors:
            for piece in self._checkpoint.tensors[key].pieces:
                found[piece.extent.file, piece.extent.offset].append(key)
        return found

    def layer(self, file: DeepSpeedFile) -> Carried:
        """Return the state_dict of a layer of a pipeline."""
        tree = self._checkpoint.tree(file.path)
        storages = self._checkpoint.streams[file.path].storages
        made, known = Ordered(), dict[str, Tensor]()
        for local, ref in tree.items():
            if not isinstance(ref, TensorRef):
                made[local] = ref
                continue
            at = self._at.get((file.path, ref.span(storages).offset), ())
            key = next((k for k in at if k == local or k.endswith(f".{local}")), None)
            if key is not None:
                if key not in known:
                    known[key] = Tensor.of(self._holdings.local(key, self._owner(key, file.mp)))
                made[local] = known[key]
        return Carried(made, storages)

    def _owner(self, key: str, tp: int) -> int:
        """Return a model-parallel rank that holds a layer's tensor, of one tensor slice."""
        placed = self._checkpoint.placed.get(self._content.tensors[key].name)
        stages = (mp // self._job.grid.tp for mp in (placed.parts if placed is not None else ()))
        return min(stages, default=0) * self._job.grid.tp + tp
