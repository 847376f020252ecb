"""Read a checkpoint of another format as a DeepSpeed job of one rank and one model file.

Parameters are those that an optimizer keeps state of; others are frozen. Where the source has no
masters (training in single precision keeps none) the weights become masters, widened, which changes
no value. Everything that is not a tensor is the client's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, counted, finding
from ftckpt.formats.deepspeed.model.files import size_of
from ftckpt.formats.deepspeed.states import LAYOUT_OF_MODEL, MODULE
from ftckpt.formats.deepspeed.zero.flat_buffers import RankFlats
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.state.objects import StateObjects
from ftckpt.formats.state.paths import NestedState, recorded_paths, with_aliases
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor, pickled, save
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import OutputFile

# The loader wants a version, and to be told of one that it knows.
_VERSION = "0.19.8"
_RESERVED = LAYOUT_OF_MODEL | {MODULE}
_GROUPS = "param_groups"
_MASTER = DTYPES["float32"]


class OtherFormatJob:
    """Content of another format, made ready.

    Attributes:
        content: what the result holds.
        trained: names of the parameters that an optimizer keeps state of.
        optimizer: the optimizer's other state.
        base: its parameter groups, where there are some.
        version: of DeepSpeed whose form it has.
        unplaced: names of objects and keys of tensors that have no place.
        notes: what the user should know.
    """

    version = _VERSION

    def __init__(self, content: Content) -> None:
        """Sort what there is.

        Raises:
            UnsupportedError: no parameter has an optimizer's state.
        """
        content = with_aliases(content)
        self.unplaced: list[str] = []
        self.notes: list[Finding] = []
        states = RankFlats(content, {}).states
        tensors = content.tensors
        self._tied = {
            key: owner
            for key, owner in content.aliases.items()
            if {key, owner} <= tensors.keys() and tensors[key].component == "model"
        }
        masters = {w.name for w in tensors.values() if w.kind is Kind.MASTER}
        weights = [w for w in tensors.values() if (w.component, w.kind) == ("model", Kind.PARAM)]
        own = [w.name for w in weights if w.key not in self._tied]
        self.trained = [name for name in own if name in states or name in masters]
        if not self.trained:
            raise UnsupportedError(
                "no parameter has an optimizer's state: DeepSpeed restores nothing else from a"
                " universal checkpoint",
                hint="ftckpt convert --to torchsave or safetensors, and load the weights as such",
            )
        moving = set(self.trained)
        self._frozen = [name for name in own if name not in moving]
        self._state = NestedState()
        self.unplaced += (
            key for name, keys in states.items() if name not in moving for key in keys.values()
        )
        self.unplaced += (
            tensor_key("optimizer", Kind.MASTER, name)
            for name in masters - moving
            if name not in self._tied
        )
        made = [self._placed(wanted, content) for wanted in tensors.values()]
        bare = [w for w in weights if w.name in moving and w.name not in masters]
        made += self._widened(bare)
        self.content = self._shared(replace(content.with_tensors(made), aliases=content.aliases))
        self._put_objects(content)
        self._client = self._state.settled(lambda path: True)
        optimizer = self._client.pop("optimizer", {})
        self.optimizer: dict[Any, Any] = optimizer if isinstance(optimizer, dict) else {}
        self.base = {_GROUPS: self._groups(self.optimizer.pop(_GROUPS, []))}
        if "lr_scheduler" not in self._client:
            what = "the source has no lr_scheduler: load with load_lr_scheduler_states=False"
            self.notes.append(finding("note", what))

    def _groups(self, found: Any) -> Any:
        """Return parameter groups, one for every parameter at least.

        The loader takes as many as the job and the file both have, and leaves the state of the
        job's further groups out without a word. A group of no settings changes none.
        """
        value = found.value if type(found) is CopiedTree else found
        if not isinstance(value, list):
            self._client[_GROUPS] = found  # by parameter, as some trainers flatten them
            value = []
        if value:
            what = (
                f"the settings of {counted(len(value), 'parameter group')} are carried by number:"
                " a job with other groups must set its own"
            )
            self.notes.append(finding("note", what))
        more: list[dict[str, Any]] = [{"params": []} for _ in self.trained[len(value) :]]
        groups = [*value, *more]
        return CopiedTree(groups, found.storages) if type(found) is CopiedTree else groups

    def _placed(self, wanted: TargetTensor, content: Content) -> TargetTensor:
        """Return a tensor as the result names it; what is not a model's is the client's state."""
        if wanted.component in ("model", "optimizer"):
            return wanted
        inside = wanted.component.removeprefix("extra:")
        name = wanted.key.removeprefix(f"{wanted.component}:")
        if not self._state.put((inside, name), Tensor.of(content.whole(wanted.key))):
            self.unplaced.append(wanted.key)
        return wanted._replace(component="extra:rank0", kind=Kind.OTHER, name=f"{inside}.{name}")

    def _widened(self, weights: Sequence[TargetTensor]) -> Iterator[TargetTensor]:
        for wanted in weights:
            yield wanted._replace(component="optimizer", kind=Kind.MASTER, dtype=_MASTER)
        if weights:
            what = f"{weights[0].name} has no master: its weights, widened, are the masters"
            more = f" (and {len(weights) - 1} more)" if len(weights) > 1 else ""
            self.notes.append(finding("note", what + more, tensor=weights[0].name))

    def _shared(self, content: Content) -> Content:
        """Return the content as the result's reader sees it.

        The masters of tied weights are their owners', and there are more parameter groups.
        """
        tensors, aliases = dict(content.tensors), dict(content.aliases)
        for name, owner in self._tied.items():
            master = tensors.get(tensor_key("optimizer", Kind.MASTER, owner))
            if master is not None:
                own = master._replace(name=name)
                tensors[own.key], aliases[own.key] = own, master.key
        objects = {n: info for n, info in content.objects.items() if not n.endswith(_GROUPS)}
        return replace(content, tensors=tensors, aliases=aliases, objects=objects)

    def _put_objects(self, content: Content) -> None:
        """Put what is not a tensor into the client's state, an object as a whole or not at all."""
        recorded = recorded_paths(content.checkpoint)
        trees, paths = StateObjects(content, recorded.objects), recorded.nested_objects()
        for name in content.objects:
            try:
                parts = list(trees.nested(name, paths.get(name)))
                pickled([part.value for part in parts])
            except UnsupportedError:
                self.unplaced.append(name)
                continue
            fits = all(part.path[0] not in _RESERVED for part in parts)
            placed = [fits and self._state.put(part.path, part.value) for part in parts]
            if not all(placed):
                self.unplaced.append(name)

    def model_file(self) -> OutputFile:
        """Return the model's file of the only rank."""
        content, weights = self.content, Ordered()
        for wanted in content.tensors.values():
            owner = self._tied.get(wanted.key)
            if wanted.component == "model" and owner is None:
                weights[wanted.name] = Tensor.of(content.whole(wanted.key))
        weights |= {name: weights[owner] for name, owner in self._tied.items()}
        shapes = {
            name: size_of(content.tensors[name].shape) for name in (*self.trained, *self._frozen)
        }
        kinds = {w.name: w.kind for w in content.tensors.values() if w.component == "model"}
        tree = {
            MODULE: weights,
            "buffer_names": [name for name in weights if kinds[name] is Kind.BUFFER],
            "optimizer": None,
            "param_shapes": [Ordered((name, shapes[name]) for name in self.trained)],
            "frozen_param_shapes": Ordered((name, shapes[name]) for name in self._frozen),
            "frozen_param_fragments": Ordered((name, weights[name]) for name in self._frozen),
            "shared_params": dict(self._tied),
            "skipped_steps": 0,
            "global_steps": content.checkpoint.step or 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_version": self.version,
            **self._client,
        }
        stem = "mp_rank_00_model_states"
        return OutputFile(f"{stem}.pt", save(tree, folder=stem))
