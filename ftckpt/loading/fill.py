"""Read what shards are made of, in the order of the files, and put it into their memory.

Runs that are dense on both sides and of one type are read straight into place. Others are read into
a buffer of the thread, a few megabytes at a time, and put in place from there: what lies close
together, of however many tensors, is one read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, Payload, Piece, Record
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.extents import Extent
from ftckpt.progress import NULL, Counter
from ftckpt.transfer.read.elements import REMOTE, SPAN, Gatherer
from ftckpt.workers import Work

from .evidence import CheckedBytes, LoadCheck, LoadEvidence
from .targets import BlockRead, FileRead, Take, Wanted

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

_ALONE = 128 << 10  # bytes of a run that is read straight into place, and not with neighbours
_TASK = 16 << 20  # bytes that one thread reads before it takes other ones
_AHEAD = 2  # threads as which the read-ahead takes ours: all of them read in one order
_GROUP = 32 << 20  # bytes of shards whose records are opened before they are read, from a server


class NotingRecords:
    """A checkpoint that notes the records around the pieces that it is asked for.

    Args:
        checkpoint: reads the tensors.

    Attributes:
        noted: by place: the record, and the extent of the piece in it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.noted: dict[Extent, tuple[Record, Extent]] = {}
        self._told: set[Extent] = set()
        self._checkpoint = checkpoint
        self._owners = {
            piece.extent: key
            for key, info in checkpoint.tensors.items()
            for piece in info.pieces
            if piece.packed
        } if checkpoint.records_by_piece else {}  # fmt: skip

    def __getattr__(self, name: str) -> object:
        return getattr(self._checkpoint, name)

    def fresh(self) -> dict[Extent, tuple[Record, Extent]]:
        """Return what was noted since this was called last."""
        new = {place: one for place, one in self.noted.items() if place not in self._told}
        self._told |= new.keys()
        return new

    def note(self, places: Iterable[Extent]) -> None:
        """Note the records of packed pieces at some places, whether their elements are read or not.

        Raises:
            CorruptError: one is damaged.
        """
        if not self._checkpoint.records_by_piece:
            return
        left = frozenset(places) - {unit for _, unit in self.noted.values()}
        for info in self._checkpoint.tensors.values() if left else ():
            for piece in info.pieces:
                if piece.extent in left:
                    self.payload(piece)

    def payload(self, piece: Piece) -> Payload:
        """Find the elements of a piece; see `Checkpoint.payload`."""
        try:
            found = self._checkpoint.payload(piece)
        except FtckptError as error:
            error.tensor = error.tensor or self._owners.get(piece.extent)
            raise
        if found.record is not None:
            place, crc = found.record
            owner = self._owners.get(piece.extent, "")
            self.noted[place] = (Record(place, crc, owner, piece.rank), piece.extent)
        return found


class _Watch:
    """Is told of what is read, before and after the check knows what it looks at."""

    check: LoadCheck | None = None

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Pass on bytes that were read."""
        if self.check is not None:
            self.check.saw(file, offset, data)

    def undid(self, extent: Extent) -> None:
        """Let a record pass that was undone: it is checked by itself."""


class Filler(Gatherer):
    """Reads shards into their memory.

    Args:
        checkpoint: the source, opened, or what `Checkpoint.for_rank` returned.
        limiter: bounds the rate of reading.

    Attributes:
        records: those around the packed pieces that were met.
    """

    def __init__(self, checkpoint: Checkpoint, limiter: RateLimit | None = None) -> None:
        self.records = NotingRecords(checkpoint)
        self.watch = _Watch()
        super().__init__(self.records, limiter, self.watch)  # type: ignore[arg-type]
        local = checkpoint.source.store.traits.local
        self._most = SPAN if local else REMOTE
        self._alone = _ALONE if local else SPAN
        self._local = local
        self._gap = self.bytes.gap

    def ahead(self) -> None:
        """Read no two records at once: each is in memory already, as one window of its own."""
        self._gap = 0

    def plan(self, wanted: Sequence[Wanted], work: Work) -> list[FileRead]:
        """Return what is to be read, in the order of the files.

        Shards that are not filled by their source alone are cleared, and those of elements smaller
        than a byte are read here.

        Raises:
            CorruptError: the pieces leave a hole, or a record is damaged.
            UnsupportedError: elements that cannot be read, or not cast.
        """
        takes: list[Take] = []
        order = range(len(wanted))
        jobs = 1 if self._local else work.threads
        found = map(self._of, order, wanted) if jobs == 1 else work.run(
            order, lambda number: self._of(number, wanted[number])
        )  # fmt: skip
        for some in found:
            takes += some
        return list(self._joined(takes, wanted))

    def _of(self, number: int, want: Wanted) -> list[Take]:
        shard = want.shard
        try:
            if not shard.dtype.itemsize:
                data = memoryview(bytearray(shard.nbytes))
                self.fill(shard, 0, shard.numel, data)
                want.target.whole(data)
                return []
            moves = list(self._moves(shard, 0, shard.numel)) if shard.numel else []
        except FtckptError as error:
            error.tensor = error.tensor or want.name
            raise
        if sum(prod(move.sizes) for move in moves) != shard.numel:
            want.target.clear()
        gap = self.bytes.gap
        return [Take(number, part) for move in moves for part in move.cut(self._most, gap)]

    def _joined(self, takes: list[Take], wanted: Sequence[Wanted]) -> Iterator[FileRead]:
        def place(take: Take) -> tuple[str, Extent | None, int]:
            held = take.move.held
            undone = None if held.undone is None else held.undone.extent
            return (held.file, undone, take.move.offset)

        takes.sort(key=lambda take: (place(take)[0], place(take)[1] or ("", 0, 0), place(take)[2]))
        joined: list[Take] = []
        begin = end = 0
        where: tuple[str, Extent | None] = ("", None)
        alone = False
        for take in takes:
            move = take.move
            file, undone, offset = place(take)
            last = offset + move.span
            large = move.span > self._alone and self._direct(take, wanted)
            if (
                joined
                and (file, undone) == where
                and not (alone or large)
                and offset - end <= self._gap
                and max(end, last) - begin <= self._most
            ):
                joined.append(take)
                end = max(end, last)
                continue
            if joined:
                yield FileRead(joined[0].move.held, begin, end - begin, joined)
            joined, begin, end, where, alone = [take], offset, last, (file, undone), large
        if joined:
            yield FileRead(joined[0].move.held, begin, end - begin, joined)

    def _direct(self, take: Take, wanted: Sequence[Wanted]) -> bool:
        return take.move.is_run and take.move.dtype == wanted[take.number].target.dtype

    def skip(self, file: str, offset: int, out: memoryview) -> None:
        """Read bytes that nobody wants, for the check alone."""
        self.bytes.read(file, offset, out)

    def carry_out(self, reading: FileRead, wanted: Sequence[Wanted]) -> memoryview:
        """Read some bytes and put them in place; return them as they lie in memory now.

        Raises:
            CorruptError: the file ends before them.
        """
        first = reading.takes[0]
        if len(reading.takes) == 1 and self._direct(first, wanted):
            move = first.move
            memory = wanted[first.number].target.memory(move.start, prod(move.sizes))
            if memory is not None:
                self.bytes.get(reading.held, reading.offset, memory)
                return memory
        raw = wanted[first.number].target.buffer(reading.nbytes)
        self.bytes.get(reading.held, reading.offset, raw)
        takes, at = reading.takes, 0
        while at < len(takes):
            number, stop = takes[at].number, at + 1
            while stop < len(takes) and takes[stop].number == number:
                stop += 1
            moves = [take.move for take in takes[at:stop]]
            wanted[number].target.put(raw, reading.offset, moves)
            at = stop
        return raw


def fill(
    checkpoint: Checkpoint,
    wanted: Sequence[Wanted],
    evidence: LoadEvidence,
    *,
    work: Work,
) -> CheckedBytes:
    """Load shards, and hold what was read to the evidence that there is.

    Args:
        checkpoint: opened, or what `Checkpoint.for_rank` returned.
        wanted: the shards.
        evidence: what is checked, and by what.
        work: threads, and who is told of the bytes.

    Raises:
        CorruptError: damage, with tensor, rank, file and range; what was loaded is not to be used.
        FtckptError: it cannot be read.
    """
    filler = Filler(checkpoint, work.limiter)
    try:
        if checkpoint.source.store.traits.local or not checkpoint.records_by_piece:
            return _filled(filler, checkpoint, wanted, evidence, work)
        # Each record has a head, which says where its elements are: with these read just before,
        # and ahead of use, a record is one request.
        found = CheckedBytes()
        groups = list(_groups(checkpoint, wanted))
        places = [piece.extent for _, pieces in groups for piece in pieces]
        filler.ahead()
        with reading_ahead(checkpoint, places, work.limiter, jobs=_AHEAD):
            for number, (some, _) in enumerate(groups):
                last = number == len(groups) - 1
                found = found.plus(_filled(filler, checkpoint, some, evidence, work, last=last))
        return found
    except CorruptError as error:
        raise _placed(error, wanted, checkpoint) from None
    finally:
        filler.close()


def _filled(
    filler: Filler,
    checkpoint: Checkpoint,
    wanted: Sequence[Wanted],
    evidence: LoadEvidence,
    work: Work,
    *,
    last: bool = True,
) -> CheckedBytes:
    """Load some shards, whose records no other call has met; the last call meets what is left."""
    counter: Counter = work.counter or NULL
    readings = filler.plan(wanted, work)
    if last:
        filler.records.note(evidence.charge or ())
    check = evidence.begin(filler.records.fresh(), readings, checkpoint)
    filler.watch.check = check
    counter.start("loading", sum(reading.nbytes for reading in readings))

    def do(task: Sequence[FileRead] | BlockRead) -> int:
        done = 0
        if isinstance(task, BlockRead):
            done = check.read_block(task, filler, wanted)
        else:
            for reading in task:
                filler.carry_out(reading, wanted)
                done += reading.nbytes
        check.drain()
        return done

    for nbytes in work.run(_tasks(readings, check.blocks_of(readings), work.threads), do):
        counter.add(nbytes)
    for want in wanted:
        want.target.finish()
    return check.end(work)


def _groups(
    checkpoint: Checkpoint, wanted: Sequence[Wanted]
) -> Iterator[tuple[list[Wanted], list[Piece]]]:
    """Yield shards in the order of the files, some megabytes together, with their pieces."""
    held: list[tuple[Extent, Wanted, list[Piece]]] = []
    for want in wanted:
        pieces = {
            piece.extent: piece
            for fill in want.shard.fills
            for piece in checkpoint.tensors[fill.key].pieces
            if not piece.replica
        }
        first = min(pieces, default=Extent("", 0, 0))
        held.append((first, want, [pieces[one] for one in sorted(pieces)]))
    held.sort(key=lambda one: one[0])
    some: list[Wanted] = []
    places: list[Piece] = []
    nbytes = 0
    for _, want, mine in held:
        some.append(want)
        places += mine
        nbytes += want.shard.nbytes
        if nbytes >= _GROUP:
            yield some, places
            some, places, nbytes = [], [], 0
    yield some, places


def _tasks(
    readings: Sequence[FileRead], blocks: Iterable[BlockRead], threads: int
) -> Iterator[Sequence[FileRead] | BlockRead]:
    """Yield what threads do: blocks of the manifest, and runs of readings of some megabytes."""
    blocks = list(blocks)
    inside = {id(one) for block in blocks for one in block.readings}
    yield from blocks
    some: list[FileRead] = []
    nbytes = 0
    most = min(_TASK, sum(reading.nbytes for reading in readings) // max(1, threads))
    for reading in readings:
        if id(reading) in inside:
            continue
        some.append(reading)
        nbytes += reading.nbytes
        if nbytes >= most:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _placed(error: CorruptError, wanted: Sequence[Wanted], checkpoint: Checkpoint) -> CorruptError:
    """Return an error with the job's name of the tensor where only the checkpoint's is said."""
    names = {fill.key: want.name for want in wanted for fill in want.shard.fills}
    name = names.get(error.tensor or "")
    if name and name not in error.message and str(error.tensor) not in error.message:
        error.message = f"{name}: {error.message}"
    return error
