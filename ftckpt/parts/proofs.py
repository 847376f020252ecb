"""Who reads back what whom has written: what part I wrote, part I+1 reads.

So no machine proves what its own page cache holds. A part waits for the one before it as long as
that one gets on, and also reads back what is left where the reader has ended already. What nobody
could read back is left to who finishes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from . import WorkPart
from .shared_folder import BEAT, ListedRecord, PartsPlace

WRITE, PROOF = "write", "proof"
# A part that has not said that it lives for this long (seconds) is not waited for.
SILENT = 4 * BEAT


@dataclass
class Neighbours:
    """The other parts, seen by one that has written its own.

    Attributes:
        place: of the records.
        part: this one.
    """

    place: PartsPlace
    part: WorkPart
    _seen: dict[int, tuple[object, float]] = field(default_factory=dict)

    def next(self, absent: Set[int] = frozenset()) -> tuple[WorkPart | None, bool]:
        """Return a part to read back now, and whether to wait where there is none.

        Args:
            absent: numbers of parts of which something cannot be read.
        """
        listed = [one for one in self.place.listed() if one.part.of == self.part.of]
        written = {one.part.number for one in listed if one.what == f".{WRITE}"}
        proven = {one.part.number for one in listed if one.what == f".{PROOF}"}
        running = {one.part.number for one in listed if one.what == ".running"}
        mine, of = self.part.number, self.part.of
        before = (mine - 1) % of
        left = written - proven - absent
        if before in left:
            return WorkPart(before, of), False
        for number in sorted(left - {mine}):
            reader = (number + 1) % of
            if reader in written and reader not in running:
                return WorkPart(number, of), False
        return None, before not in written and before in running and self.lives(before)

    def unwritten(self) -> list[int]:
        """Return the numbers of the parts that have not written theirs."""
        written = {
            one.part.number
            for one in self.place.listed()
            if one.part.of == self.part.of and one.what == f".{WRITE}"
        }
        return sorted(set(range(self.part.of)) - written)

    def ended(self) -> bool:
        """Say whether all is written, and nobody is reading back what is left."""
        listed = [one for one in self.place.listed() if one.part.of == self.part.of]
        return is_ready(listed, self.part)

    def lives(self, number: int) -> bool:
        """Say whether a part has got on since it was seen first, by this machine's own clock."""
        said = self.place.look(f"{number}-{self.part.of}.running")
        beat = None if said is None else (said.get("host"), said.get("pid"), said.get("beat"))
        now = time.monotonic()
        last, since = self._seen.get(number, (object(), now))
        if beat != last:
            since = now
        self._seen[number] = beat, since
        return beat is not None and now - since < SILENT


def is_ready(listed: Sequence[ListedRecord], part: WorkPart) -> bool:
    """Say whether all parts are written, and none but `part` is still at work.

    Args:
        listed: files of the plan.
        part: the one that asks.
    """
    stages: Mapping[str, set[int]] = {
        what: {one.part.number for one in listed if one.what == what}
        for what in (f".{WRITE}", f".{PROOF}", ".running")
    }
    everyone = set(range(part.of))
    left = everyone - stages[f".{PROOF}"]
    readers = {(number + 1) % part.of for number in left} - {part.number}
    return stages[f".{WRITE}"] >= everyone and not readers & stages[".running"]
