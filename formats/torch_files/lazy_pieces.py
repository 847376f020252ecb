"""Pieces of tensors, made when asked for: there may be a million, and few are looked at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from ftckpt.checkpoint import Box, Piece


class LazyPieces(Sequence[Piece]):
    """The pieces of one tensor."""

    __slots__ = ()

    @abstractmethod
    def piece(self, index: int) -> Piece:
        """Return one piece; `index` is in range.

        Raises:
            CorruptError: it lies in no file.
        """

    @abstractmethod
    def box(self, index: int) -> Box:
        """Return the box of one piece, whether it lies in a file or not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.piece(range(len(self))[index])
