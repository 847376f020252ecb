"""Carry files block by block into a staging place, each byte read once and judged as it goes by.

List the files of a replica, in the order in which they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import block_count, block_length
from ftckpt.digests.crc import checksum
from ftckpt.errors import CorruptError, FtckptError, NotFoundError
from ftckpt.extents import BLOCK, Extent
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.own_files import is_leftover, is_own
from ftckpt.progress import count_file
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.storage.store import Store, Upload
from ftckpt.transfer.layout import Layout, OutputFile, Stored
from ftckpt.transfer.staging import BlockSink, OpenFile, Staging
from ftckpt.transfer.write.blocks import BlockMade, CrcLedger, RunningSums
from ftckpt.workers import Work
from ftckpt.workers.threads import in_turn

from .trusted_manifest import BlockJudge


class CopiedFile(NamedTuple):
    """One file.

    Attributes:
        path: in the replica.
        name: in the source; another one only where the checkpoint is one file that is renamed.
        size: bytes.
    """

    path: str
    name: str
    size: int

    @property
    def output(self) -> OutputFile:
        """The file as a staging place and a journal know it."""
        return OutputFile(self.path, [Stored(Extent(self.name, 0, self.size))])


@dataclass(frozen=True)
class ReplicaContents:
    """The files of a replica.

    Attributes:
        files: those that belong to the checkpoint, by path; the commit marker last.
        beside: other files that are carried too.
        left: names in the source's directory that are not carried.
        marker: path of the file by which the format's own readers see a checkpoint; "" for none.
    """

    files: Sequence[CopiedFile]
    beside: Sequence[CopiedFile]
    left: Sequence[str]
    marker: str = ""

    @property
    def stages(self) -> Iterator[Sequence[CopiedFile]]:
        """What is carried first, and what only when that is whole: data, then the marker."""
        everything = [*self.beside, *self.files]
        yield [file for file in everything if file.path != self.marker]
        yield [file for file in everything if file.path == self.marker]

    @property
    def layout(self) -> Layout:
        """The same as a layout, for what names and fingerprints one."""
        return Layout(files=[file.output for stage in self.stages for file in stage])

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are carried."""
        return sum(file.size for file in (*self.files, *self.beside))


def contents_of(
    checkpoint: Checkpoint, manifest: Manifest | None, *, beside: bool = False, called: str = ""
) -> ReplicaContents:
    """Return the files of a checkpoint as a replica has them.

    What belongs to a checkpoint is what its format names and, where it is sealed, what its manifest
    lists. The manifest itself and other files of ftckpt's own do not count: they are written anew.

    Args:
        checkpoint: opened.
        manifest: its own, where it is sealed.
        beside: whether the other files of its directory are carried too.
        called: what the replica of a checkpoint that is one file is called; "" for the same.

    Raises:
        CorruptError: a file is missing, of another size than when it was sealed, or came after.
        UnsafeError: a file is a fifo, socket or device.
    """
    source = checkpoint.source
    members = {member for member in checkpoint.members() if not is_own(member)}
    if manifest is not None:
        for member in sorted(members - manifest.by_path.keys()):
            raise CorruptError(
                f"{member} belongs to the checkpoint and is not in the manifest",
                kind="added-file",
                file=member,
            )
        for sealed in manifest.files:
            _require_size(source.size(sealed.path), sealed)
        members |= manifest.by_path.keys()
    others = [
        n for n in source.entries if n not in members and not is_own(n) and not is_leftover(n)
    ]

    def file(member: str) -> CopiedFile:
        return CopiedFile(called or member, member, source.size(member))

    marker = checkpoint.commit.marker
    return ReplicaContents(
        files=[file(member) for member in sorted(members, key=lambda m: (m == marker, m))],
        beside=[file(other) for other in sorted(others)] if beside else [],
        left=[] if beside else sorted(others),
        marker=marker if marker in members and not source.single else "",
    )


def _require_size(size: int, sealed: FileDigest) -> None:
    if size != sealed.size:
        short = size < sealed.size
        low, high = sorted((size, sealed.size))
        raise CorruptError(
            f"{sealed.path} has {size} bytes and had {sealed.size} when it was sealed",
            kind="truncated-file" if short else "trailing-bytes",
            file=sealed.path,
            offset=low,
            length=high - low,
        )


# A bit can flip on the way; what is at rest is read the same twice.
_READINGS = 2


class Origin(NamedTuple):
    """Where a file is read.

    Attributes:
        store: which.
        path: the key in it.
    """

    store: Store
    path: str


class DamagedBlock(NamedTuple):
    """A block that was read twice and is wrong, or cannot be read.

    Attributes:
        path: of the file in the replica.
        number: which block, from 0.
        length: its bytes.
        error: what is wrong.
    """

    path: str
    number: int
    length: int
    error: FtckptError


@dataclass
class Moved:
    """What carrying gave.

    Attributes:
        files: digests by path; of files that are whole.
        taken_over: bytes that an earlier run had carried.
        damage: what kept other files from becoming whole.
    """

    files: dict[str, FileDigest] = field(default_factory=dict)
    taken_over: int = 0
    damage: list[DamagedBlock] = field(default_factory=list)


class _Open(OpenFile):
    """One file on its way."""

    def __init__(
        self, file: CopiedFile, upload: Upload, ledger: CrcLedger, count: int | None = None
    ) -> None:
        super().__init__(upload, file.size, count)
        self.file = file
        self.ledger = ledger


class _Task(NamedTuple):
    opened: _Open
    number: int
    earlier: BlockMade | None

    @property
    def length(self) -> int:
        return block_length(self.opened.file.size, self.number)


@dataclass(frozen=True)
class Mover:
    """Carries files into one staging place.

    Attributes:
        staging: begun.
        origin: where a block of a file is read.
        evidence: what its bytes are held to.
        work: how; its counter is told of the bytes carried or taken over.
        keep_going: gather damage and go on, instead of ending at the first.
    """

    staging: Staging
    origin: Callable[[CopiedFile, int], Origin]
    evidence: BlockJudge
    work: Work
    keep_going: bool = False

    def move(self, files: Sequence[CopiedFile], moved: Moved) -> None:
        """Carry files, and add to `moved` what came of it.

        Raises:
            CorruptError: a block is wrong wherever it is read; unless `keep_going`.
            FtckptError: it could not be read or written; what was carried stays.
        """
        opened: dict[str, _Open] = {}
        try:
            lists = (self._tasks(file, opened, moved) for file in files)
            tasks = in_turn(lists, self.work.threads)  # writers of one file wait for each other
            for task, made, whole in self.work.run(tasks, self._carried):
                if isinstance(made, DamagedBlock):
                    moved.damage.append(made)
                elif made is task.earlier:
                    moved.taken_over += task.length
                if whole is not None:
                    moved.files[whole.path] = whole
                    count_file(self.work.counter)
                    del opened[whole.path]
        finally:
            for current in opened.values():
                current.upload.close()

    def share(self, wanted: Sequence[tuple[CopiedFile, Sequence[int]]]) -> Iterator[BlockMade]:
        """Carry some blocks of files, and yield each when it is written.

        A file is flushed when the last of them is; what lies in several blocks is judged by who
        has them all.

        Args:
            wanted: files, and the numbers of their blocks; none for an empty file.

        Raises:
            CorruptError: a block is wrong wherever it is read.
            FtckptError: it could not be read or written.
        """
        opened: dict[str, _Open] = {}

        def tasks(file: CopiedFile, numbers: Sequence[int]) -> Iterator[_Task]:
            staged = self.staging.open_cut(file.output)
            upload = staged.upload
            if upload is None:  # others have joined it, with what this part had sent
                whole.extend(staged.earlier[number] for number in numbers)
                return
            ledger = CrcLedger(self.evidence.ranges(file.path))
            current = opened[file.path] = _Open(file, upload, ledger, len(numbers))
            if not numbers:
                upload.finish()
            for number in numbers:
                yield _Task(current, number, None)

        def carried(task: _Task) -> BlockMade:
            made = self._block(task)
            assert isinstance(made, BlockMade)
            made = self.staging.noted(task.opened.upload, made)
            if task.opened.completes(made):
                task.opened.upload.finish()
            return made

        whole: list[BlockMade] = []
        try:
            lists = (tasks(file, numbers) for file, numbers in wanted)
            yield from self.work.run(in_turn(lists, self.work.threads), carried)
            yield from whole
        finally:
            for current in opened.values():
                current.upload.close()

    def _tasks(self, file: CopiedFile, opened: dict[str, _Open], moved: Moved) -> Iterator[_Task]:
        staged = self.staging.open(file.output)
        if staged.upload is None:
            for number in self.evidence.doubts(file.path, staged.earlier):
                raise self.evidence.damage(file.path, number, block_length(file.size, number))
            moved.files[file.path] = _digest(file, [*staged.earlier.values()])
            moved.taken_over += file.size
            self.work.counter.add(file.size)
            count_file(self.work.counter)
            return
        ledger = CrcLedger(self.evidence.ranges(file.path))
        current = opened[file.path] = _Open(file, staged.upload, ledger)
        if not file.size:
            moved.files[file.path] = self._finish(current)
            count_file(self.work.counter)
            del opened[file.path]
        for number in range(block_count(file.size)):
            yield _Task(current, number, staged.earlier.get(number))

    def _carried(self, task: _Task) -> tuple[_Task, BlockMade | DamagedBlock, FileDigest | None]:
        """Carry a block; of those of one file the last to be there makes it whole."""
        made = self._block(task)
        if isinstance(made, DamagedBlock) or not task.opened.completes(made):
            return task, made, None
        return task, made, self._finish(task.opened)

    def _block(self, task: _Task) -> BlockMade | DamagedBlock:
        file, earlier = task.opened.file, task.earlier
        path, number = file.path, task.number
        if (
            earlier is not None
            and not self.evidence.doubts(path, {number: earlier})
            and self.staging.holds(file.output, earlier)
        ):
            self.work.counter.add(task.length)
            return earlier
        try:
            for _ in range(_READINGS):
                made = self._carry(task.opened, number)
                if not self.evidence.doubts(path, {number: made}):
                    self.staging.add(made)
                    self.work.counter.add(task.length)
                    return made
            raise self.evidence.damage(path, number, task.length)
        except FtckptError as error:
            lacking = isinstance(error, (CorruptError, NotFoundError))
            if not (self.keep_going and lacking):
                raise
            return DamagedBlock(path, number, task.length, error)

    def _carry(self, opened: _Open, number: int) -> BlockMade:
        """Read one block and write it."""
        import xxhash

        file = opened.file
        store, path = self.origin(file, number)
        begin, length = number * BLOCK, block_length(file.size, number)
        state, sums = xxhash.xxh3_128(), RunningSums(opened.ledger, checksum())
        sink = BlockSink(opened.upload, length)
        at = begin
        with store.open(path) as reader:
            for view in chunks(
                reader, begin, length, size=size_for(store), limiter=self.work.limiter
            ):
                state.update(view)
                sums.take(at, view)
                sink.write(at, view)
                at += len(view)
        sink.flush()
        return BlockMade(file.path, number, state.digest(), sums.finished())

    def _finish(self, current: _Open) -> FileDigest:
        """Judge what lies in several blocks, and make the file whole."""
        file, blocks = current.file, current.blocks
        for number in self.evidence.doubts(file.path, blocks):
            blocks[number] = self._carry(current, number)
            self.staging.add(blocks[number])
        for number in self.evidence.doubts(file.path, blocks):
            raise self.evidence.damage(file.path, number, block_length(file.size, number))
        current.upload.finish()
        made = [blocks[number] for number in sorted(blocks)]
        self.staging.finished(file.output, made)
        return _digest(file, made)


def _digest(file: CopiedFile, blocks: Sequence[BlockMade]) -> FileDigest:
    ordered = sorted(blocks, key=lambda made: made.number)
    return FileDigest(file.path, file.size, b"".join(made.digest for made in ordered))
