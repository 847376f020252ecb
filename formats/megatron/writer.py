"""Lay out a legacy Megatron checkpoint for another number of tensor, pipeline and expert ranks.

A rank's files keep the source's form: the order of the model's tensors, the groups of the
optimizer, the arguments but for the sizes of groups of ranks. The tracker
(`latest_checkpointed_iteration.txt`) is the root's and is not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.rules import Rules
from ftckpt.errors import UnsupportedError
from ftckpt.extents import Extent
from ftckpt.findings import Finding, finding
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.job.groups import optimizers_of, regrouped
from ftckpt.formats.megatron.job.layout import changed, target_of
from ftckpt.formats.megatron.job.module_order import (
    RankFileItem,
    cut_anew,
    embedding_of,
    main_stack,
    order_of,
    put,
    with_copy,
    without_copy,
)
from ftckpt.formats.megatron.job.own_state import OwnState
from ftckpt.formats.megatron.job.padding import may_differ, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.stages import Stage, offsets
from ftckpt.formats.megatron.optimizer.write_distributed import DistributedWriter, form_of
from ftckpt.formats.megatron.optimizer.write_plain import PlainWriter
from ftckpt.formats.megatron.rank_files.contents import RankModel, holdings
from ftckpt.formats.megatron.rank_files.grid import OPTIMIZER
from ftckpt.formats.megatron.rank_files.names import Weights, files_of
from ftckpt.formats.megatron.rank_files.parts import Parts
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import EXTRA_STATE, chunk_keys, head_of
from ftckpt.formats.megatron.rank_files.write_from_example import lay_out_like
from ftckpt.formats.megatron.rank_files.write_whole import lay_out
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.walk import at as value_at
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile, Stored
from ftckpt.workers.memory import no_gc

from .checkpoint import MegatronCheckpoint

_OPTIMIZER = re.compile(r"rank_\d+\.optimizer")


class MegatronWriter:
    """The writer of the format `megatron` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "megatron"
    single = False
    supported_options = ("tp", "pp", "vp", "dp", "ep", "rules", "true_vocab_size")

    def axes(self, example: Checkpoint) -> Mapping[str, int]:
        """Return the sizes of an example (`ftckpt.transfer.request.example.FollowsExample`)."""
        assert isinstance(example, MegatronCheckpoint)
        grid = example.layout.grid
        sizes = {"tp": grid.tp, "pp": grid.pp, "vp": example.layout.chunks, "ep": grid.ep}
        return sizes if grid.dp is None else sizes | {"dp": grid.dp}

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for the ranks that are wished for; the source's where nothing is said.

        With an example, as that is laid out.

        Raises:
            UsageError: sizes that do not divide, or a wish that is not of this format.
            UnsupportedError: a tensor that no rule knows, state that cannot be told from the rank
                that saved it, or a model that nothing describes.
        """
        checkpoint = content.checkpoint
        with no_gc():
            if isinstance(request.like, MegatronCheckpoint):
                return lay_out_like(content, request.like, request)
            if isinstance(checkpoint, MegatronCheckpoint):
                return _Writing(content, checkpoint, request).layout()
            return lay_out(content, request)


class _Writing:
    """One layout on its way."""

    def __init__(
        self, content: Content, checkpoint: MegatronCheckpoint, request: LayoutRequest
    ) -> None:
        source = checkpoint.layout
        self._checkpoint = checkpoint
        self._ranks = FirstRanks(checkpoint)
        self._target = target_of(source, request)
        rules = self._rules(request.rules)
        tp, true = self._target.grid.tp, request.true_vocab_size
        vocabulary = vocabulary_of(content, rules)
        self._content, rows = repadded(content, vocabulary, source.args, tp, true)
        changes = dict(self._target.arguments)
        if rows is not None:
            changes["padded_vocab_size"] = rows
        self._notes = [] if true is not None else list(self._padding_notes(vocabulary))
        self._args = changed(source.args, changes)
        self._parts = Parts(self._content, self._target.grid, rules)
        self._own = OwnState(self._content, self._ranks, self._target, changes)
        self._placed: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._distributed: DistributedWriter | None = None
        self._plain: PlainWriter | None = None
        same = self._target.same_ranks and rows is None
        self._choose_optimizer(unchanged=same and source.grid.dp == self._target.grid.dp)

    def layout(self) -> Layout:
        """Return the files."""
        files = [file for one in self._holdings() for file in self._files(one)]
        own, content = self._own, self._content
        mine = {one.key: one for one in own.tensors}
        placed = self._placed | own.placed
        tensors = {k: w for k, w in content.tensors.items() if not w.component.startswith("extra:")}
        held = replace(
            content,
            tensors=tensors | mine,
            objects={n: info for n, info in content.objects.items() if n in own.compared},
            aliases=self._aliases,
        )
        return Layout(
            files=[*files, *beside_weights(content)],
            unplaced=[name for name in (*content.tensors, *content.objects) if name not in placed],
            notes=[*own.notes, *self._notes],
            content=held,
        )

    # --- what is cut how ------------------------------------------------------------------------

    def _rules(self, given: Rules | None) -> Rules:
        held = [n.local for at in self._ranks.coordinates() for n in self._ranks.held(at)]
        rules = rules_of(self._ranks.layout.args, held)
        return given.before(rules) if given else rules

    def _padding_notes(self, vocabulary: Callable[[TargetTensor], bool]) -> Iterator[Finding]:
        """Say where Megatron may ask for other rows of padding than are kept."""
        args, before = self._ranks.layout.args, self._ranks.layout.grid.tp
        after = self._target.grid.tp
        for wanted in self._content.tensors.values():
            if vocabulary(wanted) and may_differ(args, wanted.shape[0], before, after):
                what = (
                    f"{wanted.name} keeps its {wanted.shape[0]} rows, and Megatron may pad to other"
                    f" rows for {after} tensor ranks: --true-vocab-size N lays out those"
                )
                yield finding("note", what, tensor=wanted.key)
                return

    def _holdings(self) -> list[RankModel]:
        source, target = self._ranks.layout, self._target
        order = order_of(self._ranks)
        stack = main_stack(order)
        firsts = source.firsts
        if not target.same_stages:
            if source.args.count("mtp_num_layers"):
                what = "a model that predicts several tokens keeps its pipeline stages"
                raise UnsupportedError(what, hint="leave out --pp and --vp")
            order = cut_anew(order, target.layers)
            firsts = {stage: {stack: n} for stage, n in offsets(target.layers).items()}
        embedding = embedding_of(order)
        last = Stage(target.grid.pp - 1, target.chunks - 1)
        if target.grid.pp == 1:
            order = {stage: without_copy(slots) for stage, slots in order.items()}
        elif self._ranks.tied and embedding is not None and not self._has_head(embedding.name):
            order[last] = with_copy(order[last], embedding.name, embedding.words)
        experts = source.experts * source.grid.ep // target.grid.ep
        return holdings(self._parts, order, firsts, target, experts)

    def _has_head(self, embedding: str) -> bool:
        """Return whether the output layer is a parameter of its own, whatever arguments say."""
        return head_of(embedding) in self._content.tensors

    def _choose_optimizer(self, *, unchanged: bool) -> None:
        """Say how the optimizer is written: anew, or as it stands where nothing changes."""
        content = self._content
        mapped = any(wanted.component == "optimizer" for wanted in content.tensors.values())
        listed = any(_OPTIMIZER.fullmatch(name) for name in content.objects)
        by_rank = any(
            wanted.component.startswith("extra:")
            and wanted.name.partition(".")[0] in ("optimizer", OPTIMIZER.removesuffix(".pt"))
            for wanted in content.tensors.values()
        )
        if by_rank and not unchanged:
            raise UnsupportedError(
                "the optimizer's state is kept by rank, as its parameters could not be told"
                " (`ftckpt inspect` says why), and cannot go to other ranks",
                hint="--only model writes the weights alone",
            )
        if by_rank or not (mapped or listed):
            return
        found = optimizers_of(self._ranks)
        if found is None:
            return
        apart = self._target.grid.experts_apart
        found = regrouped(found, apart=apart)
        self._plain = PlainWriter(self._parts, found)
        self._placed.update(name for name in content.objects if _OPTIMIZER.fullmatch(name))
        form = None if found.plain or not mapped else form_of(self._ranks)
        if form is not None:
            grid = self._target.grid
            self._distributed = DistributedWriter(self._parts, form, grid, self._args, found)

    # --- files ----------------------------------------------------------------------------------

    def _files(self, mine: RankModel) -> list[OutputFile]:
        """Return the files of one rank."""
        at = mine.at
        folder = self._target.grid.name(at)
        stream = self._checkpoint.stream(self._own.source(at))
        files = files_of(folder, mine, self._distributed, partial(self._tree, mine, stream))
        known = []
        if self._distributed is not None:
            self._placed |= self._distributed.placed
            known.append(OPTIMIZER)
        for path in self._own.of_others(at, known):
            whole = Extent(path, 0, self._checkpoint.source.size(path))
            files.append(OutputFile(path, [Stored(whole)]))
        return files

    def _tree(self, mine: RankModel, stream: TorchStream, weights: Weights) -> dict[Any, Any]:
        """Return what one rank's `model_optim_rng.pt` holds, in the order of the source's file."""
        made: dict[Any, Any] = {}
        models = chunk_keys(stream.tree)
        for key in stream.tree:
            if key in models.values():
                if key == models[0]:
                    made |= self._models(mine, stream, weights)
            elif key == "args":
                made[key] = self._own.args(mine.at, stream)
            elif key == "optimizer" and self._plain is not None:
                made[key] = self._plain.tree(mine)
                self._placed |= self._plain.placed
            else:
                value = self._own.of_key(mine.at, key, stream)
                if value is not None:
                    made[key] = value
        return made

    def _models(self, mine: RankModel, stream: TorchStream, weights: Weights) -> dict[str, Any]:
        """Return the model chunks of one rank."""
        held = {(one.local.chunk, one.local.name): one for one in mine.held}
        models = chunk_keys(stream.tree)
        made: dict[str, Any] = {}
        for chunk, places in enumerate(mine.chunks):
            key = "model" if self._target.chunks == 1 else f"model{chunk}"
            kept = self._target.same_ranks and self._own.takes(mine.at, models[chunk])
            model: dict[str, Any] = _like(stream.tree[models[0]])
            for item in places:
                one = held.get((chunk, item.name))
                if one is not None:
                    self._placed.add(one.wanted.key)
                    if item.entry.copy:
                        self._aliases[item.entry.name] = item.weight
                    value: Any = weights.get((chunk, item.name)) or self._parts.tensor(
                        one.wanted, one.weight, mine.at
                    )
                elif not item.entry.full:
                    value = item.entry.empty
                elif item.name.endswith(EXTRA_STATE):
                    value = _state_at(stream, models[chunk], item) if kept else None
                else:
                    continue  # the user leaves it out
                put(model, item.path, value)
            made[key] = model
        return made


def _like(model: Any) -> dict[str, Any]:
    """Return an empty dict of the kind of another: torch's `state_dict` is ordered."""
    return Ordered() if isinstance(model, Ordered) else {}


def _state_at(stream: TorchStream, key: str, item: RankFileItem) -> CopiedTree:
    return CopiedTree(value_at(stream.tree, (key, *item.path)), stream.storages)
