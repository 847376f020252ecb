"""Lay out legacy Megatron for a model that no such checkpoint holds: its weights, for any ranks.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     args, checkpoint_version, iteration, the model
    config.json, …                                what lay beside a Hugging Face model's weights

The optimizer's state, random streams and the schedule have no place: files of ranks keep them in
the form of the run that trained, which nothing else shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, OutputFile, Wishes

from .hf_beside import beside_weights
from .inert import Ordered
from .megatron_holdings import Holdings, holdings
from .megatron_modules import Order, Slot, cut_anew, embedding_of, order_of_names, with_copy
from .megatron_names import head_of, is_expert
from .megatron_parts import Parts
from .megatron_ranks import WEIGHTS
from .megatron_rules import rules_of
from .megatron_stages import Stage, offsets
from .megatron_target import Target, target_of
from .megatron_vocabulary import padding, repadded, vocabulary_of
from .megatron_whole import VERSION, Whole, namespace, whole_model
from .torch_tree import save

_STACK = "decoder.layers."


def lay_out(content: Content, wishes: Wishes) -> Layout:
    """Lay out the model of a content that is no legacy checkpoint.

    Raises:
        UsageError: sizes that do not divide, or a wish that is not of this format.
        UnsupportedError: a tensor that no rule knows, or a model that nothing describes.
    """
    whole = whole_model(content)
    _require_own_names(whole)
    target = target_of(whole.layout, wishes)
    rules = rules_of(whole.layout.args, whole.locals())
    rules = wishes.rules.before(rules) if wishes.rules else rules
    args, tp = whole.layout.args, target.grid.tp
    true = wishes.true_vocab_size or whole.rows
    padded, rows = repadded(whole.content, vocabulary_of(whole.content, rules), args, tp, true)
    slots = {Stage(0, 0): order_of_names(wanted.name for wanted in padded.tensors.values())}
    order, aliases = _with_copy(cut_anew(slots, target.layers), target, padded)
    firsts = {stage: {_STACK: first} for stage, first in offsets(target.layers).items()}
    experts = whole.layout.experts * whole.layout.grid.ep // target.grid.ep
    parts = Parts(padded, target.grid, rules)
    said = dict(target.arguments) | {"ckpt_format": "torch", "use_dist_ckpt": False}
    if rows is not None:
        said["padded_vocab_size"] = rows
    files = [
        _file(whole, target, parts, one, said)
        for one in holdings(parts, order, firsts, target, experts)
    ]
    notes = [] if whole.rows is None or rows is None else [padding(whole.rows, rows)]
    return Layout(
        files=[*files, *beside_weights(content)],
        unplaced=whole.unplaced,
        notes=[*whole.notes, *notes, _alone()],
        content=replace(padded, aliases=aliases),
    )


def _require_own_names(whole: Whole) -> None:
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
    order: dict[Stage, list[Slot]], target: Target, content: Content
) -> tuple[Order, dict[str, str]]:
    """Give the last of several stages its copy of a tied embedding; return it by its name."""
    embedding = embedding_of(order)
    if target.grid.pp == 1 or embedding is None or head_of(embedding.name) in content.tensors:
        return order, {}
    last = Stage(target.grid.pp - 1, target.chunks - 1)
    copied = with_copy(order[last], embedding.name, embedding.words)
    return {**order, last: copied}, {head_of(embedding.name): embedding.name}


def _file(
    whole: Whole, target: Target, parts: Parts, mine: Holdings, said: dict[str, Any]
) -> OutputFile:
    """Return the file of one rank."""
    args = {**whole.arguments, **said}
    rank = target.grid.rank(mine.at)
    if "rank" in args and rank is not None:
        args["rank"] = rank
    tree: dict[str, Any] = {
        "args": namespace(args), "checkpoint_version": VERSION, "iteration": whole.iteration,
    }  # fmt: skip
    for chunk in range(target.chunks):
        model = Ordered()
        for held in mine.held:
            if held.local.chunk == chunk:
                model[held.local.name] = parts.tensor(held.wanted, held.weight, mine.at)
        tree["model" if target.chunks == 1 else f"model{chunk}"] = model
    path = f"{target.grid.name(mine.at)}/{WEIGHTS}"
    return OutputFile(path, save(tree, folder=WEIGHTS.removesuffix(".pt")))


def _alone() -> Finding:
    what = (
        "these are the weights alone: start Megatron with --finetune, or with --no-load-optim and"
        " --no-load-rng"
    )
    return finding("note", what)
