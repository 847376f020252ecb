"""A legacy Megatron source, whose files keep their form: order, groups, arguments but for sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.description import MegatronJob
from ftckpt.formats.megatron.job.groups import JobOptimizer, form_of, optimizers_of, regrouped
from ftckpt.formats.megatron.job.layout import TargetLayout, changed, target_of
from ftckpt.formats.megatron.job.module_order import order_of
from ftckpt.formats.megatron.job.padding import may_differ, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .grid import OPTIMIZER
from .plan import RankFilesPlan
from .source import FirstRanks
from .states import OwnState

_OPTIMIZER = re.compile(r"rank_\d+\.optimizer")


def plan_of_ranks(
    content: Content, checkpoint: MegatronCheckpoint, request: LayoutRequest
) -> RankFilesPlan:
    """Return how files of ranks are written for the layout that is wished for.

    Raises:
        UsageError: sizes that do not divide.
        UnsupportedError: state of an optimizer that cannot be laid out anew, or a model whose
            stages cannot be cut.
    """
    source, ranks = checkpoint.layout, FirstRanks(checkpoint)
    target = target_of(source, request)
    rules = rules_of(source.args, ranks.locals(), request.rules)
    true, vocabulary = request.true_vocab_size, vocabulary_of(content, rules)
    content, rows = repadded(content, vocabulary, source.args, target.grid.tp, true)
    changes = dict(target.arguments)
    if rows is not None:
        changes["padded_vocab_size"] = rows
    job = MegatronJob(
        given=content,
        content=content,
        layout=source,
        names=[*content.tensors, *content.objects],
    )
    states = OwnState(job, ranks, target, changes)
    unchanged = target.same_ranks and rows is None and source.grid.dp == target.grid.dp
    optimizer = _optimizer(content, ranks, target, unchanged=unchanged)
    if optimizer is not None:
        job.state.placed.update(name for name in content.objects if _OPTIMIZER.fullmatch(name))
    order = order_of(ranks)
    if not target.same_stages and source.args.count("mtp_num_layers"):
        what = "a model that predicts several tokens keeps its pipeline stages"
        raise UnsupportedError(what, hint="leave out --pp and --vp")
    notes = [] if true is not None else list(_padding_notes(content, ranks, target, vocabulary))
    return RankFilesPlan(
        job=replace(job, notes=[*job.state.notes, *notes]),
        target=target,
        order=order,
        rules=rules,
        args=changed(source.args, changes),
        tied=ranks.tied,
        optimizer=optimizer,
        states=states,
    )


def _padding_notes(
    content: Content,
    ranks: FirstRanks,
    target: TargetLayout,
    vocabulary: Callable[[TargetTensor], bool],
) -> Iterator[Finding]:
    """Say where Megatron may ask for other rows of padding than are kept."""
    args, before, after = ranks.layout.args, ranks.layout.grid.tp, target.grid.tp
    for wanted in content.tensors.values():
        if vocabulary(wanted) and may_differ(args, wanted.shape[0], before, after):
            what = (
                f"{wanted.name} keeps its {wanted.shape[0]} rows, and Megatron may pad to other"
                f" rows for {after} tensor ranks: --true-vocab-size N lays out those"
            )
            yield finding("note", what, tensor=wanted.key)
            return


def _optimizer(
    content: Content, ranks: FirstRanks, target: TargetLayout, *, unchanged: bool
) -> JobOptimizer | None:
    """Return the optimizer that is laid out anew; None where its files stand as they are."""
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
    found = None if by_rank or not (mapped or listed) else optimizers_of(ranks)
    if found is None:
        return None
    found = regrouped(found, apart=target.grid.experts_apart)
    return JobOptimizer(found, None if found.plain or not mapped else form_of(ranks))
