"""One flipped bit in an unsealed distributed checkpoint: found, and located.

Nothing but the CRC-32s that torch wrote into the items is used. `--campaign full` flips a bit in
every byte; without it a sample of each kind of record, and every boundary of one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

from ftckpt.checkpoint import Record
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Severity
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.reader import DcpCheckpoint
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.formats.dcp.writing import DATA, save

A_KIND = 12


class Target(NamedTuple):
    """A checkpoint in memory, and what lies where in it."""

    store: Store
    files: dict[str, bytes]
    records: list[Record]
    names: dict[str, str]


def target(path: Path, name: str) -> Target:
    store = open_store(f"memory://flips-{name}")
    files = {f.name: f.read_bytes() for f in path.iterdir()}
    for file, data in files.items():
        store.put(file, data)
    checkpoint = opened(store)
    return Target(store, files, list(checkpoint.records()), dict(checkpoint.stored))


def opened(store: Store) -> DcpCheckpoint:
    return Dcp().open(Source.directory(store))


def flipped(which: Target, file: str, at: int, bit: int) -> VerifyReport | FtckptError:
    data = bytearray(which.files[file])
    data[at] ^= 1 << bit
    which.store.put(file, bytes(data))
    try:
        return verify(opened(which.store), VerifyOptions(level=Level.CONTENT))
    except FtckptError as error:
        return error
    finally:
        which.store.put(file, which.files[file])


@pytest.fixture(scope="module")
def sharded() -> Target:
    return target(DATA / "hsdp" / "step-3", "sharded")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Target:
    state = {"model": {"a": torch.arange(300.0), "b": torch.ones(2)}, "n": [1, 2]}
    path = save(state, tmp_path_factory.mktemp("zstd") / "c", _extensions=[ZStandard()])
    return target(path, "compressed")


def positions(which: Target, campaign: str) -> list[tuple[Record, int]]:
    """Return the bytes to damage: of every record kind, its first, its last, and some between."""
    choose = random.Random(7)
    chosen: list[tuple[Record, int]] = []
    kinds: dict[str, list[tuple[Record, int]]] = {}
    for record in which.records:
        place = record.extent
        every = [(record, at) for at in range(place.offset, place.end)]
        if campaign == "full":
            chosen += every
        elif every:
            chosen += [every[0], every[-1]]
            kinds.setdefault(f"{record.owner in which.names}{place.length}", []).extend(every)
    for every in kinds.values():
        chosen += choose.sample(every, min(A_KIND, len(every)))
    return list(dict.fromkeys(chosen))


def test_a_flip_in_a_record_is_found_and_located(
    sharded: Target, pytestconfig: pytest.Config
) -> None:
    choose = random.Random(1)
    tried = positions(sharded, pytestconfig.getoption("campaign"))
    assert len(tried) > 150
    for record, at in tried:
        answer = flipped(sharded, record.extent.file, at, choose.randrange(8))
        assert isinstance(answer, VerifyReport)
        assert answer.code in (ExitCode.CORRUPT, ExitCode.UNSAFE), (record, at)
        located = [
            f
            for f in answer.findings
            if f.severity is Severity.ERROR
            and f.file == record.extent.file
            and f.tensor == record.owner
            and f.offset is not None
            and f.offset <= at < f.offset + (f.length or 0)
        ]
        assert located, (record, at, answer.findings)
        # Nothing else is blamed.
        blamed = {f.tensor for f in answer.findings if f.severity is Severity.ERROR}
        assert blamed == {record.owner}


def test_a_flip_anywhere_else_ends_in_an_answer_and_is_said_not_to_be_covered(
    sharded: Target, pytestconfig: pytest.Config
) -> None:
    choose = random.Random(2)
    covered = {
        (r.extent.file, at) for r in sharded.records for at in range(r.extent.offset, r.extent.end)
    }
    bare = [
        (file, at)
        for file, data in sharded.files.items()
        for at in range(len(data))
        if (file, at) not in covered
    ]
    if pytestconfig.getoption("campaign") == "short":
        bare = choose.sample(bare, 100)
    total = sum(map(len, sharded.files.values()))
    silent = 0
    for file, at in bare:
        answer = flipped(sharded, file, at, choose.randrange(8))
        if isinstance(answer, FtckptError):
            assert answer.exit_code in (ExitCode.CORRUPT, ExitCode.UNSAFE, ExitCode.UNSUPPORTED)
        elif answer.code is ExitCode.OK:
            silent += 1
            (note,) = [f for f in answer.findings if f.kind == "not-covered"]
            assert note.length == answer.bytes_uncovered
            assert answer.bytes_covered + answer.bytes_uncovered == total
    assert silent  # padding is there, and no CRC covers it


def test_every_byte_is_covered_or_said_not_to_be(sharded: Target) -> None:
    answer = verify(opened(sharded.store))
    assert answer.evidence == "crc32"
    assert answer.bytes_covered == sum(r.extent.length for r in sharded.records)
    assert answer.bytes_covered + answer.bytes_uncovered == sum(map(len, sharded.files.values()))
    (note,) = [f for f in answer.findings if f.kind == "not-covered"]
    assert ".metadata" in note.message


def test_a_flip_in_a_compressed_item_is_found_or_changes_no_element(
    compressed: Target, pytestconfig: pytest.Config
) -> None:
    choose = random.Random(3)
    good = opened(compressed.store)
    truth = {key: read_tensor(good, key) for key in good.tensors}
    objects = {name: good.load_object(name) for name in good.objects}
    (file,) = [name for name in compressed.files if name.endswith(".distcp")]
    size = len(compressed.files[file])
    every = list(range(size))
    chosen = every if pytestconfig.getoption("campaign") == "full" else choose.sample(every, 120)
    found = 0
    for at in chosen:
        bit = choose.randrange(8)
        answer = flipped(compressed, file, at, bit)
        assert isinstance(answer, VerifyReport)
        if answer.code is not ExitCode.OK:
            found += 1
            located = [f for f in answer.findings if f.file == file and f.tensor is not None]
            assert located, (at, answer.findings)
            continue
        # zstd may decode to other padding between the records, which nothing reads.
        data = bytearray(compressed.files[file])
        data[at] ^= 1 << bit
        compressed.store.put(file, bytes(data))
        bad = opened(compressed.store)
        assert {key: read_tensor(bad, key) for key in bad.tensors} == truth
        assert {name: bad.load_object(name) for name in bad.objects} == objects
        compressed.store.put(file, compressed.files[file])
    assert found > len(chosen) // 2


def test_records_without_a_crc_are_no_evidence_and_no_damage(tmp_path: Path) -> None:
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"model": {"a": torch.arange(9.0)}, "n": 1}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(was)
    which = target(path, "no-crc")
    answer = verify(opened(which.store))
    assert answer.code is ExitCode.OK
    assert any(f.kind == "no-crc" and f.severity is Severity.NOTE for f in answer.findings)
    strict = VerifyOptions(require_content=True)
    assert verify(opened(which.store), strict).code is ExitCode.UNVERIFIED
    assert not any(r.crc32 for r in which.records if r.owner == "a" and r.extent.length == 36)
    a = next(r for r in which.records if r.extent.length == 36)
    answer_ = flipped(which, a.extent.file, a.extent.offset, 3)
    assert isinstance(answer_, VerifyReport)
    assert not any(f.severity is Severity.ERROR for f in answer_.findings)
