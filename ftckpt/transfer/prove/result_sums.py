"""Read a result once and sum it up by place, as its own reader says where everything lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.digests.place_sums import PlaceSum, has_rows, sum_in_box
from ftckpt.extents import Extent
from ftckpt.progress import Counter
from ftckpt.transfer.content import Content
from ftckpt.transfer.forms import copies_in, pairs
from ftckpt.transfer.read.elements import REMOTE, Gatherer
from ftckpt.workers import Work
from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    from ftckpt.transfer.read.source_bytes import SourceBytes

_TASK = 32 << 20  # bytes summed up by one task
_MOST = 256  # pieces of one task, however small
_SLOT = 4


class _Group(NamedTuple):
    """Elements of a tensor of the result, and the pieces that each hold all of them.

    Attributes:
        key: of what was wanted.
        name: of the tensor in the result, which another may be tied to.
        first: number of its first piece among all.
        copies: how many pieces.
    """

    key: str
    name: str
    first: int
    copies: int


class _Range(NamedTuple):
    """Bytes of one stored piece.

    Attributes:
        number: of the piece among all.
        info: its tensor.
        piece: where its elements belong.
        extent: its bytes in the file.
        start, stop: which of them.
    """

    number: int
    info: TensorInfo
    piece: Piece
    extent: Extent
    start: int
    stop: int


def summed_alike(
    content: Content, result: Checkpoint, sums: Mapping[str, PlaceSum], work: Work
) -> frozenset[str]:
    """Return the tensors of a content that have the same sums in the result as in the source.

    Args:
        content: what was to be written; the forms of its tensors were compared.
        result: opened by the ordinary reader.
        sums: of the content's tensors, by key.
        work: how; its counter is told of every byte of the tensors that are returned.

    Returns:
        Keys of `content.tensors`; every copy in the result, replicas included, is what it should
        be. Of the others nothing is known.
    """
    groups: list[_Group] = []
    ranges: list[_Range] = []
    unknown: set[str] = set()
    count = 0
    for (key, info), held in copies_in(pairs(content, result)):
        if key not in sums or key in unknown:
            continue
        extents = [_stored(result, info, piece, held.stop - held.start) for piece in held.pieces]
        if held.pieces[0].replica or None in extents:
            unknown.add(key)
            continue
        groups.append(_Group(key, info.key, count, len(extents)))
        for piece, extent in zip(held.pieces, extents, strict=True):
            assert extent is not None
            for start in range(0, extent.length, _TASK):
                stop = min(start + _TASK, extent.length)
                ranges.append(_Range(count, info, piece, extent, start, stop))
            count += 1
    found = [PlaceSum()] * count
    gatherer = Gatherer(result, work.limiter)
    chunk = gatherer.chunk if result.source.store.traits.local else REMOTE

    def add(task: Sequence[_Range], _: Counter) -> list[tuple[int, PlaceSum]]:
        return [(one.number, _sum(one, gatherer.bytes, chunk)) for one in task]

    places = (one.extent for one in ranges)
    with reading_ahead(result, places, work.limiter, jobs=work.threads):
        try:
            for task in work.spread(_tasks(ranges), add):
                for number, more in task:
                    found[number] = found[number].plus(more)
                    work.counter.add(more.nbytes)
        finally:
            gatherer.close()
    return _alike(groups, found, sums) - unknown


def _alike(
    groups: Sequence[_Group], found: Sequence[PlaceSum], sums: Mapping[str, PlaceSum]
) -> frozenset[str]:
    """Return the keys of which all copies have the sums that were wanted."""
    totals: dict[tuple[str, str], PlaceSum] = {}
    differ: set[str] = set()
    for key, name, first, number in groups:
        copies = found[first : first + number]
        if any(one != copies[0] for one in copies):
            differ.add(key)
        totals[key, name] = totals.get((key, name), PlaceSum()).plus(copies[0])
    # What is not stored is zero: padding adds to the bytes, and nothing to the sums.
    differ |= {key for (key, _), made in totals.items() if made[1:] != sums[key][1:]}
    return frozenset({key for key, _ in totals} - differ)


def _stored(result: Checkpoint, info: TensorInfo, piece: Piece, elements: int) -> Extent | None:
    """Return where a piece lies, dense and as it is; None where it does not."""
    size = info.dtype.itemsize
    if not size or not has_rows(info.shape, size, piece.box):
        return None
    payload = result.payload(piece)
    if payload.transforms or payload.strides is not None:
        return None
    nbytes = elements * size
    return None if payload.extent.length < nbytes else payload.extent._replace(length=nbytes)


def _sum(task: _Range, source: SourceBytes, chunk: int) -> PlaceSum:
    size = task.info.dtype.itemsize
    before = task.piece.flat[0] * size if task.piece.flat is not None else 0
    total = PlaceSum()
    for start in range(task.start, task.stop, chunk):
        view = buffer(min(chunk, task.stop - start), _SLOT)
        source.read(task.extent.file, task.extent.offset + start, view)
        at = before + start
        total = total.plus(sum_in_box(task.info.shape, size, task.piece.box, at, view))
    return total


def _tasks(ranges: Iterable[_Range]) -> Iterator[Sequence[_Range]]:
    """Yield tasks of about one size."""
    task: list[_Range] = []
    nbytes = 0
    for one in ranges:
        more = one.stop - one.start
        if task and (nbytes + more > _TASK or len(task) >= _MOST):
            yield task
            task, nbytes = [], 0
        task.append(one)
        nbytes += more
    if task:
        yield task
