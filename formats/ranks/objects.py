"""Non-tensor state for a world of other ranks: whose it is, and who can have it.

What every rank of the source held alike (a scheduler, an optimizer's groups) every new rank gets.
What each had for itself (random streams) stays with the rank of the same number, also where a store
kept it as `rank_0.rng`, `rank_1.rng`, … of just as many ranks, or nested, as `rank_0` and `rng`; a
rank beyond the source's gets none, and what belonged to a rank beyond the new world has no place.

Numbers inside rank files that are other ones for a world of other ranks.

World size, rank, and where a tensor's shard begins: what a trainer wrote beside its tensors must
speak of the new files. Everything else is carried as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.state.objects import Leaf, StateObjects
from ftckpt.formats.state.paths import recorded_paths
from ftckpt.formats.torch_files.write_tree import pickled
from ftckpt.transfer.content import Content

from .checkpoint import placed_as_in
from .names import Role
from .recorded_job import is_number_in, number_of, speaks_of_job
from .specs import MESHES, OFFSETS, SIZES

_DEPTH = 4


class Renumbering(NamedTuple):
    """From the numbers of an old rank to those of a new one.

    Attributes:
        old_world: ranks that saved.
        world: ranks that shall load.
    """

    old_world: int
    world: int

    def number(self, key: str, value: int, old: int, rank: int) -> int:
        """Return what stands under a key of a new rank's file where `value` stood in an old one's.

        Args:
            key: under which it stands.
            value: what stood there.
            old: number of the rank that wrote it.
            rank: number of the new one.
        """
        what = number_of(key)
        if what == "count" and value == self.old_world:
            return self.world
        return rank if what == "place" and value == old else value

    def value(self, key: str, value: Any, old: int, rank: int, depth: int = 0) -> Any:
        """Return a value of the non-tensor state for a new rank (see `number`)."""
        if type(value) is int:
            return self.number(key, value, old, rank)
        if depth >= _DEPTH or not (isinstance(value, (dict, Inert)) and speaks_of_job(key)):
            return value
        members = value.state if isinstance(value, Inert) else value
        if not isinstance(members, dict):
            return value
        made = {
            k: self.value(k, member, old, rank, depth + 1)
            if type(k) is str and is_number_in(k, key)
            else member
            for k, member in members.items()
        }
        if all(made[k] is member for k, member in members.items()):
            return value
        return _with_state(value, made) if isinstance(value, Inert) else made

    def spec(
        self, record: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], old: int, rank: int
    ) -> Any:
        """Return what stands beside a tensor, for a shard of `sizes` that begins at `offsets`."""
        return self._spec("", record, offsets, sizes, old, rank, 0)

    def _spec(
        self, key: str, value: Any, offsets: tuple[int, ...], sizes: tuple[int, ...],
        old: int, rank: int, depth: int,
    ) -> Any:  # fmt: skip
        if type(value) is int:
            return self.number(key, value, old, rank)
        if type(value) in (list, tuple):
            made = _numbers(key, value, offsets, sizes)
            if key in MESHES and len(value) == 1 and value[0] == self.old_world:
                made = (self.world,)
            return value if made is None else type(value)(made)
        if isinstance(value, dict) and depth < _DEPTH:
            return {
                k: self._spec(k, v, offsets, sizes, old, rank, depth + 1) if type(k) is str else v
                for k, v in value.items()
            }
        return value


def _with_state(value: Inert, state: dict[Any, Any]) -> Inert:
    clone: Inert = object.__new__(type(value))
    for slot in Inert.__slots__:
        setattr(clone, slot, getattr(value, slot))
    clone.state = state
    return clone


def _numbers(
    key: str, value: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...] | None:
    if not all(type(n) is int for n in value):
        return None
    if key in OFFSETS and len(value) == len(offsets):
        return offsets
    return sizes if key in SIZES and len(value) == len(sizes) else None


def renumbered_record(
    record: Mapping[str, Any],
    numbers: Renumbering,
    names: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> dict[str, Any]:
    """Return the record beside the files for a new world.

    Args:
        record: as it was.
        numbers: from which world to which.
        names: the old and the new files' names, of each series: a list of all old names becomes
            one of all new names.
    """
    made: dict[str, Any] = {}
    for key, value in record.items():
        new = next((n for old, n in names if isinstance(value, list) and value == list(old)), None)
        made[key] = list(new) if new is not None else numbers.value(key, value, -1, -1)
    return made


_KEY = re.compile(r"rank_(\d{1,7})(?:\.([^.]+))?")
_OWNED = re.compile(r"(?:.*\.)?rank_(\d+)\.(.+)")


class RankLeaf(NamedTuple):
    """A part of the non-tensor state of one rank: in which of its files, where, and what."""

    rank: int
    role: Role
    leaf: Leaf


class RankObjects:
    """The non-tensor state of `content`, dealt out over `world` ranks.

    Attributes:
        leaves: what each rank gets.
        unplaced: names of objects that no rank can have.
        notes: which ranks lack what.
        changed: names of objects in which a number of the old world became one of the new.
    """

    def __init__(self, content: Content, world: int) -> None:
        self.leaves: list[RankLeaf] = []
        self.unplaced: list[str] = []
        self.notes: list[Finding] = []
        self.changed: set[str] = set()
        self._numbers = Renumbering(content.topology.world_size or world, world)
        self._content = content
        self._own = placed_as_in(content.checkpoint)
        recorded = recorded_paths(content.checkpoint)
        self._recorded = recorded.nested_objects()
        self._trees = StateObjects(content, recorded.objects)
        owned: dict[str, dict[int, str]] = defaultdict(dict)
        by_path = self._by_path(world)
        again = {name for names in by_path.values() for name in names.values()}
        for name in content.objects:
            if name in again:
                continue
            match = None if name in self._recorded else _OWNED.fullmatch(name)
            if match is not None:
                owned[match[2]][int(match[1])] = name
                continue
            parts = self._read(name)
            for rank in range(world):
                self.leaves += (RankLeaf(rank, *part) for part in parts)
        for label, names in (*owned.items(), *by_path.items()):
            self._deal(label, names, world)

    def _by_path(self, world: int) -> Mapping[str, Mapping[int, str]]:
        """Return what a store keeps under the keys `rank_0.rng`, … for every rank of the new world.

        Files of ranks became such a store, and have to become what they were. Where something else
        has one of their places, all under that key stay where they are.
        """
        found: dict[Path, dict[int, str]] = defaultdict(dict)
        for name in self._content.objects:
            rank, below = _of_rank(self._recorded.get(name, ()))
            if below:
                found[below][rank] = name
        whole = {below: names for below, names in found.items() if names.keys() == {*range(world)}}
        if not whole:
            return {}
        own = {name for names in whole.values() for name in names.values()}
        objects = (self._recorded.get(name, (name,)) for name in self._content.objects.keys() - own)
        others = {_texts(path) for path in objects}
        above = {path[:n] for path in others for n in range(1, len(path) + 1)}
        taken = {
            below[0]
            for below in whole
            if _texts(below) in above
            or any(_texts(below)[:n] in others for n in range(1, len(below)))
        }
        return {".".join(map(str, b)): names for b, names in whole.items() if b[0] not in taken}

    def _deal(self, label: str, names: Mapping[int, str], world: int) -> None:
        read = {rank: self._read(name, label) for rank, name in sorted(names.items())}
        first = min(read)
        # What differs by the number of the rank alone is the same for all.
        shared = _alike([self._for_rank(parts, rank, 0) for rank, parts in read.items()])
        for rank in range(world):
            if rank in read:
                parts = self._for_rank(read[rank], rank, rank)
                if any(
                    a.value is not b.value for (_, a), (_, b) in zip(parts, read[rank], strict=True)
                ):
                    self.changed.add(names[rank])
            else:
                parts = self._for_rank(read[first], first, rank) if shared else []
            self.leaves += (RankLeaf(rank, *part) for part in parts)
        lacking = [rank for rank in range(world) if rank not in read and not shared]
        if lacking:
            what = f"{label} was of each rank alone: ranks {lacking[0]} to {lacking[-1]} have none"
            self.notes.append(finding("note", what, tensor=names[min(names)]))
        if not shared:
            self.unplaced += (name for rank, name in names.items() if rank >= world)

    def _for_rank(
        self, parts: Sequence[tuple[Role, Leaf]], old: int, rank: int
    ) -> list[tuple[Role, Leaf]]:
        """Return what an old rank had, with the numbers of a new one."""
        if self._own is None:
            return list(parts)
        made = []
        for part in parts:
            role, leaf = part
            *above, key = map(str, leaf.path)
            speaks = all(map(speaks_of_job, above)) and (not above or is_number_in(key, above[-1]))
            value = leaf.value.value
            if speaks:
                value = self._numbers.value(key, value, old, rank)
            if value is leaf.value.value:
                made.append(part)
            else:
                made.append((role, leaf._replace(value=leaf.value._replace(value=value))))
        return made

    def _read(self, name: str, label: str = "") -> list[tuple[Role, Leaf]]:
        """Return an object in parts; nothing, and its name in `unplaced`, where it has none."""
        info = self._content.objects[name]
        path: Path | None = self._recorded.get(name)
        if self._own is not None:
            path = info.field
        elif label:
            path = _of_rank(path or ())[1] or (label,)
        try:
            parts = list(self._trees.nested(name, path))
            pickled([part.value for part in parts])
        except UnsupportedError:
            self.unplaced.append(name)
            return []
        if self._own is not None and info.extent.file in self._own.streams:
            role = self._own.role_of(info.extent.file)
            return [(role, part) for part in parts]
        return list(_sorted(parts))


def _of_rank(path: Path) -> tuple[int, Path]:
    """Return the rank in a path's first key, and the path below it; () where there is none."""
    match = _KEY.fullmatch(str(path[0])) if path else None
    if match is None:
        return 0, ()
    below = (match[2], *path[1:]) if match[2] else path[1:]
    return int(match[1]), below


def _texts(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _sorted(parts: Sequence[Leaf]) -> Iterator[tuple[Role, Leaf]]:
    """Yield parts of a nested state with the file that they go to."""
    roles = {"optimizer": Role.OPTIMIZER, "model": Role.MODEL}
    for path, value in parts:
        role = roles.get(str(path[0])) if len(path) > 1 else None
        yield (role, Leaf(path[1:], value)) if role else (Role.EXTRA, Leaf(path, value))


def _alike(read: Sequence[Sequence[tuple[Role, Leaf]]]) -> bool:
    """Return whether all ranks hold the same; tensors inside are not compared and so differ."""
    seen = set()
    for parts in read:
        text, storages = pickled(
            [[role.value, list(leaf.path), leaf.value] for role, leaf in parts]
        )
        if storages:
            return False
        seen.add(text)
    return len(seen) == 1
