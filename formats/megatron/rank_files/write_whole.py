"""Lay out legacy Megatron for a model that no such checkpoint holds, for any ranks.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     args, checkpoint_version, iteration, the model
    config.json, …                                what lay beside a Hugging Face model's weights

The state of an optimizer goes with it where the source carries the job that it is of, in the form
that the job's arguments say (`megatron_trained`); the schedule and other state of all ranks too.
Random streams are a rank's own: they stay where torch_dist shows whose they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import Finding
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.job.common_state import JobState, is_random, is_repeated, job_state
from ftckpt.formats.megatron.job.layout import TargetLayout, target_of
from ftckpt.formats.megatron.job.module_order import (
    Order,
    Slot,
    cut_anew,
    embedding_of,
    order_of_names,
    with_copy,
)
from ftckpt.formats.megatron.job.padding import padding, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.stages import Stage, offsets
from ftckpt.formats.megatron.job.trained import OptimizerOutput, trained_of
from ftckpt.formats.megatron.job.whole_model import VERSION, WholeModel, whole_model
from ftckpt.formats.megatron.optimizer.write_distributed import DistributedWriter
from ftckpt.formats.megatron.optimizer.write_plain import PlainWriter
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile

from .contents import RankModel, holdings
from .grid import Arguments, Coordinate
from .names import Weights, arguments_at, files_of, seeded_anew, weights_alone
from .parts import Parts
from .tensor_names import head_of, is_expert

_STACK = "decoder.layers."
_SCHEDULE = "opt_param_scheduler"


def lay_out(content: Content, request: LayoutRequest) -> Layout:
    """Lay out the model of a content that is not a legacy checkpoint.

    Raises:
        UsageError: sizes that do not divide, or a wish that is not of this format.
        UnsupportedError: a tensor that no rule knows, a model that nothing describes, or state of
            an optimizer whose form is not certain.
    """
    return _Writing(content, request).layout()


class _Writing:
    """One layout on its way."""

    def __init__(self, content: Content, request: LayoutRequest) -> None:
        whole = self._whole = whole_model(content)
        self._given = content
        _require_own_names(whole)
        self._target = target_of(whole.layout, request)
        grid, args = self._target.grid, whole.layout.args
        self._state = job_state(content) if whole.trained else JobState()
        self._trained = trained_of(content, whole, self._state, apart=grid.experts_apart)
        full = whole.content
        if self._trained is not None:
            full = replace(full, tensors={**full.tensors, **self._trained.tensors})
        rules = rules_of(args, whole.locals())
        rules = request.rules.before(rules) if request.rules else rules
        true = request.true_vocab_size or whole.rows
        is_vocabulary = vocabulary_of(full, rules)
        self._content, self._rows = repadded(full, is_vocabulary, args, grid.tp, true)
        self._parts = Parts(self._content, grid, rules)
        said = dict(self._target.arguments) | {"ckpt_format": "torch", "use_dist_ckpt": False}
        if self._rows is not None:
            said["padded_vocab_size"] = self._rows
        self._arguments = {**whole.arguments, **said}
        self._random = self._streams()
        self._plain: PlainWriter | None = None
        self._distributed: DistributedWriter | None = None
        if self._trained is not None:
            self._choose_optimizer(self._trained)

    def layout(self) -> Layout:
        """Return the files."""
        whole, target, content = self._whole, self._target, self._content
        weights = [w.name for w in content.tensors.values() if w.component == "model"]
        slots = {Stage(0, 0): order_of_names(weights)}
        order, aliases = _with_copy(cut_anew(slots, target.layers), target, content)
        firsts = {stage: {_STACK: first} for stage, first in offsets(target.layers).items()}
        experts = whole.layout.experts * whole.layout.grid.ep // target.grid.ep
        found = holdings(self._parts, order, firsts, target, experts)
        files = [file for one in found for file in self._files(one)]
        known = {} if self._trained is None else self._trained.known
        return Layout(
            files=[*files, *beside_weights(self._given)],
            unplaced=self._unplaced(),
            notes=self._notes(),
            content=replace(content, aliases=aliases, known=known),
        )

    def _choose_optimizer(self, trained: OptimizerOutput) -> None:
        """Say how the optimizer is written.

        Raises:
            UsageError: its layout depends on the data-parallel ranks, and nobody says how many.
        """
        self._plain = PlainWriter(self._parts, trained.optimizers)
        if trained.form is None:
            return
        grid = self._target.grid
        if grid.dp is None:
            what = "the layout of the distributed optimizer depends on the data-parallel ranks"
            raise UsageError(what, hint="--dp N says how many")
        args = Arguments(self._arguments)
        form, found = trained.form, trained.optimizers
        self._distributed = DistributedWriter(self._parts, form, grid, args, found, certain=True)

    def _streams(self) -> dict[Coordinate, CopiedTree]:
        """Return the random streams of every rank; nothing where any has none to go on with.

        Of several expert ranks the source keeps those of the first alone.
        """
        old, new, random = self._whole.layout.grid, self._target.grid, self._state.random
        several = any(type(one.value) is list and len(one.value) > 1 for one in random.values())
        if not self._target.same_ranks or new.ep > 1 or (several and old.dp != new.dp):
            return {}
        ranks = new.directories()
        if not all((at.pp, at.tp) in random for at in ranks):
            return {}
        return {at: random[at.pp, at.tp] for at in ranks}

    def _unplaced(self) -> list[str]:
        placed = set(self._state.placed)
        if self._trained is not None:
            placed |= self._trained.placed
            tied = not Arguments(self._arguments).flag("untie_embeddings_and_output_weights")
            placed |= {
                key
                for key, wanted in self._given.tensors.items()
                if is_random(wanted) or (tied and is_repeated(wanted))
            }
        return [name for name in self._whole.unplaced if name not in placed]

    def _notes(self) -> list[Finding]:
        whole, notes = self._whole, [*self._whole.notes, *self._state.notes]
        if whole.rows is not None and self._rows is not None:
            notes.append(padding(whole.rows, self._rows))
        if self._trained is None:
            notes.append(weights_alone())
        elif not self._random:
            notes.append(seeded_anew())
        return notes

    # --- files ----------------------------------------------------------------------------------

    def _files(self, mine: RankModel) -> list[OutputFile]:
        """Return the files of one rank."""
        folder = self._target.grid.name(mine.at)
        return files_of(folder, mine, self._distributed, partial(self._tree, mine))

    def _tree(self, mine: RankModel, weights: Weights) -> dict[str, Any]:
        """Return what one rank's `model_optim_rng.pt` holds."""
        root = {} if self._trained is None else dict(self._state.root)
        tree: dict[str, Any] = {
            "args": arguments_at(self._arguments, self._target.grid.rank(mine.at)),
            "checkpoint_version": root.pop("checkpoint_version", VERSION),
            "iteration": root.pop("iteration", self._whole.iteration),
        }
        chunks = self._target.chunks
        for chunk in range(chunks):
            model = Ordered()
            for held in mine.held:
                place = held.local.chunk, held.local.name
                if place[0] == chunk:
                    value = weights.get(place)
                    model[place[1]] = value or self._parts.tensor(held.wanted, held.weight, mine.at)
            tree["model" if chunks == 1 else f"model{chunk}"] = model
        if self._plain is not None:
            tree["optimizer"] = self._plain.tree(mine)
        if _SCHEDULE in root:
            tree[_SCHEDULE] = root[_SCHEDULE]
        if mine.at in self._random:
            tree["rng_state"] = self._random[mine.at]
        return tree | {key: value for key, value in root.items() if key not in tree}


def _require_own_names(whole: WholeModel) -> None:
    """Refuse names that the implementation in the arguments does not have.

    Megatron loads such files without a word and leaves what it does not find at random.

    Raises:
        UnsupportedError: experts that the job keeps in one matrix, or norms of the other one.
    """
    args, names = whole.layout.args, whole.content.tensors
    local = args.get("transformer_impl") == "local"
    stacked = args.flag("moe_grouped_gemm") and (local or args.flag("moe_use_legacy_grouped_gemm"))
    if stacked and any(is_expert(name) for name in names):
        what = "the job of the source keeps all experts of a rank in one matrix (moe_grouped_gemm)"
        raise UnsupportedError(what, hint="--to megatron-dist writes what such a job loads")
    latent = args.flag("multi_latent_attention")
    if not (local or latent) and f"{_STACK}0.input_layernorm.weight" in names:
        what = "the norms have the names of Megatron's own layers, and the arguments say otherwise"
        raise UnsupportedError(what, hint="--names megatron --spelling transformer_engine")


def _with_copy(
    order: dict[Stage, list[Slot]], target: TargetLayout, content: Content
) -> tuple[Order, dict[str, str]]:
    """Give the last of several stages its copy of a tied embedding; return it by its name."""
    embedding = embedding_of(order)
    if target.grid.pp == 1 or embedding is None or head_of(embedding.name) in content.tensors:
        return order, {}
    last = Stage(target.grid.pp - 1, target.chunks - 1)
    copied = with_copy(order[last], embedding.name, embedding.words)
    return {**order, last: copied}, {head_of(embedding.name): embedding.name}
