"""Prove a result: read it back through its format's own reader and hold it to the source.

What was read of the source for the writing was summed up by place (`source_sums`), and the result
is read once, with all replicas, and summed up by the places that its own reader gives. These sums
know nothing of what planned the reading, put elements in order and wrote them, so a fault there
or on the disk is seen.

Tensors without such a sum (of a source that decodes or compresses them, smaller than a byte, or
written by several machines) are read from the source once more and compared bit by bit, and so are
those whose sums differ: that names the elements. What the two readings share is then the reading of
the source and the description of what was wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.checkpoint import Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.coverage import show
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.replicas import Copies
from ftckpt.digests.place_sums import PlaceSum, sum_in_box
from ftckpt.errors import CorruptError
from ftckpt.progress import Counter
from ftckpt.transfer.casting import Changes, changes
from ftckpt.transfer.content import Content, Shard
from ftckpt.transfer.forms import (
    ResultTensor,
    compare_forms,
    copies_in,
    failed,
    nbytes_in,
    pairs,
    require_all_read,
)
from ftckpt.transfer.read.copies_plan import whole_rows
from ftckpt.transfer.read.elements import Gatherer, of_content, of_result
from ftckpt.workers import ALONE, Work
from ftckpt.workers.buffers import buffer, same

from .result_sums import summed_alike

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.transfer.casting import Array

    from .source_sums import SourceSums

_TASK = 32 << 20  # bytes compared by one task
_MOST = 256  # tensors compared by one task: handing over a task costs more than comparing a few
_STEP = 2 << 20
_SIDE_BY_SIDE = 2 << 20  # elements of each tensor of one parameter that are compared in turn
_WANTED_SLOT, _FOUND_SLOT = 4, 5


# For a source and a result, what says whether an object that both have is the same.
SameObjects = Callable[[Checkpoint, Checkpoint], Callable[[str], bool]]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared.

    Attributes:
        tensors: logical tensors that are what was to be written, bit for bit.
        nbytes: bytes of the result that were compared, those of every replica included.
        objects: objects that are equal; those that the format names otherwise are not counted.
        cast: what was cast on the way; None where nothing was.
        source_bytes: bytes of the source's tensors that were read for it.
    """

    tensors: int
    nbytes: int
    objects: int
    cast: Cast | None = None
    source_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cast:
    """Tensors that are equal to the source cast to another type.

    Attributes:
        tensors: how many.
        dtypes: the types that they became.
        values: their elements.
        changed: of these, those that are another number than in the source.
        infinite: of these, those that were finite and are no longer.
    """

    tensors: int
    dtypes: Sequence[str]
    values: int
    changed: int
    infinite: int


class ProofRange(NamedTuple):
    """Elements `start` to `stop` of a box of one tensor, as they should be and as they are.

    Attributes:
        info: the tensor in the result.
        wanted: what the box should hold.
        pieces: those of the result that hold the elements, each all of them.
        start, stop: in the box's C order.
    """

    info: TensorInfo
    wanted: Shard
    pieces: Sequence[Piece]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, in every piece."""
        return len(self.pieces) * self.wanted.dtype.nbytes(self.stop - self.start)

    @property
    def is_whole(self) -> bool:
        """Whether it is of one piece that holds all of the tensor, in elements of whole bytes."""
        whole = [piece.box.sizes == self.info.shape and piece.flat is None for piece in self.pieces]
        return whole == [True] and bool(self.info.dtype.itemsize)


def prove(
    content: Content,
    result: Checkpoint,
    same_objects: SameObjects,
    work: Work = ALONE,
    read: SourceSums | None = None,
) -> Proof:
    """Compare a result with what was to be written.

    Args:
        content: what was to be written.
        result: opened by the ordinary reader.
        same_objects: how objects are compared.
        work: how; its counter is told of every byte of the result that was compared, replicas
            included.
        read: what was read of the source for the writing; None: it is read again.

    Raises:
        CorruptError: names, shapes, types, tiling, bits of a copy or objects differ
            (`failed-proof`).
    """
    require_all_read(result)
    compare_forms(content, result)
    known = [ResultTensor(key, result.tensors[key]) for key in content.known]
    nbytes = nbytes_in(pairs(content, result)) + nbytes_in(known)
    counter, limiter = work.counter, work.limiter
    counter.start("proving", nbytes)
    decoded = content.checkpoint.decoding.slots() or result.decoding.slots()
    sums: Mapping[str, PlaceSum] = {} if read is None else read.sums
    equal = frozenset[str]()
    if sums and not decoded:
        equal = summed_alike(content, result, sums, work)
    source, target = _CountingGatherer(content.checkpoint, limiter), Gatherer(result, limiter)

    def compare(task: Sequence[ProofRange], counter: Counter) -> Changes:
        found = Changes()
        for one in task:
            source.begin()
            _compare_bits(one, source, target)
            counter.add(one.nbytes)
            if one.info.key in content.tensors:  # a tied weight is counted once
                found = found.plus(source.changes)
        return found

    def sum_up(
        task: Sequence[ProofRange], counter: Counter
    ) -> tuple[Changes, list[tuple[str, PlaceSum]]]:
        rest: list[ProofRange] = []
        made: list[tuple[str, PlaceSum]] = []
        for one in task:
            if one.info.key in sums and one.is_whole:
                made.append((one.info.key, _sum(one, target)))
                counter.add(one.nbytes)
            else:
                rest.append(one)
        return compare(rest, counter), made

    def compare_known(one: ResultTensor) -> None:
        if read_tensor(result, one.key) != content.known[one.key].data:
            raise failed(f"{one.key} is not what the source holds", one.key)
        counter.add(one.info.nbytes)

    with ExitStack() as stack:
        for one, places in (
            (content.checkpoint, of_content(content, sums.keys() if decoded else equal)),
            (result, of_result(content, result, equal)),
        ):
            stack.enter_context(reading_ahead(one, places, limiter, jobs=work.threads))
        try:
            found = Changes()
            if decoded:
                ranges = _tasks(_by_parameter(content, result))
            else:
                ranges = _tasks((one,) for one in _ranges(content, result, equal))
            if decoded and sums:
                # What is decoded serves the others of its parameter, whether summed or compared.
                totals: dict[str, PlaceSum] = {}
                for changed, made in work.spread(ranges, sum_up):
                    found = found.plus(changed)
                    for key, more in made:
                        totals[key] = totals.get(key, PlaceSum()).plus(more)
                equal = frozenset(key for key, made in totals.items() if made == sums[key])
                done = content.tensors.keys() - (totals.keys() - equal)
                ranges = _tasks((one,) for one in _ranges(content, result, done))
            if read is not None:
                for key in equal & read.changes.keys():
                    found = found.plus(read.changes[key])
            for one_task in work.spread(ranges, compare):
                found = found.plus(one_task)
            for _ in work.run(known, compare_known):
                pass
            compare_replicas(known, target, work)
        finally:
            source.close()
            target.close()
        objects = 0 if work.partial else compare_objects(content, result, same_objects)
    compared = sum(
        content.checkpoint.tensors[copy.key].dtype.nbytes(copy.source.volume)
        for key, wanted in content.tensors.items()
        if key not in equal
        for copy in wanted.copies
    )
    count = len(content.tensors) + len(known)
    return Proof(count, nbytes, objects, _cast(content, found), compared)


class _CountingGatherer(Gatherer):
    """Counts, thread by thread, what casts do to values."""

    @property
    def changes(self) -> Changes:
        """What was cast by this thread since `begin`."""
        found: Changes = self._thread.changes
        return found

    def begin(self) -> None:
        """Count anew, in this thread."""
        self._thread.changes = Changes()

    def cast(self, items: Array, source: DType, target: DType) -> Array:
        """Return elements in another type, and count those that are another number there."""
        done = super().cast(items, source, target)
        self._thread.changes = self._thread.changes.plus(changes(items, source, done, target))
        return done


def _cast(content: Content, found: Changes) -> Cast | None:
    types = [
        wanted.dtype.name
        for wanted in content.tensors.values()
        if any(content.checkpoint.tensors[c.key].dtype != wanted.dtype for c in wanted.copies)
    ]
    return Cast(len(types), sorted(set(types)), *found) if types else None


class Prover(Protocol):
    """Compares a result with what was to be written, as `prove` does."""

    def __call__(
        self,
        content: Content,
        result: Checkpoint,
        same_objects: SameObjects,
        work: Work = ALONE,
    ) -> Proof:
        """Compare them; see `prove`."""


def compare_replicas(
    tensors: Iterable[ResultTensor],
    result: Gatherer,
    work: Work,
) -> None:
    """Compare the replicas of tensors with the main pieces, where these were proven otherwise.

    Args:
        tensors: of the result.
        result: reads it.
        work: how, by threads; its counter is told of every byte of the replicas.

    Raises:
        CorruptError: they differ (`failed-proof`).
    """
    found = Content.of(result.bytes.checkpoint)
    ranges = (
        one
        for pair, held in copies_in(tensors)
        if held.replicas
        for one in _cut(pair.info, held, held.replicas, found.part(pair.info.key, held.box))
    )

    def compare(task: Sequence[ProofRange]) -> None:
        for one in task:
            _compare_bits(one, result, result)
            work.counter.add(one.nbytes)

    for _ in work.run(_tasks((one,) for one in ranges), compare):
        pass


def _ranges(content: Content, result: Checkpoint, equal: Collection[str]) -> Iterator[ProofRange]:
    """Yield every element of the content, as the result's pieces hold it: once and its replicas.

    Tensors that are known to be `equal` are left out.

    A piece is one run of its file, so that only the source's elements must be put in order. They
    are read once for all copies.
    """
    for (key, info), held in copies_in(pairs(content, result)):
        if key not in equal:
            yield from _cut(info, held, held.pieces, content.part(key, held.box))


def _by_parameter(content: Content, result: Checkpoint) -> Iterator[Sequence[ProofRange]]:
    """Yield the same as `_ranges`, ranges of the tensors of one parameter side by side.

    A block of one may be what those of the others are decoded from.
    """
    parameters: dict[str, list[ResultTensor]] = {}
    for pair in pairs(content, result):
        parameters.setdefault(pair.info.name, []).append(pair)
    side_by_side = copies_in(chain.from_iterable(parameters.values()))
    for _, several in groupby(side_by_side, lambda one: one[0].info.name):
        ranges = []
        for (key, info), held in several:
            part = content.part(key, held.box)
            ranges.append(_steps(info, held, held.pieces, part, _row_end(part, _SIDE_BY_SIDE)))
        for together in zip_longest(*ranges):
            yield [one for one in together if one is not None]


def _cut(
    info: TensorInfo, held: Copies, pieces: Sequence[Piece], wanted: Shard
) -> Iterator[ProofRange]:
    return _steps(info, held, pieces, wanted, _elements(wanted, max(_TASK // len(pieces), _STEP)))


def _steps(
    info: TensorInfo, held: Copies, pieces: Sequence[Piece], wanted: Shard, step: int
) -> Iterator[ProofRange]:
    for start in range(held.start, held.stop, step):
        yield ProofRange(info, wanted, pieces, start, min(start + step, held.stop))


def _tasks(ranges: Iterable[Sequence[ProofRange]]) -> Iterator[Sequence[ProofRange]]:
    """Yield tasks of about one size; what comes together stays together."""
    task: list[ProofRange] = []
    nbytes = 0
    for several in ranges:
        more = sum(one.nbytes for one in several)
        if task and (nbytes + more > _TASK or len(task) + len(several) > _MOST):
            yield task
            task, nbytes = [], 0
        task += several
        nbytes += more
    if task:
        yield task


def _elements(shard: Shard, nbytes: int) -> int:
    """Return how many elements fit in a number of bytes; they end where bytes and rows end."""
    return _row_end(shard, nbytes // shard.dtype.bits * 8)


def _row_end(shard: Shard, most: int) -> int:
    """Return how many elements, at most `most`, end where bytes and rows end."""
    return whole_rows(shard.shape, most) if shard.dtype.itemsize else most


def _compare_bits(task: ProofRange, source: Gatherer, result: Gatherer) -> None:
    dtype = task.wanted.dtype
    asked = max(source.chunk, result.chunk)
    step = _elements(task.wanted, _STEP if asked == Gatherer.chunk else asked)
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        size = dtype.nbytes(stop - start)
        want, has = buffer(size, _WANTED_SLOT), buffer(size, _FOUND_SLOT)
        source.fill(task.wanted, start, stop, want)
        for piece in task.pieces:
            result.fill_piece(task.info, piece, start, stop, has)
            if not same(want, has):
                by = "main piece" if source is result else "source"
                raise _differs(task, piece, start, stop, by)


def _sum(task: ProofRange, result: Gatherer) -> PlaceSum:
    """Sum up by place what the result holds; of a tensor that is whole in one piece."""
    info, (piece,) = task.info, task.pieces
    size = info.dtype.itemsize
    step = _elements(task.wanted, max(_STEP, result.chunk))
    total = PlaceSum()
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        has = buffer(info.dtype.nbytes(stop - start), _FOUND_SLOT)
        result.fill_piece(info, piece, start, stop, has)
        total = total.plus(sum_in_box(info.shape, size, piece.box, start * size, has))
    return total


def _differs(task: ProofRange, piece: Piece, start: int, stop: int, by: str) -> CorruptError:
    info, file = task.info, piece.extent.file
    box = "" if piece.box.sizes == info.shape else f"box {show(piece.box)} of "
    repeated = f", as {file} repeats them," if piece.replica else ""
    what = f"elements [{start}, {stop}) of {box}{info.key}{repeated} are not what the {by} holds"
    return failed(what, info.key, file)


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
