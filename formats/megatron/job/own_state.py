"""Assign a legacy Megatron checkpoint's state outside the model to ranks of a new layout.

What all ranks have alike (the iteration, the schedule) goes to every rank. Random streams belong to
the tensor, pipeline and expert rank that drew from them. Where the layout of these ranks changes no
stream has a rank to go to, and none is written: Megatron itself ignores them when it reads
torch_dist for another layout, and here asks for `--no-load-rng` before it starts.

Source: `get_rng_state` and `load_checkpoint` in megatron/training/checkpointing.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.findings import Finding, counted, finding
from ftckpt.formats.megatron.checkpoint import MegatronCheckpoint
from ftckpt.formats.megatron.rank_files.grid import WEIGHTS, Coordinate
from ftckpt.formats.megatron.rank_files.job import WRITTEN, RankFrame
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import chunk_keys
from ftckpt.formats.pickles.inert import Ordered
from ftckpt.formats.pickles.walk import at as value_at
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content, TargetTensor

from .layout import TargetLayout, recorded
from .module_order import RankFileItem

# What Megatron reads before anything else; written whatever part of the state is wanted.
ALWAYS = ("args", "checkpoint_version", "iteration")
_RNG = "rng_state"


class OwnState:
    """The state of each rank of a target."""

    def __init__(
        self, content: Content, ranks: FirstRanks, target: TargetLayout, changes: Mapping[str, Any]
    ) -> None:
        # what of it is listed as tensors, as the result will have them
        self.tensors: list[TargetTensor] = []
        self.compared: set[str] = set()  # names of objects that the result has just as the source
        # keys of tensors and names of objects of the source that need no other place
        self.placed: set[str] = set()
        self.notes: list[Finding] = []  # what the user should know
        self._content = content
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
        """Return what a rank's file holds, in the order of the source's; see `RankStates`."""
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
