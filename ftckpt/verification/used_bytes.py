"""The bytes of a checkpoint that a part of its tensors and objects needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from ftckpt.checkpoint import Checkpoint


class UsedBytes:
    """Says which ranges of files are needed.

    A file in which no tensor and no object has a known place is needed as a whole.

    Args:
        checkpoint: the whole.
        names: keys of tensors and names of objects that are needed.
    """

    def __init__(self, checkpoint: Checkpoint, names: Collection[str]) -> None:
        runs: dict[str, list[tuple[int, int]]] = {}
        for extent, owner, _ in checkpoint.extents_by_owner():
            held = runs.setdefault(extent.file, [])
            if owner in names and extent.length:
                held.append((extent.offset, extent.end))
        self._runs: dict[str, tuple[list[int], list[int]]] = {}
        for file, held in runs.items():
            starts: list[int] = []
            ends: list[int] = []
            for start, end in sorted(held):
                if ends and start <= ends[-1]:
                    ends[-1] = max(ends[-1], end)
                else:
                    starts.append(start)
                    ends.append(end)
            self._runs[file] = starts, ends

    def takes(self, file: str, start: int, end: int) -> bool:
        """Whether a range of a file holds needed bytes."""
        known = self._runs.get(file)
        if known is None:
            return True
        starts, ends = known
        number = bisect_right(ends, start)
        return number < len(starts) and starts[number] < end
