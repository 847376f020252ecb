"""A whole model of any other format, as files of ranks keep it.

The state of an optimizer goes with it where the source carries the job that it is of, in the form
that the job's arguments say (`job.trained`); the schedule and other state of all ranks too. Random
streams are a rank's own: they stay where torch_dist shows whose they are.

Files of ranks laid out as a checkpoint that the target job saved itself.

The example says all that no number of ranks says: which module stands where, in what order the
optimizer has its parameters, where buckets end, the arguments. The values are the source's. What
the example's tensors hold is never used; what else it holds is kept only where the source has
nothing in its place, and a note says so.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import finding, listed
from ftckpt.formats.families.facts import arguments_of
from ftckpt.formats.megatron.job.common_state import job_state, not_carried
from ftckpt.formats.megatron.job.kept_state import PLACE, KeptState
from ftckpt.formats.megatron.job.layout import MegatronJob, TargetLayout, target_of
from ftckpt.formats.megatron.job.module_order import order_of, order_of_names
from ftckpt.formats.megatron.job.optimizer_tree import numbered
from ftckpt.formats.megatron.job.padding import padding, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.megatron.job.trained import carried_optimizer, optimizer_of, placed_with
from ftckpt.formats.megatron.job.whole_model import (
    VERSION,
    is_ours,
    model_and_copies,
    plain_arguments,
    trained_tensors,
    whole_model,
)
from ftckpt.formats.megatron.optimizer.from_example import example_optimizer
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from ftckpt.formats.megatron.torch_dist.legacy_names import own_name
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .grid import Arguments, Coordinate
from .source import FirstRanks
from .states import SEEDED_ANEW, WEIGHTS_ALONE, RankFilesPlan, SharedState
from .tensor_names import LocalTensor, chunk_keys, is_expert

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


# Of a job's arguments, those that count what was trained.
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_SHOWN = 3  # names in a message


def plan_of_example(
    content: Content, example: MegatronCheckpoint, request: LayoutRequest
) -> RankFilesPlan:
    """Return how a content is written as an example shows it.

    Args:
        content: what is written.
        example: saved by the job that is to load it.
        request: rules, and how many rows of the vocabulary are no padding.

    Raises:
        UnsupportedError: the source's tensors are other ones than the example's, or it lacks a part
            of the optimizer's state that the example has.
        CorruptError, UnsafeError: a file of the example is damaged or hostile.
    """
    ranks, layout = FirstRanks(example), example.layout
    args, grid = layout.args, layout.grid
    target = target_of(layout, LayoutRequest())
    model, trained, rest = _named(content, example)
    named = replace(
        content.with_tensors([*model.values(), *trained.values()]), objects={}, aliases={}
    )
    rules = rules_of(args, ranks.locals(), request.rules)
    true = request.true_vocab_size
    named, _ = repadded(named, vocabulary_of(named, rules), args, grid.tp, true)
    _require_same_model(named, example)
    state = job_state(content)
    optimizers = list(numbered(state.root.get("optimizer")).values())
    by_source = {key: named.tensors[wanted.key] for key, wanted in trained.items()}
    kept = KeptState(content, by_source, optimizers)
    weights = [w for w in named.tensors.values() if w.component == "model"]
    parameters = [
        LocalTensor(0, w.name, PLACE._replace(shape=w.shape, dtype=w.dtype), w.kind)
        for w in weights
        if example.tensors[w.key].kind is Kind.PARAM
    ]
    shown = example_optimizer(ranks, kept, state.root, parameters) if trained else None
    optimizer, notes = shown if shown is not None else (None, [])
    notes = [*state.notes, *notes]
    known = arguments_of(content.checkpoint)
    counted = {n: v for n in _COUNTERS if type(v := known.get(n)) is int}
    if not counted and optimizer is not None:
        what = "the position in the data is the example's: the source does not record one"
        notes.append(finding("note", what))
    tree = ranks.stream(ranks.coordinates()[0]).tree
    models = chunk_keys(tree)
    root = dict(state.root)
    root.setdefault("iteration", content.checkpoint.step or 0)
    if "checkpoint_version" in tree:
        root.setdefault("checkpoint_version", tree["checkpoint_version"])
    repeated = optimizer is not None
    state.placed |= {*kept.placed, *not_carried(content, repeated=repeated)}
    return RankFilesPlan(
        job=MegatronJob(
            given=content,
            content=replace(
                named, tensors={w.key: w for w in weights} | kept.tensors, known=kept.known
            ),
            layout=layout,
            state=state,
            names=rest,
            notes=[*notes, WEIGHTS_ALONE if optimizer is None else SEEDED_ANEW],
        ),
        target=target,
        order=order_of(ranks),
        rules=rules,
        args=args,
        tied=False,  # the order shows it
        optimizer=optimizer,
        states=SharedState(
            keys=["model" if key == models[0] else key for key in tree],
            root=root,
            arguments={**plain_arguments(args), **counted},
            grid=grid,
            ordered=isinstance(tree[models[0]], Ordered),
        ),
    )


def _named(
    content: Content, example: MegatronCheckpoint
) -> tuple[dict[str, TargetTensor], dict[str, TargetTensor], list[str]]:
    """Return the model and what an optimizer keeps of it, by the source's keys, and the rest.

    The rest are the names of tensors and objects that are neither.
    """
    model, tied = model_and_copies(content)
    has = {w.name for w in example.tensors.values() if w.component == "model"}
    owned = {
        w.name: own_name(w.name, example.layout.args) for k, w in model.items() if k not in tied
    }
    lost = sorted(has - set(owned.values()))
    more = sorted(name for name, own in owned.items() if own not in has)
    if lost:
        what = f"the source lacks {listed(lost, _SHOWN)} of the example's model"
        if more:
            what += f", and the example lacks {listed(more, _SHOWN)} of the source's"
        hint = "--rename gives parameters other names" if more else ""
        raise UnsupportedError(what, tensor=lost[0], hint=hint)
    owned = {name: own for name, own in owned.items() if own in has}
    kept = {key: w._replace(name=owned[w.name]) for key, w in model.items() if w.name in owned}
    trained = dict(trained_tensors(content, owned))
    arguments = arguments_of(content.checkpoint).record is not None
    rest = [k for k in content.tensors if k not in kept and k not in tied]
    rest += [name for name in content.objects if not (arguments and is_ours(content, name))]
    return kept, trained, rest


def _require_same_model(named: Content, example: MegatronCheckpoint) -> None:
    """Refuse tensors of other shapes or types than the example's."""
    for key, wanted in named.tensors.items():
        shown = example.tensors.get(key)
        if shown is None or wanted.component != "model":
            continue
        if wanted.shape != shown.shape:
            raise UnsupportedError(
                f"{key} has the shape {list(wanted.shape)} in the source and"
                f" {list(shown.shape)} in the example",
                hint="--true-vocab-size N pads a vocabulary as the example's job does",
                tensor=key,
            )
        if wanted.dtype != shown.dtype:
            raise UnsupportedError(
                f"{key} is {wanted.dtype.name} in the source and {shown.dtype.name} in the example",
                hint="--dtype casts the weights",
                tensor=key,
            )
