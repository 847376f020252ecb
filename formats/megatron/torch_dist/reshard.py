"""Reshard torch_dist to torch_dist: decide what is copied and what must change.

Optimizer state in buckets, or in flat shards, is read as tensors of parameters and written as
those. What each group of data-parallel ranks recorded of its optimizer (parameter groups, the loss
scale) is the same in all of them and becomes a part of the common state.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, RUN_CONFIG, TRAIN_STATE
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.checkpoint import MegatronLayout
from ftckpt.formats.megatron.job.optimizer_tree import RESHARDABLE, SHARDING, master_word, numbered
from ftckpt.formats.megatron.job.stages import Counts, Stage, planned
from ftckpt.formats.megatron.rank_files.grid import Arguments, MegatronGrid
from ftckpt.formats.state.objects import Storages
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor

from .job import (
    NEEDED,
    Blob,
    Common,
    TorchDistJob,
    weight_among,
)
from .names import StoredForm, form_of
from .optimizer_buckets import is_bucket
from .owners import experts_of, layers_of
from .reader import FOLDERS, MegatronDistCheckpoint

_OF_GROUP = re.compile(
    r"(?:chained_(?P<number>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_\d{1,7}\."
    r"(?P<leaf>\w+)/shard_0(?:_1)?"
)
# Sizes of buckets: other ranks have other buckets, and `fully_reshardable` has none.
OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")
# The state of all parameters in one object, which nothing here takes apart.
GATHERED = "param_state"
# What Megatron-Bridge keeps of a run: the same for any grid of ranks.
_BRIDGE = (TRAIN_STATE, RUN_CONFIG)
_RANDOM = re.compile(r"(?:.*[._])?rng_state/shard_(\d{1,7})\.(\d{1,7})(?:_[\d.]+)?")


class OfGroup(NamedTuple):
    """What a name says of state that a group of ranks recorded of its optimizer."""

    number: int | None  # of the optimizer; None for one alone
    leaf: str  # which state


def of_group(name: str) -> OfGroup | None:
    """Return which group's state the name of an object means; None for other names."""
    match = _OF_GROUP.fullmatch(name)
    if match is None:
        return None
    return OfGroup(None if match["number"] is None else int(match["number"]), match["leaf"])


# Number of the optimizer (None for one alone) -> leaf -> names of objects, one a group of ranks.
_Groups = Mapping[int | None, Mapping[str, list[str]]]


def job_of_dist(content: Content) -> TorchDistJob:
    """Return what is written of a torch_dist source.

    Raises:
        UnsupportedError: groups of ranks recorded different optimizers, or state that is not given
            to parameters.
    """
    checkpoint = content.checkpoint
    assert isinstance(checkpoint, MegatronDistCheckpoint)
    tensors = _Tensors(content)
    groups, of_groups = _groups(content)
    gathered = [name for leaves in groups.values() for name in leaves.get(GATHERED, ())]
    _require_mapped(checkpoint, [*tensors.buckets, *gathered])
    common = _common(content)
    optimizers = numbered(common.root.get("optimizer")) if common else {}
    if common is not None:
        made = {n: _reshardable(content, one, groups.get(n, {})) for n, one in optimizers.items()}
        common.make_reshardable(made)
    objects = {
        name: info
        for name, info in content.objects.items()
        if name not in of_groups and not is_common(name) and name != TRAIN_STATE
    }
    return TorchDistJob(
        content=replace(content, objects=objects),
        layout=layout_of(content, common.args if common else Arguments()),
        common=common,
        form_of=tensors.form,
        weight_of=tensors.weight,
        as_stored=tensors.own,
        objects={
            name: Blob(stored=info.extent, transforms=_transforms(checkpoint, name))
            for name, info in objects.items()
        },
        random={
            name: (int(match[1]), int(match[2]))
            for name in objects
            if (match := _RANDOM.fullmatch(name))
        },
        beside=[n for n in checkpoint.source.entries if n in _BRIDGE or n.startswith(FOLDERS)],
        further=list(beside_weights(content)),
        configuration=checkpoint.source.read(CONFIGURATION),
        master=master_word(optimizers.values()),
    )


def _require_mapped(checkpoint: MegatronDistCheckpoint, left: list[str]) -> None:
    """Refuse state that is not a parameter's: other ranks have other buckets.

    Raises:
        UnsupportedError: there is some.
    """
    if left:
        raise UnsupportedError(
            f"{listed(left)}: {checkpoint.unmapped}",
            hint="a job that loads it can save it with --dist-ckpt-optim-fully-reshardable; --only"
            " model writes the weights alone",
            tensor=left[0],
        )


class _Tensors:
    """How the source stores its tensors."""

    def __init__(self, content: Content) -> None:
        # by key: the stored name of what is not part of the model or its optimizer
        self.own: dict[str, str] = {}
        self.buckets: list[str] = []  # keys of optimizer state that is not a parameter's
        self._forms: dict[str, StoredForm] = {}
        for key, wanted in content.tensors.items():
            info = _source(content, wanted)
            if info is None or not info.stored_name:
                continue
            if is_bucket(info):
                self.buckets.append(key)
            elif wanted.component not in ("model", "optimizer"):
                self.own[key] = info.stored_name
            elif wanted.component == "model" or wanted.kind is not Kind.OTHER:
                self._forms.setdefault(wanted.name, form_of(info.stored_name))
        self._weights = frozenset(self._forms)

    def weight(self, wanted: TargetTensor) -> str:
        """Return the weight that a tensor is, or is state of: a state's name comes before it."""
        return weight_among(self._weights, wanted.name)

    def form(self, wanted: TargetTensor) -> StoredForm:
        """Return how a tensor is stored: as the weight is that it belongs to."""
        return self._forms.get(self.weight(wanted), StoredForm())


def _source(content: Content, wanted: TargetTensor) -> TensorInfo | None:
    copies = wanted.copies
    return content.checkpoint.tensors[copies[0].key] if copies else None


def _groups(content: Content) -> tuple[_Groups, frozenset[str]]:
    """Return what groups of ranks recorded of their optimizers, and the names of all of it."""
    found: dict[int | None, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    names = []
    for name in content.objects:
        of = of_group(name)
        if of is not None:
            found[of.number][of.leaf].append(name)
            names.append(name)
    return found, frozenset(names)


def _reshardable(
    content: Content, one: Mapping[Any, Any], groups: Mapping[str, list[str]]
) -> Mapping[Any, Any]:
    """Return an optimizer of the common state as it is for state that is stored by parameter."""
    if one.get(SHARDING, RESHARDABLE) == RESHARDABLE:
        return one
    made = {key: value for key, value in one.items() if key != GATHERED}
    for leaf, names in groups.items():
        if leaf not in (*OF_BUCKETS, GATHERED):
            made[leaf] = _shared(content, leaf, names)
    return made | {SHARDING: RESHARDABLE}


def _shared(content: Content, leaf: str, names: list[str]) -> CopiedTree:
    """Return what all groups of ranks hold."""
    checkpoint = content.checkpoint
    found: CopiedTree | None = None
    first = b""
    for name in names:
        value = checkpoint.load_object(name)
        inner = value[0] if type(value) is list and len(value) == 1 else value
        carried = CopiedTree(inner, Storages(checkpoint, checkpoint.objects[name]))
        pickle, _ = pickled(carried)
        if found is None:
            found, first = carried, pickle
        elif pickle != first:
            raise differing(leaf, name, names[0])
    assert found is not None
    return found


def differing(leaf: str, name: str, other: str) -> UnsupportedError:
    """Return the error about groups of ranks that recorded different states of an optimizer."""
    return UnsupportedError(
        f"{name} differs from {other}: ranks have different {leaf} states, and a checkpoint that"
        " any number of ranks can load has one",
        tensor=name,
        hint="--only model writes the weights alone",
    )


def _common(content: Content) -> Common | None:
    """Return the common state; what a job needs to load at all, where the rest is not wanted."""
    checkpoint = content.checkpoint
    assert isinstance(checkpoint, MegatronDistCheckpoint)
    name = next(filter(is_common, checkpoint.objects), None)
    if name is None:
        return None
    value, info = checkpoint.load_object(name), checkpoint.objects[name]
    file = name == COMMON
    root = value[0] if not file and type(value) is list and len(value) == 1 else value
    if not isinstance(root, dict):
        raise UnsupportedError(f"{name} is not a dict, as Megatron's common state is", tensor=name)
    common = Common(
        dict(root), Storages(checkpoint, info), file, info.extent, _transforms(checkpoint, name)
    )
    if name not in content.objects:
        trained = any(wanted.component == "optimizer" for wanted in content.tensors.values())
        common.keep((*NEEDED, "optimizer") if trained else NEEDED)
    return common


def _transforms(checkpoint: MegatronDistCheckpoint, name: str) -> tuple[str, ...]:
    item = checkpoint.meta.objects.get(name)
    return item.transforms if item is not None else ()


def layout_of(content: Content, args: Arguments) -> MegatronLayout:
    """Return how the job was laid out, by its arguments and by what else shows it.

    Raises:
        CorruptError: more ranks or stages than any cluster has.
    """
    known = content.topology
    tp = args.count("tensor_model_parallel_size") or known.tp or 1
    pp = args.count("pipeline_model_parallel_size") or known.pp or 1
    cp = args.count("context_parallel_size") or 1
    ranks = known.world_size or 0
    dp = args.count("data_parallel_size") or ranks // (tp * pp * cp) or None
    ep = args.count("expert_model_parallel_size") or known.ep or 1
    etp = args.count("expert_tensor_parallel_size") or tp
    names = {wanted.name for wanted in content.tensors.values() if wanted.component == "model"}
    experts = experts_of(names)
    if experts % ep:
        ep = 1
    chunks = args.count("virtual_pipeline_model_parallel_size") or 1 if pp > 1 else 1
    grid = MegatronGrid(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=dp)
    grid._replace(pp=pp * chunks).require_size()
    return MegatronLayout(
        grid=grid,
        chunks=chunks,
        args=args if args.record is not None else Arguments({}),
        layers=_layers(args, pp, chunks, layers_of(names)),
        firsts={},
        experts=experts // ep,
    )


def _layers(args: Arguments, pp: int, chunks: int, total: int) -> Counts:
    """Return the layers of each stage: as the arguments have it, else as equal as can be."""
    plan = planned(args, pp, chunks)
    if plan is not None and sum(plan.values()) == total:
        return plan
    found: dict[Stage, int] = {}
    for number in range(pp * chunks):
        start, stop = even_rows(total, pp * chunks, number)
        found[Stage(number % pp, number // pp)] = stop - start
    return found
