"""A differing event of two records: its items, and how they differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ftckpt.replay.record.log import BY_KEY, RANDOM, Value, ulps, value_of
from ftckpt.replay.record.streams import difference_in_words, read_stream
from ftckpt.reports import UNSAID

_SHOWN = 5  # items of a difference that a document has


class ItemDifference(NamedTuple):
    """A differing item of an event.

    Attributes:
        name: of the tensor, stream or place.
        reference: its value in the uninterrupted run; None if absent.
        other: its value in the other run; None if absent.
    """

    name: str
    reference: Value
    other: Value

    @property
    def words(self) -> str:
        """Return how they differ, as far as the log shows; slow for random streams."""
        return _words(self.reference, self.other)


class ItemShown(NamedTuple):
    """A differing item as a document has it.

    Attributes:
        name: of the tensor, stream or place.
        words: how the two differ.
        reference: digest, float in hexadecimal, or None where it is not there.
        other: likewise.
    """

    name: str
    words: str
    reference: Value
    other: Value


@dataclass(frozen=True, slots=True)
class Difference:
    """A differing event of one step and rank.

    Attributes:
        step: of the training.
        rank: whose record differs.
        event: key of `events.EVENTS`.
        items: the differing ones, in the order of the log.
        of: number of items of the event in the two runs together.
    """

    SAID: ClassVar = {"items": "item_count", "shown": "shown"}

    step: int
    rank: int
    event: str
    items: tuple[ItemDifference, ...] = field(metadata=UNSAID)
    of: int

    @property
    def item_count(self) -> int:
        """Number of the items that differ."""
        return len(self.items)

    @property
    def shown(self) -> list[ItemShown]:
        """The first items in words and short values."""
        return [
            ItemShown(one.name, one.words, _short(one.reference), _short(one.other))
            for one in self.items[:_SHOWN]
        ]

    @property
    def words(self) -> str:
        """Return the difference in words: `loss (3 ULP)`, `gradients (4 of 12, first w)`."""
        return f"{BY_KEY[self.event].title} ({self.detail})"

    @property
    def detail(self) -> str:
        """Return the detail in words: `3 ULP`, `4 of 12, first w`."""
        if self.event in RANDOM:
            return ", ".join(f"{i.name}: {i.words}" for i in self.items)
        if len(self.items) == 1:
            item = self.items[0]
            return item.words if self.of == 1 else f"{item.name}: {item.words}"
        return f"{len(self.items)} of {self.of}, first {self.items[0].name}"


def _short(value: Value) -> Value:
    return value.get("digest") if isinstance(value, Mapping) else value


def _words(ours: Value, theirs: Value) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return difference_in_words(read_stream(ours), read_stream(theirs))
    if ours is None or theirs is None:
        return "not there" if theirs is None else "only there"
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return "differs"
    apart = ulps(ours, theirs)
    if apart is not None:
        return f"{apart:,} ULP"
    a, b = value_of(ours), value_of(theirs)
    if a is not None and b is not None:
        return f"{theirs.rpartition(' ')[2]} instead of {ours.rpartition(' ')[2]}"
    if ours.rpartition(":")[0] != theirs.rpartition(":")[0]:
        return f"{theirs.rpartition(':')[0]} instead of {ours.rpartition(':')[0]}"
    return "bits differ"
