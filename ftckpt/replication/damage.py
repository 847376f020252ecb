"""Find the blocks of a checkpoint that are not what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ftckpt.digests.blocks import Block, BlockDigest, block_count, block_length, hash_or_fail
from ftckpt.errors import DeniedError, UnsafeError
from ftckpt.extents import BLOCK
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit


class BadBlock(NamedTuple):
    """A block that must be had from elsewhere.

    Attributes:
        file: which file.
        number: which block of it, from 0.
        offset: its first byte.
        length: its bytes.
        why: `missing`, `short`, `differs` or `unreadable`.
    """

    file: str
    number: int
    offset: int
    length: int
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a checkpoint.

    Attributes:
        blocks: that must be had from elsewhere, in the manifest's order.
        long: files with bytes behind their end.
        nbytes: bytes of all blocks, good and bad.
    """

    blocks: Sequence[BadBlock]
    long: Sequence[str]
    nbytes: int

    @property
    def files(self) -> set[str]:
        """Files that must be built anew."""
        return {block.file for block in self.blocks} | set(self.long)

    @cached_property
    def places(self) -> frozenset[tuple[str, int]]:
        """File and number of every bad block."""
        return frozenset((block.file, block.number) for block in self.blocks)

    @property
    def bad_bytes(self) -> int:
        """Bytes of the bad blocks."""
        return sum(block.length for block in self.blocks)


class BlockToJudge(NamedTuple):
    """A block, and the digest that it should have: a task of the engine."""

    block: Block
    expected: bytes


def diagnose(source: Source, manifest: Manifest, work: Work) -> Diagnosis:
    """Compare every block with the manifest; what does not match is read twice.

    Args:
        source: the files, listed.
        manifest: what they should be.
        work: how; its counter is told of the bytes read.

    Raises:
        UnsafeError: a name of the manifest is a fifo, socket or device.
        UnavailableError: the listing does not show a file that is there.
        DeniedError: a file may not be read.
    """
    work.counter.start("looking for damage", manifest.nbytes)
    bad: list[BadBlock] = []
    tasks = _blocks(source, manifest, bad, work.limiter)
    for block, why in work.run(tasks, _judged):
        work.counter.add(block.length)
        if why:
            bad.append(BadBlock(block.file, block.number, block.offset, block.length, why))
    order = {file.path: number for number, file in enumerate(manifest.files)}
    entries = source.entries
    return Diagnosis(
        sorted(bad, key=lambda block: (order[block.file], block.number)),
        [f.path for f in manifest.files if f.path in entries and entries[f.path].size > f.size],
        manifest.nbytes,
    )


def _blocks(
    source: Source, manifest: Manifest, bad: list[BadBlock], limiter: RateLimit | None
) -> Iterator[BlockToJudge]:
    """Yield the blocks that are there, and note those that are not."""
    for file in manifest.files:
        size = _size(source, file)
        path = source.path(file.path)
        for number in range(block_count(file.size)):
            length = block_length(file.size, number)
            if size is None or number * BLOCK + length > size:
                why = "missing" if size is None else "short"
                bad.append(BadBlock(file.path, number, number * BLOCK, length, why))
            else:
                block = Block(source.store, path, file.path, number, length, limiter)
                yield BlockToJudge(block, file.block(number))


def _size(source: Source, file: FileDigest) -> int | None:
    """Return the bytes of a file that is there; None where it is not."""
    entry = source.entries.get(file.path)
    if entry is None:
        source.require_absent(file.path)
        return None
    if entry.kind is EntryKind.SPECIAL and entry.link is None:
        raise UnsafeError(f"{file.path} is not a regular file", kind="special-file", file=file.path)
    return None if entry.kind is EntryKind.SPECIAL else entry.size  # a link to nothing


def _judged(task: BlockToJudge) -> tuple[Block, str]:
    """Hash one block, twice where it is wrong, and say what is the matter with it; "" for good."""
    why = ""
    for _ in range(2):
        found = hash_or_fail(task.block)
        if isinstance(found, BlockDigest):
            if found.digest == task.expected:
                return task.block, ""
            why = "differs"
        elif isinstance(found.error, (DeniedError, UnsafeError)):
            raise found.error
        else:
            why = "unreadable"
    return task.block, why
