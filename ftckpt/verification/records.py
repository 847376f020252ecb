"""Check the CRC-32s that torch.save and torch's distributed checkpoint write and never read.

The work of a CRC check: read ranges of one file and compute their CRCs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, Extent, Record
from ftckpt.digests.crc import checksum, combine
from ftckpt.errors import FtckptError
from ftckpt.findings import finding, from_error, listed
from ftckpt.own_files import is_own
from ftckpt.progress import count_file, expect_files
from ftckpt.storage.decompress import open_stream, short, supported
from ftckpt.storage.ranges import LOCAL, chunks, size_for
from ftckpt.storage.store import Opens
from ftckpt.workers import ALONE, Work
from ftckpt.workers.buffers import buffer
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Owner, Report, Sample, named

if TYPE_CHECKING:
    from .seen import SeenBytes
    from .used_bytes import UsedBytes


PART = 64 << 20  # larger records are summed in parts, by several threads
SPAN = 4 << 20  # smaller ones are read together, up to this many bytes


class Range(NamedTuple):
    """A run of bytes to sum.

    Attributes:
        key: the caller's number for the sum.
        offset: first byte, in the file or in the decoded stream.
        length: number of bytes.
    """

    key: int
    offset: int
    length: int


class Spans(NamedTuple):
    """Ranges of one file: a task of the engine.

    Attributes:
        store: opens the file.
        path: of the file in `store`.
        file: its name in the checkpoint.
        ranges: sorted; either one of up to `PART` bytes, or several within `SPAN` bytes.
        limiter: bounds the rate of reading.
    """

    store: Opens
    path: str
    file: str
    ranges: tuple[Range, ...]
    limiter: RateLimit | None = None


class RecordStream(NamedTuple):
    """A transformed record: a task of the engine.

    Attributes:
        store: opens the file.
        path: of the file in `store`.
        extent: the stored bytes; its file is the name in the checkpoint.
        transforms: to undo.
        ranges: in the decoded stream.
        limiter: bounds the rate of reading.
    """

    store: Opens
    path: str
    extent: Extent
    transforms: tuple[str, ...]
    ranges: tuple[Range, ...]
    limiter: RateLimit | None = None


class Sums(NamedTuple):
    """CRC-32 of each range, or an error.

    Attributes:
        crcs: one per range of the task; empty after an error.
        nbytes: bytes of the file that were read.
        error: the failure.
    """

    task: Spans | RecordStream
    crcs: tuple[int, ...]
    nbytes: int
    error: FtckptError | None = None


def sum_or_fail(task: Spans | RecordStream) -> Sums:
    """Sum every range of the task; a failure is a result too."""
    try:
        if isinstance(task, RecordStream):
            return Sums(task, _sum_stream(task), task.extent.length)
        return _sum_spans(task)
    except FtckptError as error:
        return Sums(task, (), 0, error)


def _sum_spans(task: Spans) -> Sums:
    crc32 = checksum()
    first, last = task.ranges[0], task.ranges[-1]
    with task.store.open(task.path) as reader:
        if len(task.ranges) == 1:
            crc = 0
            size = size_for(task.store)
            for view in chunks(reader, first.offset, first.length, size=size, limiter=task.limiter):
                crc = crc32(view, crc)
            return Sums(task, (crc,), first.length)
        length = last.offset + last.length - first.offset
        view = buffer(length)
        if task.limiter is not None:
            task.limiter.take(length)
        reader.readinto(first.offset, view)
    starts = [(r.offset - first.offset, r.length) for r in task.ranges]
    return Sums(task, tuple(crc32(view[at : at + n], 0) for at, n in starts), length)


def _sum_stream(task: RecordStream) -> tuple[int, ...]:
    crc32 = checksum()
    order = sorted(range(len(task.ranges)), key=lambda i: task.ranges[i].offset)
    crcs = [0] * len(task.ranges)
    need = max((r.offset + r.length for r in task.ranges), default=0)
    position = 0
    done = 0  # ranges of `order` that lie wholly before `position`
    with task.store.open(task.path) as reader:
        for part in open_stream(
            reader, task.extent, task.transforms, limit=need, limiter=task.limiter, size=LOCAL
        ):
            view, end = memoryview(part), position + len(part)
            for i in order[done:]:
                _, offset, length = task.ranges[i]
                if offset >= end:
                    break
                inside = view[max(0, offset - position) : max(0, offset + length - position)]
                crcs[i] = crc32(inside, crcs[i])
            while done < len(order) and sum(task.ranges[order[done]][1:]) <= end:
                done += 1
            position = end
    if position < need:
        raise short(task.extent, need, position)
    return tuple(crcs)


def check_records(
    checkpoint: Checkpoint,
    *,
    emit: Emit,
    work: Work = ALONE,
    sample: float | None = None,
    used: UsedBytes | None = None,
    seen: SeenBytes | None = None,
) -> ContentResult:
    """Compare every record of `checkpoint` with the CRC-32 that its writer recorded.

    Reports records of other content (`bad-crc`, with tensor, rank, file and range), records without
    a CRC (`no-crc`, once per file), and the number of uncovered bytes (`not-covered`, once). For a
    format without records the evidence is `none` and nothing is reported. The arguments are as in
    `blocks.check_manifest`; what was `seen` whole is not read again.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    report = Report(checkpoint.source, emit)
    chosen = Sample(sample, checkpoint.source.name)
    check = _Check(checkpoint, report, chosen, work.limiter, seen)
    # Padding and headers have no sums and are not read: it ends a little below the total.
    members = {name for name in checkpoint.members() if name in checkpoint.source.entries}
    total = sum(map(checkpoint.source.size, members))
    work.counter.start("checking CRC-32", round(total * (sample or 1)))
    read = 0
    records: Iterable[Record] = checkpoint.records()
    if used is not None:
        records = (r for r in records if used.takes(r.extent.file, r.extent.offset, r.extent.end))
    tasks = check.tasks(iter(records))
    expect_files(work.counter, len(members))
    begun: set[str] = set()
    for sums in work.run(tasks, sum_or_fail):
        file = sums.task.extent.file if isinstance(sums.task, RecordStream) else sums.task.file
        if begun and file not in begun:  # they come in the order of files
            count_file(work.counter)
        begun.add(file)
        work.counter.add(sums.nbytes)
        read += sums.nbytes
        check.take(sums)
    for _ in range(len(members) - max(0, len(begun) - 1)):
        count_file(work.counter)
    if seen is not None:
        seen.taken += check.seen_bytes
    work.counter.add(check.seen_bytes)
    read += check.seen_bytes
    covered = check.covered.nbytes()
    uncovered, bare = check.summarise()
    evidence = "crc32" if check.records else "none"
    return ContentResult(evidence, read, covered, uncovered, sample, report.ok, bare)


def check_these(
    checkpoint: Checkpoint, records: Iterable[Record], *, emit: Emit, work: Work = ALONE
) -> int:
    """Compare some records, sorted by place, with their CRC-32s; return the bytes read.

    Raises:
        UnavailableError: the storage does not answer.
    """
    check = _Check(checkpoint, Report(checkpoint.source, emit), Sample(), work.limiter)
    read = 0
    tasks = check.tasks(iter(records))
    for sums in work.run(tasks, sum_or_fail):
        read += sums.nbytes
        check.take(sums)
    return read


class _Coverage:
    """The bytes of each file with evidence, each counted once."""

    def __init__(self) -> None:
        # Two machine words per record: there may be millions.
        self._runs: dict[str, tuple[array[int], array[int]]] = {}

    def add(self, extent: Extent) -> None:
        starts, ends = self._runs.setdefault(extent.file, (array("q"), array("q")))
        if ends and ends[-1] == extent.offset:
            ends[-1] = extent.end
        else:
            starts.append(extent.offset)
            ends.append(extent.end)

    def of(self, file: str) -> int:
        """Return the number of covered bytes of `file`."""
        total = reached = 0
        for start, end in sorted(zip(*self._runs.get(file, ((), ())), strict=True)):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
        return total

    def nbytes(self) -> int:
        return sum(self.of(file) for file in self._runs)


class _Check:
    """One run over the records: reads in flight, and results."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: Report,
        chosen: Sample,
        limiter: RateLimit | None,
        seen: SeenBytes | None = None,
    ) -> None:
        self.seen_bytes = 0  # that were read and summed up before this check
        self._seen = seen
        self.any = False  # whether the format has records at all
        self.records = 0  # with a CRC, and requested
        self.covered = _Coverage()
        self._checkpoint = checkpoint
        self._source = checkpoint.source
        self._report = report
        self._chosen = chosen
        self._limiter = limiter
        self._flying: dict[int, tuple[Record, dict[int, tuple[int, int]]]] = {}
        self._keys = count()
        self._started: set[str] = set()
        self._without: dict[str, tuple[int, int]] = {}
        self._opaque: dict[str, tuple[int, int]] = {}

    def tasks(self, records: Iterator[Record]) -> Iterator[Spans | RecordStream]:
        """Yield the reads to do; small neighbouring records are read together."""
        waiting: list[Range] = []
        place = ""
        wanted = groupby(
            self._wanted(records), key=lambda record: record.extent if record.transforms else None
        )
        for extent, together in wanted:
            if extent is not None:
                yield self._stream(extent, list(together))
                continue
            for record in together:
                key = self._begin(record)
                file, offset, length = record.extent
                if waiting and (file != place or not self._joins(waiting, offset, length)):
                    yield self._spans(place, waiting)
                    waiting = []
                place = file
                if length <= SPAN:
                    waiting.append(Range(key, offset, length))
                    continue
                for start in range(0, length, PART):
                    part = Range(key, offset + start, min(PART, length - start))
                    yield self._spans(file, [part])
        if waiting:
            yield self._spans(place, waiting)

    def take(self, sums: Sums) -> None:
        """Compare computed with recorded CRCs."""
        file = sums.task.extent.file if isinstance(sums.task, RecordStream) else sums.task.file
        if sums.error is not None:
            lost = [self._flying.pop(r.key, None) for r in sums.task.ranges]
            record = next((found[0] for found in lost if found is not None), None)
            owner = None if record is None else (record.owner, record.rank)
            if sums.error.kind == "bad-transform" and isinstance(sums.task, RecordStream):
                self._report_stream(sums.task, sums.error, owner)
            else:
                self._report.fail(file, sums.error, owner)
            return
        for (key, offset, length), crc in zip(sums.task.ranges, sums.crcs, strict=True):
            if key not in self._flying:
                continue  # another part of it could not be read
            record, parts = self._flying[key]
            parts[offset] = (length, crc)
            if sum(n for n, _ in parts.values()) < _nbytes(record):
                continue
            del self._flying[key]
            whole = 0
            for _, (n, value) in sorted(parts.items()):
                whole = combine(whole, value, n) if len(parts) > 1 else value
            if whole != record.crc32 and not self._report.changed(file):
                self._report_record(record, whole, sums.task)

    def summarise(self) -> tuple[int, tuple[str, ...]]:
        """Report uncovered bytes; return their number, and the files without any evidence."""
        if not self.any:  # a format without records
            return self._source.nbytes, ()
        for table, why in (
            (self._without, "carry no CRC-32"),
            (self._opaque, "are stored behind a transform that is not known"),
        ):
            for file, (number, nbytes) in table.items():
                message = f"{number} records of {file} ({nbytes} bytes) {why}"
                self._report.add(finding("no-crc", message, file=file, length=nbytes))
        members = [f for f in self._checkpoint.members() if f in self._source.entries]
        read = {f: self._source.shown(f) for f in members if not is_own(f)}
        left = {f: self._source.size(n) - self.covered.of(n) for f, n in read.items()}
        bare = [f for f, n in left.items() if n and not self.covered.of(read[f])]
        total = sum(left.values())
        if total:
            around = total - sum(left[f] for f in bare)
            parts = [f"{around} bytes of headers and padding"] if around else []
            if bare:
                parts.append(f"all {total - around} bytes of {listed(bare)}")
            message = f"no evidence covers {' and '.join(parts)}"
            self._report.add(finding("not-covered", message, length=total))
        return total, tuple(bare)

    def _wanted(self, records: Iterator[Record]) -> Iterator[Record]:
        """Yield the records to check."""
        while True:
            try:
                record = next(records, None)
            except FtckptError as error:
                self._report.fail(error.file or "", error)
                return
            if record is None:
                return
            self.any = True
            file = record.extent.file
            if self._report.failed(file):
                continue
            if record.crc32 is None or not supported(record.transforms):
                if _nbytes(record):
                    table = self._without if record.crc32 is None else self._opaque
                    number, nbytes = table.get(file, (0, 0))
                    table[file] = (number + 1, nbytes + _nbytes(record))
                continue
            self.records += 1
            self.covered.add(record.extent)
            if _nbytes(record) == 0:
                if record.crc32:
                    self._report_record(record, 0, None)
                continue
            try:
                self._source.entry(file)
            except FtckptError as error:
                self._report.fail(file, error, (record.owner, record.rank))
                continue
            first = file not in self._started
            self._started.add(file)
            if self._seen is not None and self._seen.shows(record):
                self.seen_bytes += _nbytes(record)
            elif self._chosen.takes(file, record.extent.offset, first=first):
                yield record

    def _begin(self, record: Record) -> int:
        key = next(self._keys)
        self._flying[key] = (record, {})
        return key

    def _joins(self, waiting: Sequence[Range], offset: int, length: int) -> bool:
        """Whether a record is worth reading together with those before it."""
        end = waiting[-1].offset + waiting[-1].length
        gap = self._source.store.traits.gap
        return 0 <= offset - end <= gap and offset + length - waiting[0].offset <= SPAN

    def _spans(self, file: str, ranges: Sequence[Range]) -> Spans:
        return Spans(*self._source.opener(file), file, tuple(ranges), self._limiter)

    def _stream(self, extent: Extent, records: Sequence[Record]) -> RecordStream:
        ranges = tuple(Range(self._begin(r), *_inner(r)) for r in records)
        return self._undone(extent, records[0].transforms, ranges)

    def _undone(
        self, extent: Extent, transforms: tuple[str, ...], ranges: tuple[Range, ...]
    ) -> RecordStream:
        path = self._source.path(extent.file)
        return RecordStream(self._source.store, path, extent, transforms, ranges, self._limiter)

    def _report_record(self, record: Record, crc: int, task: Spans | RecordStream | None) -> None:
        """Report one record of other content, unless only the transfer damaged it."""
        file, offset, length = record.extent
        if task is not None and self._again(record):
            # A bit can flip on the wire or in memory; damage at rest is read the same twice.
            message = f"{file} was read wrongly once at {offset} and rightly then"
            self._report.add(finding("note", message, file=file, offset=offset, length=length))
            return
        who = named([(record.owner, record.rank)])
        self._report.add(
            finding(
                "bad-crc",
                f"{who} in {file} has the CRC-32 {crc:08x} and {record.crc32 or 0:08x} is recorded",
                file=file,
                tensor=record.owner,
                rank=record.rank,
                offset=offset,
                length=length,
            )
        )

    def _report_stream(self, task: RecordStream, error: FtckptError, owner: Owner | None) -> None:
        """Report one compressed record that cannot be decoded; others in its file still can."""
        if not self._report.changed(task.extent.file):
            key, rank = owner or (None, None)
            self._report.add(from_error(error, tensor=key, rank=rank))

    def _again(self, record: Record) -> bool:
        """Read one record once more; return whether it is whole."""
        if record.transforms:
            place = (Range(0, *_inner(record)),)
            task: Spans | RecordStream = self._undone(record.extent, record.transforms, place)
        else:
            task = self._spans(record.extent.file, [Range(0, *_inner(record))])
        sums = sum_or_fail(task)
        return sums.error is None and sums.crcs == (record.crc32,)


def _inner(record: Record) -> tuple[int, int]:
    """Return where the CRC's bytes are: in the decoded stream, or in the file."""
    if not record.transforms:
        return record.extent.offset, record.extent.length
    if record.inner is None:
        raise ValueError(f"a transformed record of {record.owner} says not where its bytes are")
    return record.inner


def _nbytes(record: Record) -> int:
    return _inner(record)[1]
