"""Map layer numbers of a pipeline stage to layer numbers of the model.

A file numbers its layers from 0. With interleaving a stage holds several chunks (`model0`,
`model1`, …), and the layers run chunk by chunk over all stages: chunk 0 of every stage, then
chunk 1 of every stage. So counts alone give each layer its number in the model.

Source: `get_num_layers_to_build` in megatron/core/transformer/transformer_block.py,
`get_transformer_layer_offset` in transformer_layer.py, `PipelineParallelLayerLayout` (core 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.pickles.unpickle import Inert


class Stage(NamedTuple):
    """One chunk of one pipeline stage; without interleaving `chunk` is 0."""

    pp: int
    chunk: int


Counts = Mapping[Stage, int]

_GROUP_TIMES = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_TIMES = re.compile(r"(.)\*(\d{1,4})")
_MAX_LAYERS = 100_000


def planned(args: Arguments, pp: int, chunks: int) -> Counts | None:
    """Return how many layers the arguments put on each stage.

    Args:
        args: of the job.
        pp: pipeline stages.
        chunks: chunks a stage.

    Returns:
        None where the arguments do not say, or cannot be carried out.
    """
    recorded = args.get("pipeline_model_parallel_layout")
    if recorded is not None:
        layout = _layout(recorded)
        if layout is None or len(layout) != pp * chunks:
            return None
        return {Stage(n % pp, n // pp): count for n, count in enumerate(layout)}
    layers = args.count("num_layers")
    if not layers:
        return None
    first = args.get("decoder_first_pipeline_num_layers")
    last = args.get("decoder_last_pipeline_num_layers")
    whole = _a_stage(layers, pp, first, last, args)
    if whole is None or any(n % chunks for n in whole):
        return None
    counts = {Stage(p, v): whole[p] // chunks for p in range(pp) for v in range(chunks)}
    if args.flag("account_for_embedding_in_pipeline_split"):
        counts[Stage(0, 0)] -= 1
    if args.flag("account_for_loss_in_pipeline_split"):
        counts[Stage(pp - 1, chunks - 1)] -= 1
    return counts if sum(counts.values()) == layers and min(counts.values()) >= 0 else None


def _a_stage(layers: int, pp: int, first: Any, last: Any, args: Arguments) -> list[int] | None:
    """Return the layers of each stage, the embedding and the loss counted where they count."""
    ends = {0: first, pp - 1: last}
    given = {p: n for p, n in ends.items() if type(n) is int and 0 <= n <= layers}
    layers += args.flag("account_for_embedding_in_pipeline_split")
    layers += args.flag("account_for_loss_in_pipeline_split")
    rest, left = layers - sum(given.values()), pp - len(given)
    if rest < 0 or (rest % left if left else rest):
        return None
    return [given.get(p, rest // left if left else 0) for p in range(pp)]


def _layout(record: Any) -> list[int] | None:
    """Return the layers of each stage in a custom layout: `Et|(t|)*3tL`, or lists of words."""
    if isinstance(record, Inert):
        record = record.get("input_data")
    if isinstance(record, str) and len(record) <= _MAX_LAYERS:
        text = record.replace(",", "")
        for pattern in (_GROUP_TIMES, _TIMES):
            if sum(len(m[1]) * int(m[2]) for m in pattern.finditer(text)) > _MAX_LAYERS:
                return None
            text = pattern.sub(lambda m: m[1] * int(m[2]), text)
        return [stage.count("t") for stage in text.split("|")]
    if isinstance(record, list) and all(isinstance(stage, list) for stage in record):
        return [sum(1 for layer in stage if layer == "decoder") for stage in record]
    return None


def offsets(counts: Counts) -> dict[Stage, int]:
    """Return the number in the model of each stage's first layer."""
    found, before = {}, 0
    for stage in sorted(counts, key=lambda s: (s.chunk, s.pp)):
        found[stage] = before
        before += counts[stage]
    return found


def settle(held: Counts, plan: Counts | None, stages: list[Stage], layers: int) -> Counts:
    """Return how many layers each stage has, from what files hold and what was planned.

    Files that hold all layers are believed; where a file is missing, or a layer has no tensor, the
    plan fills the gap.

    Args:
        held: what the files of each stage hold; a stage whose files are missing is not in it.
        plan: what the arguments say, or None.
        stages: all of them.
        layers: of the model, as recorded; 0 where not.

    Raises:
        CorruptError: files are missing and the arguments do not say what they hold
            (`missing-rank`).
    """
    complete = all(stage in held for stage in stages)
    if complete and sum(held.values()) == layers:
        return held
    if plan is not None and all(n <= plan.get(stage, -1) for stage, n in held.items()):
        return plan
    if complete:
        return held
    lost = next(stage for stage in stages if stage not in held)
    raise CorruptError(
        f"no file of pipeline stage {lost.pp} can be read, and the arguments do not say how many"
        " layers it holds, so that later layers have no number",
        kind="missing-rank",
    )
