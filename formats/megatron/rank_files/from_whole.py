"""A whole model of any other format, as files of ranks keep it.

The state of an optimizer goes with it where the source carries the job that it is of, in the form
that the job's arguments say (`job.trained`); the schedule and other state of all ranks too. Random
streams are a rank's own: they stay where torch_dist shows whose they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import finding
from ftckpt.formats.megatron.job.description import MegatronJob
from ftckpt.formats.megatron.job.layout import TargetLayout, target_of
from ftckpt.formats.megatron.job.module_order import order_of_names
from ftckpt.formats.megatron.job.padding import padding, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.megatron.job.trained import carried_optimizer, optimizer_of, placed_with
from ftckpt.formats.megatron.job.whole_model import VERSION, whole_model
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest

from .grid import Arguments, Coordinate
from .plan import SEEDED_ANEW, WEIGHTS_ALONE, RankFilesPlan
from .states import SharedState
from .tensor_names import is_expert

# The order of a rank's file; other state of the source follows.
_KEYS = (
    "args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler",
    "rng_state",
)  # fmt: skip
_CONVOLUTION = re.compile(r".*\.mixer\.conv1d\.weight")
_OLDER = (
    "the convolution of state-space layers has its name of before Megatron-core 0.18"
    " (mixer.conv1d.weight), which later versions load from --to megatron-dist alone"
)
_NORM = "decoder.layers.0.input_layernorm.weight"


def plan_of_whole(content: Content, request: LayoutRequest) -> RankFilesPlan:
    """Return how a content that is not a legacy checkpoint is written.

    Raises:
        UsageError: sizes that do not divide, or a distributed optimizer without the number of
            data-parallel ranks.
        UnsupportedError: a model that nothing describes, or state of an optimizer whose form is not
            certain.
    """
    job = whole_model(content)
    _require_own_names(job)
    target = target_of(job.layout, request)
    carried = carried_optimizer(job)
    optimizer, full = None, job.content
    if carried is not None:
        optimizer = optimizer_of(job, carried, apart=target.grid.experts_apart)
        kept = carried.kept
        full = replace(full, tensors={**full.tensors, **kept.tensors}, known=kept.known)
    rules = rules_of(job.args, job.locals(), request.rules)
    true = request.true_vocab_size or job.rows
    full, rows = repadded(full, vocabulary_of(full, rules), job.args, target.grid.tp, true)
    arguments = {**job.arguments, **target.arguments, "ckpt_format": "torch"}
    arguments["use_dist_ckpt"] = False
    if rows is not None:
        arguments["padded_vocab_size"] = rows
    state = job.state
    notes = [*job.notes, *state.notes]
    if any(map(_CONVOLUTION.fullmatch, job.content.tensors)):
        notes.append(finding("note", _OLDER))
    if job.rows is not None and rows is not None:
        notes.append(padding(job.rows, rows))
    root = {"checkpoint_version": VERSION, "iteration": job.iteration}
    random = _streams(job, target)
    if carried is None:
        notes.append(WEIGHTS_ALONE)
    else:
        if carried.distributed and target.grid.dp is None:
            what = "the layout of the distributed optimizer depends on the data-parallel ranks"
            raise UsageError(what, hint="--dp N says how many")
        state = replace(state, placed=placed_with(job, carried.kept))
        notes += () if random else (SEEDED_ANEW,)
        root |= state.root
    weights = [w.name for w in full.tensors.values() if w.component == "model"]
    return RankFilesPlan(
        job=replace(job, content=full, state=state, notes=notes),
        target=target._replace(same_stages=False),  # a whole model is one stage
        order={Stage(0, 0): order_of_names(weights)},
        rules=rules,
        args=Arguments(arguments),
        tied=True,
        optimizer=optimizer,
        states=SharedState(
            keys=_KEYS, root=root, arguments=arguments, grid=target.grid, random=random
        ),
    )


def _streams(job: MegatronJob, target: TargetLayout) -> dict[Coordinate, CopiedTree]:
    """Return the random streams of every rank; nothing where any has none to go on with.

    Of several expert ranks the source keeps those of the first alone.
    """
    old, new, random = job.layout.grid, target.grid, job.state.random
    several = any(type(one.value) is list and len(one.value) > 1 for one in random.values())
    if not target.same_ranks or new.ep > 1 or (several and old.dp != new.dp):
        return {}
    ranks = new.directories()
    if not all((at.pp, at.tp) in random for at in ranks):
        return {}
    return {at: random[at.pp, at.tp] for at in ranks}


def _require_own_names(job: MegatronJob) -> None:
    """Refuse names that the implementation in the arguments does not have.

    Megatron loads such files without a word and leaves what it does not find at random.

    Raises:
        UnsupportedError: experts that the job keeps in one matrix, norms of the other one, or
            layers that predict further tokens.
    """
    args, names = job.args, job.content.tensors
    local = args.get("transformer_impl") == "local"
    stacked = args.flag("moe_grouped_gemm") and (local or args.flag("moe_use_legacy_grouped_gemm"))
    if stacked and any(is_expert(name) for name in names):
        what = "the job of the source keeps all experts of a rank in one matrix (moe_grouped_gemm)"
        raise UnsupportedError(what, hint="--to megatron-dist writes what such a job loads")
    further = next((name for name in names if name.startswith("mtp.")), None)
    if further is not None:
        what = f"{further}: the name of its module depends on the version of Megatron-core"
        hint = "--to megatron-dist, where it does not, or --drop 'mtp.*'"
        raise UnsupportedError(what, hint=hint, tensor=further)
    latent = args.flag("multi_latent_attention")
    if not (local or latent) and _NORM in names:
        what = "the norms have the names of Megatron's own layers, and the arguments say otherwise"
        raise UnsupportedError(what, hint="--names megatron --spelling transformer_engine")
