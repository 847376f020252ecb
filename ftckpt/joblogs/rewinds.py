"""Find where training went back to an earlier step: it stopped there, whatever the logs say of it.

A node that loses its power, or a process that is killed, writes no line. The numbers of the steps
show it: 99 is followed by 50.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .collect import Stretch

# Lines of ranks that are not told apart come in any order within this.
_ORDER = 60.0


class Rewind(NamedTuple):
    """One such place.

    Attributes:
        since: time at which the stretch of steps began that ended here.
        after: of its last line.
        before: of the first line of the next, with an earlier step or the same.
    """

    since: float
    after: float
    before: float


def rewinds_of(stretches: Iterable[Stretch]) -> list[Rewind]:
    """Return where steps went back, in the order of their times.

    Only lines of one file and rank are compared, and no progress bars. What several ranks or files
    say of one restart is one.
    """
    by: dict[tuple[int, int | None], list[Stretch]] = {}
    for stretch in stretches:
        if not stretch.bar:
            by.setdefault((stretch.source, stretch.rank), []).append(stretch)
    each = sorted(
        (found for row in by.values() for found in _of_one(row)), key=lambda one: one.after
    )
    merged: list[Rewind] = []
    for one in each:
        if merged and one.after < merged[-1].before:
            last = merged[-1]
            # The last line of any rank is the last sign of life.
            merged[-1] = Rewind(max(last.since, one.since), one.after, min(last.before, one.before))
        else:
            merged.append(one)
    return merged


def _of_one(stretches: Sequence[Stretch]) -> Iterator[Rewind]:
    row = sorted(stretches, key=lambda one: one.began)
    for place in range(1, len(row)):
        last, one = row[place - 1], row[place]
        if one.first > last.last or one.began <= last.ended:
            continue
        following = row[place + 1] if place + 1 < len(row) else None
        if not _disordered(last, one, following):
            yield Rewind(last.began, last.ended, one.began)


def _disordered(last: Stretch, one: Stretch, following: Stretch | None) -> bool:
    """Return whether ranks that are not told apart explain a step back: one is behind the other."""
    gap = one.began - last.ended
    if gap > _ORDER:
        return False
    if (
        following is not None
        and following.first > last.last
        and following.began - one.ended <= _ORDER
    ):  # what was behind does not catch up: the other goes on from where it was
        return True
    lines = (last.last - last.first) / last.stride
    usual = (last.ended - last.began) / lines if lines else _ORDER
    return gap < usual and last.last - one.first <= 2 * max(last.stride, one.stride)
