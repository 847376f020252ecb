"""Numbers inside rank files that are other ones for a world of other ranks.

World size, rank, and where a tensor's shard begins: what a trainer wrote beside its tensors must
speak of the new files. Everything else is carried as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.formats.pickles.unpickle import Inert

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
