"""Pages of zeros inside a tensor that is not zero: what a crash leaves of pages never written.

A run of zeros is suspicious where it begins and ends exactly at pages of the file (or at an end of
the piece), between elements that are not zero, and tensors do not look so by themselves:

- Padded vocabularies, unused embeddings and pruned blocks are whole rows. An end of the piece is
  the end of a row as well, because a flat partition may cut it.
- Causal masks, padded rows and tables of positions are zero from or to the end of a row.
- Blocks of zeros are at the same place in the row before or after.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from ftckpt.checkpoint import Piece
from ftckpt.checkpoint.dtypes import DType

PAGE = 4096
# Runs of one piece that are remembered.
_MOST = 10_000


class ZeroPages:
    """Looks for pages of zeros in the bytes of one piece, block after block.

    Args:
        piece: whose bytes lie dense in C order.
        dtype: of its elements.
        start: the offset of its first byte in the file.
        length: of the bytes.

    Attributes:
        runs: how many there are, once it has finished.
        first: the bytes of the first of them in the file.
    """

    def __init__(self, piece: Piece, dtype: DType, start: int, length: int) -> None:
        sizes, size = piece.box.sizes, dtype.itemsize
        self._rows = [prod(sizes[axis:]) * size for axis in range(1, len(sizes))]
        self._shift = start - (0 if piece.flat is None else piece.flat[0] * size)
        self._start, self._end, self._size = start, start + length, size
        self._at, self._last, self._begun, self._sharp = start, b"", -1, False
        self._found: list[tuple[int, int]] = []
        self.runs = 0
        self.first = (0, 0)

    def take(self, block: bytes) -> None:
        """Look at the bytes that follow."""
        import numpy as np

        if not self._rows:
            return
        lead = min(-self._at % PAGE, len(block))
        pages = (len(block) - lead) // PAGE
        tail = lead + pages * PAGE
        words = np.frombuffer(block, np.uint64, pages * PAGE // 8, lead).reshape(pages, PAGE // 8)
        full = np.ones(pages, np.bool_)
        doubted = np.flatnonzero((words[:, 0] == 0) & (words[:, -1] == 0))
        full[doubted] = words[doubted].any(axis=1)
        if self._begun < 0 and full.all() and any(block[tail:]) and any(block[:lead]):
            self._at, self._last = self._at + len(block), block[-self._size :]
            return
        changes = np.flatnonzero(full[1:] != full[:-1]) + 1
        bounds = [lead + int(page) * PAGE for page in (*changes, pages)] if pages else []
        cuts = sorted({0, lead, *bounds, len(block)})
        for begin, end in pairwise(cuts):
            inner = lead <= begin < tail
            empty = not (full[(begin - lead) // PAGE] if inner else any(block[begin:end]))
            if empty and self._begun < 0:
                before = (self._last + block[max(0, begin - self._size) : begin])[-self._size :]
                self._begun = self._at + begin
                self._sharp = any(before) or self._begun == self._start
            elif not empty and self._begun >= 0:
                self._run(self._at + begin, after=any(block[begin : begin + self._size]))
        self._at, self._last = self._at + len(block), block[-self._size :]

    def finish(self) -> None:
        """Look at what reaches to the end of the piece, and count."""
        if self._begun > self._start:
            self._run(self._end, after=True)
        found = set(self._found)
        alone = [
            (begin, end)
            for begin, end in self._found
            if not any((begin + by, end + by) in found for row in self._rows for by in (row, -row))
        ]
        self.runs = len(alone)
        self.first = alone[0] if alone else (0, 0)

    def _run(self, end: int, *, after: bool) -> None:
        begin, self._begun = self._begun, -1
        edges = self._start, self._end
        aligned = all(at % PAGE == 0 or at in edges for at in (begin, end))
        if not (aligned and after and self._sharp) or end - begin < PAGE:
            return

        def ends(at: int, row: int) -> bool:
            return at in edges or (at - self._shift) % row == 0

        if any(ends(begin, row) and ends(end, row) for row in self._rows):
            return
        inner = self._rows[-1]
        if end - begin <= inner and (ends(begin, inner) or ends(end, inner)):
            return
        if len(self._found) < _MOST:
            self._found.append((begin, end))
