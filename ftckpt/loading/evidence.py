"""Hold what is loaded to what its writer, or a seal, has recorded of it.

- A record with a CRC-32 of its own (torch's files) that is read whole is summed up on the way. One
  that is read in part is read once more, by one rank of the job.
- Other files are held to the blocks of the manifest, if there is one: a block is read in order, by
  one thread of one rank, so that its digest is made of the very bytes that are loaded.
- Bytes without either are counted, and the report says how many.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, Record
from ftckpt.checkpoint.alone import StoredAlone
from ftckpt.digests.blocks import block_length
from ftckpt.errors import CorruptError, ExitCode, UnavailableError, error_of
from ftckpt.extents import BLOCK, Extent
from ftckpt.findings import Finding, listed
from ftckpt.verification.record_sums import ReadSums, RecordIndex
from ftckpt.verification.records import check_these
from ftckpt.workers.buffers import buffer

from .targets import BlockRead

if TYPE_CHECKING:
    from ftckpt.manifest import Manifest
    from ftckpt.workers import Work

    from .targets import CarriesOut, FileRead, Wanted

_CHUNK = 2 << 20
_SLOT = 4  # of `workers.buffers`
_MOST_NAMED = 3


class CheckedBytes(NamedTuple):
    """How many bytes were read, and by what they were checked.

    Attributes:
        crc32: bytes of records that were held to their CRC-32s here.
        manifest: bytes of blocks that were held to the manifest here.
        elsewhere: bytes that were read here and that another rank checks.
        none: bytes that nothing is recorded of.
        again: bytes that were read for the check alone.
    """

    crc32: int = 0
    manifest: int = 0
    elsewhere: int = 0
    none: int = 0
    again: int = 0

    def plus(self, other: CheckedBytes) -> CheckedBytes:
        """Return both together."""
        return CheckedBytes(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class LoadEvidence:
    """What a rank checks of what it loads.

    Attributes:
        records: that the format lists; those around packed pieces are met on the way.
        manifest: of the checkpoint; None without one.
        charge: places that this rank is to check: of records, of packed pieces, and of blocks of
            the manifest. None for all that it meets.
        off: whether nothing is checked.
    """

    records: Sequence[Record] = ()
    manifest: Manifest | None = None
    charge: frozenset[Extent] | None = None
    off: bool = False

    def begin(
        self,
        noted: Mapping[Extent, tuple[Record, Extent]],
        readings: Sequence[FileRead],
        checkpoint: Checkpoint,
    ) -> LoadCheck:
        """Return the check of some readings, none of which was made yet.

        Args:
            noted: the records around packed pieces, each with the piece's place.
            readings: in the order of the files.
            checkpoint: what is read.

        Raises:
            CorruptError: a file has another size than the manifest says.
        """
        return LoadCheck(self, noted, readings, checkpoint)


def block_at(manifest: Manifest, file: str, number: int) -> Extent:
    """Return the place of a block."""
    return Extent(file, number * BLOCK, block_length(manifest.by_path[file].size, number))


class LoadCheck:
    """One check of some readings; `saw` and `drain` may be called by many threads.

    Attributes:
        sums: of the records that are read whole.
    """

    def __init__(
        self,
        evidence: LoadEvidence,
        noted: Mapping[Extent, tuple[Record, Extent]],
        readings: Sequence[FileRead],
        checkpoint: Checkpoint,
    ) -> None:
        self._evidence = evidence
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._parts: list[Record] = []
        self._blocks: set[tuple[str, int]] = set()
        self._crc = self._none = self._elsewhere = self._again = self._hashed = 0
        whole: list[Record] = []
        plain, undone = _runs(readings)
        if not evidence.off:
            units = {place: unit for place, (_, unit) in noted.items()}
            known = {record.extent: record for record, _ in noted.values()}
            behind: dict[Extent, list[Record]] = defaultdict(list)
            for record in evidence.records:
                if record.transforms:
                    behind[record.extent].append(record)
                elif record.crc32 is not None and record.extent.length:
                    known[record.extent] = record
            left = self._sort(known, units, plain, whole)
            left += self._sort_undone(behind, undone)
            self._choose_blocks(left)
        index = RecordIndex(
            StoredAlone(source=checkpoint.source, tensors={}, objects={}, known=whole)
        )
        self.sums = ReadSums(index)

    def _sort(
        self,
        known: Mapping[Extent, Record],
        units: Mapping[Extent, Extent],
        runs: Mapping[str, list[tuple[int, int]]],
        whole: list[Record],
    ) -> list[Extent]:
        """Tell records that are read whole from those in part; return what lies in none."""
        by_file: dict[str, list[Record]] = defaultdict(list)
        for record in known.values():
            by_file[record.extent.file].append(record)
        left = [
            Extent(file, begin, end - begin)
            for file, spans in runs.items()
            if file not in by_file
            for begin, end in spans
        ]
        charge = self._evidence.charge
        for file, records in by_file.items():
            spans = runs.get(file, [])
            begins = [begin for begin, _ in spans]
            for record in records:
                met = _met(spans, begins, record.extent)
                if met == record.extent.length:
                    whole.append(record)
                    self._crc += met
                elif met if charge is None else self._in_charge(record.extent, units):
                    self._parts.append(record)
                    self._again += record.extent.length
                else:
                    self._elsewhere += met
        return left

    def _sort_undone(
        self, behind: Mapping[Extent, Sequence[Record]], undone: Collection[Extent]
    ) -> list[Extent]:
        """Choose the compressed records to check; return the places without any."""
        left = []
        for place in undone:
            if place not in behind:
                left.append(place)
            elif self._in_charge(place, {}):
                self._parts += behind[place]
                self._again += place.length
            else:
                self._elsewhere += place.length
        return left

    def _choose_blocks(self, places: Sequence[Extent]) -> None:
        manifest, source = self._evidence.manifest, self._checkpoint.source
        charge = self._evidence.charge
        if manifest is not None and charge is not None:
            for unit in charge:  # all that a rank is given, whichever bytes of it it needs itself
                number, inside = divmod(unit.offset, BLOCK)
                if not inside and unit.file in manifest.by_path:
                    size = manifest.by_path[unit.file].size
                    if number * BLOCK < size and unit == block_at(manifest, unit.file, number):
                        self._blocks.add((unit.file, number))
        for file, offset, length in places:
            sealed = None if manifest is None else manifest.by_path.get(file)
            if manifest is None or sealed is None:
                self._none += length
                continue
            has = source.entries[file].size
            if has != sealed.size:
                raise CorruptError(
                    f"{file} has {has} bytes and the manifest says {sealed.size}",
                    kind="size-mismatch",
                    file=file,
                )
            for number in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1):
                if charge is None:
                    self._blocks.add((file, number))
                elif (file, number) not in self._blocks:
                    self._elsewhere += _shared(offset, length, number)

    def _in_charge(self, place: Extent, units: Mapping[Extent, Extent]) -> bool:
        charge = self._evidence.charge
        return charge is None or place in charge or units.get(place) in charge

    # --- while it is read ------------------------------------------------------------------------

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Sum up bytes of a file that were just read."""
        self.sums.saw(file, offset, data)

    def drain(self) -> None:
        """Keep what this thread has summed up."""
        runs = self.sums.drain()
        if runs:
            with self._lock:
                self.sums.take(runs)

    def blocks_of(self, readings: Sequence[FileRead]) -> Iterator[BlockRead]:
        """Yield the blocks to check, each with the readings that begin in it."""
        manifest = self._evidence.manifest
        if manifest is None or not self._blocks:
            return
        inside: dict[tuple[str, int], list[FileRead]] = defaultdict(list)
        for reading in readings:
            if reading.held.undone is None:
                inside[reading.held.file, reading.offset // BLOCK].append(reading)
        for file, number in sorted(self._blocks):
            place = block_at(manifest, file, number)
            digest = manifest.by_path[file].block(number)
            some = inside.get((file, number), ())
            yield BlockRead(file, number, place.length, digest, some)

    def read_block(self, block: BlockRead, filler: CarriesOut, wanted: Sequence[Wanted]) -> int:
        """Load what begins in a block, and hold all of the block to its digest.

        Returns:
            Bytes that were loaded.

        Raises:
            CorruptError: its bytes are others (`bad-digest`).
        """
        import xxhash

        state = xxhash.xxh3_128()
        at = begin = block.number * BLOCK
        end = begin + block.length
        loaded = again = 0

        def skip(to: int) -> None:
            nonlocal at, again
            while at < to:
                view = buffer(min(_CHUNK, to - at), _SLOT)
                filler.skip(block.file, at, view)
                state.update(view)
                at += len(view)
                again += len(view)

        for reading in block.readings:
            skip(min(reading.offset, end))
            memory = filler.carry_out(reading, wanted)
            loaded += reading.nbytes
            stop = min(end, reading.end)
            if stop > at:
                state.update(memory[at - reading.offset : stop - reading.offset])
                at = stop
        skip(end)
        with self._lock:
            self._again += again
            self._hashed += block.length
        if state.digest() != block.digest:
            names = dict.fromkeys(
                wanted[take.number].name for one in block.readings for take in one.takes
            )
            holds = f", which hold {listed(list(names))}" if names else ""
            raise CorruptError(
                f"bytes {begin} to {end} of {block.file} are not those that were sealed{holds}",
                kind="bad-digest",
                file=block.file,
                tensor=next(iter(names), None),
                offset=begin,
                length=block.length,
            )
        return loaded

    # --- at the end ------------------------------------------------------------------------------

    def end(self, work: Work) -> CheckedBytes:
        """Compare what was summed up, and check what was read in part.

        Raises:
            CorruptError: damage, by tensor, rank, file and range.
            UnavailableError: something was read wrongly, and rightly when it was read again.
        """
        wrong = [record for record, _ in self.sums.doubtful()]
        found: list[Finding] = []
        if wrong or self._parts:
            records = sorted({r.extent: r for r in (*wrong, *self._parts)}.values(), key=_place)
            check_these(self._checkpoint, records, emit=found.append, work=work)
        errors = [one for one in found if one.code is not ExitCode.OK]
        if errors:
            more = f" ({len(errors) - 1} more records are damaged)" if errors[1:] else ""
            one = errors[0]
            raise error_of(
                one.code, one.message + more, kind=one.kind, file=one.file, tensor=one.tensor,
                offset=one.offset, length=one.length,
            )  # fmt: skip
        if wrong:
            first = wrong[0]
            raise UnavailableError(
                f"{first.owner} was read wrongly from {first.extent.file}, and rightly when it was"
                " read again",
                hint="load again; memory or a link damages what is read",
                file=first.extent.file,
                tensor=first.owner,
            )
        parts = sum(record.extent.length for record in self._parts)
        return CheckedBytes(
            self._crc + parts, self._hashed, self._elsewhere, self._none, self._again
        )


def _place(record: Record) -> Extent:
    return record.extent


def _runs(
    readings: Sequence[FileRead],
) -> tuple[dict[str, list[tuple[int, int]]], dict[Extent, None]]:
    """Return the runs of bytes of each file that are read, and what is undone."""
    plain: dict[str, list[tuple[int, int]]] = defaultdict(list)
    undone: dict[Extent, None] = {}
    for reading in readings:
        if reading.held.undone is not None:
            undone[reading.held.undone.extent] = None
            continue
        runs = plain[reading.held.file]
        if runs and reading.offset <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], reading.end))
        else:
            runs.append((reading.offset, reading.end))
    return plain, undone


def _met(spans: Sequence[tuple[int, int]], begins: Sequence[int], extent: Extent) -> int:
    """Return how many bytes of an extent some runs hold; `begins` are theirs."""
    at = max(0, bisect_left(begins, extent.offset + 1) - 1)
    met = 0
    while at < len(spans) and spans[at][0] < extent.end:
        begin, end = spans[at]
        met += max(0, min(end, extent.end) - max(begin, extent.offset))
        at += 1
    return met


def _shared(offset: int, length: int, number: int) -> int:
    """Return how many bytes of a range lie in a block."""
    begin = number * BLOCK
    return max(0, min(offset + length, begin + BLOCK) - max(offset, begin))
