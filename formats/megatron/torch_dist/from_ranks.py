"""Merge the ranks of a legacy Megatron source into one state for torch_dist's writer.

What every rank's file repeats (arguments, iteration, scheduler, groups of the optimizer) becomes
the common state, once. Random states become objects by stage and tensor rank, and what modules keep
beside their weights (`_extra_state`) objects by layer. A step that the optimizer keeps for each
parameter becomes one for all, as torch_dist has it, if all are equal.

Source: `generate_state_dict` and `get_rng_state` in megatron/training/checkpointing.py,
`Float16OptimizerWithFloat16Params.sharded_state_dict` in megatron/core/optimizer/optimizer.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.optimizer_tree import (
    ALL_MASTERS,
    RESHARDABLE,
    SHARDING,
    master_word,
    numbered,
    torchs,
)
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import chunk_keys
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor

from .job import (
    NEEDED,
    Blob,
    Common,
    TorchDistJob,
    weight_among,
)
from .names import StoredForm, state_name, stored_place
from .owners import experts_of, layers_of
from .packed import PackedTensors
from .spelling import JobNames

# Of core 0.16: every version since 0.4 reads a store with common.pt.
CONFIGURATION = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# What the store is said to hold beside tensors of the model.
CONTENT = {"singleton_local_shards": False}
_OBJECT = re.compile(r"rank_(\d+)\.(.+)", re.DOTALL)
_STACKS = ("decoder.layers.", "encoder.layers.")
EXTRA = "._extra_state"
_NO_EXTRA = "output_layer._extra_state"  # which Megatron takes out before it saves or loads
_RANDOM, _RERUN = "rng_state", "rerun_state_machine"
_OF_RANKS = (_RANDOM, _RERUN)


def job_of_ranks(content: Content) -> TorchDistJob:
    """Return what is written of a legacy source.

    Raises:
        UnsupportedError: tensors that torch_dist stores in another shape, or steps that differ.
    """
    checkpoint = content.checkpoint
    assert isinstance(checkpoint, MegatronCheckpoint)
    ranks = FirstRanks(checkpoint)
    state = _State(content, ranks)
    tensors = StoredTensors(content, checkpoint.layout.args, state.inside)
    common = state.common(tensors.steps)
    kept = replace(content.with_tensors(tensors.named.values()), objects={})
    random = state.random()
    return TorchDistJob(
        content=kept,
        layout=checkpoint.layout,
        common=common,
        form_of=tensors.form,
        weight_of=tensors.weight,
        objects={name: blob for name, (blob, _) in random.items()} | tensors.extra(ranks),
        random={name: place for name, (_, place) in random.items()},
        configuration=json.dumps(CONFIGURATION).encode(),
        master=master_word(numbered(common.root.get("optimizer")).values()),
        unplaced=[*state.unplaced, *tensors.unplaced],
        notes=state.notes,
        further=list(beside_weights(content)),
    )


class StoredTensors:
    """The tensors under their names on disk."""

    def __init__(self, content: Content, args: Arguments, inside: frozenset[str]) -> None:
        weights = {w.name for w in content.tensors.values() if w.component == "model"}
        self._spelling = JobNames(weights, args)
        self._packed = PackedTensors(args)
        self._homogeneous = _is_homogeneous(args)
        self.named: dict[str, TargetTensor] = {}  # by key
        self.steps: list[str] = []  # keys of the source's counters of steps
        self.unplaced: list[str] = []  # keys of what torch_dist has no place for
        for key, wanted in content.tensors.items():
            if wanted.component in ("model", "optimizer"):
                self._place(key, wanted, weights, content)
            elif wanted.name.partition(".")[0] not in inside:
                self.unplaced.append(key)
        self._weights = frozenset(w.name for w in self.named.values() if w.component == "model")

    def _place(self, key: str, wanted: TargetTensor, weights: set[str], content: Content) -> None:
        name = wanted.name
        if wanted.component == "optimizer" and wanted.kind is Kind.OTHER:
            weight, _, leaf = name.rpartition(".")
            if leaf == "step":
                self.steps.append(key)
                return
            of = content.tensors.get(weight)
            if of is None or of.shape != wanted.shape:
                self.unplaced.append(key)
                return
            stored = self._spelling.stored(weight)
            parts = [
                (state_name(stored + e, leaf), p) for e, p in self._packed.parts(stored, wanted)
            ]
        else:
            stored = self._spelling.stored(name)
            parts = [(stored + end, part) for end, part in self._packed.parts(stored, wanted)]
        for spelled, part in parts:
            named = part._replace(name=spelled)
            self.named[named.key] = named

    def weight(self, wanted: TargetTensor) -> str:
        """Return the weight that a tensor is, or is state of."""
        return weight_among(self._weights, wanted.name)

    def form(self, wanted: TargetTensor) -> StoredForm:
        """Return how a tensor is stored: stacked, where all layers of the model are alike."""
        return self.form_of(self.weight(wanted))

    def form_of(self, weight: str) -> StoredForm:
        """Return how a weight of this name is stored."""
        return StoredForm(layers=self._homogeneous and weight.startswith(_STACKS))

    def extra(self, ranks: FirstRanks) -> dict[str, Blob]:
        """Return what modules keep beside their weights, mostly nothing, by name of the object.

        Megatron up to core 0.18 does not load a store without them.
        """
        sizes = (layers_of(self._weights), experts_of(self._weights))
        found: dict[str, Blob] = {}
        for at in ranks.coordinates():
            stream = ranks.stream(at)
            for chunk, key in chunk_keys(stream.tree).items():
                for path, value in leaves(stream.tree[key]):
                    local = ".".join(map(str, path))
                    if not local.endswith(EXTRA) or local.endswith(_NO_EXTRA):
                        continue
                    whole = self._spelling.stored(ranks.weight(at, chunk, local)[0])
                    name = object_of(whole, self.form_of(whole), sizes)
                    if name not in found:
                        found[name] = Blob([CopiedTree(value, stream.storages)])
        return found


class _State:
    """The state that is not a tensor of a parameter's.

    Attributes:
        unplaced: names of objects that torch_dist has no place for.
    """

    def __init__(self, content: Content, ranks: FirstRanks) -> None:
        self._content = content
        self._ranks = ranks
        self._first = ranks.coordinates()[0]
        stream = ranks.stream(self._first)
        chunks = set(chunk_keys(stream.tree).values())
        self._tree = {key: v for key, v in stream.tree.items() if key not in chunks}
        # names at the top of a rank's file whose tensors lie in objects that are written
        self.inside = frozenset(map(str, (*self._tree, *chunks)))
        self.notes: list[Finding] = []  # what is worth knowing
        self.unplaced = [
            name
            for name in content.objects
            if (match := _OBJECT.fullmatch(name)) is None or match[2] not in self.inside
        ]

    def common(self, steps: list[str]) -> Common:
        """Return the common state: what the first rank's file says.

        Args:
            steps: keys of the counters of steps that the optimizer keeps for each parameter.
        """
        content = self._content
        trained = any(wanted.component == "optimizer" for wanted in content.tensors.values())
        needed = (*NEEDED, "optimizer") if trained else NEEDED
        root = {
            key: value
            for key, value in self._tree.items()
            if key in needed or (f"rank_0.{key}" in content.objects and key not in _OF_RANKS)
        }
        if f"rank_0.{_RERUN}" in content.objects:
            what = "the state of reruns is of one rank each and is dropped: Megatron begins it anew"
            self.notes.append(finding("note", what, tensor=f"rank_0.{_RERUN}"))
        common = Common(root, self._ranks.stream(self._first).storages)
        common.put("content_metadata", dict(CONTENT))
        if "optimizer" in root:
            require_one_step(content.checkpoint, steps)
            optimizers = numbered(root["optimizer"])
            common.make_reshardable({n: _shared(o, bool(steps)) for n, o in optimizers.items()})
        return common

    def random(self) -> dict[str, tuple[Blob, tuple[int, int]]]:
        """Return the random states by name on disk, each with its stage and tensor rank."""
        checkpoint = self._ranks.checkpoint
        grid = checkpoint.layout.grid
        found: dict[str, tuple[Blob, tuple[int, int]]] = {}
        for rank, at in enumerate(grid.directories()):
            stored = f"{_RANDOM}/shard_{at.pp}.{at.tp}_{grid.pp}.{grid.tp}"
            # Those of further expert ranks Megatron does not keep either.
            if f"rank_{rank}.{_RANDOM}" in self._content.objects and stored not in found:
                stream = checkpoint.stream(at)
                blob = Blob([CopiedTree(stream.tree[_RANDOM], stream.storages)])
                found[stored] = blob, (at.pp, at.tp)
        return found


def require_one_step(checkpoint: Checkpoint, steps: Sequence[str]) -> None:
    """Refuse counters of steps that differ.

    Args:
        checkpoint: that has them.
        steps: their keys.

    Raises:
        UnsupportedError: they do.
    """
    if len({read_tensor(checkpoint, key) for key in steps}) > 1:
        raise UnsupportedError(
            "the optimizer has made another number of steps for some parameters than for"
            " others, and torch_dist keeps one number for all",
            tensor=steps[0],
            hint="--drop '*.step' leaves them out, and the optimizer counts from 0 again",
        )


def _shared(one: Mapping[Any, Any], counts: bool) -> dict[Any, Any]:
    """Return what an optimizer holds beside the state of parameters, as torch_dist keeps it.

    Args:
        one: the optimizer.
        counts: whether its steps are kept.
    """
    state = torchs(one).get("state")
    beside: dict[Any, Any] | None = None
    if state is not None:
        found = (entry["step"] for entry in state.values() if "step" in entry)
        step = next(found, None) if counts else None
        beside = {} if step is None else {"common_step": step}
    distributed = state is None and not any(key in one for key in ALL_MASTERS)
    return as_stored(one, beside, distributed=distributed)


def as_stored(
    one: Mapping[Any, Any], beside: Mapping[Any, Any] | None, *, distributed: bool
) -> dict[Any, Any]:
    """Return an optimizer as the common state has it.

    Args:
        one: as a rank's file has it; the state of parameters and their lists are left out.
        beside: what the store keeps of the state for all parameters; None where there is none.
        distributed: whether its state is that of flat buffers, stored by parameter.
    """
    made = {key: value for key, value in one.items() if key not in ALL_MASTERS}
    inner = one["optimizer"] if isinstance(one.get("optimizer"), dict) else made
    kept = {key: value for key, value in inner.items() if key != "state"}
    if isinstance(kept.get("param_groups"), list):
        kept["param_groups"] = [
            {k: v for k, v in group.items() if k != "params"} for group in kept["param_groups"]
        ]
    if beside is not None:
        kept["state"] = dict(beside)
    if inner is made:
        made = kept
    else:
        made["optimizer"] = kept
    return made | ({SHARDING: RESHARDABLE} if distributed else {})


def _is_homogeneous(args: Arguments) -> bool:
    """Return whether Megatron stacks the layers of such a job (`TransformerBlock`)."""
    for name in ("moe_layer_freq", "linear_attention_freq"):
        every = args.get(name, 1)
        if type(every) is not int or every > 1:
            return False
    numbered = (
        "heterogeneous_layers_config_path", "hybrid_layer_pattern", "hybrid_override_pattern",
        "is_hybrid_model", "hetereogenous_dist_checkpoint",
    )  # fmt: skip
    return all(args.get(name) in (None, False) for name in numbered)


def object_of(name: str, form: StoredForm, sizes: tuple[int, int]) -> str:
    """Return the name of the object of one layer, or of one expert of it."""
    stored, place = stored_place(name, form)
    lead = (*sizes[:1] * form.layers, *sizes[1:])[: len(place)]
    numbers = ".".join(map(str, place or (0,)))
    return f"{stored}/shard_{numbers}_{'.'.join(map(str, lead or (1,)))}"
