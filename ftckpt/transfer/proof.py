"""Prove a result: read it back through its format's own reader and compare it with the source.

Every logical tensor is read twice, from the source and from the result, and compared bit by bit;
that is more than equal digests would say and ten times as fast. What the two readings share is the
reading of the source and the description of what was wanted, so a fault in a writer, in the engine
or on the disk is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.assembly import read_tensor
from ftckpt.buffers import buffer, same
from ftckpt.checkpoint import Box, Checkpoint, TensorInfo
from ftckpt.coverage import check_coverage, show
from ftckpt.engine import run
from ftckpt.errors import CorruptError
from ftckpt.progress import NULL, Counter

from .content import Content, Known, Shard, Wanted
from .gathering import Gatherer
from .regions import whole_rows

if TYPE_CHECKING:
    from ftckpt.limits import RateLimit

_TASK = 32 << 20  # bytes compared by one task
_MOST = 256  # tensors compared by one task: handing over a task costs more than comparing a few
_STEP = 2 << 20
_WANTED_SLOT, _FOUND_SLOT = 4, 5


# For a source and a result, what says whether an object that both have is the same.
SameObjects = Callable[[Checkpoint, Checkpoint], Callable[[str], bool]]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared.

    Attributes:
        tensors: logical tensors that are equal bit for bit.
        nbytes: bytes of them.
        objects: objects that are equal; those that the format names otherwise are not counted.
    """

    tensors: int
    nbytes: int
    objects: int


class _Range(NamedTuple):
    """Elements `start` to `stop` of a box of one tensor, as they should be and as they are."""

    key: str
    whole: tuple[int, ...]  # the tensor's shape
    box: Box
    wanted: Shard
    found: Shard
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.wanted.dtype.nbytes(self.stop - self.start)


def prove(
    content: Content,
    result: Checkpoint,
    same_objects: SameObjects,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    limiter: RateLimit | None = None,
    counter: Counter = NULL,
) -> Proof:
    """Compare a result with what was to be written.

    Args:
        content: what was to be written.
        result: opened by the ordinary reader.
        same_objects: how objects are compared.
        jobs: number of threads.
        executor: where to run instead.
        limiter: bounds the rate of reading.
        counter: is told of every byte compared.

    Raises:
        CorruptError: names, shapes, types, tiling, bits or objects differ (`failed-proof`).
    """
    wanted = content.tensors
    compare_forms(content, result)
    counter.start("proving", sum(w.nbytes for w in wanted.values()))
    source, target = Gatherer(content.checkpoint, limiter), Gatherer(result, limiter)

    def compare(task: Sequence[_Range]) -> None:
        for one in task:
            _compare_bits(one, source, target)
            counter.add(one.nbytes)

    def compare_known(one: tuple[str, Known]) -> None:
        if read_tensor(result, one[0]) != one[1].data:
            raise failed(f"{one[0]} is not what the source holds", one[0])

    try:
        for _ in run(_tasks(_ranges(content, result)), compare, jobs=jobs, executor=executor):
            pass
        for _ in run(content.known.items(), compare_known, jobs=jobs, executor=executor):
            pass
    finally:
        source.close()
        target.close()
    objects = compare_objects(content, result, same_objects)
    return Proof(
        len(wanted) + len(content.known),
        sum(w.nbytes for w in wanted.values()) + sum(len(k.data) for k in content.known.values()),
        objects,
    )


class Prover(Protocol):
    """Compares a result with what was to be written, as `prove` does."""

    def __call__(
        self,
        content: Content,
        result: Checkpoint,
        same_objects: SameObjects,
        *,
        jobs: int = 1,
        executor: Executor | None = None,
        limiter: RateLimit | None = None,
        counter: Counter = NULL,
    ) -> Proof:
        """Compare them; see `prove`."""


def compare_forms(content: Content, result: Checkpoint) -> None:
    """Compare names, shapes and types, and look whether pieces tile their tensors.

    Raises:
        CorruptError: they differ (`failed-proof`).
    """
    listed = content.tensors.keys() | content.aliases.keys() | content.known.keys()
    _compare_names(listed, result)
    for key in content.tensors:
        _compare_form(content.tensors[key], key, result)
    for key, known in content.known.items():
        _compare_form(known, key, result)


def _compare_names(wanted: Set[str], result: Checkpoint) -> None:
    has = result.tensors.keys() | result.aliases.keys()
    # A reader may list the tensors inside objects, which are compared as parts of those.
    inside = {key for key, info in result.tensors.items() if info.component.startswith("extra:")}
    missing, more = sorted(wanted - has), sorted(has - wanted - inside)
    if missing or more:
        what = f"lacks {missing[0]}" if missing else f"has {more[0]}, which nobody asked for"
        count = len(missing) + len(more)
        raise failed(f"the result {what} ({count} names differ)", (missing + more)[0])


def _compare_form(want: Wanted | Known, key: str, result: Checkpoint) -> None:
    has = result.tensors[result.aliases.get(key, key)]
    if (has.shape, has.dtype) != (want.shape, want.dtype):
        raise failed(
            f"{key} is {has.dtype.name}{list(has.shape)} in the result and not "
            f"{want.dtype.name}{list(want.shape)}",
            key,
        )
    for gap in check_coverage(has.shape, has.pieces):
        raise failed(f"{key} in the result: {gap.message}", key)


def _ranges(content: Content, result: Checkpoint) -> Iterator[_Range]:
    """Yield every element of the content once, as the result's pieces hold them.

    A piece is one run of its file, so that only the source's elements must be put in order.
    """
    found = Content.of(result)
    for key in content.tensors:
        owner = result.aliases.get(key, key)
        info = result.tensors[owner]
        whole = info.dtype.itemsize == 0  # such a tensor cannot be cut
        for box, flat in [(Box.whole(info.shape), None)] if whole else _held(info):
            one, two = content.part(key, box), found.part(owner, box)
            begin, end = flat or (0, one.numel)
            step = _elements(one, _TASK)
            for start in range(begin, end, step):
                yield _Range(key, info.shape, box, one, two, start, min(start + step, end))


def _held(info: TensorInfo) -> Iterator[tuple[Box, tuple[int, int] | None]]:
    """Yield the boxes, or flat ranges of boxes, of a tensor's main pieces: they tile it."""
    for piece in info.pieces:
        if not piece.replica and piece.box.volume:
            yield piece.box, piece.flat


def _tasks(ranges: Iterable[_Range]) -> Iterator[Sequence[_Range]]:
    task: list[_Range] = []
    nbytes = 0
    for one in ranges:
        if task and (nbytes + one.nbytes > _TASK or len(task) == _MOST):
            yield task
            task, nbytes = [], 0
        task.append(one)
        nbytes += one.nbytes
    if task:
        yield task


def _elements(shard: Shard, nbytes: int) -> int:
    """Return how many elements fill so many bytes, or less; they end where bytes and rows end."""
    most = nbytes // shard.dtype.bits * 8
    return whole_rows(shard.shape, most) if shard.dtype.itemsize else most


def _compare_bits(task: _Range, source: Gatherer, target: Gatherer) -> None:
    dtype = task.wanted.dtype
    step = _elements(task.wanted, _STEP)
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        size = dtype.nbytes(stop - start)
        want, has = buffer(size, _WANTED_SLOT), buffer(size, _FOUND_SLOT)
        source.fill(task.wanted, start, stop, want)
        target.fill(task.found, start, stop, has)
        if not same(want, has):
            box = "" if task.box.sizes == task.whole else f"box {show(task.box)} of "
            raise failed(
                f"elements [{start}, {stop}) of {box}{task.key} are not what the source holds",
                task.key,
            )


def compare_objects(content: Content, result: Checkpoint, same_objects: SameObjects) -> int:
    """Compare the objects that have one name in both; return how many those are.

    A format that keeps a nested state in one place and one that keeps its leaves apart have other
    names for the same state, and what was put under other names is not compared here.
    """
    shared = [name for name in content.objects if name in result.objects]
    equal = same_objects(content.checkpoint, result)
    for name in shared:
        if not equal(name):
            raise failed(f"{name} in the result is not what the source holds", name)
    return len(shared)


def failed(message: str, key: str) -> CorruptError:
    """Return the error of a proof that failed, given why and at which tensor or object."""
    return CorruptError(
        f"the proof failed: {message}",
        kind="failed-proof",
        tensor=key,
        hint="nothing was made visible, the source is untouched; --restart builds it anew",
    )
