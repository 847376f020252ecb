"""A checkpoint against another copy: the same bytes, or the same tensors."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from ftckpt.extents import BLOCK
from ftckpt.findings import Finding
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification.evidence import ContentResult
from ftckpt.verification.replica import _narrow, check_against, check_tensors_against
from ftckpt.workers import Work
from tests.builders.checkpoints import copy, flip, open_checkpoint, save_dcp

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(tmp_path_factory.mktemp("whole") / "step-7")


@pytest.fixture
def replica(whole: Path, tmp_path: Path) -> Path:
    return copy(whole, tmp_path / "replica")


def check(path: Path, replica: Path, **options: Any) -> tuple[ContentResult, list[Finding]]:
    found: list[Finding] = []
    other = Source.directory(open_store(str(replica)))
    checkpoint = open_checkpoint(path)
    return check_against(checkpoint, other, emit=found.append, **options), found


@pytest.mark.parametrize("jobs", [1, 2])
def test_equal_copies_are_equal(whole: Path, replica: Path, jobs: int) -> None:
    result, found = check(whole, replica, work=Work(threads=jobs))
    size = sum((whole / n).stat().st_size for n in (".metadata", DATA))
    assert (result, found) == (ContentResult("replica", size, size, 0, None, True), [])


@pytest.mark.parametrize("places", [[0], [43_000], [5, 6, 30_000]])
def test_a_difference_is_narrowed_to_its_bytes(
    whole: Path, replica: Path, places: list[int]
) -> None:
    for place in places:
        flip(replica / DATA, place)
    result, found = check(whole, replica, owners=lambda *range: [("w", 3)])
    (one,) = found
    assert not result.ok
    assert (one.kind, one.file, one.tensor, one.rank) == ("differs-from-replica", DATA, "w", 3)
    assert (one.offset, one.length) == (places[0], places[-1] + 1 - places[0])
    assert str(replica) in one.message


def test_differences_are_located_across_blocks(whole: Path, replica: Path, tmp_path: Path) -> None:
    mine = copy(whole, tmp_path / "mine")
    for path in (mine, replica):
        os.truncate(path / DATA, BLOCK + (3 << 20))
    for place in (BLOCK - 1, BLOCK, BLOCK + (2 << 20) + 7):
        with (mine / DATA).open("r+b") as file:
            file.seek(place)
            file.write(b"!")
    _, found = check(mine, replica)
    assert sorted((f.offset, f.length) for f in found) == [
        (BLOCK - 1, 1),
        (BLOCK, (2 << 20) + 8),
    ]


def test_other_sizes_and_absent_files_are_reported(whole: Path, replica: Path) -> None:
    os.truncate(replica / DATA, 100)
    (replica / ".metadata").unlink()
    result, found = check(whole, replica)
    size = (whole / DATA).stat().st_size
    assert [(f.file, f.offset, f.length) for f in found] == [
        (".metadata", None, None),
        (DATA, 100, size - 100),
    ]
    assert not result.ok
    assert result.bytes_read == 100


def test_narrowing_finds_the_first_and_the_last() -> None:
    draw = random.Random(0)
    for _ in range(200):
        a = bytearray(draw.randbytes(draw.randrange(1, 50)))
        b = bytearray(a)
        places = sorted(draw.sample(range(len(a)), draw.randrange(1, len(a) + 1)))
        for place in places:
            b[place] ^= 1 + draw.randrange(255)
        assert _narrow(bytes(a), bytes(b)) == (places[0], places[-1])


def save_other(path: Path, *, change: str = "") -> Path:
    """Save the tensors of `save_dcp` as a safetensors file, changed as asked."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(64, 33) for i in range(4)}
    if change == "element":
        state["layers.2.weight"][3, 4] += 1
    elif change == "shape":
        state["layers.2.weight"] = state["layers.2.weight"].reshape(33, 64)
    elif change == "name":
        state["other"] = state.pop("layers.2.weight")
    save_file(state, path)
    return path


@pytest.mark.parametrize(
    ("change", "tensors", "word"),
    [
        ("", [], ""),
        ("element", ["layers.2.weight"], "other elements"),
        ("shape", ["layers.2.weight"], "float32[64, 33] against float32[33, 64]"),
        ("name", ["layers.2.weight", "other"], "is not in"),
    ],
)
def test_tensors_are_compared_across_formats(
    whole: Path, tmp_path: Path, change: str, tensors: list[str], word: str
) -> None:
    other = save_other(tmp_path / "model.safetensors", change=change)
    found: list[Finding] = []
    result = check_tensors_against(
        open_checkpoint(whole), open_checkpoint(other), emit=found.append, work=Work(threads=2)
    )
    assert [f.tensor for f in found] == tensors
    assert all(word in f.message for f in found)
    assert result.ok == (not tensors)
    assert result.bytes_read == (4 - (change == "name")) * 64 * 33 * 4
