"""Carry a layout out: every block of every file, several at once, taking over what is there.

Carry a layout out in copies of this process, block by block.

For results whose making keeps processors busy: `ftckpt.workers.processes` says why threads do less
then. Files are opened by each copy for itself, and flushed by the first process when all their
blocks are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ftckpt.digests.blocks import WIDTH, block_count, block_length, blocks_of_bytes
from ftckpt.extents import BLOCK
from ftckpt.manifest import FileDigest
from ftckpt.progress import NULL, Counter, count_file, expect_files
from ftckpt.storage.store import Upload
from ftckpt.transfer.layout import Checksums, Layout, Literal, OutputFile
from ftckpt.transfer.prove.source_sums import ReadForProof, SourceSums
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.staging import BlockSink, OpenFile, Staging
from ftckpt.workers import ALONE, Work, processes
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


# This many files are flushed at a time, each by a thread that waits: a disk takes them together,
# and the thread that makes the next file does not wait.
_FLUSHES = 8
_NO_DEPTHS: Mapping[str, int] = {}


@dataclass
class Built:
    """What building gave.

    Attributes:
        digests: of every data file, in the layout's order.
        taken_over: bytes that an earlier run had made.
        blocks: of the files that were made here.
    """

    digests: list[FileDigest] = field(default_factory=list)
    taken_over: int = 0
    blocks: list[BlockMade] = field(default_factory=list)


class _Open(OpenFile):
    """One file on its way."""

    def __init__(self, file: OutputFile, gatherer: Gatherer, counter: Counter, to: Upload) -> None:
        super().__init__(to, file.size)
        self.maker = BlockMaker(file, gatherer, counter)


class _BlockTask(NamedTuple):
    opened: _Open
    number: int
    earlier: BlockMade | None


def build(
    layout: Layout,
    gatherer: Gatherer,
    staging: Staging,
    work: Work = ALONE,
    *,
    depths: Mapping[str, int] = _NO_DEPTHS,
    sums: SourceSums | None = None,
) -> Built:
    """Make every data file of a layout in a staging place.

    Args:
        layout: what to make.
        gatherer: reads the source.
        staging: where to make it; begun.
        work: how; its counter is told of every byte made or taken over.
        depths: of the source's tensors (`written.depths_of`).
        sums: is told by the gatherer of what it reads, and keeps it here.

    Raises:
        FtckptError: the source could not be read or the place not written; what was made stays.
    """
    counter = work.counter
    built = Built()
    opened: dict[str, _Open] = {}
    done: dict[str, FileDigest] = {}
    counter.start("writing", sum(file.size for file in layout.files))
    expect_files(counter, len(layout.files))

    def begin(file: OutputFile, upload: Upload) -> _Open:
        current = opened[file.path] = _Open(file, gatherer, counter, upload)
        return current

    def tasks(file: OutputFile) -> Iterator[_BlockTask]:
        staged = staging.open(file)
        if staged.upload is None:
            done[file.path] = _digest(file, staged.earlier)
            built.taken_over += file.size
            counter.add(file.size)
            count_file(counter)
            return
        current = begin(file, staged.upload)
        if not file.size:
            done[file.path] = finish(current)
            count_file(counter)
            del opened[file.path]
        for number in range(block_count(file.size)):
            yield _BlockTask(current, number, staged.earlier.get(number))

    def make(task: _BlockTask) -> tuple[int, _Open | None, ReadForProof | None]:
        """Return the bytes taken over, and the file where this was the last of its blocks."""
        current, number, earlier = task
        made, taken = make_block(current.maker, number, current.upload, staging, earlier, counter)
        read = None if sums is None else sums.drain()
        return taken, current if current.completes(made) else None, read

    def keep(read: ReadForProof | None) -> None:
        if sums is not None and read is not None:
            sums.take(read)

    def made_whole() -> Iterator[_Open]:
        # Blocks of one file wait for each other, in the kernel and for checksums.
        turns = in_turn(map(tasks, layout.files), work.threads)
        for taken, current, read in work.run(turns, make):
            built.taken_over += taken
            keep(read)
            if current is not None:
                yield current

    def made_apart() -> Iterator[_Open]:
        files = {file.path: file for file in layout.files}
        blocks: dict[str, list[BlockMade]] = {path: [] for path in files}
        for share in make_shares(
            layout, gatherer, staging, depths=depths, jobs=work.threads, copies=work.processes,
            counter=counter, sums=sums,
        ):  # fmt: skip
            built.taken_over += share.taken_over
            keep(share.read)
            file, held = files[share.path], blocks[share.path]
            held += share.blocks
            if len(held) == block_count(file.size):
                yield whole(file, held)
        # Only now: the thread that flushes them would keep copies from being made.
        yield from (whole(file, []) for file in layout.files if not file.size)

    def whole(file: OutputFile, blocks: Sequence[BlockMade]) -> _Open:
        """Return a file that other processes have written, to be flushed by this one."""
        upload = staging.open(file).upload
        assert upload is not None
        current = begin(file, upload)
        for made in blocks:
            current.completes(made)
        return current

    def finish(current: _Open) -> FileDigest:
        file, blocks = current.maker.file, current.blocks
        current.upload.finish()
        staging.finished(file, [blocks[n] for n in sorted(blocks)])
        built.blocks += blocks.values()
        return _digest(file, blocks)

    try:
        apart = work.processes > 1 and work.executor is None and staging.by_processes
        apart = apart and pays(layout, work.threads)
        made = made_apart() if apart else made_whole()
        for digest in run(made, finish, jobs=_FLUSHES, window=_FLUSHES):
            done[digest.path] = digest
            count_file(counter)
            del opened[digest.path]
    except BaseException as error:
        for current in opened.values():
            current.maker.ledger.fail(error)
        raise
    finally:
        for current in opened.values():
            current.upload.close()
    built.digests = [done[file.path] for file in layout.files]
    return built


def commit_bytes(files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the content of a layout's last small files, in order."""
    result = {}
    for file in files:
        assert all(isinstance(segment, Literal) for segment in file.segments)
        result[file.path] = b"".join(s.data for s in file.segments if isinstance(s, Literal))
    return result


def digest_of_bytes(path: str, data: bytes) -> FileDigest:
    """Return what a manifest says of a small file."""
    return FileDigest(path, len(data), blocks_of_bytes(data))


def _digest(file: OutputFile, blocks: dict[int, BlockMade] | object) -> FileDigest:
    assert isinstance(blocks, dict)
    digests = b"".join(blocks[number].digest for number in range(block_count(file.size)))
    assert len(digests) == WIDTH * -(-file.size // BLOCK)
    return FileDigest(file.path, file.size, digests)
