"""Hash the blocks of files in parallel, by threads that read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.progress import count_file
from ftckpt.workers import ALONE, Work

from .blocks import WIDTH, Block, BlockDigest, block_count, blocks, hash_block

if TYPE_CHECKING:
    from ftckpt.storage.source import Source


class BlockFailure(NamedTuple):
    """A block that could not be read, and why."""

    file: str
    number: int
    length: int
    error: FtckptError


def hash_files(source: Source, sizes: Mapping[str, int], *, work: Work = ALONE) -> dict[str, bytes]:
    """Return the block digests, put together, of each file.

    Args:
        source: where the files lie.
        sizes: bytes of each file to hash, by its name in the checkpoint.
        work: who does it, and how fast; its counter is told of every block's bytes.

    Raises:
        TruncatedError: a file is shorter than `sizes` says.
        FtckptError: a file could not be read.
    """
    result = {file: bytearray(WIDTH * block_count(size)) for file, size in sizes.items()}
    tasks = blocks(source, sizes, work.limiter)
    left = {file: block_count(size) for file, size in sizes.items()}
    for done in work.run(tasks, hash_or_fail):
        if isinstance(done, BlockFailure):
            raise done.error
        start = done.number * WIDTH
        result[done.file][start : start + WIDTH] = done.digest
        work.counter.add(done.length)
        left[done.file] -= 1
        if not left[done.file]:
            count_file(work.counter)
    return {file: bytes(digests) for file, digests in result.items()}


def hash_or_fail(block: Block) -> BlockDigest | BlockFailure:
    """Hash one block; a failure is an answer too, so that it does not end the check of others."""
    try:
        return hash_block(block)
    except FtckptError as error:
        return BlockFailure(block.file, block.number, block.length, error)
