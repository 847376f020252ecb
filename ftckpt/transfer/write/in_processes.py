"""Carry a layout out in copies of this process, block by block.

For results whose making keeps processors busy: `ftckpt.workers.processes` says why threads do less
then. Files are opened by each copy for itself, and flushed by the first process when all their
blocks are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ftckpt.digests.blocks import block_count, block_length
from ftckpt.extents import BLOCK
from ftckpt.progress import NULL, Counter
from ftckpt.storage.store import Upload
from ftckpt.transfer.layout import Checksums, Layout, OutputFile
from ftckpt.transfer.prove.source_sums import ReadForProof, SourceSums
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.staging import BlockSink, Staging
from ftckpt.workers import processes
from ftckpt.workers.threads import in_turn, run

from .blocks import BlockMade, BlockMaker
from .peek_output import depth_of


class BlockShare(NamedTuple):
    """Blocks of one file that one process makes."""

    file: OutputFile
    numbers: Sequence[int]


class MadeShare(NamedTuple):
    """Blocks that are there.

    Attributes:
        path: of their file.
        blocks: one each.
        taken_over: bytes of them that an earlier run had made.
        read: what was read for them, where that is summed up.
    """

    path: str
    blocks: Sequence[BlockMade]
    taken_over: int
    read: ReadForProof | None


def pays(layout: Layout, jobs: int) -> bool:
    """Say whether copies of a process make a layout no later than `jobs` threads.

    One copy makes a whole file whose checksums depend on all of its blocks; threads share it.
    """
    whole = max((file.size for file in layout.files if _is_whole(file)), default=0)
    return processes.pays(whole, sum(file.size for file in layout.files), jobs)


def make_shares(
    layout: Layout,
    gatherer: Gatherer,
    staging: Staging,
    *,
    depths: Mapping[str, int],
    jobs: int,
    copies: int,
    counter: Counter = NULL,
    sums: SourceSums | None = None,
) -> Iterator[MadeShare]:
    """Yield all blocks of a layout's files, in the order in which they are made.

    Args:
        layout: what to make.
        gatherer: reads the source.
        staging: where several processes may build; begun.
        depths: of the source's tensors (`written.depths_of`): what one needs is made before it, by
            whichever process.
        jobs: number of threads, where no copies can be made.
        copies: number of copies of this process.
        counter: is told of every byte made or taken over.
        sums: is told by the gatherer of what it reads.

    Raises:
        FtckptError: the source could not be read or the place not written; what was made stays.
    """
    # Writes to one file wait for each other in the kernel.
    shares: Iterable[BlockShare] = in_turn(map(_shares, layout.files), copies)
    if depths:
        shares = sorted(shares, key=partial(_depth, depths))
    stream = partial(_made, gatherer=gatherer, staging=staging, sums=sums)
    return processes.run_in_processes(shares, stream, jobs=jobs, processes=copies, counter=counter)


def make_block(
    maker: BlockMaker,
    number: int,
    upload: Upload,
    staging: Staging,
    earlier: BlockMade | None,
    counter: Counter,
) -> tuple[BlockMade, int]:
    """Make one block of a file, or take it over; return it, and the bytes taken over.

    Args:
        maker: of the file; it counts what it makes.
        number: which block.
        upload: takes the file's bytes.
        staging: where the file is built.
        earlier: the block as an earlier run says it has made it.
        counter: is told of what is taken over.

    Raises:
        FtckptError: the source could not be read or the place not written.
    """
    length = block_length(maker.file.size, number)
    if earlier is not None and staging.holds(maker.file, earlier):
        maker.known(earlier)
        counter.add(length)
        return earlier, length
    sink = BlockSink(upload, length)
    made = maker.make(number, sink)
    sink.flush()
    staging.add(made)
    return made, 0


def _shares(file: OutputFile) -> Iterator[BlockShare]:
    """Yield a share for each block; all in one where some depend on what is in the others."""
    numbers = range(block_count(file.size))
    if _is_whole(file):
        yield BlockShare(file, numbers)
    else:
        for number in numbers:
            yield BlockShare(file, (number,))


def _depth(depths: Mapping[str, int], share: BlockShare) -> float:
    first, last = share.numbers[0], share.numbers[-1]
    return depth_of(share.file, depths, first * BLOCK, (last + 1) * BLOCK)


def _is_whole(file: OutputFile) -> bool:
    return any(isinstance(segment, Checksums) for segment in file.segments)


def _made(
    shares: Iterator[BlockShare],
    counter: Counter,
    jobs: int,
    *,
    gatherer: Gatherer,
    staging: Staging,
    sums: SourceSums | None,
) -> Iterator[MadeShare]:
    def make(share: BlockShare) -> MadeShare:
        file, blocks, taken_over = share.file, [], 0
        maker = BlockMaker(file, gatherer, counter)
        staged = staging.open(file)
        assert staged.upload is not None
        try:
            for number in share.numbers:
                earlier = staged.earlier.get(number)
                made, taken = make_block(maker, number, staged.upload, staging, earlier, counter)
                blocks.append(made)
                taken_over += taken
        finally:
            staged.upload.close()
        read = None if sums is None else sums.drain()
        return MadeShare(file.path, blocks, taken_over, read)

    return run(shares, make, jobs=jobs, window=jobs)
