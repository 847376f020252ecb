"""Plan which byte ranges to read together if every request has a latency.

Extents are given in the order of their use. They are taken a stage at a time, and neighbours of one
stage in a file are one window: a window is used up soon after it was read, however the pieces of
one tensor are spread over files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ftckpt.extents import Extent
from ftckpt.storage.ranges import PART, plan_runs

STAGE = 16 << 20  # bytes, at most
LONGEST = 4 << 20  # a longer extent is read by itself: there is little to save


@dataclass(slots=True, eq=False)
class Window:
    """One run of bytes of a file, and its state.

    Attributes:
        number: its place in the expected order of use.
        path: the file.
        offset: of the first byte.
        length: bytes.
        wanted: bytes of the extents in it.
        data: its bytes, while they are kept.
        coming: whether it is being read.
        hopeless: whether it cannot be read whole.
        fetches: number of times it was read.
        reads: requests for it since the last read.
        served: bytes requested since then.
        early: whether it was read before its first request, which has not come yet.
    """

    number: int
    path: str
    offset: int
    length: int
    wanted: int
    data: memoryview | None = field(default=None, repr=False)
    coming: bool = False
    hopeless: bool = False
    fetches: int = 0
    reads: int = 0
    served: int = 0
    early: bool = False

    @property
    def done(self) -> bool:
        """Whether all wanted bytes were requested."""
        return self.served >= self.wanted

    def pays(self, gap: int) -> bool:
        """Whether reading it whole is worthwhile, if a request costs as much as `gap` bytes.

        The first time it is expected to be. Again only after enough requests that single reads
        would have cost as much: an unexpected order costs at most twice.
        """
        if self.hopeless:
            return False
        return not self.fetches or self.reads * gap >= self.length


class Windows:
    """The windows of some files.

    Args:
        extents: by the store's paths, in the order of use; a repeated one counts once.
        gap: extents of one file with at most this many bytes between them are read together.
        stage: bytes of the extents that are taken together, and the maximum of a window.
    """

    def __init__(self, extents: Iterable[Extent], gap: int, stage: int = STAGE) -> None:
        self.all: list[Window] = []
        self._gap = gap
        self._most = min(PART, stage)
        longest = min(LONGEST, stage)
        places: dict[str, list[tuple[int, int, int]]] = {}
        seen: set[Extent] = set()
        taken: list[Extent] = []
        nbytes = 0
        for extent in extents:
            if not 0 < extent.length <= longest or extent in seen:
                continue
            seen.add(extent)
            taken.append(extent)
            nbytes += extent.length
            if nbytes >= stage:
                self._add(taken, places)
                taken, nbytes = [], 0
        self._add(taken, places)
        self._places = {path: _columns(rows) for path, rows in places.items()}

    def holding(self, path: str, offset: int, length: int) -> Window | None:
        """Return the window of the extent that contains a range, if there is one."""
        columns = self._places.get(path)
        if columns is None or not length:
            return None
        starts, ends, numbers = columns
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset + length > ends[at]:
            return None
        return self.all[numbers[at]]

    def _add(self, taken: list[Extent], places: dict[str, list[tuple[int, int, int]]]) -> None:
        runs = plan_runs(taken, self._gap, self._most)
        runs.sort(key=lambda run: min(want.asked for want in run.wants))
        for run in runs:
            number = len(self.all)
            wanted = sum(want.length for want in run.wants)
            self.all.append(Window(number, run.file, run.offset, run.length, wanted))
            rows = places.setdefault(run.file, [])
            for want in run.wants:
                start = run.offset + want.start
                rows.append((start, start + want.length, number))


def _columns(rows: list[tuple[int, int, int]]) -> tuple[array[int], array[int], array[int]]:
    """Return starts, ends and numbers; of extents with one start the longest comes last."""
    rows.sort()
    starts, ends, numbers = (array("q", column) for column in zip(*rows, strict=True))
    return starts, ends, numbers
