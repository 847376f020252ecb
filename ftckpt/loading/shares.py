"""What each rank of a job reads, and which of them checks what several read.

One rank has opened the checkpoint. Each other one is sent the places of the pieces that it needs,
and no more. A record, or a block of the manifest, that several ranks read is checked by one of
them: by one that reads all of it if there is one, else by the one that has least to check so far.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Piece, Record, TensorInfo
from ftckpt.checkpoint.alone import for_rank
from ftckpt.checkpoint.coverage import intersection
from ftckpt.extents import BLOCK, Extent
from ftckpt.transfer.read.copies_plan import Boxes, boxes_of_range

from .evidence import LoadEvidence, block_at

if TYPE_CHECKING:
    from ftckpt.manifest import Manifest
    from ftckpt.transfer.content import Shard

_FEW = 8


class RankShare(NamedTuple):
    """What one rank needs to read its shards.

    Attributes:
        shards: in the order in which they were asked for.
        checkpoint: reads them; None where the rank must open the checkpoint itself.
        evidence: what it checks.
    """

    shards: Sequence[Shard]
    checkpoint: Checkpoint | None
    evidence: LoadEvidence


def divide(
    checkpoint: Checkpoint,
    asked: Sequence[Sequence[Shard]],
    manifest: Manifest | None,
    *,
    check: bool,
) -> list[RankShare]:
    """Divide the reading and the checking of a checkpoint among the ranks of a job.

    Args:
        checkpoint: opened.
        asked: the shards of each rank.
        manifest: of the checkpoint; None without one.
        check: whether what is read is checked.

    Raises:
        FtckptError: the records of the checkpoint cannot be listed.
    """
    near = _Near(checkpoint)
    tensors = [near.tensors(shards) for shards in asked]
    if not check:
        off = LoadEvidence(off=True)
        return [
            RankShare(shards, for_rank(checkpoint, some), off)
            for shards, some in zip(asked, tensors, strict=True)
        ]
    records = listed_records(checkpoint, near.files(tensors))
    places = _Places(checkpoint, records, manifest)
    meets: dict[Extent, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, shards in enumerate(asked):
        for piece, share in near.met(shards):
            for unit, nbytes in places.of(piece):
                meets[unit][rank] += int(nbytes * share)
    charge = _charges(meets, len(asked))
    shares = []
    for rank, (shards, some) in enumerate(zip(asked, tensors, strict=True)):
        evidence = LoadEvidence(
            records=places.records_near(some),
            manifest=places.manifest_of(some),
            charge=frozenset(charge[rank]),
        )
        shares.append(RankShare(shards, for_rank(checkpoint, some), evidence))
    return shares


def listed_records(checkpoint: Checkpoint, files: Iterable[str]) -> list[Record]:
    """Return the records of some files that are not met on the way, by place."""
    if checkpoint.records_by_piece:
        return []
    wanted = frozenset(files)
    found = [one for one in checkpoint.records() if one.extent.file in wanted]
    return sorted(found, key=lambda record: record.extent)


def _charges(meets: Mapping[Extent, Mapping[int, int]], ranks: int) -> list[list[Extent]]:
    """Return for each rank the places that it checks."""
    charge: list[list[Extent]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(meets):
        held = meets[unit]
        most = max(held.values())
        # Reading a part more or less is all the same: what counts is reading all of it.
        best = [rank for rank, nbytes in held.items() if nbytes >= most * 0.999]
        if most < unit.length // 2:
            best = list(held)
        rank = min(best, key=lambda one: (loads[one], one))
        charge[rank].append(unit)
        loads[rank] += unit.length
    return charge


class _Near:
    """Finds the pieces that boxes of tensors meet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, tuple[list[Piece], Boxes | None]] = {}

    def tensors(self, shards: Sequence[Shard]) -> dict[str, TensorInfo]:
        """Return the tensors that some shards are filled from, with the pieces that they meet."""
        pieces: dict[str, dict[Piece, None]] = defaultdict(dict)
        for shard in shards:
            for fill in shard.fills:
                pieces[fill.key].update(dict.fromkeys(self._pieces(fill.key, fill.source)))
        infos = self._checkpoint.tensors
        return {key: infos[key]._replace(pieces=list(some)) for key, some in pieces.items()}

    def files(self, tensors: Iterable[Mapping[str, TensorInfo]]) -> set[str]:
        """Return the files that some tensors lie in."""
        return {
            piece.extent.file for some in tensors for info in some.values() for piece in info.pieces
        }

    def met(self, shards: Sequence[Shard]) -> Iterator[tuple[Piece, float]]:
        """Yield the pieces that some shards meet, and which share of each."""
        for shard in shards:
            for fill in shard.fills:
                for piece in self._pieces(fill.key, fill.source):
                    yield piece, _shared(piece, fill.source) / _volume(piece)

    def _pieces(self, key: str, box: Box) -> Iterator[Piece]:
        known = self._known.get(key)
        if known is None:
            infos = self._checkpoint.tensors[key].pieces
            main = [piece for piece in infos if not piece.replica and piece.box.volume]
            many = len(main) > _FEW and bool(main[0].box.sizes)
            index = Boxes.of([piece.box for piece in main]) if many else None
            known = self._known[key] = (main, index)
        main, index = known
        some = main if index is None else [main[number] for number in index.near(box)]
        for piece in some:
            if _shared(piece, box):
                yield piece


def _volume(piece: Piece) -> int:
    return piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]


def _shared(piece: Piece, box: Box) -> int:
    """Return how many elements of a box a piece holds."""
    if piece.flat is None:
        found = intersection(piece.box, box) if box.sizes else box
        return 0 if found is None else found.volume
    count = 0
    for part in boxes_of_range(piece.box.sizes, *piece.flat):
        begin = zip(part.offsets, piece.box.offsets, strict=True)
        found = intersection(Box(tuple(a + b for a, b in begin), part.sizes), box)
        count += 0 if found is None else found.volume
    return count


class _Places:
    """Finds what covers pieces: packed items, records, blocks of the manifest."""

    def __init__(
        self, checkpoint: Checkpoint, records: Sequence[Record], manifest: Manifest | None
    ) -> None:
        self._by_piece = checkpoint.records_by_piece
        self._records: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self._records[record.extent.file].append(record)
        self._starts = {
            file: [one.extent.offset for one in some] for file, some in self._records.items()
        }
        self._manifest = manifest

    def of(self, piece: Piece) -> Iterator[tuple[Extent, int]]:
        """Yield the places that cover a piece, and how many of its bytes lie in each."""
        extent = piece.extent
        if self._by_piece and piece.packed:
            yield extent, extent.length
        elif extent.file in self._records:
            for record in self._near(extent):
                shared = min(record.extent.end, extent.end)
                yield record.extent, shared - max(record.extent.offset, extent.offset)
        elif self._manifest is not None and extent.file in self._manifest.by_path and extent.length:
            for number in range(extent.offset // BLOCK, (extent.end - 1) // BLOCK + 1):
                block = block_at(self._manifest, extent.file, number)
                shared = min(block.end, extent.end) - max(block.offset, extent.offset)
                yield block, shared

    def _near(self, extent: Extent) -> Iterator[Record]:
        records, starts = self._records[extent.file], self._starts[extent.file]
        at = max(0, bisect_right(starts, extent.offset) - 1)
        # Records behind one compression have the same place.
        at = bisect_left(starts, starts[at]) if starts else 0
        while at < len(records) and starts[at] < extent.end:
            if records[at].extent.end > extent.offset:
                yield records[at]
            at += 1

    def records_near(self, tensors: Mapping[str, TensorInfo]) -> list[Record]:
        """Return the records that some tensors meet."""
        found: dict[tuple[Extent, tuple[int, int] | None], Record] = {}
        for info in tensors.values():
            for piece in info.pieces:
                if piece.extent.file in self._records:
                    for record in self._near(piece.extent):
                        found[record.extent, record.inner] = record
        return list(found.values())

    def manifest_of(self, tensors: Mapping[str, TensorInfo]) -> Manifest | None:
        """Return the manifest, with the files alone that some tensors lie in."""
        if self._manifest is None:
            return None
        from dataclasses import replace

        files = {piece.extent.file for info in tensors.values() for piece in info.pieces}
        kept = [one for one in self._manifest.files if one.path in files]
        return replace(self._manifest, files=tuple(kept), unmanaged=(), checks=())
