"""Copy a share of a checkpoint beside other machines, and read back what others have copied.

Locally all parts write into one staging directory, each its own blocks of files that have their
full size from the beginning. In an object store each part writes whole files, with the receipt that
any copy leaves of a file; of a file that is more than a quarter of a share it sends blocks, and the
last part that has sent some joins them. The commit marker of the format and all that is visible are
left to who finishes: `copy` with what the parts have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import Block, BlockFailure, block_count, block_length, hash_or_fail
from ftckpt.errors import CorruptError
from ftckpt.extents import BLOCK
from ftckpt.transfer.request.example import blamed, require_unchanged
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.workers import Division, Work

from .carry_files import CopiedFile, Moved, Mover
from .copy import CopyJob, evidence_of, origin_in

Others = Callable[[str], "Sequence[BlockMade] | None"]
"""(path) -> the blocks of a file that other parts have sent; None if one of them has not ended."""

Takes = Callable[[str, int, int], bool]
"""(path, offset, length) -> whether these bytes are of this part."""


@dataclass(frozen=True)
class CopiedShare:
    """What a part has copied.

    Attributes:
        blocks: that it has written.
        built: what the staging place is called.
        nbytes: bytes of the blocks.
    """

    blocks: tuple[BlockMade, ...]
    built: str
    nbytes: int


def copy_share(
    checkpoint: Checkpoint,
    job: CopyJob,
    part: str,
    takes: Takes,
    work: Work,
    *,
    share: int,
    others: Others,
    known: Division | None = None,
    needed: Callable[[], bool] = lambda: True,
    keep: Callable[[CopiedShare], None] = lambda share: None,
) -> CopiedShare | None:
    """Copy the share of one part into the staging place of a copy.

    Args:
        checkpoint: opened; never written.
        job: prepared.
        part: which, in a word.
        takes: says what is the part's.
        work: how.
        share: bytes that a part has, roughly.
        others: knows what other parts have sent of files that are cut.
        known: does its share of the checks that are made beforehand.
        needed: asked when no other process can do the same part: whether there is something to do.
        keep: told of what was copied, while no other process can do the same part.

    Returns:
        What was copied; None if it was not needed.

    Raises:
        CorruptError: the source is damaged.
        IncompleteError: it changed meanwhile.
        ExistsError, RefusedError, NoResourceError, DeniedError, UnavailableError: as `copy`.
    """
    source, contents, staging = checkpoint.source, job.contents, job.staging
    try:
        built = staging.join(job.plan, job.sizes, part)
        if not needed():
            return None
        with blamed(source, job.names):
            divided = replace(work, division=known)
            evidence = evidence_of(checkpoint, job.manifest, contents, divided)
            mover = Mover(staging, origin_in(source), evidence, work)
            files = [f for f in (*contents.beside, *contents.files) if f.path != contents.marker]
            work.counter.start("copying", None)
            cut = [f for f in files if staging.cuts(f.size, share)]
            whole = [f for f in files if not staging.cuts(f.size, share)]
            wanted = [(f, n) for f in cut if (n := _numbers(f, takes)) is not None]
            blocks = [
                *mover.share(wanted),
                *_whole_files(mover, [f for f in whole if takes(f.path, 0, f.size)]),
            ]
            cut = [f for f, _ in wanted]
            _join(mover, job.plan, cut, blocks, built, others)
        require_unchanged(source, job.names)
        sizes = job.sizes
        nbytes = sum(block_length(sizes[made.file], made.number) for made in blocks)
        copied = CopiedShare(tuple(blocks), built, nbytes)
        keep(copied)
        # Two that end at once have not seen each other's records before.
        _join(mover, job.plan, cut, blocks, built, others)
        return copied
    finally:
        staging.close()


def _join(
    mover: Mover,
    plan: str,
    cut: Sequence[CopiedFile],
    own: Sequence[BlockMade],
    built: str,
    others: Others,
) -> None:
    """Make files whole of which this part has sent the last block."""
    staging = mover.staging
    for file in cut if staging.joins else ():
        rest = None if staging.is_whole(plan, file.path) else others(file.path)
        if rest is not None:
            staging.believe([*(made for made in own if made.file == file.path), *rest], built)
            mover.move([file], Moved())


def prove_share(
    job: CopyJob, blocks: Iterable[tuple[str, int, bytes]], work: Work
) -> dict[tuple[str, int], bytes]:
    """Read back blocks that another part has written; return their digests.

    Args:
        job: prepared, with the same staging place.
        blocks: file, number and digest of each, as its writer had read it.
        work: how.

    Raises:
        CorruptError: a block is not what was written (`failed-proof`).
        FtckptError: one could not be read.
    """
    store = job.staging.built
    wanted = {(file, number): digest for file, number, digest in blocks}
    work.counter.start("reading back", None)

    def block(file: str, number: int) -> Block:
        length = block_length(job.sizes[file], number)
        return Block(store, file, file, number, length, work.limiter)

    tasks = (block(file, number) for file, number in wanted)
    found: dict[tuple[str, int], bytes] = {}
    for done in work.run(tasks, hash_or_fail):
        if isinstance(done, BlockFailure):
            raise done.error
        work.counter.add(done.length)
        key = done.file, done.number
        if done.digest != wanted[key]:
            again = hash_or_fail(block(*key))  # a bit can flip on the way
            if isinstance(again, BlockFailure) or again.digest != wanted[key]:
                raise CorruptError(
                    f"the proof failed: {done.file} differs from what was written in bytes"
                    f" {done.number * BLOCK} to {done.number * BLOCK + done.length}",
                    kind="failed-proof",
                    file=done.file,
                    offset=done.number * BLOCK,
                    length=done.length,
                    hint="remove the record of that part, and run it again",
                )
        found[key] = wanted[key]
    return found


def _numbers(file: CopiedFile, takes: Takes) -> list[int] | None:
    """Return the blocks of a file that are a part's; None if it has nothing to do with it."""
    if not file.size:
        return [] if takes(file.path, 0, 0) else None
    numbers = [
        number
        for number in range(block_count(file.size))
        if takes(file.path, number * BLOCK, block_length(file.size, number))
    ]
    return numbers or None


def _whole_files(mover: Mover, files: list[CopiedFile]) -> list[BlockMade]:
    """Copy whole files; what a killed run of the part has finished is taken over."""
    moved = Moved()
    mover.move(files, moved)
    if moved.damage:
        raise moved.damage[0].error
    return [
        BlockMade(path, number, digest.block(number))
        for path, digest in moved.files.items()
        for number in range(block_count(digest.size))
    ]
