"""Read tensors of two checkpoints side by side, in blocks, and tally what differs.

A block that is the same on both sides costs a comparison of bytes and no arithmetic. What the norm
of a tensor needs of such blocks is read once more at the end, and only of tensors that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.buffers import buffer, same, size_for
from ftckpt.engine import run
from ftckpt.errors import FtckptError
from ftckpt.limits import RateLimit
from ftckpt.progress import NULL, Counter
from ftckpt.transfer.content import Content, Shard
from ftckpt.transfer.gathering import Gatherer

from .arithmetic import Tally, Tolerance, measure, unchanged

_TASK = 32 << 20  # bytes of a tensor compared by one task
_BATCH, _TOGETHER = 2 << 20, 256  # bytes and number of small tensors compared by one task
_OURS_SLOT, _THEIRS_SLOT = 4, 5


class Work(NamedTuple):
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
class Found:
    """What became of one piece of work.

    Attributes:
        tally: what was counted.
        error: why it could not be read to its end.
    """

    tally: Tally = field(default_factory=Tally)
    error: FtckptError | None = None
    equal: list[tuple[int, int]] = field(default_factory=list)


class _Part(NamedTuple):
    work: Work
    start: int
    stop: int
    equal: bool  # whether it is known to be equal, and only its norm is wanted

    @property
    def nbytes(self) -> int:
        return self.work.ours[1].dtype.nbytes(self.stop - self.start)


class _Done(NamedTuple):
    name: str
    tally: Tally
    nbytes: int
    equal: list[tuple[int, int]]
    error: FtckptError | None = None


class Readers:
    """Both checkpoints, open for reading by many threads.

    Args:
        ours: the first.
        theirs: the second.
        limiter: bounds the rate of reading, of both together.
    """

    def __init__(self, ours: Content, theirs: Content, limiter: RateLimit | None = None) -> None:
        checkpoints = ours.checkpoint, theirs.checkpoint
        self._sides = tuple(Gatherer(one, limiter) for one in checkpoints)
        self._block = max(size_for(one.source.store) for one in checkpoints)

    def compare(
        self,
        works: Mapping[str, Work],
        tolerance: Tolerance | None,
        *,
        jobs: int = 1,
        executor: Executor | None = None,
        counter: Counter = NULL,
    ) -> dict[str, Found]:
        """Compare everything; what cannot be read is an answer too.

        Args:
            works: what to compare, by name.
            tolerance: see `measure`.
            jobs: number of threads.
            executor: where to run instead.
            counter: is told of the bytes of one side.
        """
        found = {name: Found() for name in works}

        def do(task: list[_Part]) -> list[_Done]:
            return [self._try(part, tolerance) for part in task]

        def carry_out(parts: Iterator[_Part]) -> None:
            for task in run(_batched(parts), do, jobs=jobs, executor=executor):
                for done in task:
                    result = found[done.name]
                    result.tally.add(done.tally)
                    result.equal += done.equal
                    result.error = result.error or done.error
                    counter.add(done.nbytes)

        def wanted() -> Iterator[_Part]:
            for work in works.values():
                for start, stop in _cut(work.ours[1], 0, work.ours[1].numel, _TASK):
                    if found[work.name].error is None:
                        yield _Part(work, start, stop, False)

        def owed() -> Iterator[_Part]:
            for name, result in found.items():
                equal, result.equal = result.equal, []
                if result.tally.changed and result.error is None:
                    for start, stop in equal:
                        for place in _cut(works[name].ours[1], start, stop, _TASK):
                            yield _Part(works[name], *place, True)

        carry_out(wanted())
        carry_out(owed())
        return found

    def close(self) -> None:
        """Close every file."""
        for side in self._sides:
            side.close()

    def _try(self, part: _Part, tolerance: Tolerance | None) -> _Done:
        try:
            return self._norm(part) if part.equal else self._compare(part, tolerance)
        except FtckptError as error:
            return _Done(part.work.name, Tally(), 0, [], error)

    def _compare(self, part: _Part, tolerance: Tolerance | None) -> _Done:
        (one, ours), (two, theirs) = part.work.ours, part.work.theirs
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
        return _Done(part.work.name, tally, part.nbytes, equal)

    def _norm(self, part: _Part) -> _Done:
        one, ours = part.work.ours
        tally = Tally()
        for start, stop in _cut(ours, part.start, part.stop, self._block):
            data = buffer(ours.dtype.nbytes(stop - start), _OURS_SLOT)
            self._sides[one].fill(ours, start, stop, data)
            tally.add(unchanged(ours.dtype, data, stop - start))
        return _Done(part.work.name, tally, 0, [])


def _batched(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Put small parts together: handing a task over costs as much as comparing kilobytes."""
    task: list[_Part] = []
    nbytes = 0
    for part in parts:
        task.append(part)
        nbytes += part.nbytes
        if nbytes >= _BATCH or len(task) == _TOGETHER:
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
