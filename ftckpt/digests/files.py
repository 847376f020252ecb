"""Hash the blocks of files in parallel, by threads that read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.progress import NULL, Counter
from ftckpt.workers.threads import run

from .blocks import WIDTH, Block, BlockDigest, block_count, blocks, hash_block

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ftckpt.storage.source import Source
    from ftckpt.workers.limits import RateLimit


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
    for done in hash_blocks(tasks, jobs=jobs, executor=executor):
        if isinstance(done, BlockFailure):
            raise done.error
        start = done.number * WIDTH
        result[done.file][start : start + WIDTH] = done.digest
        counter.add(done.length)
    return {file: bytes(digests) for file, digests in result.items()}


def hash_blocks(
    tasks: Iterable[Block], *, jobs: int, executor: Executor | None = None
) -> Iterator[BlockDigest | BlockFailure]:
    """Return an iterator of the digest of each block, or why it has none, in order of completion.

    Args:
        tasks: the blocks; consumed as slowly as possible.
        jobs: number of threads.
        executor: where to run instead.
    """
    return run(tasks, hash_or_fail, jobs=jobs, executor=executor)


def hash_or_fail(block: Block) -> BlockDigest | BlockFailure:
    """Hash one block; a failure is an answer too, so that it does not end the check of others."""
    try:
        return hash_block(block)
    except FtckptError as error:
        return BlockFailure(block.file, block.number, block.length, error)
