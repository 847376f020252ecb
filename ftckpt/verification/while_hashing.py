"""Verify a checkpoint and hash its files by one reading: what a seal needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.digests.blocks import WIDTH, Block, BlockDigest, block_count, blocks
from ftckpt.errors import ExitCode
from ftckpt.manifest import FileDigest
from ftckpt.own_files import is_own
from ftckpt.progress import count_file, expect_files
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.workers import Work

from . import Level, VerifyOptions, VerifyReport, verify
from .seen import SeenBytes, SeenRuns


class CheckedAndHashed(NamedTuple):
    """What a check found, and what it hashed.

    Attributes:
        report: the verdict.
        digests: of every file of the checkpoint, as it was read for the check; none where they must
            still be hashed.
    """

    report: VerifyReport
    digests: Sequence[FileDigest] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that were hashed."""
        return sum(file.size for file in self.digests)

    def of_another_listing(self) -> CheckedAndHashed:
        """Return the same for files that were listed again: they may be others than were hashed."""
        return self._replace(digests=())


def verify_while_hashing(
    checkpoint: Checkpoint, options: VerifyOptions, *, work: Work
) -> CheckedAndHashed:
    """Verify a checkpoint as `verify` does, and hash the bytes that are read for it.

    The structure is checked before anything is read. A checkpoint that does not pass is not hashed.

    Args:
        checkpoint: opened from a fresh listing.
        options: what to check.
        work: threads, rate limit and counter of bytes.

    Raises:
        FtckptError: see `verify`; a file that cannot be read.
    """
    alone = work.division is None and work.executor is None
    open_end = checkpoint.commit.state is CommitState.UNCOMMITTED
    if options.level is Level.STRUCTURE or not alone or open_end:
        return CheckedAndHashed(verify(checkpoint, options, work=work))
    seen = SeenBytes(checkpoint, use_manifest=options.use_manifest)
    told = replace(options, seen=seen)
    report = verify(checkpoint, told, work=work)
    if report.code is not ExitCode.OK:
        return CheckedAndHashed(report)
    seen.begin()
    made = _hashed(checkpoint, seen, work)
    seen.end()
    report = verify(checkpoint, told, work=work)
    # Read wrongly once, and rightly by the check: then the digests are of what is not there.
    return CheckedAndHashed(report, () if seen.differing else made)


def _hashed(checkpoint: Checkpoint, seen: SeenBytes, work: Work) -> Sequence[FileDigest]:
    """Hash every file of a checkpoint, and tell `seen` of what is read."""
    import xxhash

    source = checkpoint.source
    sizes = {n: source.size(n) for n in sorted(set(checkpoint.members())) if not is_own(n)}
    made = {name: bytearray(WIDTH * block_count(size)) for name, size in sizes.items()}
    left = {name: block_count(size) for name, size in sizes.items()}

    def hashed(block: Block) -> tuple[BlockDigest, SeenRuns]:
        state, at = xxhash.xxh3_128(), block.offset
        with block.store.open(block.path) as reader:
            size = size_for(block.store)
            for view in chunks(reader, at, block.length, size=size, limiter=block.limiter):
                state.update(view)
                seen.saw(block.file, at, view)
                at += len(view)
        digest = BlockDigest(block.file, block.number, block.length, state.digest())
        return digest, seen.drain()

    work.counter.start("hashing", sum(sizes.values()))
    expect_files(work.counter, sum(1 for size in sizes.values() if size))
    for one, runs in work.run(blocks(source, sizes, work.limiter), hashed):
        seen.take(runs)
        start = one.number * WIDTH
        made[one.file][start : start + WIDTH] = one.digest
        work.counter.add(one.length)
        left[one.file] -= 1
        if not left[one.file]:
            count_file(work.counter)
    return [FileDigest(name, size, bytes(made[name])) for name, size in sizes.items()]
