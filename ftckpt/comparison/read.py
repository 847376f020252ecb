"""Read tensors of two checkpoints side by side, in blocks, and tally what differs.

A block that is the same on both sides costs a comparison of bytes and no arithmetic. What the norm
of a tensor needs of such blocks is read once more at the end, and only of tensors that changed.
Where a side is decoded, copies of this process do it (`ftckpt.workers.processes`), and the tensors
of a parameter lie side by side, because a block of one may be what the others are decoded from.

Decide how many threads or processes compare within the memory limit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_ahead import for_reading
from ftckpt.errors import FtckptError
from ftckpt.progress import Counter
from ftckpt.storage.prefetch import most_kept
from ftckpt.storage.ranges import LOCAL, REMOTE, size_for
from ftckpt.transfer.content import Content, Shard
from ftckpt.transfer.read.elements import SPAN, Gatherer
from ftckpt.verification.record_sums import ByteRun, ReadSums
from ftckpt.workers import ALONE, Work
from ftckpt.workers.budget import thread_count
from ftckpt.workers.buffers import buffer, same
from ftckpt.workers.limits import RateLimit

from .arithmetic import Tally, Tolerance, measure, unchanged

_TASK = 32 << 20  # bytes of a tensor compared by one task
_BATCH, _TOGETHER = 2 << 20, 256  # bytes and number of small tensors compared by one task
_SIDE_BY_SIDE = 1 << 20  # elements of each tensor of one parameter that are compared in turn
_OURS_SLOT, _THEIRS_SLOT = 4, 5


class ShardPair(NamedTuple):
    """Two shards of one shape to compare.

    Attributes:
        name: whose result it is; the caller's own.
        ours: and whether it is of the second checkpoint.
        theirs: the same.
    """

    name: str
    ours: tuple[bool, Shard]
    theirs: tuple[bool, Shard]


@dataclass(slots=True)
class ShardResult:
    """What became of one pair.

    Attributes:
        tally: what was counted.
        error: why it could not be read to its end.
        equal: elements that are equal.
        nbytes: of one side that were compared here.
        elsewhere: whether other machines compare some of it.
    """

    tally: Tally = field(default_factory=Tally)
    error: FtckptError | None = None
    equal: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0
    elsewhere: bool = False


class ComparedRange(NamedTuple):
    """Elements of a pair.

    Attributes:
        pair: of which.
        start, stop: which elements.
        equal: whether they are known to be equal, and only their norm is wanted.
    """

    pair: ShardPair
    start: int
    stop: int
    equal: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one side."""
        return self.pair.ours[1].dtype.nbytes(self.stop - self.start)


class RangeResult(NamedTuple):
    """What became of a range.

    Attributes:
        name: of its pair.
        tally: what was counted.
        nbytes: of one side that were compared.
        equal: elements that are equal.
        error: why it could not be read.
        runs: what was read of each checkpoint.
    """

    name: str
    tally: Tally
    nbytes: int
    equal: list[tuple[int, int]]
    error: FtckptError | None = None
    runs: Sequence[Sequence[ByteRun]] = ()


class Readers:
    """Both checkpoints, open for reading by many threads.

    Args:
        ours: the first.
        theirs: the second.
        sums: sum up what is read of the two.
        limiter: bounds the rate of reading, of both together.
    """

    def __init__(
        self,
        ours: Content,
        theirs: Content,
        sums: Sequence[ReadSums],
        limiter: RateLimit | None = None,
    ) -> None:
        checkpoints = ours.checkpoint, theirs.checkpoint
        self._sums = sums
        self._sides = tuple(
            Gatherer(one, limiter, observer)
            for one, observer in zip(checkpoints, sums, strict=True)
        )
        self._block = max(size_for(one.source.store) for one in checkpoints)
        self._checkpoints = checkpoints

    def compare(
        self,
        shards: Mapping[str, ShardPair],
        tolerance: Tolerance | None,
        work: Work = ALONE,
    ) -> dict[str, ShardResult]:
        """Compare everything; what cannot be read is an answer too.

        Args:
            shards: what to compare, by name.
            tolerance: see `measure`.
            work: who does it; its counter is told of the bytes of one side. Processes are a gain
                where a side is decoded.
        """
        found = {name: ShardResult() for name in shards}
        division = work.division

        def compare(task: Sequence[ComparedRange], _: Counter) -> Sequence[RangeResult]:
            return [self._try(part, tolerance) for part in task]

        def carry_out(tasks: Iterable[Sequence[ComparedRange]]) -> None:
            for task in work.spread(tasks, compare):
                for done in task:
                    result = found[done.name]
                    result.tally.add(done.tally)
                    result.equal += done.equal
                    result.error = result.error or done.error
                    result.nbytes += done.nbytes
                    for sums, runs in zip(self._sums, done.runs, strict=False):
                        sums.take(runs)
                    work.counter.add(done.nbytes)

        def wanted() -> Iterator[Sequence[ComparedRange]]:
            for several in self._side_by_side(shards.values()):
                # Other machines cannot know of an error here: theirs are the same tasks.
                parts = [
                    part
                    for part in several
                    if division is not None or found[part.pair.name].error is None
                ]
                if parts:
                    yield parts

        def owed() -> Iterator[Sequence[ComparedRange]]:
            for name, result in found.items():
                if (result.tally.changed or result.elsewhere) and result.error is None:
                    for start, stop in result.equal:
                        for place in _cut(shards[name].ours[1], start, stop, _TASK):
                            yield (ComparedRange(shards[name], *place, True),)

        carry_out(_batched(wanted()))
        if division is not None and division.partial:
            for task in _batched(wanted()):
                if not division.takes(task):
                    for part in task:
                        found[part.pair.name].elsewhere = True
        carry_out(_alone(owed()) if division is not None else _batched(owed()))
        return found

    def close(self) -> None:
        """Close every file."""
        for side in self._sides:
            side.close()

    def _side_by_side(self, shards: Iterable[ShardPair]) -> Iterator[Sequence[ComparedRange]]:
        """Yield all parts of all pairs, those together of which some help to decode the others."""
        if not any(one.decoding.helpers() for one in self._checkpoints):
            for pair in shards:
                yield from ((part,) for part in _parts(pair, _TASK))
            return
        parameters: dict[str, list[ShardPair]] = {}
        for pair in shards:
            parameters.setdefault(self._parameter(pair), []).append(pair)
        for several in parameters.values():
            lists = [_parts(pair, pair.ours[1].dtype.nbytes(_SIDE_BY_SIDE)) for pair in several]
            for together in zip_longest(*lists):
                yield [part for part in together if part is not None]

    def _parameter(self, pair: ShardPair) -> str:
        """Return the parameter that a pair's tensor is, or belongs to."""
        second, shard = pair.ours
        if not shard.fills:
            return pair.name
        return self._checkpoints[second].tensors[shard.fills[0].key].name

    def _try(self, part: ComparedRange, tolerance: Tolerance | None) -> RangeResult:
        try:
            done = self._norm(part) if part.equal else self._compare(part, tolerance)
        except FtckptError as error:
            done = RangeResult(part.pair.name, Tally(), 0, [], error)
        runs = [sums.drain() for sums in self._sums]
        return done if part.equal else done._replace(runs=runs)  # else it was summed up before

    def _compare(self, part: ComparedRange, tolerance: Tolerance | None) -> RangeResult:
        (one, ours), (two, theirs) = part.pair.ours, part.pair.theirs
        tally = Tally()
        equal: list[tuple[int, int]] = []
        for start, stop in _cut(ours, part.start, part.stop, self._block):
            count = stop - start
            mine = buffer(ours.dtype.nbytes(count), _OURS_SLOT)
            other = buffer(theirs.dtype.nbytes(count), _THEIRS_SLOT)
            self._sides[one].fill(ours, start, stop, mine)
            self._sides[two].fill(theirs, start, stop, other)
            if ours.dtype == theirs.dtype and same(mine, other):
                if equal and equal[-1][1] == start:
                    equal[-1] = equal[-1][0], stop
                else:
                    equal.append((start, stop))
                continue
            tally.add(measure((ours.dtype, mine), (theirs.dtype, other), count, tolerance))
        return RangeResult(part.pair.name, tally, part.nbytes, equal)

    def _norm(self, part: ComparedRange) -> RangeResult:
        one, ours = part.pair.ours
        tally = Tally()
        for start, stop in _cut(ours, part.start, part.stop, self._block):
            data = buffer(ours.dtype.nbytes(stop - start), _OURS_SLOT)
            self._sides[one].fill(ours, start, stop, data)
            tally.add(unchanged(ours.dtype, data, stop - start))
        return RangeResult(part.pair.name, tally, 0, [])


def _parts(pair: ShardPair, nbytes: int) -> Iterator[ComparedRange]:
    shard = pair.ours[1]
    for start, stop in _cut(shard, 0, shard.numel, nbytes):
        yield ComparedRange(pair, start, stop, False)


def _alone(parts: Iterable[Sequence[ComparedRange]]) -> Iterator[Sequence[ComparedRange]]:
    """Make a task of every range: machines that know different ones name each the same."""
    for several in parts:
        yield from ((one,) for one in several)


def _batched(parts: Iterable[Sequence[ComparedRange]]) -> Iterator[Sequence[ComparedRange]]:
    """Put small parts together: handing a task over costs as much as comparing kilobytes."""
    task: list[ComparedRange] = []
    nbytes = 0
    for several in parts:
        task += several
        nbytes += sum(part.nbytes for part in several)
        if nbytes >= _BATCH or len(task) >= _TOGETHER:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


def _cut(shard: Shard, start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a shard's elements into runs of about `nbytes`."""
    # Elements smaller than a byte can be cut where a byte ends.
    step = max(8, nbytes * 8 // shard.dtype.bits) // 8 * 8
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)


# What numpy and the modules of the comparison take when they are imported: measured at 19 MiB.
_IMPORTS = 20 << 20


def within_budget(work: Work, sides: Sequence[Checkpoint]) -> Work:
    """Return the same work by as many threads and processes as fit into the memory budget.

    A thread holds a block of each side, a span out of which elements are picked, and what its
    arithmetic takes; where a side lies behind a latency, blocks and spans are larger, and the
    answer to a request is held too. One thread always may. What is held is the whole process, with
    its libraries and those that are still to be imported.

    Args:
        work: as many as are wanted.
        sides: the checkpoints that are compared.
    """
    stores = [one.source.store for one in sides]
    near = all(store.traits.local for store in stores)
    imports = 0 if "numpy" in sys.modules else _IMPORTS
    threads = thread_count(
        work.threads,
        4 * LOCAL + SPAN if near else 4 * REMOTE,
        reserved=imports + sum(map(most_kept, stores)),
        decoding=any(bool(one.decoding) for one in sides),
        mapped=True,
    )
    processes = 0 if work.limiter is not None else _processes(threads, sides)
    return replace(work, threads=threads, processes=processes)


def _processes(threads: int, sides: Sequence[Checkpoint]) -> int:
    """Return how many copies of this process compare faster than the threads; 0 for none.

    They do where a side is decoded, and both lie on this machine.
    """
    try:
        if not all(one.is_local() for one in sides):
            return 0
        decoded = [one for one in sides if one.decoding.slots()]
    except FtckptError:  # what is read of it says what it is
        return 0
    each = 4 * LOCAL + SPAN
    return min((for_reading(one, threads, each) for one in decoded), default=0)
