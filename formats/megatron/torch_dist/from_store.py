"""Reshard torch_dist to torch_dist: decide what is copied and what must change.

Optimizer state in buckets, or in flat shards, is read as tensors of parameters and written as
those. What each group of data-parallel ranks recorded of its optimizer (parameter groups, the loss
scale) is the same in all of them and becomes a part of the common state.

Decide which Megatron rank writes which part of a tensor into its own file.

A part of a tensor is on every data-parallel rank, and any of them may write it; with
`--ckpt-fully-parallel-save`, Megatron's default, they share the work. A store reads the same,
whichever rank wrote it: this decides only how many files a job reads from, and how even they are.

Source: `RankGenerator` in megatron/core/parallel_state.py: tensor ranks vary first, stages last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, RUN_CONFIG, TRAIN_STATE
from ftckpt.formats.megatron.job.groups import GATHERED, OF_BUCKETS, agreed, of_group
from ftckpt.formats.megatron.job.layout import MegatronJob
from ftckpt.formats.megatron.job.optimizer_tree import RESHARDABLE, SHARDING, numbered
from ftckpt.formats.megatron.job.stages import Counts, Stage, offsets, planned
from ftckpt.formats.megatron.rank_files.grid import Arguments, MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import expert_of
from ftckpt.formats.megatron.reader import MegatronLayout
from ftckpt.formats.state.objects import Storages
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor

from .names import StoredForm, form_of
from .optimizer_buckets import is_bucket
from .plan import NEEDED, Blob, Common, StorePlan
from .reader import FOLDERS, MegatronDistCheckpoint

_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d{1,7})\.")
_LAST = ("decoder.final_layernorm.", "decoder.final_norm.", "output_layer.", "mtp.")


class Owners:
    """The ranks of one job."""

    def __init__(self, grid: MegatronGrid, layers: Counts, experts: int) -> None:
        """Prepare.

        Args:
            grid: sizes of the groups of ranks; without data-parallel ranks as few as can be.
            layers: of each chunk of each stage.
            experts: of the whole model; 0 without.
        """
        self._grid = grid
        least = lcm(grid.tp, grid.etp * grid.ep) // grid.tp if experts else 1
        self._copies = grid.dense_ranks if grid.dp is not None else max(least, grid.cp)
        self._stage = grid.tp * self._copies
        self.world = self._stage * grid.pp  # how many
        self._of_layer: dict[int, int] = {}
        for stage, first in offsets(layers).items():
            for number in range(first, first + layers[stage]):
                self._of_layer[number] = stage.pp
        self._experts = experts
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def stage_of(self, name: str) -> int:
        """Return the pipeline stage of a tensor by its name in the whole model."""
        match = _LAYER.match(name)
        if match is not None:
            return self._of_layer.get(int(match[1]), 0)
        return self._grid.pp - 1 if name.startswith(_LAST) else 0

    def first(self, pp: int, tp: int) -> int:
        """Return the first rank of a stage that is a tensor rank."""
        return pp * self._stage + tp

    def dense(self, pp: int, tp: int) -> tuple[int, ...]:
        """Return the ranks that hold one part of a dense tensor of a stage."""
        begin = pp * self._stage + tp
        return tuple(range(begin, begin + self._stage, self._grid.tp))

    def expert(self, pp: int, tp: int, number: int) -> tuple[int, ...]:
        """Return the ranks that hold one part of one expert's tensor.

        Args:
            pp: the stage.
            tp: tensor rank among the experts'.
            number: of the expert.
        """
        each = max(1, self._experts // self._grid.ep)
        key = (pp, tp, min(number // each, self._grid.ep - 1))
        if key not in self._known:
            etp, ep = self._grid.etp, self._grid.ep
            inside = (r for r in range(self._stage) if (r % etp, r // etp % ep) == key[1:])
            self._known[key] = tuple(pp * self._stage + r for r in inside)
        return self._known[key]


def experts_of(names: Iterable[str]) -> int:
    """Return how many experts a model has, by the names of its tensors; 0 without."""
    found = (expert_of(name) for name in names)
    return max((one[1] for one in found if one is not None), default=-1) + 1


def layers_of(names: Iterable[str]) -> int:
    """Return how many layers a model has, by the names of its tensors."""
    matches = (_LAYER.match(name) for name in names)
    return max((int(m[1]) for m in matches if m is not None), default=-1) + 1


# What Megatron-Bridge keeps of a run: the same for any grid of ranks.
_BRIDGE = (TRAIN_STATE, RUN_CONFIG)
_RANDOM = re.compile(r"(?:.*[._])?rng_state/shard_(\d{1,7})\.(\d{1,7})(?:_[\d.]+)?")


# Number of the optimizer (None for one alone) -> leaf -> names of objects, one a group of ranks.
_Groups = Mapping[int | None, Mapping[str, list[str]]]


def plan_of_store(content: Content) -> StorePlan:
    """Return how a store is written for other ranks.

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
    if common is not None:
        optimizers = numbered(common.root.get("optimizer"))
        made = {n: _reshardable(content, one, groups.get(n, {})) for n, one in optimizers.items()}
        common.make_reshardable(made)
    objects = {
        name: info
        for name, info in content.objects.items()
        if name not in of_groups and not is_common(name) and name != TRAIN_STATE
    }
    return StorePlan(
        job=MegatronJob(
            given=content,
            content=replace(content, objects=objects),
            layout=layout_of(content, common.args if common else Arguments()),
        ),
        common=common,
        weights=tensors.forms.keys(),
        form_of=lambda weight: tensors.forms.get(weight, StoredForm()),
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
        configuration=checkpoint.source.read(CONFIGURATION),
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
        self.forms: dict[str, StoredForm] = {}  # by name of a weight
        for key, wanted in content.tensors.items():
            info = _source(content, wanted)
            if info is None or not info.stored_name:
                continue
            if is_bucket(info):
                self.buckets.append(key)
            elif wanted.component not in ("model", "optimizer"):
                self.own[key] = info.stored_name
            elif wanted.component == "model" or wanted.kind is not Kind.OTHER:
                self.forms.setdefault(wanted.name, form_of(info.stored_name))


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
            made[leaf] = agreed(leaf, recorded(content, names))
    return made | {SHARDING: RESHARDABLE}


def recorded(content: Content, names: Iterable[str]) -> Iterator[tuple[str, CopiedTree]]:
    """Yield names of objects and what each holds; the store keeps it in a list of one."""
    checkpoint = content.checkpoint
    for name in names:
        value = checkpoint.load_object(name)
        inner = value[0] if type(value) is list and len(value) == 1 else value
        yield name, CopiedTree(inner, Storages(checkpoint, checkpoint.objects[name]))


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
        kept = (*NEEDED, "optimizer") if trained else NEEDED
        common.remove(key for key in root if key not in kept)
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
