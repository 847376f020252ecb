"""The digest of a file: XXH3-128 of each 64 MiB block, and of those digests put together.

- The digest of a block is XXH3-128 with seed 0 over its bytes, in canonical form: 16 bytes,
  big-endian, which is what `xxhsum -H2` and `xxh128_hexdigest` print.
- The digest of a file is XXH3-128 over the 16-byte digests of its blocks in order, also where
  there is one block, or none: an empty file has no block, and the digest of no bytes.

Blocks make hashing parallel, locate damage, and let a sample be read. XXH3 detects accidents, not
attackers: anybody who can change a file can find another with the same digest.

Hash the blocks of files in parallel, by threads that read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.extents import BLOCK
from ftckpt.progress import count_file
from ftckpt.workers import ALONE, Work

if TYPE_CHECKING:
    from ftckpt.storage.source import Source
    from ftckpt.storage.store import Store
    from ftckpt.workers.limits import RateLimit


WIDTH = 16  # bytes of a digest


class Block(NamedTuple):
    """One block to hash: a task of the engine.

    Attributes:
        store: where the file lies.
        path: its key in the store.
        file: its name in the checkpoint.
        number: which block of the file, from 0.
        length: bytes of the block; `BLOCK` but for the last.
        limiter: bounds the rate of reading.
    """

    store: Store
    path: str
    file: str
    number: int
    length: int
    limiter: RateLimit | None = None

    @property
    def offset(self) -> int:
        """The block's first byte in the file."""
        return self.number * BLOCK


class BlockDigest(NamedTuple):
    """What hashing one block gave: `digest` has 16 bytes."""

    file: str
    number: int
    length: int
    digest: bytes


def block_count(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes; 0 for an empty one."""
    return -(-size // BLOCK)


def block_length(size: int, number: int) -> int:
    """Return the bytes of block `number` of a file of `size` bytes."""
    return min(BLOCK, size - number * BLOCK)


def file_digest(blocks: bytes) -> bytes:
    """Return the digest of a file from its block digests put together (16 bytes each)."""
    import xxhash

    digest: bytes = xxhash.xxh3_128_digest(blocks)
    return digest


def blocks_of_bytes(data: bytes | memoryview) -> bytes:
    """Return the block digests, put together, of a file that holds `data`."""
    import xxhash

    view = memoryview(data)
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK)
    )


def hash_block(block: Block) -> BlockDigest:
    """Read one block and return its digest.

    Raises:
        TruncatedError: the file ends inside the block.
        FtckptError: the store could not read it.
    """
    import xxhash

    from ftckpt.storage.ranges import chunks, size_for

    state = xxhash.xxh3_128()
    size = size_for(block.store)
    with block.store.open(block.path) as reader:
        for view in chunks(reader, block.offset, block.length, size=size, limiter=block.limiter):
            state.update(view)
    return BlockDigest(block.file, block.number, block.length, state.digest())


def blocks(
    source: Source, sizes: Mapping[str, int], limiter: RateLimit | None = None
) -> Iterator[Block]:
    """Yield every block of the named files, file by file, in order."""
    for file, size in sizes.items():
        path = source.path(file)
        for number in range(block_count(size)):
            length = block_length(size, number)
            yield Block(source.store, path, file, number, length, limiter)


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
