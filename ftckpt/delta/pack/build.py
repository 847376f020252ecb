"""Make the data files of a delta in a staging place, several at once, or take over what is there.

A file's size is known only when its last block is encoded, so it is announced by the most that it
can have. What an earlier run has finished is hashed again before it counts.

Divide blocks over data files before encoding, the same way on every machine.

The tensors of one parameter lie together, block by block, those that predict others first: who
encodes or reads them in this order has what the next one needs still at hand. A data file is made
from its beginning to its end by one thread, so there are many more files than threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.delta.codec.choose_encoding import EncodingPlan
from ftckpt.delta.codec.encode import DeltaEncoder, Rows
from ftckpt.delta.index import DataFile
from ftckpt.delta.index.part_record import ElementSums, PartRecord, plans_digest
from ftckpt.digests.blocks import block_count
from ftckpt.errors import RefusedError
from ftckpt.extents import BLOCK
from ftckpt.manifest import FileDigest
from ftckpt.progress import Counter
from ftckpt.storage.store import Upload
from ftckpt.transfer.layout import OutputFile, Zeros
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.workers import ALONE, Work
from ftckpt.workers.threads import run

from .pair import DeltaPair

if TYPE_CHECKING:
    from ftckpt.transfer.prove.source_sums import ReadForProof, SourceSums
    from ftckpt.verification.seen import SeenBytes, SeenRuns

    Seen = SeenBytes | SourceSums

LEAST, MOST = 16 << 20, 1 << 30  # bytes of elements that go into one data file
_FILES = 64  # as many files as that, where the elements suffice
_ORDER = {Kind.EXP_AVG: 0, Kind.EXP_AVG_SQ: 1, Kind.MASTER: 2}


@dataclass
class PackedFile:
    """The blocks of one data file, in the order in which they lie in it.

    Attributes:
        number: of the file.
        nbytes: of the elements; the file has at most as many.
    """

    number: int
    nbytes: int = 0
    _tensors: array[int] = field(default_factory=lambda: array("I"), repr=False)
    _blocks: array[int] = field(default_factory=lambda: array("I"), repr=False)

    @property
    def path(self) -> str:
        """The file's name."""
        return f"{self.number:05d}.blocks"

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def blocks(self) -> Iterator[tuple[int, int]]:
        """Each block: its tensor's place in the list of pairs, and its number."""
        return zip(self._tensors, self._blocks, strict=True)

    def add(self, tensor: int, block: int, nbytes: int) -> None:
        """Put one more block at the end."""
        self._tensors.append(tensor)
        self._blocks.append(block)
        self.nbytes += nbytes


def divide(pairs: Sequence[DeltaPair]) -> list[PackedFile]:
    """Deal out all blocks of the tensors of `pairs` to data files."""
    total = sum(pair.info.nbytes for pair in pairs)
    most = min(MOST, max(LEAST, total // _FILES))
    parts: list[PackedFile] = []
    for tensor, block, nbytes in _in_order(pairs):
        if not parts or parts[-1].nbytes + nbytes > most:
            parts.append(PackedFile(len(parts)))
        parts[-1].add(tensor, block, nbytes)
    return parts


def _in_order(pairs: Sequence[DeltaPair]) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, block and bytes of every block."""
    families: dict[tuple[str, str], list[int]] = {}
    for number, pair in enumerate(pairs):
        families.setdefault(pair.kin, []).append(number)
    for members in families.values():
        members.sort(key=lambda number: _ORDER.get(pairs[number].info.kind, len(_ORDER)))
        counts = [pairs[number].blocks for number in members]
        for block in range(max(counts)):
            for number, count in zip(members, counts, strict=True):
                if block < count:
                    yield number, block, pairs[number].block_nbytes(block)


# How each tensor is stored, by its place in the list of pairs; of those that are packed here.
Plans = Sequence[EncodingPlan] | Mapping[int, EncodingPlan]

_FLUSHES = 4  # files at a time that are being flushed, beside those being made


@dataclass
class BuiltFiles:
    """What building gave.

    Attributes:
        rows: of the blocks of all tensors.
        files: in the order of their numbers.
        digests: of the files, in the same order.
        sums: by tensor, those of the target's elements and of the base's.
        taken_over: bytes that an earlier run had made.
        blocks: of the files.
    """

    rows: Rows
    files: list[DataFile] = field(default_factory=list)
    digests: list[FileDigest] = field(default_factory=list)
    sums: dict[int, tuple[ElementSums, ElementSums]] = field(default_factory=dict)
    taken_over: int = 0
    blocks: list[BlockMade] = field(default_factory=list)

    def add(self, part: PackedFile, receipt: PartRecord, blocks: Sequence[BlockMade]) -> None:
        """Take the rows and the sums of one file; files come in the order of their numbers."""
        digests = b"".join(one.digest for one in blocks) if receipt.size else b""
        self.files.append(DataFile(part.path, receipt.size))
        self.digests.append(FileDigest(part.path, receipt.size, digests))
        self.blocks += blocks
        for (tensor, block), stored in zip(part.blocks, receipt.blocks, strict=True):
            self.rows.put(tensor, block, stored)
        for tensor, (target, base) in receipt.sums.items():
            ours, theirs = self.sums.get(tensor, (ElementSums(), ElementSums()))
            self.sums[tensor] = ours.plus(target), theirs.plus(base)


class _Encoded(NamedTuple):
    part: PackedFile
    upload: Upload | None
    receipt: PartRecord
    blocks: Sequence[BlockMade]
    found: bool
    read: Sequence[SeenRuns | ReadForProof]


class _Made(NamedTuple):
    """One file, whole; a few kilobytes, because it may come from another process.

    Attributes:
        number: of its part.
        receipt: what was noted of it.
        blocks: of it.
        found: whether an earlier run had made it.
        read: what was read of the sources for it.
    """

    number: int
    receipt: PartRecord
    blocks: Sequence[BlockMade]
    found: bool
    read: Sequence[SeenRuns | ReadForProof]


def build_files(
    parts: Sequence[PackedFile],
    encoder: DeltaEncoder,
    plans: Plans,
    staging: Staging,
    work: Work = ALONE,
    seen: Sequence[Seen] = (),
) -> BuiltFiles:
    """Encode every block and write it.

    Args:
        parts: which blocks go into which file.
        encoder: encodes them.
        plans: how each tensor is stored.
        staging: where the files are made; begun.
        work: how; each thread or process makes a file of its own. The counter is told of the
            elements' bytes that are encoded or taken over.
        seen: are told by the encoder's readers of what they read, and keep it here.

    Raises:
        RefusedError: what an earlier run has put on an object store was encoded otherwise.
        FtckptError: a source could not be read or the place not written; what was made stays.
    """
    built = BuiltFiles(Rows([pair.blocks for pair in encoder.pairs]))
    done: dict[int, _Made] = {}
    work.counter.start("packing", sum(part.nbytes for part in parts))
    made_of = partial(_files, encoder=encoder, plans=plans, staging=staging, seen=seen)
    work = work if staging.by_processes else replace(work, processes=0)
    for made in work.streamed(parts, made_of):
        for one, read in zip(seen, made.read, strict=True):
            one.take(read)  # type: ignore[arg-type]  # each gets what it has drained
        done[made.number] = made._replace(read=())
    for part in parts:
        made = done[part.number]
        built.add(part, made.receipt, made.blocks)
        built.taken_over += made.receipt.size if made.found else 0
    return built


def built_before(
    parts: Sequence[PackedFile], encoder: DeltaEncoder, plans: Plans, blocks: Iterable[BlockMade]
) -> BuiltFiles | None:
    """Return what others have built; None where that was by other plans, or not all of it.

    Args:
        parts: which blocks go into which file.
        encoder: would encode them.
        plans: how each tensor is stored.
        blocks: of the files, as they were made.
    """
    held: dict[str, list[BlockMade]] = {}
    for one in blocks:
        held.setdefault(one.file, []).append(one)
    built = BuiltFiles(Rows([pair.blocks for pair in encoder.pairs]))
    for part in parts:
        made = sorted(held.get(part.path, ()), key=lambda one: one.number)
        fingerprint = plans_digest(plans, (tensor for tensor, _ in part.blocks))
        receipt = PartRecord.parse(made[-1].note, fingerprint, len(part)) if made else None
        if receipt is None or len(made) != max(1, block_count(receipt.size)):
            return None
        built.add(part, receipt, made)
    return built


def _files(
    parts: Iterator[PackedFile],
    counter: Counter,
    jobs: int,
    *,
    encoder: DeltaEncoder,
    plans: Plans,
    staging: Staging,
    seen: Sequence[Seen],
) -> Iterator[_Made]:
    """Yield the file of each part; several threads make them."""
    opened: dict[int, Upload] = {}

    def encode(part: PackedFile) -> _Encoded:
        staged = staging.open(_file(part, part.nbytes), at_most=True)
        if staged.upload is not None:
            opened[part.number] = staged.upload
        fingerprint = plans_digest(plans, (tensor for tensor, _ in part.blocks))
        known = _taken_over(part, staged, staging, fingerprint)
        if known is not None:
            counter.add(part.nbytes)
            numbers = range(max(1, block_count(known.size)))
            before = [staged.earlier[n] for n in numbers]
            return _Encoded(part, staged.upload, known, before, True, _drained(seen))
        if staged.upload is None:
            raise RefusedError(
                f"an earlier run has encoded {part.path} otherwise",
                hint="--restart builds it anew",
                file=part.path,
            )
        receipt = PartRecord(fingerprint)
        writer = _Writer(part.path, staged.upload)
        for tensor, block in part.blocks:
            made = encoder.encode(tensor, block, plans[tensor])
            target, base = receipt.sums.get(tensor, (ElementSums(), ElementSums()))
            stored = made.at(part.number, writer.append(made.payload))
            receipt.add(tensor, stored, target.and_of(made.target), base.and_of(made.base))
            counter.add(made.nbytes)
        receipt.size = writer.size
        blocks = writer.end(receipt.dump())
        for one in blocks:
            staging.add(one)
        return _Encoded(part, staged.upload, receipt, blocks, False, _drained(seen))

    def finish(encoded: _Encoded) -> _Made:
        part, upload, receipt, blocks, found, read = encoded
        if upload is not None:
            upload.finish(receipt.size)
            staging.finished(_file(part, receipt.size), blocks)
            del opened[part.number]
        return _Made(part.number, receipt, blocks, found, read)

    try:
        # A disk takes a while to flush a file; who encodes the next one does not wait for it.
        yield from run(run(parts, encode, jobs=jobs, window=jobs), finish, jobs=_FLUSHES)
    finally:
        for upload in opened.values():
            upload.close()


def _drained(seen: Sequence[Seen]) -> list[SeenRuns | ReadForProof]:
    return [one.drain() for one in seen]


class _Writer:
    """Writes one data file from its beginning to its end.

    Args:
        path: the file's name.
        upload: takes its bytes.
    """

    def __init__(self, path: str, upload: Upload) -> None:
        import xxhash

        self.size = 0
        self._path = path
        self._upload = upload
        # A store that wants whole parts gets them at once.
        self._held = bytearray() if upload.unit > 1 else None
        self._state = xxhash.xxh3_128()
        self._blocks: list[BlockMade] = []

    def append(self, payload: bytes | memoryview) -> int:
        """Write bytes at the end, and return where they lie."""
        offset, view = self.size, memoryview(payload)
        while view:
            part = view[: BLOCK - self.size % BLOCK]
            self._state.update(part)
            if self._held is None:
                self._upload.write(self.size, part)
            else:
                self._held += part
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK == 0:
                self._end_block()
        return offset

    def end(self, note: str) -> list[BlockMade]:
        """Write what is left; return the blocks, the last with a note: without it none counts."""
        if self.size % BLOCK or not self.size:
            self._end_block()
        *rest, last = self._blocks
        return [*rest, last._replace(note=note)]

    def _end_block(self) -> None:
        number = len(self._blocks)
        if self._held:
            self._upload.write(number * BLOCK, memoryview(self._held))
            self._held = bytearray()
        self._blocks.append(BlockMade(self._path, number, self._state.digest()))
        self._state.reset()


def _taken_over(
    part: PackedFile, staged: StagedFile, staging: Staging, plans: str
) -> PartRecord | None:
    """Return the receipt of a file that an earlier run has made, if all of it is still there."""
    notes = [made.note for made in staged.earlier.values() if made.note]
    receipt = PartRecord.parse(notes[-1], plans, len(part)) if notes else None
    if receipt is None or receipt.size > part.nbytes:
        return None
    numbers = range(max(1, block_count(receipt.size)))
    if any(number not in staged.earlier for number in numbers):
        return None
    if staged.upload is None or not receipt.size:
        return receipt
    file = _file(part, receipt.size)
    return receipt if all(staging.holds(file, staged.earlier[n]) for n in numbers) else None


def _file(part: PackedFile, size: int) -> OutputFile:
    return OutputFile(part.path, [Zeros(size)])
