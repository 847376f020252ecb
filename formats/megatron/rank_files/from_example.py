"""Files of ranks laid out as a checkpoint that the target job saved itself.

The example says all that no number of ranks says: which module stands where, in what order the
optimizer has its parameters, where buckets end, the arguments. The values are the source's. What
the example's tensors hold is never used; what else it holds is kept only where the source has
nothing in its place, and a note says so.
"""

from __future__ import annotations

from dataclasses import replace

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.findings import finding, listed
from ftckpt.formats.families.facts import arguments_of
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.common_state import job_state, not_carried
from ftckpt.formats.megatron.job.description import MegatronJob
from ftckpt.formats.megatron.job.kept_state import PLACE, KeptState
from ftckpt.formats.megatron.job.layout import target_of
from ftckpt.formats.megatron.job.module_order import order_of
from ftckpt.formats.megatron.job.optimizer_tree import numbered
from ftckpt.formats.megatron.job.padding import repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.whole_model import (
    is_ours,
    model_and_copies,
    plain_arguments,
    trained_tensors,
)
from ftckpt.formats.megatron.optimizer.from_example import example_optimizer
from ftckpt.formats.megatron.torch_dist.legacy_names import own_name
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .plan import SEEDED_ANEW, WEIGHTS_ALONE, RankFilesPlan
from .source import FirstRanks
from .states import SharedState
from .tensor_names import LocalTensor, chunk_keys

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
