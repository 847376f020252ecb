"""Read parts of a checkpoint ahead of use if requests have a latency.

`ftckpt.storage.prefetch` reads; this module chooses which bytes, and in which order.

Choose the number of processes that decode a checkpoint.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from ftckpt.errors import FtckptError
from ftckpt.extents import Extent
from ftckpt.storage.prefetch import most_kept
from ftckpt.workers.budget import process_count

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.storage.source import Source
    from ftckpt.workers.limits import RateLimit


# A thread uses two stages of windows, and as many are in flight. With less room each would be
# dropped for another before it is used up, and read again and again.
_STAGES = 4


@contextmanager
def reading_ahead(
    checkpoint: Checkpoint,
    extents: Iterable[Extent] | None = None,
    limiter: RateLimit | None = None,
    *,
    bases: bool = True,
    jobs: int = 1,
) -> Iterator[None]:
    """Inside the block, read ahead if the store has a latency.

    The cache of an enclosing block is dropped: a proof reads again what was read before.

    Args:
        checkpoint: to read.
        extents: expected reads of its files, in about that order; default: everything. Others are
            read on demand; an unused one costs little.
        limiter: bounds the rate of reading; `Source.limited` says who must still use it.
        bases: whether to read its bases ahead too.
        jobs: number of threads that will read, each at its own place.
    """
    if extents is None:
        extents = extents_of(checkpoint)
    below: Sequence[Checkpoint] = ()
    if bases:
        with suppress(FtckptError):  # a reader of the tensors gets the error
            below = checkpoint.decoding.bases()
    read = [(checkpoint.source, extents), *((base.source, extents_of(base)) for base in below)]
    with ExitStack() as stack:
        for source, places in read:
            bound = most_kept(source.store) // len(read)
            stack.enter_context(_ahead_of(source, places, bound, limiter, jobs))
        yield


def read_again(checkpoint: Checkpoint) -> None:
    """Drop the read-ahead: a bit may have flipped in transit."""
    for one in (checkpoint, *checkpoint.decoding.bases()):
        if one.source.lookahead.current is not None:
            one.source.lookahead.current.forget()


@contextmanager
def _ahead_of(
    source: Source, extents: Iterable[Extent], bound: int, limiter: RateLimit | None, jobs: int
) -> Iterator[None]:
    traits = source.store.traits
    if traits.local or not traits.gap:
        yield
        return
    around = source.lookahead.current
    if around is not None:
        around.forget()
    from ftckpt.storage.prefetch.plan import STAGE, Windows
    from ftckpt.storage.prefetch.reads import Ahead

    stage = min(STAGE, bound // (_STAGES * max(1, jobs)))
    windows = Windows(_inside(source, extents), traits.gap, stage)
    ahead = source.lookahead.current = Ahead(source.store, windows, bound, limiter)
    try:
        yield
    finally:
        source.lookahead.current = around
        ahead.close()


def extents_of(checkpoint: Checkpoint, names: Container[str] | None = None) -> Iterator[Extent]:
    """Yield the places of a checkpoint's tensors and objects with these names, or of all."""
    for extent, name, _ in checkpoint.extents_by_owner():
        if names is None or name in names:
            yield extent


def extents_in_order(
    checkpoint: Checkpoint, keys: Iterable[str], objects: Iterable[str] = ()
) -> Iterator[Extent]:
    """Yield the places of tensors in this order by their main pieces, then all their other bytes.

    A format may decode tensors from other bytes than its pieces name. A repeated key counts once;
    `objects` are read after the tensors.
    """
    wanted = dict.fromkeys(keys)
    for key in wanted:
        for piece in checkpoint.tensors[key].pieces:
            if not piece.replica:
                yield piece.extent
    yield from extents_of(checkpoint, {*wanted, *objects})


def _inside(source: Source, extents: Iterable[Extent]) -> Iterator[Extent]:
    """Yield the extents in listed files, by the store's paths; small files whole."""
    gap = source.store.traits.gap
    places = {name: (source.path(name), entry.size) for name, entry in source.entries.items()}
    whole: set[str] = set()
    for extent in extents:
        path, size = places.get(extent.file, ("", 0))
        if extent.end > size or path in whole:
            continue
        if size <= gap:
            whole.add(path)
            yield Extent(path, 0, size)
        else:
            yield extent._replace(file=path)


def for_reading(checkpoint: Checkpoint, jobs: int, each: int = 0) -> int:
    """Return how many processes read a checkpoint faster than `jobs` threads; 0 for none.

    0 if a part of it is not local, because they would share its connections. `each` is the bytes
    that one process holds besides the decoded ones.

    Raises:
        FtckptError: a base cannot be opened.
    """
    if not checkpoint.is_local():
        return 0
    return process_count(min(jobs, checkpoint.decoding.slots()), each, decoding=True)
