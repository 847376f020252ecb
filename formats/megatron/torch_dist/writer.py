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
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ftckpt.checkpoint import Box, Extent
from ftckpt.checkpoint.coverage import intersection
from ftckpt.findings import Finding
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, MARKER
from ftckpt.formats.dcp.rank_files import RankFiles
from ftckpt.formats.dcp.write_metadata import ItemPlace, TensorItems, WrittenChunk, metadata
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.layout import TargetLayout, target_of
from ftckpt.formats.megatron.job.optimizer_tree import master_word
from ftckpt.formats.megatron.job.padding import padding, repadded
from ftckpt.formats.megatron.job.registration import expert_of
from ftckpt.formats.torch_files.write_tree import save_shard
from ftckpt.transfer.content import Content, ShardBox, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile, Stored

from .cuts import TensorCut, TensorCuts
from .from_model import plan_of_ranks, plan_of_whole
from .from_store import plan_of_store
from .owners import Owners
from .plan import Blob, StorePlan
from .rank_state import RankState
from .reader import MegatronDistCheckpoint
from .stacks import StackedTensor, StoredTensor, stacked

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
