"""Assign the state beside the model to the ranks of a legacy checkpoint that is written.

`SharedState` is of a source that has it once, `OwnState` of one that has files of ranks itself.

What all ranks have alike (the iteration, the schedule) goes to every rank. Random streams belong to
the tensor, pipeline and expert rank that drew from them. Where the layout of these ranks changes no
stream has a rank to go to, and none is written: Megatron itself ignores them when it reads
torch_dist for another layout, and here asks for `--no-load-rng` before it starts.

Source: `get_rng_state` and `load_checkpoint` in megatron/training/checkpointing.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ftckpt.findings import counted, finding
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.job.description import MegatronJob
from ftckpt.formats.megatron.job.layout import TargetLayout, recorded
from ftckpt.formats.megatron.job.module_order import RankFileItem
from ftckpt.formats.megatron.job.whole_model import namespace
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.walk import at as value_at
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor

from .grid import WEIGHTS, Coordinate, MegatronGrid
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
