"""Lay out legacy Megatron as a checkpoint that the target job saved itself.

The example says all that no number of ranks says: which module stands where, in what order the
optimizer has its parameters, where buckets end, the arguments. The values are the source's. What
the example's tensors hold is never used; what else it holds is kept only where the source has
nothing in its place, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.findings import finding, listed
from ftckpt.formats.families.facts import arguments_of
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.common_state import is_random, is_repeated, job_state
from ftckpt.formats.megatron.job.kept_state import PLACE, KeptState
from ftckpt.formats.megatron.job.layout import target_of
from ftckpt.formats.megatron.job.module_order import order_of, put
from ftckpt.formats.megatron.job.padding import repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.whole_model import is_ours, plain_arguments, trained_tensors
from ftckpt.formats.megatron.optimizer.from_example import Shown, example_optimizer
from ftckpt.formats.megatron.optimizer.write_distributed import DistributedWriter
from ftckpt.formats.megatron.optimizer.write_plain import PlainWriter
from ftckpt.formats.megatron.torch_dist.job import numbered
from ftckpt.formats.megatron.torch_dist.spelling import own_name
from ftckpt.formats.torch_files.write_tree import Tensor
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile

from .contents import RankModel, holdings
from .grid import Arguments
from .names import Weights, arguments_at, files_of, seeded_anew, weights_alone
from .parts import Parts
from .source import FirstRanks
from .tensor_names import LocalTensor, chunk_keys, tied_to

# Of a job's arguments, those that count what was trained.
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_SHOWN = 3  # names in a message


def lay_out_like(content: Content, example: MegatronCheckpoint, request: LayoutRequest) -> Layout:
    """Lay out a content as an example.

    Args:
        content: what is written.
        example: saved by the job that is to load it.
        request: rules, and how many rows of the vocabulary are no padding.

    Raises:
        UnsupportedError: the source's tensors are other ones than the example's, or it lacks a part
            of the optimizer's state that the example has.
        CorruptError, UnsafeError: a file of the example is damaged or hostile.
    """
    return _Writing(content, example, request).layout()


class _Writing:
    """One layout on its way."""

    def __init__(
        self, content: Content, example: MegatronCheckpoint, request: LayoutRequest
    ) -> None:
        self._given = content
        self._example = example
        self._ranks = FirstRanks(example)
        self._layout = example.layout
        self._target = target_of(example.layout, LayoutRequest())
        args = example.layout.args
        self._unplaced: list[str] = []
        model, trained = self._named(args)
        named = replace(
            content.with_tensors([*model.values(), *trained.values()]), objects={}, aliases={}
        )
        held = [n.local for at in self._ranks.coordinates() for n in self._ranks.held(at)]
        rules = rules_of(args, held)
        rules = request.rules.before(rules) if request.rules else rules
        is_vocabulary = vocabulary_of(named, rules)
        grid = example.layout.grid
        named, _ = repadded(named, is_vocabulary, args, grid.tp, request.true_vocab_size)
        self._require_same_model(named)
        by_source = {key: named.tensors[wanted.key] for key, wanted in trained.items()}
        self._state = job_state(content)
        optimizers = list(numbered(self._state.root.get("optimizer")).values())
        self._kept = KeptState(content, by_source, optimizers)
        weights = {w.name: w for w in named.tensors.values() if w.component == "model"}
        self._shown = self._optimizer(weights) if trained else None
        tensors = {w.key: w for w in weights.values()} | self._kept.tensors
        self._content = replace(named, tensors=tensors, known=self._kept.known)
        self._parts = Parts(self._content, grid, rules)
        self._aliases: dict[str, str] = {}
        self._arguments = plain_arguments(args)
        self._notes = [*self._state.notes, *(self._shown.notes if self._shown else ())]
        self._take_counters()
        self._plain: PlainWriter | None = None
        self._distributed: DistributedWriter | None = None
        if self._shown is not None:
            self._plain = PlainWriter(self._parts, self._shown.optimizers)
            if self._shown.form is not None:
                self._distributed = DistributedWriter(
                    self._parts,
                    self._shown.form,
                    grid,
                    args,
                    self._shown.optimizers,
                    starts=self._shown.starts,
                )

    def layout(self) -> Layout:
        """Return the files."""
        target = self._target
        order = order_of(self._ranks)
        experts = self._layout.experts
        found = holdings(self._parts, order, self._layout.firsts, target, experts)
        files = [file for one in found for file in self._files(one)]
        placed = {*self._state.placed, *self._kept.placed}
        placed |= {
            key
            for key, wanted in self._given.tensors.items()
            if is_random(wanted) or (self._shown is not None and is_repeated(wanted))
        }
        return Layout(
            files=[*files, *beside_weights(self._given)],
            unplaced=[name for name in self._unplaced if name not in placed],
            notes=[*self._notes, weights_alone() if self._shown is None else seeded_anew()],
            content=replace(self._content, aliases=self._aliases),
        )

    # --- what is written ------------------------------------------------------------------------

    def _named(self, args: Arguments) -> tuple[dict[str, TargetTensor], dict[str, TargetTensor]]:
        """Return the model and what an optimizer keeps of it, by the source's keys."""
        content = self._given
        model = {key: w for key, w in content.tensors.items() if w.component == "model"}
        tied = {k for k, owner in content.aliases.items() if tied_to(k) == owner and k in model}
        has = {w.name for w in self._example.tensors.values() if w.component == "model"}
        owned = {w.name: own_name(w.name, args) for k, w in model.items() if k not in tied}
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
        self._unplaced = [k for k in content.tensors if k not in kept and k not in tied]
        self._unplaced += [
            name for name in content.objects if not (arguments and is_ours(content, name))
        ]
        return kept, trained

    def _require_same_model(self, named: Content) -> None:
        """Refuse tensors of other shapes or types than the example's."""
        for key, wanted in named.tensors.items():
            shown = self._example.tensors.get(key)
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
                    f"{key} is {wanted.dtype.name} in the source and {shown.dtype.name} in the"
                    " example",
                    hint="--dtype casts the weights",
                    tensor=key,
                )

    def _optimizer(self, weights: Mapping[str, TargetTensor]) -> Shown | None:
        parameters = [
            LocalTensor(0, w.name, PLACE._replace(shape=w.shape, dtype=w.dtype), w.kind)
            for w in weights.values()
            if self._example.tensors[w.key].kind is Kind.PARAM
        ]
        return example_optimizer(self._ranks, self._kept, self._state.root, parameters)

    def _take_counters(self) -> None:
        """Give the arguments the source's counters, by which Megatron goes on in the data."""
        known = arguments_of(self._given.checkpoint)
        said = {n: v for n in _COUNTERS if type(v := known.get(n)) is int}
        self._arguments = {**self._arguments, **said}
        if not said and self._shown is not None:
            what = "the position in the data is the example's: the source does not record one"
            self._notes.append(finding("note", what))

    # --- files ----------------------------------------------------------------------------------

    def _files(self, mine: RankModel) -> list[OutputFile]:
        """Return the files of one rank."""
        folder = self._target.grid.name(mine.at)
        return files_of(folder, mine, self._distributed, partial(self._tree, mine))

    def _tree(self, mine: RankModel, weights: Weights) -> dict[Any, Any]:
        """Return what one rank's `model_optim_rng.pt` holds, in the order of the example's."""
        root = dict(self._state.root)
        step = self._given.checkpoint.step
        root.setdefault("iteration", 0 if step is None else step)
        tree = self._ranks.stream(self._ranks.coordinates()[0]).tree
        models = chunk_keys(tree)
        made: dict[Any, Any] = {}
        for key, value in tree.items():
            if key in models.values():
                if key == models[0]:
                    made |= self._models(mine, weights, type(value))
            elif key == "args":
                made[key] = arguments_at(self._arguments, self._target.grid.rank(mine.at))
            elif key == "optimizer":
                if self._plain is not None:
                    made[key] = self._plain.tree(mine)
            elif key in root:
                made[key] = root[key]
            elif key == "checkpoint_version":
                made[key] = value
        return made | {k: v for k, v in root.items() if k not in made and k != "optimizer"}

    def _models(
        self, mine: RankModel, weights: Mapping[tuple[int, str], Tensor], kind: type[dict[str, Any]]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the model chunks of one rank, dicts of a kind: torch's `state_dict` is ordered."""
        held = {(one.local.chunk, one.local.name): one for one in mine.held}
        for chunk, places in enumerate(mine.chunks):
            model = kind()
            for item in places:
                one = held.get((chunk, item.name))
                if one is not None:
                    if item.entry.copy:
                        self._aliases[item.entry.name] = item.weight
                    value: Any = weights.get((chunk, item.name))
                    value = value or self._parts.tensor(one.wanted, one.weight, mine.at)
                else:
                    value = None if item.entry.full else item.entry.empty
                put(model, item.path, value)
            yield ("model" if self._target.chunks == 1 else f"model{chunk}"), model
