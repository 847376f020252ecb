"""Separate main pieces of a tensor from the replicas that repeat them.

A reader takes a tensor's elements from the main pieces. A trainer's rank loads its own files,
replica or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Box, Piece, TensorInfo


class Copies(NamedTuple):
    """Elements of a tensor, and the pieces with exactly these: one, or several copies.

    Attributes:
        box: in the tensor.
        start: the first element, in the box's C order.
        stop: one more than the last.
        pieces: a main one first, if there is one. Each has its own order in its file.
    """

    box: Box
    start: int
    stop: int
    pieces: Sequence[Piece]

    @property
    def replicas(self) -> Sequence[Piece]:
        """The pieces that are not main pieces."""
        return self.pieces if self.pieces[0].replica else self.pieces[1:]


def copies_of(info: TensorInfo) -> Iterator[Copies]:
    """Yield the pieces of a tensor, grouped by equal elements.

    Those with main pieces come first, in their order. A replica with elements of no single main
    piece is a group of its own.
    """
    pieces = [piece for piece in info.pieces if piece.box.volume]
    repeated: dict[tuple[Box, int, int], list[Piece]] = {}
    for piece in pieces:
        if piece.replica:
            repeated.setdefault(_place(piece), []).append(piece)
    for piece in pieces:
        if not piece.replica:
            place = _place(piece)
            yield Copies(*place, (piece, *repeated.pop(place, ())))
    for place, replicas in repeated.items():
        yield Copies(*place, replicas)


def _place(piece: Piece) -> tuple[Box, int, int]:
    start, stop = piece.flat or (0, piece.box.volume)
    return piece.box, start, stop
