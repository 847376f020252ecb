"""Pages of a file that were never written, and zeros that are a tensor's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ftckpt.api import verify
from ftckpt.checkpoint import Box, Extent, Piece
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import ExitCode
from ftckpt.verification.zero_pages import PAGE, ZeroPages

ROWS, COLUMNS, START = 64, 250, 120
LENGTH = ROWS * COLUMNS * 4
ROW = COLUMNS * 4


def looked(spans: list[tuple[int, int]], step: int = LENGTH, sizes: tuple[int, ...] = ()) -> int:
    """Return the runs in a tensor whose bytes are zero in `spans` of the file."""
    data = np.full(START + LENGTH, 7, np.uint8)
    for begin, end in spans:
        data[begin:end] = 0
    box = Box((0, 0), sizes or (ROWS, COLUMNS))
    piece = Piece(box=box, extent=Extent("f", START, LENGTH))
    pages = ZeroPages(piece, DType("float32", 32, "float"), START, LENGTH)
    raw = data[START:].tobytes()
    for begin in range(0, LENGTH, step):
        pages.take(raw[begin : begin + step])
    pages.finish()
    return pages.runs


@pytest.mark.parametrize("step", [LENGTH, PAGE, 10_000, 4])
@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([(PAGE, 2 * PAGE)], 1),
        ([(PAGE, 9 * PAGE)], 1),
        ([(PAGE, 2 * PAGE), (3 * PAGE, 4 * PAGE)], 2),
        ([(START, 2 * PAGE)], 1),  # from its first byte
        ([(PAGE, START + LENGTH)], 1),  # to its last one
        ([(PAGE, 2 * PAGE + 4)], 0),  # to no page
        ([(PAGE - 4, 2 * PAGE)], 0),
        ([(START + 10 * ROW, START + 20 * ROW)], 0),  # whole rows
        ([(START, START + LENGTH)], 0),  # it is zero
        ([], 0),
    ],
)
def test_runs(spans: list[tuple[int, int]], runs: int, step: int) -> None:
    assert looked(spans, step) == runs


def test_rows_that_end_at_pages_are_rows() -> None:
    assert looked([(PAGE, 2 * PAGE)], sizes=(LENGTH // 8, 2)) == 0  # rows of 8 bytes, from byte 120


def test_verify_says_it_and_strict_refuses_it(tmp_path: Path) -> None:
    file = tmp_path / "ck" / "model.safetensors"
    file.parent.mkdir()
    save_file({"w": torch.ones(64, 250), "v": torch.ones(7)}, file)
    sound = verify(str(file.parent), level="values")
    assert "zero-pages" not in {one.kind for one in sound.findings}
    data = bytearray(file.read_bytes())
    data[2 * PAGE : 3 * PAGE] = bytes(PAGE)
    file.write_bytes(data)
    (found,) = (
        f for f in verify(str(file.parent), level="values").findings if f.kind == "zero-pages"
    )
    assert (found.tensor, found.offset, found.length) == ("w", 2 * PAGE, PAGE)
    assert verify(str(file.parent), level="values", strict=["values"]).code is ExitCode.CORRUPT
