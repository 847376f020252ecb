"""Hash the blocks of files in parallel: by reading them, or where they lie.

A task of the engine is a run of blocks that one thread takes together. Where blocks are read a run
is one block. Where processes hash cached files for us (`stores.mapped`) it is several: to ask and
to be woken for each block took a tenth of what hashing it takes, on processors that hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .digest import WIDTH, Block, BlockDigest, block_count, blocks, hash_block
from .engine import run
from .errors import FtckptError
from .progress import NULL, Counter

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .limits import RateLimit
    from .source import Source
    from .store import Store
    from .stores.mapped import MappedHashing

# A run has at most so many bytes, a moment's work; and at most its share of what is left, divided
# by this, so that no thread is still at a long one when the others have ended.
_SPAN = 256 << 20
_SHARE = 4


class BlockFailure(NamedTuple):
    """A block that could not be read, and why."""

    file: str
    number: int
    length: int
    error: FtckptError


def hash_files(
    source: Source,
    sizes: Mapping[str, int],
    *,
    jobs: int,
    executor: Executor | None = None,
    limiter: RateLimit | None = None,
    counter: Counter = NULL,
) -> dict[str, bytes]:
    """Return the block digests, put together, of each file.

    Args:
        source: where the files lie.
        sizes: bytes of each file to hash, by its name in the checkpoint.
        jobs: number of threads.
        executor: where to run instead.
        limiter: bounds the rate of reading.
        counter: is told of every block's bytes.

    Raises:
        TruncatedError: a file is shorter than `sizes` says.
        FtckptError: a file could not be read.
    """
    result = {file: bytearray(WIDTH * block_count(size)) for file, size in sizes.items()}
    tasks = blocks(source, sizes, limiter)
    nbytes = sum(sizes.values())
    for done in hash_blocks(
        tasks, source.store, nbytes, jobs=jobs, executor=executor, limiter=limiter
    ):
        if isinstance(done, BlockFailure):
            raise done.error
        start = done.number * WIDTH
        result[done.file][start : start + WIDTH] = done.digest
        counter.add(done.length)
    return {file: bytes(digests) for file, digests in result.items()}


def hash_blocks(
    tasks: Iterable[Block],
    store: Store,
    nbytes: int,
    *,
    jobs: int,
    executor: Executor | None = None,
    limiter: RateLimit | None = None,
) -> Iterator[BlockDigest | BlockFailure]:
    """Yield the digest of each block, or why it has none, in the order in which they are done.

    Args:
        tasks: the blocks, of files of one store; consumed as slowly as possible.
        store: that store.
        nbytes: how many bytes they have together, about.
        jobs: number of threads.
        executor: where to run instead.
        limiter: that of the blocks.
    """
    from .stores.mapped import mapped_hashing

    with mapped_hashing(store, nbytes, jobs, executor, limiter) as mapped:
        runs = _runs(tasks, nbytes, max(1, jobs), mapped)
        work = partial(hash_run, mapped=mapped)
        for done in run(runs, work, jobs=jobs, executor=executor):
            yield from done


def _runs(
    tasks: Iterable[Block], nbytes: int, jobs: int, mapped: MappedHashing | None
) -> Iterator[Sequence[Block]]:
    """Yield the blocks in order, as many together as are best taken so just then."""
    if mapped is None:
        yield from ((block,) for block in tasks)
        return
    taken: list[Block] = []
    size = 0
    left = nbytes
    for block in tasks:
        # What is read is read block by block, so that it is seen how far that has come.
        most = min(_SPAN, left // (_SHARE * jobs)) if mapped.useful else 0
        if taken and (len(taken) == mapped.most or size + block.length > most):
            yield taken
            left -= size
            taken, size = [], 0
        taken.append(block)
        size += block.length
    if taken:
        yield taken


def hash_run(
    tasks: Sequence[Block], mapped: MappedHashing | None = None
) -> list[BlockDigest | BlockFailure]:
    """Hash blocks that one thread takes together; a failure is an answer too.

    Args:
        tasks: the blocks.
        mapped: hashes them without reading, where that works; they are read otherwise.
    """
    if mapped is None:
        return [hash_or_fail(block) for block in tasks]
    result: list[BlockDigest | BlockFailure] = []
    digests = mapped.digests([(block.path, block.offset, block.length) for block in tasks])
    for block, digest in zip(tasks, digests, strict=True):
        if digest is not None:
            result.append(BlockDigest(block.file, block.number, block.length, digest))
        elif not mapped.closed:  # else nobody waits for it any more
            result.append(hash_or_fail(block))
    return result


def hash_or_fail(block: Block) -> BlockDigest | BlockFailure:
    """Hash one block; a failure is an answer too, so that it does not end the check of others."""
    try:
        return hash_block(block)
    except FtckptError as error:
        return BlockFailure(block.file, block.number, block.length, error)
