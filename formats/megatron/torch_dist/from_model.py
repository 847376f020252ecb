"""How a job is written as a store whose source is none: files of ranks, or a model in any format.

What every rank's file repeats becomes the common state, once. A store keeps an optimizer by
parameter, and what all ranks share of it (groups with their settings, the loss scale, one step)
in the common state. Flat buffers are not laid out here, so of the job's own groups only their
settings count; they are matched by settings that no other trainer has, so without them there is
nothing to write that Megatron would load.

Megatron up to core 0.18 loads no store that lacks an object for what a module keeps beside its
weights (`_extra_state`), mostly nothing. Which modules ask for one depends on the implementation;
what no module asks for is passed over.

Source: `generate_state_dict` and `get_rng_state` in megatron/training/checkpointing.py;
`DistributedOptimizer.sharded_state_dict` (`fully_sharded_model_space`) and
`Float16OptimizerWithFloat16Params.sharded_state_dict` in megatron/core/optimizer;
`sharded_state_dict` in megatron/core/tensor_parallel/layers.py and
megatron/core/extensions/transformer_engine.py, `StrictHandling` in
megatron/core/dist_checkpointing/validation.py.

Give the tensors of a job the names that they have on disk, and the objects of its modules.

A step that the optimizer keeps for each parameter becomes one for all, as torch_dist has it, if all
are equal. What modules keep beside their weights (`_extra_state`) becomes objects by layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.findings import finding
from ftckpt.formats.megatron.job.common_state import state_of_ranks
from ftckpt.formats.megatron.job.layout import MegatronJob
from ftckpt.formats.megatron.job.optimizer_tree import (
    ALL_MASTERS,
    RESHARDABLE,
    SHARDING,
    is_muon,
    numbered,
    torchs,
)
from ftckpt.formats.megatron.job.trained import (
    CarriedOptimizer,
    carried_optimizer,
    moments_of,
    placed_with,
)
from ftckpt.formats.megatron.job.whole_model import VERSION, namespace, whole_model
from ftckpt.formats.megatron.optimizer.per_rank import HALF
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import EXTRA_STATE, chunk_keys
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor
from ftckpt.transfer.content import Content, TargetTensor

from .from_store import experts_of, layers_of
from .legacy_names import JobNames, PackedTensors
from .names import StoredForm, state_name, stored_place
from .plan import NEEDED, Blob, Common, StorePlan

_STACKS = ("decoder.layers.", "encoder.layers.")


class StoredTensors:
    """The tensors under their names on disk."""

    def __init__(self, content: Content, args: Arguments, placed: Collection[str] = ()) -> None:
        """Take those of the model and of its optimizer.

        Args:
            content: under the names of the job's own modules.
            args: of the job.
            placed: keys of other tensors that have a place.
        """
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
            elif key not in placed:
                self.unplaced.append(key)
        named = self.named.values()
        self.weights = dict.fromkeys(w.name for w in named if w.component == "model")

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

    def form_of(self, weight: str) -> StoredForm:
        """Return how a weight is stored: stacked, where all layers of the model are alike."""
        return StoredForm(layers=self._homogeneous and weight.startswith(_STACKS))

    def extra_states(self, held: Iterable[tuple[str, Any]]) -> dict[str, Blob]:
        """Return what modules keep beside their weights, mostly nothing, by name of the object.

        Megatron up to core 0.18 does not load a store without them.

        Args:
            held: the name of each in the whole model, and its value; the first of a name counts.
        """
        sizes = (layers_of(self.weights), experts_of(self.weights))
        found: dict[str, Blob] = {}
        for own, value in held:
            whole = self._spelling.stored(own)
            found.setdefault(_object_of(whole, self.form_of(whole), sizes), Blob([value]))
        return found


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


def _object_of(name: str, form: StoredForm, sizes: tuple[int, int]) -> str:
    """Return the name of the object of one layer, or of one expert of it."""
    stored, place = stored_place(name, form)
    lead = (*sizes[:1] * form.layers, *sizes[1:])[: len(place)]
    numbers = ".".join(map(str, place or (0,)))
    return f"{stored}/shard_{numbers}_{'.'.join(map(str, lead or (1,)))}"


# Of core 0.16: every version since 0.4 reads a store with common.pt.
CONFIGURATION = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# What the store is said to hold beside tensors of the model.
CONTENT = {"singleton_local_shards": False}
_EXTRA = f".{EXTRA_STATE}"
_NO_EXTRA = f"output_layer{_EXTRA}"  # which Megatron takes out before it saves or loads
_HINT = (
    "--to megatron --like EXAMPLE makes files of ranks, which then become megatron-dist; --only"
    " model writes the weights alone"
)
_ALONE = "these are the weights alone: Megatron begins its optimizer and its random streams anew"
_SEEDED = "random streams were not written: Megatron seeds them anew from --seed"
_LINEAR = re.compile(r"((?:decoder|mtp)\..*\.linear_\w+)\.weight")
_NORM = re.compile(
    r"((?:decoder|mtp)\..*_layernorm|decoder\.final_norm|decoder\..*\.(?:mixer\.norm|out_norm)"
    r"|mtp\..*\.[eh]norm)\.weight"
)
# Linear attention, state-space layers, and what joins further layers with the model.
_PROJECTION = re.compile(
    r"(decoder\..*\.(?:in_proj|out_proj)|mtp\..*\.eh_proj)\.weight(?:\.query|\.z)?"
)
_ATTENTION = re.compile(r"((?:decoder|mtp)\..*\.self_attention)\.linear_proj\.weight")
_OUTPUT = re.compile(r"(output_layer)\.weight")


def plan_of_ranks(content: Content, checkpoint: MegatronCheckpoint) -> StorePlan:
    """Return how files of ranks are written.

    Raises:
        UnsupportedError: tensors that torch_dist stores in another shape, or steps that differ.
    """
    ranks = FirstRanks(checkpoint)
    state = state_of_ranks(content, ranks, needed=NEEDED)
    tensors = StoredTensors(content, checkpoint.layout.args, state.placed)
    optimizers = {}
    if "optimizer" in state.root:
        _require_one_step(checkpoint, tensors.steps)
        trees = numbered(state.root["optimizer"])
        optimizers = {n: _of_file(one, counts=bool(tensors.steps)) for n, one in trees.items()}
    job = MegatronJob(
        given=content,
        content=content,
        layout=checkpoint.layout,
        state=state,
        names=list(content.objects),
        notes=state.notes,
    )
    return _plan(job, tensors, optimizers, _extra_states(ranks))


def plan_of_whole(content: Content) -> StorePlan:
    """Return how a model is written that is in files of ranks nowhere.

    Raises:
        UnsupportedError: the source does not carry the job's own groups, lacks a part of the state,
            or has made other numbers of steps for some parameters than for others.
        UsageError, CorruptError, UnsafeError: see `whole_model`.
    """
    job = whole_model(content)
    carried = carried_optimizer(job, hint=_HINT)
    root = {
        "args": namespace(job.arguments), "checkpoint_version": VERSION, "iteration": job.iteration,
        "content_metadata": {}, **job.state.root,
    }  # fmt: skip
    # Ranks are seeded anew, as the note says.
    state, kept, optimizers = replace(job.state, root=root, random={}), job.content, {}
    if carried is not None:
        optimizers = _carried(job, carried)
        state.placed = placed_with(job, carried.kept)
        own = [w for key, w in carried.kept.tensors.items() if not key.endswith(".step")]
        kept = kept.with_tensors([*kept.tensors.values(), *own])
    tensors = StoredTensors(kept, job.args)
    extra = ((module + _EXTRA, None) for module in _modules(tensors.weights, job.args))
    said = finding("note", _ALONE if carried is None else _SEEDED)
    notes = [*job.notes, *job.state.notes, said]
    return _plan(replace(job, state=state, notes=notes), tensors, optimizers, extra)


def _plan(
    job: MegatronJob,
    tensors: StoredTensors,
    optimizers: Mapping[Any, Mapping[Any, Any]],
    extra: Iterable[tuple[str, Any]],
) -> StorePlan:
    """Return how a job is written, given its optimizers as a store has them."""
    common = Common(job.state.root, job.state.storages)
    common.put("content_metadata", dict(CONTENT))
    common.make_reshardable(optimizers)
    grid = job.layout.grid
    random = {f"rng_state/shard_{p}.{t}_{grid.pp}.{grid.tp}": (p, t) for p, t in job.state.random}
    streams = {name: Blob([job.state.random[place]]) for name, place in random.items()}
    unplaced = [name for name in job.names if name not in job.state.placed]
    return StorePlan(
        job=replace(
            job,
            content=replace(job.content.with_tensors(tensors.named.values()), objects={}),
            names=[*unplaced, *tensors.unplaced],
        ),
        common=common,
        weights=tensors.weights.keys(),
        form_of=tensors.form_of,
        objects=streams | tensors.extra_states(extra),
        random=random,
        configuration=json.dumps(CONFIGURATION).encode(),
    )


# --- optimizers -----------------------------------------------------------------------------------


def _carried(job: MegatronJob, carried: CarriedOptimizer) -> dict[Any, Mapping[Any, Any]]:
    """Return the optimizers that a source carries along as a store has them; take their state."""
    kept, distributed = carried.kept, carried.distributed
    muons = next((n for n, one in enumerate(carried.trees.values()) if is_muon(one)), None)
    for local in job.locals():
        if local.kind is Kind.PARAM:
            masters = distributed or local.ref.dtype.name in HALF
            kept.of_parameter(local, None, masters=masters, moments=moments_of(local, muons))
    content = job.given
    own = [key for key in content.tensors if key in kept.placed and _is_step(content, key)]
    _require_one_step(content.checkpoint, own)
    common = Tensor.of(content.whole(own[0])) if own else None
    made: dict[Any, Mapping[Any, Any]] = {}
    for (number, one), step in zip(carried.trees.items(), kept.steps, strict=True):
        counted = (
            Tensor.of(content.whole(step.copies[0].key)) if isinstance(step, TargetTensor) else step
        )
        counted = common if counted is None else counted
        beside = None if distributed else {} if counted is None else {"common_step": counted}
        made[number] = _as_stored(one, beside, distributed=distributed)
    return made


def _is_step(content: Content, key: str) -> bool:
    wanted = content.tensors[key]
    return wanted.component == "optimizer" and wanted.name.endswith(".step")


def _require_one_step(checkpoint: Checkpoint, steps: Sequence[str]) -> None:
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


def _of_file(one: Mapping[Any, Any], *, counts: bool) -> dict[Any, Any]:
    """Return an optimizer of a rank's file as the common state has it.

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
    return _as_stored(one, beside, distributed=distributed)


def _as_stored(
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


# --- what modules keep beside their weights -------------------------------------------------------


def _extra_states(ranks: FirstRanks) -> Iterator[tuple[str, Any]]:
    """Yield it by name in the whole model."""
    for at in ranks.coordinates():
        stream = ranks.stream(at)
        for chunk, key in chunk_keys(stream.tree).items():
            for path, value in leaves(stream.tree[key]):
                local = ".".join(map(str, path))
                if local.endswith(_EXTRA) and not local.endswith(_NO_EXTRA):
                    yield ranks.weight(at, chunk, local)[0], CopiedTree(value, stream.storages)


def _modules(stored: Iterable[str], args: Arguments) -> Iterator[str]:
    """Yield the modules that keep something beside their weights, by their names on disk."""
    patterns = [_LINEAR, _PROJECTION]
    if args.get("hybrid_layer_pattern") is not None:
        patterns.append(_OUTPUT)  # a GPT model takes its own out
    if args.get("transformer_impl") != "local":
        patterns += (_NORM, _ATTENTION)
    for name in stored:
        for pattern in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                yield f"{match[1]}.core_attention" if pattern is _ATTENTION else match[1]
