"""Lay out Megatron-Core's `torch_dist` for other tensor ranks, stages, experts' and data ranks.

The store holds whole tensors, so that a job of any layout can load it; what follows the layout are
the chunks, in whose file they lie, the arguments in the common state, and what is of single ranks.

    __R_0.distcp     what rank R of such a job would write
    common.pt        the common state, where the source has it there or is of another format
    .metadata        of torch.distributed.checkpoint
    metadata.json    the commit marker

The optimizer is written so that any layout loads it: `fully_reshardable` where it is distributed,
and as it is where it is not.

Source: `save` and `load` in megatron/core/dist_checkpointing/serialization.py (core 0.9 to 0.19).

The parts of a whole tensor that tensor-parallel ranks hold: the chunks of a torch_dist store.

A store holds whole tensors, and where a chunk ends decides only who reads it. A name that no rule
knows is therefore not refused, as it is where each rank has a file of its own: it is one chunk.

Keep the state of single ranks for a job of another layout, as far as it can be used.

Random states are by stage and tensor rank. Megatron asks for them where the arguments in a
checkpoint have the tensor ranks and stages of the run, and does not start where they are missing;
`no_save_rng` among the arguments keeps it from asking, and it seeds anew. With other sizes it never
asks. So they are left out where the sizes change, and the arguments say so.

Source: `load_checkpoint` in megatron/training/checkpointing.py (core 0.9 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box, Extent
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.sharding import Rule, Rules, even_rows, slabs
from ftckpt.errors import UsageError
from ftckpt.findings import Finding, finding
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, MARKER
from ftckpt.formats.dcp.writer import ItemPlace, RankFiles, TensorItems, WrittenChunk, metadata
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.job.layout import TargetLayout, target_of
from ftckpt.formats.megatron.job.optimizer_tree import RESHARDABLE, SHARDING, master_word
from ftckpt.formats.megatron.job.padding import padding, repadded
from ftckpt.formats.megatron.job.registration import expert_of
from ftckpt.formats.megatron.rank_files.grid import Arguments, MegatronGrid
from ftckpt.formats.megatron.rank_files.tensor_names import is_expert
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from ftckpt.formats.state.rule_tables import built_in
from ftckpt.formats.torch_files.write_tree import save_shard
from ftckpt.transfer.content import Content, ShardBox, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile, Stored

from .from_model import plan_of_ranks, plan_of_whole
from .from_store import Owners, plan_of_store
from .plan import Blob, StorePlan
from .reader import MegatronDistCheckpoint
from .stacks import StackedTensor, StoredTensor, stacked

_FIRST, _SECOND = ".linear_fc1.weight", ".linear_fc2.weight"


class TensorCut(NamedTuple):
    """A part of a tensor."""

    box: Box  # of the whole tensor
    tp: int  # the tensor rank that has it, among the experts' where the tensor is of an expert


class TensorCuts:
    """How tensors are cut over the tensor ranks of one job."""

    def __init__(
        self, weights: Mapping[str, TargetTensor], grid: MegatronGrid, rules: Rules | None
    ) -> None:
        """Prepare.

        Args:
            weights: the model's tensors by name.
            grid: sizes of the groups of ranks.
            rules: asked before the built-in ones.
        """
        table = built_in("megatron", {"gated": int(_is_gated(weights))})
        self._rules = rules.before(table) if rules else table
        self._weights = weights
        self._grid = grid

    def is_vocabulary(self, wanted: TargetTensor) -> bool:
        """Return whether the first axis of a tensor is the vocabulary."""
        rule = self._rules.get(wanted.name)
        return rule is not None and rule.vocabulary and bool(wanted.shape)

    def of(self, wanted: TargetTensor, weight: str) -> list[TensorCut]:
        """Return the parts of a tensor, each once; they tile it.

        Args:
            wanted: a weight, or state of one.
            weight: name of the weight.

        Raises:
            UsageError: it cannot be divided over that many ranks.
        """
        rule = self._rule(wanted, weight)
        parts = self._grid.etp if is_expert(weight) else self._grid.tp
        if rule is None or rule.split.axis is None or parts == 1 or 0 in wanted.shape:
            return [TensorCut(Box.whole(wanted.shape), 0)]
        if rule.vocabulary:  # Megatron pads what it loads to its own size
            return _rows(wanted.shape, parts)
        try:
            return [
                TensorCut(slab.box, tp)
                for tp in range(parts)
                for slab in slabs(wanted.shape, rule.split, parts, tp)
            ]
        except UsageError as error:
            what = f"{wanted.key}: {error.message} tensor ranks"
            raise UsageError(what, tensor=wanted.key) from error

    def _rule(self, wanted: TargetTensor, weight: str) -> Rule | None:
        """Return the rule of a weight and of what has its shape; other state is not cut."""
        of = self._weights.get(weight, wanted)
        cut = wanted.component in ("model", "optimizer") and of.shape == wanted.shape
        return self._rules.get(weight) if cut else None


def _rows(shape: tuple[int, ...], parts: int) -> list[TensorCut]:
    rows, *rest = shape
    zeros = (0,) * len(rest)
    spans = (even_rows(rows, parts, part) for part in range(parts))
    return [
        TensorCut(Box((start, *zeros), (stop - start, *rest)), tp)
        for tp, (start, stop) in enumerate(spans)
        if start < stop
    ]


def _is_gated(weights: Mapping[str, TargetTensor]) -> bool:
    """Return whether first matrices hold a gate too: they have two rows for each column after."""
    for name, first in weights.items():
        if name.endswith(_FIRST):
            second = weights.get(name.removesuffix(_FIRST) + _SECOND)
            if second is not None and len(first.shape) == len(second.shape) == 2:
                return first.shape[0] == 2 * second.shape[1]
    return False


_RERUN, _RERUN_OBJECT = "rerun_state_machine", "rerun_state_machine_state/"
# Digests of the source's files, which Megatron checks with `--verify-integrity`.
_INTEGRITY = "integrity.json"


class RankState:
    """The decision for one job."""

    def __init__(self, plan: StorePlan, target: TargetLayout) -> None:
        self._plan = plan
        self._old, self._new = plan.job.layout.grid, target.grid
        self._same_stages = (self._old.tp, self._old.pp) == (self._new.tp, self._new.pp)
        self._same_ranks = self._same_stages and self._old.dp == self._new.dp
        self._args = plan.common.args if plan.common is not None else Arguments()
        each = self._args.flag("data_parallel_random_init")
        self._random = self._same_ranks if each else self._same_stages

    def has(self, name: str) -> bool:
        """Return whether an object is kept."""
        if name in self._plan.random:
            return self._random
        return self._same_ranks or not name.startswith(_RERUN_OBJECT)

    def finish(self, said: dict[str, Any]) -> None:
        """Make the common state say what the store holds.

        Args:
            said: further arguments.
        """
        common = self._plan.common
        if common is None:
            return
        if not self._same_ranks:
            common.remove((_RERUN,))
        known = {
            "ckpt_format": "torch_dist",
            "use_dist_ckpt": True,
            "dist_ckpt_optim_fully_reshardable": any(
                one.get(SHARDING) == RESHARDABLE for one in self._plan.optimizers.values()
            ),
        }
        said = said | {n: v for n, v in known.items() if self._args.get(n) is not None}
        if not self._same_stages:  # what Megatron compares with the run
            said["tensor_model_parallel_size"] = self._new.tp
            said["pipeline_model_parallel_size"] = self._new.pp
        if not (self._random and self._plan.random):
            said["no_save_rng"] = True
        tensors = self._plan.job.content.tensors.values()
        if not any(wanted.component == "optimizer" for wanted in tensors):
            said["no_save_optim"] = True
        common.change_arguments(said)

    def notes(self) -> Iterator[Finding]:
        """Yield what the user must know."""
        old, new, random = self._old, self._new, sorted(self._plan.random)
        if random and not self._random:
            yield finding(
                "note",
                f"RNG states: dropped, they are of tp {old.tp}, pp {old.pp}, dp {old.dp}; for tp"
                f" {new.tp}, pp {new.pp}, dp {new.dp} Megatron seeds anew from --seed",
                tensor=random[0],
            )
        elif random and not self._same_ranks:
            yield finding(
                "note",
                "RNG states: kept for each tensor rank and stage; all data-parallel ranks of one"
                " load the same, as Megatron does itself",
                tensor=random[0],
            )
        if not self._same_ranks and any(n.startswith(_RERUN_OBJECT) for n in self._plan.objects):
            yield finding("note", "the state of reruns: dropped, it is of the ranks that saved it")
        if not self._same_ranks and self._args.get("consumed_train_samples") is not None:
            yield finding(
                "note",
                "position in the data: kept as consumed_train_samples, from which Megatron's own"
                " data loader goes on; another loader must be told",
            )
        if _INTEGRITY in self._plan.job.content.checkpoint.source.entries:
            yield finding(
                "note",
                f"{_INTEGRITY}: dropped, it has digests of the source's files; load without"
                " --verify-integrity",
                file=_INTEGRITY,
            )


_COMMON_STATE = "common_state/shard_0_1"
# An object of a layer: `decoder.layers.mlp.linear_fc1._extra_state/shard_3_24`.
_OF_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d).*/shard_(\d{1,7})[._].*")


class MegatronDistWriter:
    """The writer of the format `megatron-dist` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "megatron-dist"
    single = False
    supported_options = ("tp", "pp", "vp", "dp", "ep", "rules", "true_vocab_size")

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for a job of other sizes; the source's where nothing is wished.

        Raises:
            UsageError: sizes that do not divide, or a wish of another format.
            UnsupportedError: nothing describes the model to Megatron, or it has tensors that
                torch_dist stores in another shape.
        """
        plan = _plan(content)
        target = target_of(plan.job.layout, request)
        kept = RankState(plan, target)
        store = _Store(plan, target, request)
        store.add_objects(kept)
        beside = store.add_common(kept)
        store.add_tensors()
        return Layout(
            files=[*store.files.outputs(), *beside, *beside_weights(content)],
            commit=[
                OutputFile(MARKER, [Literal(metadata(store.tensors, store.objects, {}))]),
                OutputFile(CONFIGURATION, [Literal(plan.configuration)]),
            ],
            unplaced=plan.job.names,
            notes=[*plan.job.notes, *store.notes, *kept.notes()],
            content=store.content,
        )


def _plan(content: Content) -> StorePlan:
    checkpoint = content.checkpoint
    if isinstance(checkpoint, MegatronDistCheckpoint):
        return plan_of_store(content)
    if isinstance(checkpoint, MegatronCheckpoint):
        return plan_of_ranks(content, checkpoint)
    return plan_of_whole(content)


class _Store:
    """Files and metadata, as they grow."""

    def __init__(self, plan: StorePlan, target: TargetLayout, request: LayoutRequest) -> None:
        job = plan.job
        self.content = job.content  # what the store holds
        weights = {w.name: w for w in job.content.tensors.values() if w.component == "model"}
        self._plan = plan
        self._cuts = TensorCuts(weights, target.grid, request.rules)
        self._arguments = dict(target.arguments)
        self.notes: list[Finding] = []  # on what it holds otherwise than the source
        true = request.true_vocab_size or job.rows
        if true is not None:
            args, tp = job.args, target.grid.tp
            self.content, rows = repadded(job.content, self._cuts.is_vocabulary, args, tp, true)
            if rows is not None:
                self._arguments["padded_vocab_size"] = rows
                self.notes = [padding(true, rows)] if job.rows else []
            weights = {w.name: w for w in self.content.tensors.values() if w.component == "model"}
            self._cuts = TensorCuts(weights, target.grid, request.rules)
        experts = job.layout.experts * job.layout.grid.ep
        self._owners = Owners(target.grid, target.layers, experts)
        self.files = RankFiles(self._owners.world)  # of the ranks
        self.tensors: dict[str, TensorItems] = {}  # by stored name
        self.objects: dict[str, ItemPlace] = {}  # places of byte items by name

    def add_objects(self, kept: RankState) -> None:
        """Place the byte items: those of a rank or a layer with their owners, others first."""
        names = [name for name in self._plan.objects if kept.has(name)]
        for name in names:
            self._add(name, self._owner_of(name), self._plan.objects[name])
        objects = {n: info for n, info in self.content.objects.items() if n in self.objects}
        self.content = replace(self.content, objects=objects)

    def _add(self, name: str, rank: int, blob: Blob) -> None:
        segments = blob.segments(self.files.sizes[rank])
        self.objects[name] = self.files.add(rank, segments, blob.transforms)

    def _owner_of(self, name: str) -> int:
        """Return the rank that writes an object."""
        if name in self._plan.random:
            return self._owners.first(*self._plan.random[name])
        match = _OF_LAYER.fullmatch(name)
        layer = f"{match[1]}{match[2]}." if match else name
        return self._owners.first(self._owners.stage_of(layer), 0)

    def add_common(self, kept: RankState) -> list[OutputFile]:
        """Place the common state; return the files beside the store."""
        plan, checkpoint = self._plan, self.content.checkpoint
        entries = checkpoint.source.entries
        beside = [
            OutputFile(name, [Stored(Extent(name, 0, entries[name].size))]) for name in plan.beside
        ]
        kept.finish(self._arguments)
        if plan.common is None:
            return beside
        blob = plan.common.blob()
        if blob.stored is not None:
            infos = checkpoint.objects.items()
            same = {name: info for name, info in infos if info.extent == blob.stored}
            self.content = replace(self.content, objects={**self.content.objects, **same})
        if plan.common.file:
            return [OutputFile(COMMON, blob.segments(folder="common")), *beside]
        self._add(_COMMON_STATE, 0, blob)
        return beside

    def add_tensors(self) -> None:
        """Place every chunk of every tensor in the file of a rank that would write it."""
        plan, tensors = self._plan, self.content.tensors
        parts = {key: wanted for key, wanted in tensors.items() if key not in plan.as_stored}
        stores = stacked(parts, plan.form, master_word(plan.optimizers.values()))
        for key, name in plan.as_stored.items():
            wanted = tensors[key]
            whole = StackedTensor(key, (), Box.whole(wanted.shape))
            stores.append(StoredTensor(name, wanted.dtype, wanted.shape, (whole,)))
        for stored in stores:
            chunks = [chunk for member in stored.members for chunk in self._chunks(member)]
            self.tensors[stored.name] = TensorItems(stored.dtype, stored.shape, chunks)

    def _chunks(self, member: StackedTensor) -> list[WrittenChunk]:
        """Return the chunks of one logical tensor, or of the half of it that is stored here."""
        wanted = self.content.tensors[member.key]
        weight = self._plan.weight(wanted)
        found = []
        for cut in self._cuts.of(wanted, weight):
            box = intersection(cut.box, member.box) if cut.box != member.box else cut.box
            if box is None:
                continue
            rank = self.files.lightest(self._ranks(weight, cut))
            found.append(self._chunk(wanted, member, box, rank))
        return found

    def _ranks(self, weight: str, cut: TensorCut) -> Sequence[int]:
        stage, expert = self._owners.stage_of(weight), expert_of(weight)
        if expert is not None:
            return self._owners.expert(stage, cut.tp, expert)
        return self._owners.dense(stage, cut.tp)

    def _chunk(
        self, wanted: TargetTensor, member: StackedTensor, box: Box, rank: int
    ) -> WrittenChunk:
        """Put one chunk, with leading axes of one, at the end of a rank's file."""
        ones = (1,) * len(member.place)
        sizes = (*ones, *box.sizes)
        inside = zip(box.offsets, member.box.offsets, strict=True)
        offsets = (*member.place, *(at - begin for at, begin in inside))
        part = ShardBox(Box.whole(sizes), wanted.key, box)
        shard = self.content.shard(sizes, wanted.dtype, [part])
        place = self.files.add(rank, save_shard(shard, base=self.files.sizes[rank]))
        return WrittenChunk(offsets, sizes, place)
