"""Verify a checkpoint and hash its files by one reading: what a seal needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.digests.blocks import WIDTH, Block, BlockDigest, block_count, blocks
from ftckpt.errors import ExitCode
from ftckpt.manifest import FileDigest
from ftckpt.own_files import is_own
from ftckpt.progress import count_file, expect_files
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.storage.source import Source
from ftckpt.workers import Work

from . import Level, VerifyOptions, VerifyReport, verify
from .seen import SeenBytes, SeenRuns


class CheckedAndHashed(NamedTuple):
    """What a check found, and what it hashed.

    Attributes:
        report: the verdict.
        digests: of every file of the checkpoint, as it was read for the check; none where they must
            still be hashed.
        sha256: of the same files in hexadecimal digits, where they were asked for.
    """

    report: VerifyReport
    digests: Sequence[FileDigest] = ()
    sha256: Mapping[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that were hashed."""
        return sum(file.size for file in self.digests)

    def of_another_listing(self) -> CheckedAndHashed:
        """Return the same for files that were listed again: they may be others than were hashed."""
        return self._replace(digests=(), sha256={})


def verify_while_hashing(
    checkpoint: Checkpoint, options: VerifyOptions, *, work: Work, sha256: bool = False
) -> CheckedAndHashed:
    """Verify a checkpoint as `verify` does, and hash the bytes that are read for it.

    The structure is checked before anything is read. A checkpoint that does not pass is not hashed.

    Args:
        checkpoint: opened from a fresh listing.
        options: what to check.
        work: threads, rate limit and counter of bytes.
        sha256: whether to make these digests too, each file by one thread then.

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
    made = hash_members(checkpoint, work, seen, sha256=sha256)
    seen.end()
    report = verify(checkpoint, told, work=work)
    # Read wrongly once, and rightly by the check: then the digests are of what is not there.
    return CheckedAndHashed(report, *(((), {}) if seen.differing else made))


class _FileBlocks(NamedTuple):
    """Blocks of one file that one thread reads, in order: a task of the engine."""

    file: str
    blocks: Sequence[Block]


class _Hashed(NamedTuple):
    """What hashing them gave."""

    file: str
    blocks: Sequence[BlockDigest]
    sha256: str
    runs: SeenRuns | None


def hash_members(
    checkpoint: Checkpoint, work: Work, seen: SeenBytes | None = None, *, sha256: bool = False
) -> tuple[Sequence[FileDigest], Mapping[str, str]]:
    """Hash every file of a checkpoint by one reading, and tell `seen` of what is read.

    SHA-256 is made of a file's bytes in their order, so with it one thread reads a whole file;
    without it threads share its blocks.

    Returns:
        The digests of a manifest, and SHA-256 in hexadecimal digits by name, where asked for.
    """
    import hashlib

    import xxhash

    source = checkpoint.source
    sizes = {n: source.size(n) for n in sorted(set(checkpoint.members())) if not is_own(n)}
    made = {name: bytearray(WIDTH * block_count(size)) for name, size in sizes.items()}
    left = {name: block_count(size) for name, size in sizes.items()}
    whole: dict[str, str] = {}

    def hashed(task: _FileBlocks) -> _Hashed:
        every = hashlib.sha256() if sha256 else None
        digests = []
        for block in task.blocks:
            state, at = xxhash.xxh3_128(), block.offset
            with block.store.open(block.path) as reader:
                size = size_for(block.store)
                for view in chunks(reader, at, block.length, size=size, limiter=block.limiter):
                    state.update(view)
                    if every is not None:
                        every.update(view)
                    if seen is not None:
                        seen.saw(block.file, at, view)
                    at += len(view)
            digests.append(BlockDigest(block.file, block.number, block.length, state.digest()))
        runs = None if seen is None else seen.drain()
        return _Hashed(task.file, digests, every.hexdigest() if every else "", runs)

    work.counter.start("hashing", sum(sizes.values()))
    expect_files(work.counter, sum(1 for size in sizes.values() if size))
    for done in work.run(_tasks(source, sizes, work, whole=sha256), hashed):
        if seen is not None and done.runs is not None:
            seen.take(done.runs)
        if sha256:
            whole[done.file] = done.sha256
        for one in done.blocks:
            start = one.number * WIDTH
            made[one.file][start : start + WIDTH] = one.digest
            work.counter.add(one.length)
            left[one.file] -= 1
            if not left[one.file]:
                count_file(work.counter)
    return [FileDigest(name, size, bytes(made[name])) for name, size in sizes.items()], whole


def _tasks(
    source: Source, sizes: Mapping[str, int], work: Work, *, whole: bool
) -> Iterator[_FileBlocks]:
    if not whole:
        yield from (_FileBlocks(b.file, (b,)) for b in blocks(source, sizes, work.limiter))
        return
    for name, size in sizes.items():
        yield _FileBlocks(name, tuple(blocks(source, {name: size}, work.limiter)))
