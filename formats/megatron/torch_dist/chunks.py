"""Buckets of Megatron's distributed optimizer as a DCP store holds them, and pieces of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ftckpt.checkpoint import Box, Extent, Piece, TensorInfo
from ftckpt.formats.megatron.optimizer.buffers import Slot
from ftckpt.formats.torch_files.lazy_pieces import LazyPieces

_NOWHERE = Extent("", 0, 0)


class Bucket:
    """One kind of state of one bucket: a flat tensor, whose chunks are cut at its parameters."""

    def __init__(self, info: TensorInfo) -> None:
        """Keep a stored tensor of one dimension."""
        assert isinstance(info.pieces, LazyPieces)
        self.info = info
        self.pieces = info.pieces

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """First element, end and index of each chunk, in the order of the bucket."""
        boxes = map(self.pieces.box, range(len(self.pieces)))
        return sorted((o[0], o[0] + s[0], index) for index, (o, s) in enumerate(boxes))

    @cached_property
    def cuts(self) -> frozenset[int]:
        """Where chunks begin and end; nowhere, where they do not tile the bucket."""
        ends = [0, *(stop for _, stop, _ in self.chunks)]
        tiled = ends[:-1] == [start for start, _, _ in self.chunks] and ends[-1] == self.numel
        return frozenset(ends if tiled else ())

    @property
    def numel(self) -> int:
        """Elements of the bucket, without the padding at its end."""
        return self.info.shape[0]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield index, first element, and the part of [start, stop) of each chunk that has some."""
        at = bisect_right(self.chunks, (start, self.numel + 1, 0)) - 1
        while 0 <= at < len(self.chunks) and self.chunks[at][0] < stop:
            first, end, index = self.chunks[at]
            if end > start:
                yield index, first, max(start, first), min(stop, end)
            at += 1


# Bucket -> kind of state -> what is stored, of one buffer.
Buckets = Mapping[int, Mapping[str, Bucket]]


class Owned(NamedTuple):
    """What one rank has of one parameter."""

    boxes: tuple[Box, ...]  # the boxes of its own part, in the order of that part
    buckets: Buckets  # of the buffer that it is in
    slot: Slot  # where it is there
    replica: int  # 0 for the first rank that has these boxes, then 1, 2, …


class BucketPieces(LazyPieces):
    """The pieces of one kind of a parameter's state: ranges of chunks of buckets."""

    __slots__ = ("_found", "_owned", "_state")

    def __init__(self, state: str, owned: Sequence[Owned]) -> None:
        """Keep the kind of state, and what each rank has of the parameter."""
        self._state = state
        self._owned = owned
        self._found: list[tuple[Bucket, int, Piece]] | None = None

    def _ranges(self) -> list[tuple[Bucket, int, Piece]]:
        """Return bucket, chunk, and the piece but for its place in a file."""
        if self._found is None:
            self._found = []
            for boxes, buckets, slot, replica in self._owned:
                bucket = buckets[slot.bucket][self._state]
                start = slot.start
                for box in boxes:
                    for index, first, low, high in bucket.within(start, start + box.volume):
                        flat = (low - start, high - start)
                        at = low - first
                        piece = Piece(box, _NOWHERE, flat, None, replica, None, True, at)
                        self._found.append((bucket, index, piece))
                    start += box.volume
        return self._found

    def __len__(self) -> int:
        return len(self._ranges())

    def box(self, index: int) -> Box:
        """Return the box of the rank's part that one piece is a range of."""
        return self._ranges()[index][2].box

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        bucket, chunk, piece = self._ranges()[index]
        stored = bucket.pieces.piece(chunk)
        return piece._replace(extent=stored.extent, rank=stored.rank)
