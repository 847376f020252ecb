"""The data files of a new distributed checkpoint: one per rank, items in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ftckpt.transfer.layout import OutputFile, Segment

from .write_metadata import ItemPlace


class RankFiles:
    """One data file per rank; `sizes` are their bytes so far."""

    def __init__(self, world: int) -> None:
        """Start with empty files of `world` ranks."""
        self.sizes = [0] * world
        self._segments: list[list[Segment]] = [[] for _ in range(world)]

    def add(
        self, rank: int, segments: list[Segment], transforms: tuple[str, ...] = ()
    ) -> ItemPlace:
        """Put an item at the end of a rank's file."""
        start = self.sizes[rank]
        length = sum(segment.nbytes for segment in segments)
        self.sizes[rank] = start + length
        self._segments[rank] += segments
        return ItemPlace(_file(rank), start, length, transforms)

    def lightest(self, ranks: Iterable[int] | None = None) -> int:
        """Return the rank, of `ranks` or of all, with the smallest file; the first of equals."""
        return min(range(len(self.sizes)) if ranks is None else ranks, key=self.sizes.__getitem__)

    def outputs(self) -> Iterator[OutputFile]:
        """Yield the files of all ranks; like torch, an empty one for a rank without items."""
        for rank, segments in enumerate(self._segments):
            yield OutputFile(_file(rank), segments)


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"
