"""The weights in DeepSpeed's files: a state_dict of each model-parallel rank, or one of each layer.

Stage 3 keeps placeholders of no elements where a parameter is partitioned, and the frozen ones in
fragments.

Lay out a pipeline layer's state besides weights (a module's extra state).

Each slice of a layer has a file of its own. Laid out anew by the job that saved it, a file keeps
what it had. As an example, it gets what the source has under the same name; the example's own value
stays where the source has none, and is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.findings import finding, listed
from ftckpt.formats.deepspeed.autoep import (
    AUTOEP,
    AUTOEP_KEYS,
    ExpertLayer,
    ExpertRank,
    StackedRows,
    relaid,
)
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.job import DeepSpeedJob
from ftckpt.formats.deepspeed.job.objects import name_in_layer
from ftckpt.formats.deepspeed.job.rank_states import (
    RANK_COMPONENT,
    FileState,
    OtherState,
    PartitionRank,
    RoleStates,
)
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole, deepspeed_files
from ftckpt.formats.deepspeed.states import INFO, MODULE
from ftckpt.formats.deepspeed.zero.flat_buffers import RankFlats, fragment
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.pickles.write import Call, Global
from ftckpt.formats.state.objects import StateObjects
from ftckpt.formats.state.paths import NestedState, RecordedPaths, recorded_paths
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor, save
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import OutputFile


class LayerStates(OtherState):
    """The other state of the files of a pipeline's layers.

    Args:
        content: what is to be written.
        job: whose files they are.

    Attributes:
        claimed: names of objects that belong here if anywhere.
    """

    def __init__(self, content: Content, job: DeepSpeedJob) -> None:
        super().__init__(content)
        self._job = job
        self._taken: set[str] = set()
        self._placed: set[str] = set()
        self._parts: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        self._lacking: list[str] = []
        self._inside: dict[str, list[str]] = defaultdict(list)
        self.claimed = frozenset(self._claimed())

    @cached_property
    def _recorded(self) -> RecordedPaths:
        return recorded_paths(self._content.checkpoint)

    @cached_property
    def _objects(self) -> StateObjects:
        return StateObjects(self._content, self._recorded.objects)

    def _claimed(self) -> set[str]:
        source, objects = self._content.checkpoint, self._content.objects
        found: set[str] = set()
        if self._job.is_example:
            paths = self._recorded.nested_objects()
            trees = ((file, self._job.checkpoint.tree(file.path)) for file in self._job.layers)
            names = {name_in_layer(file, key) for file, tree in trees for key in tree}
            for name in objects:
                # All of it, or a part where a format takes state apart.
                path = paths.get(name, (name,))
                if path and path[0] in names:
                    self._parts[str(path[0])].append((name, path))
                    found.add(name)
        if isinstance(source, DeepSpeedCheckpoint):
            files = deepspeed_files(source.streams)
            own = {file.path for file in files if file.role is FileRole.LAYER}
            found |= {name for name, info in objects.items() if info.extent.file in own}
            for info in source.tensors.values():
                if info.component.startswith(RANK_COMPONENT) and info.pieces[0].extent.file in own:
                    self._inside[info.pieces[0].extent.file].append(info.key)
        return found & objects.keys()

    def fields(self, file: DeepSpeedFile, tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return what is not a tensor in a file of the result, by its key in the state_dict.

        Args:
            file: of the job that is laid out, or of the example.
            tree: the state_dict in it.

        Raises:
            UnsupportedError: a value of the example that the source does not have holds a tensor.
        """
        others = {key: value for key, value in tree.items() if not isinstance(value, TensorRef)}
        if self._job.is_example:
            return {key: self._of_source(file, key, value) for key, value in others.items()}
        return {key: value for key, value in others.items() if self._keeps(file, key)}

    def _keeps(self, file: DeepSpeedFile, key: Any) -> bool:
        """Note a value of the source that stays where it is; say whether none of it was dropped."""
        name, held = name_in_layer(file, key), self._content
        label = f"module.{file.layer}.{key}"
        inside = [
            own
            for own in self._inside.get(file.path, ())
            if f"{held.checkpoint.tensors[own].name}.".startswith(f"{label}.")
        ]
        gone = name in held.checkpoint.objects and name not in held.objects
        if gone or any(own not in held.tensors for own in inside):
            return False
        self.same.add(name)
        self.tensors += (self._moved(held.tensors[own], file) for own in inside)
        self._placed.update(inside)
        return True

    def _moved(self, wanted: TargetTensor, file: DeepSpeedFile) -> TargetTensor:
        """Return a tensor as the reader of the result calls it: by the first rank that has it."""
        before, grid = self._job.checkpoint.grid, self._job.grid
        stage = int(wanted.component.removeprefix(RANK_COMPONENT)) // (before.tp * before.dp)
        return wanted._replace(
            component=f"{RANK_COMPONENT}{grid.rank(stage * grid.tp + file.mp, None)}"
        )

    def _of_source(self, file: DeepSpeedFile, key: Any, example: Any) -> Any:
        name, state = name_in_layer(file, key), NestedState()
        own = self._parts.get(name, ())
        parts = [part for of, path in own for part in self._objects.nested(of, path)]
        if parts and all(state.put(part.path, part.value) for part in parts):
            self._taken.update(of for of, _ in own)
            if own == [(name, (name,))]:
                self.same.add(name)
            return state.settled(lambda path: True)[name]
        if example is not None:
            self._lacking.append(name)
        if any(isinstance(leaf, TensorRef) for _, leaf in leaves(example)):
            raise UnsupportedError(
                f"{key} in {file.path} of the example holds a tensor, of which the source has no"
                " values",
                file=file.path,
            )
        return example

    def inside(self) -> Iterator[Sequence[str]]:
        """Yield the keys of the source's tensors that lie in files of layers."""
        yield from self._inside.values()

    def finish(self) -> None:
        """List what has no place, after all files were laid out."""
        own = {key for keys in self._inside.values() for key in keys}
        left = (own & self._content.tensors.keys()) - self._placed
        self.unplaced = [*sorted(self.claimed - self.same - self._taken), *sorted(left)]
        if self._lacking:
            what = (
                f"the source has no {listed(self._lacking)}, which the example's layer files have:"
                " the example's is kept"
            )
            self.notes.append(finding("note", what))


_SIZE = Global("torch", "Size")


def size_of(shape: Shape) -> Call:
    """Return a shape as torch has it; DeepSpeed's own tools ask it for `numel()`."""
    return Call(_SIZE, ((*shape,),))


class ModelFiles:
    """The model's files of a job, and those of a pipeline's layers.

    Attributes:
        rewritten: labels of objects of which a part says another layout now.

    Args:
        content: what they hold.
        flats: of that content.
        job: whose files they are.
        states: the state around the weights.
        layers: the same in the files of a pipeline's layers.
    """

    def __init__(
        self,
        content: Content,
        flats: RankFlats,
        job: DeepSpeedJob,
        states: RoleStates,
        layers: LayerStates,
    ) -> None:
        self._content, self._flats, self._states, self._layers = content, flats, states, layers
        self._job, self._checkpoint = job, job.checkpoint
        self.rewritten: set[str] = {INFO} if job.moves_experts else set()

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
        weights, called = self._weights(mp), self._job.called
        tree = {**state.layout, "optimizer": None, **state.below()}
        tree[MODULE] = None if self._job.pipeline else Ordered({**weights, **state.below(MODULE)})
        tree["param_shapes"] = [
            Ordered((called.get(name, name), size_of(shape)) for name, shape in flat.items())
            for group in self._job.flats[mp]
            for flat in group
        ]
        tree |= self._frozen(mp, dp, weights)
        if dp:
            tree["shared_params"] = {}  # only rank 0 lists them
        if self._job.moves_experts:
            tree |= self._layers_of_rank(state, dp)
        if state.repeats_layers and isinstance(info := tree.get(INFO), dict):
            tree[INFO] = {**info, AUTOEP: next(tree[k] for k in AUTOEP_KEYS if tree.get(k))}
        tree["dp_world_size"] = self._job.grid.dp
        return tree

    def _layers_of_rank(self, state: FileState, dp: int) -> dict[str, Any]:
        """Return what a partition's file says of the layers that AutoEP stacks."""
        job, experts = self._job, self._job.zero.experts
        ep = experts.ep or 1
        rank = ExpertRank(ep, job.grid.dp // ep, *experts.place(dp, ep))
        shapes = {name: self._checkpoint.placed[name].shape for name in experts.stacked}
        return {
            key: relaid(state.layout[key], shapes, rank, partitioned=job.stage == 3)
            for key in AUTOEP_KEYS
            if state.layout.get(key)
        }

    def expert_files(self) -> Iterator[OutputFile]:
        """Yield the files of experts, which are the same however many ranks share them."""
        for file in self._job.files[FileRole.EXPERT]:
            made, stem = Ordered(), file.path.removesuffix(".pt")
            for name in self._checkpoint.tree(file.path):
                if name in self._content.tensors:
                    made[name] = Tensor.of(self._flats.local(name, file.mp))
            if made:
                yield OutputFile(file.path, save(made, folder=stem))
        stacked = self._job.zero.experts.stacked if self._job.stage < 3 else {}
        layers: dict[ExpertLayer, list[str]] = defaultdict(list)
        for name, layer in stacked.items():
            if name in self._content.tensors:
                layers[layer].append(name)
        for layer, names in layers.items():
            for expert in range(layer.experts):
                made = Ordered({f"{name}.{expert}": self._row(name, expert) for name in names})
                stem = f"layer_{layer.number}_expert_{expert}_mp_rank_00_model_states"
                yield OutputFile(f"{stem}.pt", save(made, folder=stem))

    def _row(self, name: str, expert: int) -> Tensor:
        """Return what the file of an expert has of a stacked parameter."""
        row = Tensor.of(self._flats.local(name, 0, StackedRows(name, expert, 1).key))
        return replace(row, shape=row.shape[1:], strides=row.strides[1:])

    def layer_files(self) -> Iterator[OutputFile]:
        """Yield the files of a pipeline's layers."""
        for file in self._job.layers:
            stem = file.path.removesuffix(".pt")
            yield OutputFile(file.path, save(self._layer(file), folder=stem))
        self._layers.finish()

    def _weights(self, mp: int) -> Ordered:
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
                    known[owner] = Tensor.of(self._flats.local(key, mp))
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
            for name in (*state.weights, *self._job.zero.experts.stacked)
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

    def _frozen(self, mp: int, dp: int, weights: Mapping[str, Any]) -> dict[str, Any]:
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
            shard = self._flats.local(name, mp, self._job.zero.experts.rows_of(name, dp))
            whole, called = self._job.stage < 3, self._job.called.get(name, name)
            shapes[called] = size_of(shard.shape)
            if not whole:
                held[called] = fragment(shard, self._job.grid.dp, dp)
            else:  # experts that are stacked are not among the module's weights
                held[called] = weights[name] if name in weights else Tensor.of(shard)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": held}

    @cached_property
    def _at(self) -> Mapping[tuple[str, int], list[str]]:
        """Keys of the tensors that begin at a place of a file."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        for key in self._content.tensors.keys() & self._checkpoint.tensors.keys():
            for piece in self._checkpoint.tensors[key].pieces:
                found[piece.extent.file, piece.extent.offset].append(key)
        return found

    def _layer(self, file: DeepSpeedFile) -> CopiedTree:
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
                    known[key] = Tensor.of(self._flats.local(key, self._owner(key, file.mp)))
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
