"""Every kept hostile archive is refused, with its own finding, its exit code and little memory."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest
import torch

from ftckpt.errors import worst
from ftckpt.formats.torchsave import TorchSave
from tests.conformance.formats import findings_of
from tests.data.hostile.make_zips import GOOD, HERE, ZIPS, files

MEMORY = 64 << 20


@pytest.mark.parametrize("name", ZIPS)
def test_a_hostile_archive_is_refused(name: str) -> None:
    case = ZIPS[name]
    tracemalloc.start()
    try:
        found = findings_of(TorchSave(), HERE / "zip" / f"{name}.pt")
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert case.kind in {f.kind for f in found}, found
    assert worst(f.code for f in found) == case.code, found
    assert all(len(f.message) < 300 and f.file == f"{name}.pt" for f in found)


def test_the_good_archive_is_good(tmp_path: Path) -> None:
    assert torch.load(io.BytesIO(GOOD), weights_only=True)["w"].tolist() == [1, 2, 3]
    (tmp_path / "good.pt").write_bytes(GOOD)
    assert findings_of(TorchSave(), tmp_path / "good.pt") == []


def test_the_kept_files_are_what_the_script_writes() -> None:
    kept = {f"zip/{p.name}": p.read_bytes() for p in (HERE / "zip").iterdir()}
    assert kept == files()
    assert len(ZIPS) >= 40
