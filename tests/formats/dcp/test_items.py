"""Items of a distributed checkpoint: how they are read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint import Extent
from ftckpt.errors import ExitCode
from ftckpt.formats.dcp import Dcp
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from tests.conformance.formats import open_path
from tests.formats.dcp.writing import save

RECORDS = 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint with an object of many records, as the state of random generators is."""
    states = Namespace(states=[torch.randn(1000) for _ in range(RECORDS)])
    save({"weight": torch.randn(30, 30), "rng": states}, tmp_path / "step-1")
    return tmp_path / "step-1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many places each read of files asks for, as they are read."""
    asked: list[int] = []
    read, read_many = Source.read, Source.read_many

    def one(source: Source, name: str, offset: int = 0, length: int | None = None) -> bytes:
        asked.append(1)
        return read(source, name, offset, length)

    def many(source: Source, extents: Sequence[Extent]) -> list[bytes]:
        asked.append(len(extents))
        return read_many(source, extents)

    monkeypatch.setattr(Source, "read", one)
    monkeypatch.setattr(Source, "read_many", many)
    return asked


def test_the_headers_of_an_objects_records_are_read_at_once(path: Path, asked: list[int]) -> None:
    checkpoint = open_path(Dcp(), path)
    asked.clear()
    assert verify(checkpoint, VerifyOptions(Level.STRUCTURE)).code is ExitCode.OK
    assert max(asked) > RECORDS
    assert len(asked) < 10


def test_the_objects_of_many_ranks_are_read_at_once(tmp_path: Path, asked: list[int]) -> None:
    """Their pickles and directories are longer than what is read of a tensor's record."""
    state = {f"rng_{n}": Namespace(states=[torch.randn(200)] * 2, s="x" * 9000) for n in range(6)}
    save({**state, "w": torch.ones(2)}, tmp_path / "step-1")
    checkpoint = open_path(Dcp(), tmp_path / "step-1")
    asked.clear()
    assert verify(checkpoint, VerifyOptions(Level.STRUCTURE)).code is ExitCode.OK
    assert set(asked) == {6, 7}  # once for each who looks; one looks at the tensor's record too


def test_a_header_in_the_midst_of_an_object_is_still_looked_at(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = data.index(b"/data/9", data.index(b"/data/8") + 1)
    data[place + 6] = ord("8")
    file.write_bytes(data)
    answer = verify(open_path(Dcp(), path), VerifyOptions(Level.STRUCTURE))
    assert answer.code is not ExitCode.OK
    assert [(f.kind, f.tensor) for f in answer.findings if "9" in f.message] == [
        ("unsafe-zip", "rng")
    ]
