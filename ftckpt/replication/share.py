"""Copy a share of a checkpoint beside other machines, and read back what others have copied.

Locally all parts write into one staging directory, each its own blocks of files that have their
full size from the beginning. In an object store each part writes whole files, with the receipt that
any copy leaves of a file. The commit marker of the format and all that is visible are left to who
finishes: `copy` with what the parts have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import Block, block_count, block_length
from ftckpt.digests.files import BlockFailure, hash_or_fail
from ftckpt.errors import CorruptError
from ftckpt.extents import BLOCK
from ftckpt.transfer.request.source_changes import blamed, require_unchanged
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.workers import Division, Work

from .carry_files import Moved, Mover
from .contents import CopiedFile
from .copy import CopyJob, evidence_of, origin_in

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
            if staging.parts_of_files():
                wanted = [(f, n) for f in files if (n := _numbers(f, takes)) is not None]
                blocks = list(mover.share(wanted))
            else:
                blocks = _whole_files(mover, [f for f in files if takes(f.path, 0, f.size)])
        require_unchanged(source, job.names)
        sizes = job.sizes
        nbytes = sum(block_length(sizes[made.file], made.number) for made in blocks)
        share = CopiedShare(tuple(blocks), built, nbytes)
        keep(share)
        return share
    finally:
        staging.close()


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
