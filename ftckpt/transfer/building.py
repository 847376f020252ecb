"""Carry a layout out: every block of every file, several at once, taking over what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.digest import BLOCK, WIDTH, block_count, block_length, blocks_of_bytes
from ftckpt.engine import in_turn, run
from ftckpt.manifest import FileDigest
from ftckpt.progress import NULL, Counter
from ftckpt.store import Upload

from .blocks import BlockMade, BlockMaker
from .gathering import Gatherer
from .layout import Layout, Literal, OutputFile
from .staging import BlockSink, OpenFile, Staging

# So many files are flushed at a time, each by a thread that waits: a disk takes them together, and
# who makes the next file does not wait for it.
_FLUSHES = 8


@dataclass
class Built:
    """What building gave.

    Attributes:
        digests: of every data file, in the layout's order.
        taken_over: bytes that an earlier run had made.
    """

    digests: list[FileDigest] = field(default_factory=list)
    taken_over: int = 0


class _Open(OpenFile):
    """One file on its way."""

    def __init__(self, maker: BlockMaker, upload: Upload) -> None:
        super().__init__(upload, maker.file.size)
        self.maker = maker


class _Work(NamedTuple):
    opened: _Open
    number: int
    earlier: BlockMade | None


def build(
    layout: Layout,
    gatherer: Gatherer,
    staging: Staging,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    counter: Counter = NULL,
) -> Built:
    """Make every data file of a layout in a staging place.

    Args:
        layout: what to make.
        gatherer: reads the source.
        staging: where to make it; begun.
        jobs: number of threads.
        executor: where to run instead; it must begin tasks in the order of submission.
        counter: is told of every byte made or taken over.

    Raises:
        FtckptError: the source could not be read or the place not written; what was made stays.
    """
    built = Built()
    opened: dict[str, _Open] = {}
    done: dict[str, FileDigest] = {}
    counter.start("writing", sum(file.size for file in layout.files))

    def tasks(file: OutputFile) -> Iterator[_Work]:
        staged = staging.open(file)
        if staged.upload is None:
            done[file.path] = _digest(file, staged.earlier)
            built.taken_over += file.size
            counter.add(file.size)
            return
        current = opened[file.path] = _Open(BlockMaker(file, gatherer, counter), staged.upload)
        if not file.size:
            done[file.path] = finish(current)
            del opened[file.path]
        for number in range(block_count(file.size)):
            yield _Work(current, number, staged.earlier.get(number))

    def work(task: _Work) -> tuple[int, _Open | None]:
        """Return the bytes taken over, and the file where this was the last of its blocks."""
        current, number, earlier = task
        maker, taken = current.maker, 0
        length = block_length(maker.file.size, number)
        if earlier is not None and staging.holds(maker.file, earlier):
            maker.known(earlier)
            counter.add(length)
            made, taken = earlier, length
        else:
            sink = BlockSink(current.upload, length)
            made = maker.make(number, sink)
            sink.flush()
            staging.add(made)
        return taken, current if current.completes(made) else None

    def made_whole() -> Iterator[_Open]:
        # Blocks of one file wait for each other, in the kernel and for checksums.
        turns = in_turn(map(tasks, layout.files), jobs)
        for taken, whole in run(turns, work, jobs=jobs, executor=executor):
            built.taken_over += taken
            if whole is not None:
                yield whole

    def finish(current: _Open) -> FileDigest:
        file, blocks = current.maker.file, current.blocks
        current.upload.finish()
        staging.finished(file, [blocks[n] for n in sorted(blocks)])
        return _digest(file, blocks)

    try:
        for whole in run(made_whole(), finish, jobs=_FLUSHES, window=_FLUSHES):
            done[whole.path] = whole
            del opened[whole.path]
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
