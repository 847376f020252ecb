"""Assign the state beside the model to the ranks of a legacy checkpoint that is written.

`SharedState` is of a source that has it once, `OwnState` of one that has files of ranks itself.

What all ranks have alike (the iteration, the schedule) goes to every rank. Random streams belong to
the tensor, pipeline and expert rank that drew from them. Where the layout of these ranks changes no
stream has a rank to go to, and none is written: Megatron itself ignores them when it reads
torch_dist for another layout, and here asks for `--no-load-rng` before it starts.

Source: `get_rng_state` and `load_checkpoint` in megatron/training/checkpointing.py.

How the files of a job's ranks are written.

A legacy Megatron source, whose files keep their form: order, groups, arguments but for sizes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, counted, finding
from ftckpt.formats.megatron.job.groups import JobOptimizer, form_of, optimizers_of, regrouped
from ftckpt.formats.megatron.job.layout import (
    MegatronJob,
    TargetLayout,
    changed,
    recorded,
    target_of,
)
from ftckpt.formats.megatron.job.module_order import Order, RankFileItem, order_of
from ftckpt.formats.megatron.job.padding import may_differ, repadded, vocabulary_of
from ftckpt.formats.megatron.job.rules import rules_of
from ftckpt.formats.megatron.job.whole_model import namespace
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.walk import at as value_at
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

from .grid import OPTIMIZER, WEIGHTS, Arguments, Coordinate, MegatronGrid
from .source import FirstRanks
from .tensor_names import chunk_keys

# What Megatron reads before anything else; written whatever part of the state is wanted.
ALWAYS = ("args", "checkpoint_version", "iteration")
_RNG = "rng_state"


# What stands in a frame for the model's chunks and for the optimizer.
WRITTEN = object()


class RankFrame(NamedTuple):
    """What a rank's `model_optim_rng.pt` holds beside tensors that are laid out."""

    # by key, in the file's order; `WRITTEN` for `model` (all chunks) and `optimizer`
    root: Mapping[Any, Any]
    # returns what a module keeps beside its weights (`_extra_state`), by chunk and place
    extra: Callable[[int, RankFileItem], Any] = lambda chunk, item: None
    ordered: bool = True  # whether a chunk is an ordered dict, as torch's `state_dict` is


@dataclass(kw_only=True)
class SharedState:
    """The state of every rank, of a source that has it once.

    As of `OwnState`, `frame` is what a file holds, `of_others` which further files are copied, and
    `held` what the result holds, given the tensors that were laid out.
    """

    keys: Sequence[str]  # of a rank's file, in its order; what `root` holds beyond them follows
    root: Mapping[Any, Any]
    arguments: Mapping[str, Any]  # of the job
    grid: MegatronGrid  # its ranks
    # random streams of each rank, where there are any to go on with
    random: Mapping[Coordinate, CopiedTree] = field(default_factory=dict)
    ordered: bool = True  # see `RankFrame`

    def frame(self, at: Coordinate, *, trained: bool) -> RankFrame:
        """Return what a rank's file holds; its arguments say which rank it is, where known."""
        rank = self.grid.rank(at)
        known = "rank" in self.arguments and rank is not None
        args = namespace({**self.arguments, "rank": rank} if known else self.arguments)
        root = {k: v for k, v in self.root.items() if k != "optimizer"}
        own = root | {"args": args, "model": WRITTEN}
        if trained:
            own["optimizer"] = WRITTEN
        if at in self.random:
            own["rng_state"] = self.random[at]
        made = {key: own[key] for key in self.keys if key in own}
        made |= {key: value for key, value in root.items() if key not in made}
        return RankFrame(made, ordered=self.ordered)

    def of_others(self, at: Coordinate, known: Sequence[str]) -> list[str]:
        """Return nothing: such a source has no files of ranks."""
        return []

    def held(self, content: Content) -> Content:
        """Return the content: the result lists no object of what all ranks share."""
        return content


class OwnState:
    """The state of each rank of a target; what has its place by it is noted in the job's."""

    def __init__(
        self, job: MegatronJob, ranks: FirstRanks, target: TargetLayout, changes: Mapping[str, Any]
    ) -> None:
        # what of it is listed as tensors, as the result will have them
        self.tensors: list[TargetTensor] = []
        self.compared: set[str] = set()  # names of objects that the result has just as the source
        self.placed, self.notes = job.state.placed, job.state.notes
        self._content = job.content
        self._ranks = ranks
        self._checkpoint: MegatronCheckpoint = ranks.checkpoint
        self._target = target
        self._changes = changes
        self._numbers = {at: n for n, at in enumerate(target.grid.directories())}
        self._sources = {at: n for n, at in enumerate(ranks.layout.grid.directories())}
        self._first = ranks.coordinates()[0]
        self._listed: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, info in self._checkpoint.tensors.items():
            self._listed[info.component].append((key, info.name))
        self._keeps_streams = self._streams_stay()
        if not self._keeps_streams:
            self._leave_streams()
        if not target.same_ranks:
            self._share()

    def source(self, at: Coordinate) -> Coordinate:
        """Return the rank of the source whose state a rank of the target gets."""
        return at if self._target.same_ranks else self._first

    def args(self, at: Coordinate, stream: TorchStream) -> CopiedTree:
        """Return a rank's arguments, with the sizes of the new layout."""
        own = dict(self._changes)
        arguments = type(self._ranks.layout.args)(stream.tree.get("args"))
        rank = self._target.grid.rank(at)
        if type(arguments.get("rank")) is int and rank is not None:
            own["rank"] = rank
        name = self._name(self._sources[self.source(at)], "args")
        if all(arguments.get(key) == value for key, value in own.items()):
            self._compare(at, "args")
        self.placed.add(name)
        return CopiedTree(recorded(arguments, own), stream.storages)

    def takes(self, at: Coordinate, key: str) -> bool:
        """Return whether a rank gets what the source's file holds under a key, and note it so.

        False where the user leaves it out, or a part of it that cannot be missing alone.
        """
        number = self._sources[self.source(at)]
        name = self._name(number, key)
        keys = self._tensors(number, key)
        tensors = [w for k in keys if (w := self._content.tensors.get(k))]
        if len(tensors) < len(keys) or (name not in self._content.objects and not tensors):
            return False
        self.placed.add(name)
        self.placed.update(keys)
        mine = f"extra:rank{self._numbers[at]}"
        self.tensors += (one._replace(component=mine) for one in tensors)
        self._compare(at, key)
        return True

    def frame(self, at: Coordinate, *, trained: bool) -> RankFrame:
        """Return what a rank's file holds, in the order of the source's.

        Args:
            at: the rank.
            trained: whether its optimizer is laid out.
        """
        stream = self._checkpoint.stream(self.source(at))
        models = chunk_keys(stream.tree)
        same = self._target.same_ranks
        kept = {chunk for chunk, key in models.items() if same and self.takes(at, key)}
        root: dict[Any, Any] = {}
        for key in stream.tree:
            if key in models.values():
                if key == models[0]:
                    root["model"] = WRITTEN
            elif key == "args":
                root[key] = self.args(at, stream)
            elif key == "optimizer" and trained:
                root[key] = WRITTEN
            elif key == _RNG and not self._keeps_streams:
                continue
            elif self.takes(at, key) or key in ALWAYS:
                root[key] = CopiedTree(stream.tree[key], stream.storages)

        def extra(chunk: int, item: RankFileItem) -> Any:
            if chunk not in kept:
                return None
            value = value_at(stream.tree, (models[chunk], *item.path))
            return CopiedTree(value, stream.storages)

        ordered = bool(models) and isinstance(stream.tree[models[0]], Ordered)
        return RankFrame(root, extra, ordered)

    def held(self, content: Content) -> Content:
        """Return what the result holds: each rank has its own state, which may be another's."""
        mine = {one.key: one for one in self.tensors}
        tensors = {k: w for k, w in content.tensors.items() if not w.component.startswith("extra:")}
        objects = {n: info for n, info in content.objects.items() if n in self.compared}
        return replace(content, tensors=tensors | mine, objects=objects)

    def _compare(self, at: Coordinate, key: str) -> None:
        if self._numbers[at] == self._sources[self.source(at)]:
            self.compared.add(self._name(self._numbers[at], key))

    def of_others(self, at: Coordinate, known: Sequence[str]) -> list[str]:
        """Return the further files of a rank: written byte for byte where no group changes.

        Args:
            at: the rank.
            known: names of files that are laid out anew.
        """
        old, new = self._ranks.layout.grid, self._target.grid
        if not self._target.same_ranks or old.dp != new.dp:
            return []
        folder = self._ranks.layout.grid.name(at)
        number = self._sources[at]
        paths = []
        for path in self._checkpoint.files:
            inside, _, file = path.rpartition("/")
            if inside != folder or file == WEIGHTS or file in known:
                continue
            label = file.removesuffix(".pt")
            tensors = self._tensors(number, label)
            objects = [
                name for name, info in self._checkpoint.objects.items() if info.extent.file == path
            ]
            if not all(key in self._content.tensors for key in tensors):
                continue
            if not all(name in self._content.objects for name in objects):
                continue
            if tensors or objects:
                paths.append(path)
                self.placed.update(tensors)
                self.placed.update(objects)
                self.compared.update(objects)
                self.tensors += (self._content.tensors[key] for key in tensors)
        return paths

    def _tensors(self, number: int, key: str) -> list[str]:
        """Return the keys of the source's tensors of one rank that stand below a key of a file."""
        return [
            tensor
            for tensor, name in self._listed.get(f"extra:rank{number}", ())
            if name == key or name.startswith(f"{key}.")
        ]

    def _streams_stay(self) -> bool:
        """Return whether all random streams have the ranks that they belonged to."""
        old, new = self._ranks.layout.grid, self._target.grid
        streams = self._ranks.stream(self._first).tree.get(_RNG)
        several = isinstance(streams, list) and len(streams) > 1  # one a data-parallel rank
        return self._target.same_ranks and (not several or old.dp == new.dp)

    def _leave_streams(self) -> None:
        """Leave out random streams that have no rank to go to, and say so."""
        mine = [self._name(number, _RNG) for number in self._sources.values()]
        mine += (key for number in self._sources.values() for key in self._tensors(number, _RNG))
        kept = self._content.objects.keys() | self._content.tensors.keys()
        if kept.isdisjoint(mine):
            return
        self.placed.update(mine)
        what = (
            f"the random streams of {counted(len(self._sources), 'rank')} were not written, as"
            " other ranks cannot go on with them: start Megatron with --no-load-rng, and each is"
            " seeded anew"
        )
        self.notes.append(finding("note", what, tensor=mine[0]))

    def _share(self) -> None:
        """Give all ranks what the first has; say what was not the same on all of them."""
        first = self._ranks.stream(self._first)
        models = chunk_keys(first.tree).values()
        shared = [k for k in first.tree if k not in (*models, "optimizer", _RNG)]
        for key in shared:
            # Other ranks had the same, and have it again.
            for number in self._sources.values():
                self.placed.add(self._name(number, key))
                self.placed.update(self._tensors(number, key))
            want = pickled(CopiedTree(first.tree[key], first.storages))[0]
            others = (self._ranks.stream(at) for at in self._ranks.coordinates())
            if key != "args" and any(
                pickled(CopiedTree(own.tree.get(key), own.storages))[0] != want for own in others
            ):
                what = f"{key} differs between ranks; all have it now as in {first.file}"
                self.notes.append(finding("note", what, tensor=self._name(0, key)))

    @staticmethod
    def _name(number: int, key: str) -> str:
        return f"rank_{number}.{key}"


# Notes of files without an optimizer's state, and of those without random streams.
WEIGHTS_ALONE = finding(
    "note",
    "these are the weights alone: start Megatron with --finetune, or with --no-load-optim and"
    " --no-load-rng",
)
SEEDED_ANEW = finding(
    "note",
    "random streams were not written, as no rank can go on with them: start Megatron with"
    " --no-load-rng, and each is seeded anew",
)


@dataclass(kw_only=True)
class RankFilesPlan:
    """How a job's files are written."""

    # its content is that of the target: with its padding, and with the optimizer's state
    job: MegatronJob
    target: TargetLayout  # the layout that is written
    order: Order  # of the modules on every stage of the job's layout
    rules: Rules  # how tensors are cut
    args: Arguments  # of the job that is to load the files
    # whether a last stage without an output layer of its own has a copy of the embedding
    tied: bool
    optimizer: JobOptimizer | None  # None where none is laid out
    states: SharedState | OwnState  # of its ranks


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
