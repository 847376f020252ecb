"""Pages of a file that were never written, and zeros that are a tensor's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ftckpt import verify
from ftckpt.checkpoint import Box, Extent, Piece
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import ExitCode
from ftckpt.verification.values.numbers import PAGE, ZeroPages

Array = np.ndarray[Any, Any]

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


def warns(tensor: Array, start: int = PAGE, flat: tuple[int, int] | None = None) -> int:
    """Return the runs in a tensor that begins at a byte of the file."""
    part = tensor.reshape(-1)[slice(*flat) if flat else slice(None)].tobytes()
    box = Box((0,) * tensor.ndim, tensor.shape)
    piece = Piece(box=box, extent=Extent("f", start, len(part)), flat=flat)
    pages = ZeroPages(piece, DType("float32", 32, "float"), start, len(part))
    pages.take(part)
    pages.finish()
    return pages.runs


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def wide(low: int, high: int) -> Array:
    """Return rows of four pages with zeros in each row."""
    tensor = random(8, 4096)
    tensor[:, low:high] = 0
    return tensor


def positions() -> Array:
    angles = np.arange(16)[:, None] / 10000 ** (np.arange(1024) / 1024)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1, dtype=np.float32)


OWN: dict[str, Callable[[], Array]] = {
    "a causal mask": lambda: np.tril(np.ones((1, 1, 2048, 2048), np.float32)),
    "its other half": lambda: np.triu(np.ones((1, 1, 2048, 2048), np.float32)),
    "padded rows": lambda: wide(1024, 4096),
    "rows padded before": lambda: wide(0, 1024),
    "a block": lambda: wide(1024, 3072),
    "sines beside cosines": positions,
}


@pytest.mark.parametrize("name", OWN)
def test_zeros_of_a_tensor_that_begin_and_end_at_pages(name: str) -> None:
    assert warns(OWN[name]()) == 0


@pytest.mark.parametrize("parts", [3, 5, 7])
def test_an_unused_row_may_be_cut_by_the_end_of_a_flat_partition(parts: int) -> None:
    tensor = random(64, 2048)
    tensor[[row for row in range(64) if row not in (0, 3, 9, 30, 50)]] = 0
    length = tensor.size // parts // 64 * 64
    for begin in range(0, parts * length, length):
        flat = begin, begin + length
        assert not any(warns(tensor, start, flat) for start in range(0, PAGE, 256))


def test_a_page_that_was_lost_in_the_middle_of_a_row_or_over_several() -> None:
    for low, high in ((1024, 2048), (1024, 7 * 1024), (1024, 8 * 4096)):
        tensor = random(8, 4096)
        tensor.reshape(-1)[low:high] = 0
        assert warns(tensor) == 1


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
