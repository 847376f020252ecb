"""Which tensors and objects lie in a damaged range of a file?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ftckpt.checkpoint import Checkpoint

from .evidence import Owner


class OwnerIndex:
    """Finds owners of byte ranges; the index is built when the first damage is found."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, list[tuple[int, int, Owner]]] | None = None

    def __call__(self, file: str, offset: int, length: int) -> Sequence[Owner]:
        """Return key and rank of what has bytes in the range, in the order of its bytes."""
        if self._files is None:
            self._files = self._build()
        end = offset + length
        found: dict[Owner, None] = {}
        for start, stop, owner in self._files.get(file, ()):
            if start < end and stop > offset:
                found[owner] = None
        return list(found)

    def _build(self) -> dict[str, list[tuple[int, int, Owner]]]:
        files: dict[str, list[tuple[int, int, Owner]]] = defaultdict(list)
        for extent, name, rank in self._checkpoint.holdings():
            files[extent.file].append((extent.offset, extent.end, (name, rank)))
        for owners in files.values():
            owners.sort(key=lambda item: item[:2])
        return files
