"""Read parts of a checkpoint ahead of use where requests have a latency.

`ftckpt.storage.prefetch` says why and reads it; here is which bytes, and in which order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from ftckpt.errors import FtckptError
from ftckpt.extents import Extent
from ftckpt.storage.prefetch import most_kept

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.storage.source import Source
    from ftckpt.workers.limits import RateLimit

# What a thread asks for lies in two stages of windows, and as many are on their way. Were there no
# room for them, each would be dropped for another before it is used up, and read again and again.
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
    """Read ahead of what is asked for inside the block, where the store has a latency.

    What an enclosing block has kept is forgotten: a proof reads again what was read before.

    Args:
        checkpoint: what is read.
        extents: what will be read of its files, in about that order; what is not named is read as
            it is asked for, and what is named and not asked for is hardly read. By default all
            that it holds.
        limiter: bounds the rate of reading; `Source.limited` says who else need not ask it.
        bases: whether what its tensors are decoded from is read too.
        jobs: how many threads will ask, each at a place of its own.
    """
    if extents is None:
        extents = extents_of(checkpoint)
    below: Sequence[Checkpoint] = ()
    if bases:
        with suppress(FtckptError):  # who reads the tensors hears of it
            below = checkpoint.bases()
    read = [(checkpoint.source, extents), *((base.source, extents_of(base)) for base in below)]
    with ExitStack() as stack:
        for source, places in read:
            bound = most_kept(source.store) // len(read)
            stack.enter_context(_ahead_of(source, places, bound, limiter, jobs))
        yield


def read_again(checkpoint: Checkpoint) -> None:
    """Forget what was read ahead: a bit may have flipped on its way here."""
    for one in (checkpoint, *checkpoint.bases()):
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
    """Yield the places of the tensors and objects of a checkpoint that have these names, or all."""
    for extent, name, _ in checkpoint.extents_by_owner():
        if names is None or name in names:
            yield extent


def extents_in_order(
    checkpoint: Checkpoint, keys: Iterable[str], objects: Iterable[str] = ()
) -> Iterator[Extent]:
    """Yield the places of tensors in this order, by their main pieces, and then all that is theirs.

    A format may decode tensors from other bytes than those that its pieces name.

    Args:
        checkpoint: what holds them.
        keys: of the tensors; one that is named again counts once.
        objects: names of objects that are read after them.
    """
    wanted = dict.fromkeys(keys)
    for key in wanted:
        for piece in checkpoint.tensors[key].pieces:
            if not piece.replica:
                yield piece.extent
    yield from extents_of(checkpoint, {*wanted, *objects})


def _inside(source: Source, extents: Iterable[Extent]) -> Iterator[Extent]:
    """Yield the extents that lie in the listed files, by the store's paths; small files whole."""
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
