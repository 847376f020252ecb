"""Lay out a legacy Megatron checkpoint for another number of tensor, pipeline and expert ranks.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     weights, optimizer, arguments and other state
                           distrib_optim.pt       flat buffers of the distributed optimizer
    config.json, …                                what lay beside a Hugging Face model's weights

What is written comes from files of ranks, from a whole model of any format, or has the layout of an
example; of all three a `RankFilesPlan` says how. The tracker (`latest_checkpointed_iteration.txt`)
is the root's and is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.extents import Extent
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.job.module_order import (
    cut_anew,
    embedding_of,
    main_stack,
    put,
    with_copy,
    without_copy,
)
from ftckpt.formats.megatron.job.stages import Stage, offsets
from ftckpt.formats.megatron.optimizer.write_distrib_optim import DistributedWriter, PlainWriter
from ftckpt.formats.megatron.rank_files.from_whole import plan_of_example, plan_of_whole
from ftckpt.formats.megatron.rank_files.grid import OPTIMIZER, WEIGHTS
from ftckpt.formats.megatron.rank_files.parts import Parts, RankModel, holdings
from ftckpt.formats.megatron.rank_files.states import (
    WRITTEN,
    RankFilesPlan,
    RankFrame,
    plan_of_ranks,
)
from ftckpt.formats.megatron.rank_files.tensor_names import EXTRA_STATE, head_of
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.torch_files.write_tree import Tensor, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile, Stored
from ftckpt.workers.memory import no_gc

from .reader import MegatronCheckpoint


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
        with no_gc():
            if isinstance(request.like, MegatronCheckpoint):
                plan = plan_of_example(content, request.like, request)
            elif isinstance(content.checkpoint, MegatronCheckpoint):
                plan = plan_of_ranks(content, content.checkpoint, request)
            else:
                plan = plan_of_whole(content, request)
            return _Writing(plan).layout()


class _Writing:
    """One layout on its way."""

    def __init__(self, plan: RankFilesPlan) -> None:
        self._plan, self._job = plan, plan.job
        self._target = plan.target
        self._parts = Parts(plan.job.content, plan.target.grid, plan.rules)
        self._placed: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._plain: PlainWriter | None = None
        self._distributed: DistributedWriter | None = None
        found = plan.optimizer
        if found is not None:
            self._plain = PlainWriter(self._parts, found.optimizers)
            if found.form is not None:
                self._distributed = DistributedWriter(
                    self._parts, found.form, found, plan.target.grid, plan.args
                )

    def layout(self) -> Layout:
        """Return the files."""
        job = self._job
        files = [file for one in self._holdings() for file in self._files(one)]
        placed = self._placed | job.state.placed
        for writer in (self._plain, self._distributed):
            placed |= writer.placed if writer is not None else set()
        return Layout(
            files=[*files, *beside_weights(job.given)],
            unplaced=[name for name in job.names if name not in placed],
            notes=job.notes,
            content=self._plan.states.held(replace(job.content, aliases=self._aliases)),
        )

    def _holdings(self) -> list[RankModel]:
        plan, source, target = self._plan, self._job.layout, self._target
        order, firsts, known = dict(plan.order), source.firsts, self._job.content.tensors
        if not target.same_stages:
            stack = main_stack(order)
            order = cut_anew(order, target.layers)
            firsts = {stage: {stack: n} for stage, n in offsets(target.layers).items()}
        embedding = embedding_of(order)
        last = Stage(target.grid.pp - 1, target.chunks - 1)
        if target.grid.pp == 1:
            order = {stage: without_copy(slots) for stage, slots in order.items()}
        elif plan.tied and embedding is not None and head_of(embedding.name) not in known:
            # Whatever arguments say, the output layer may be a parameter of its own.
            order[last] = with_copy(order[last], embedding.name, embedding.words)
        experts = source.experts * source.grid.ep // target.grid.ep
        return holdings(self._parts, order, firsts, target, experts)

    def _files(self, mine: RankModel) -> list[OutputFile]:
        """Return the files of one rank."""
        states, folder = self._plan.states, self._target.grid.name(mine.at)
        frame = states.frame(mine.at, trained=self._plain is not None)
        trees: dict[str, Any] = {}
        weights: Mapping[tuple[int, str], Tensor] = {}
        if self._distributed is not None:
            buffers = self._distributed.buffers(mine)
            weights = self._distributed.weights(buffers)
            trees[OPTIMIZER] = self._distributed.tree(buffers)
        trees = {WEIGHTS: self._tree(mine, frame, weights), **trees}
        files = [
            OutputFile(f"{folder}/{name}", save(tree, folder=name.removesuffix(".pt")))
            for name, tree in trees.items()
        ]
        for path in states.of_others(mine.at, list(trees)):
            whole = Extent(path, 0, self._job.given.checkpoint.source.size(path))
            files.append(OutputFile(path, [Stored(whole)]))
        return files

    def _tree(
        self, mine: RankModel, frame: RankFrame, weights: Mapping[tuple[int, str], Tensor]
    ) -> dict[Any, Any]:
        """Return what one rank's `model_optim_rng.pt` holds; `weights` lie in buffers."""
        made: dict[Any, Any] = {}
        for key, value in frame.root.items():
            if value is not WRITTEN:
                made[key] = value
            elif key == "optimizer":
                assert self._plain is not None
                made[key] = self._plain.tree(mine)
            else:
                made |= self._models(mine, frame, weights)
        return made

    def _models(
        self, mine: RankModel, frame: RankFrame, weights: Mapping[tuple[int, str], Tensor]
    ) -> dict[str, Any]:
        """Return the model chunks of one rank."""
        held = {(one.local.chunk, one.local.name): one for one in mine.held}
        made: dict[str, Any] = {}
        for chunk, places in enumerate(mine.chunks):
            model: dict[str, Any] = Ordered() if frame.ordered else {}
            for item in places:
                one = held.get((chunk, item.name))
                if one is not None:
                    self._placed.add(one.wanted.key)
                    if item.entry.copy:
                        self._aliases[item.entry.name] = item.weight
                    value: Any = weights.get((chunk, item.name))
                    value = value or self._parts.tensor(one.wanted, one.weight, mine.at)
                elif not item.entry.full:
                    value = item.entry.empty
                elif item.name.endswith(EXTRA_STATE):
                    value = frame.extra(chunk, item)
                else:
                    continue  # the user leaves it out
                put(model, item.path, value)
            made["model" if self._target.chunks == 1 else f"model{chunk}"] = model
        return made
