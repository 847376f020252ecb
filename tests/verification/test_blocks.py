"""A sealed checkpoint against its manifest: every kind of change is found and located."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import FtckptError, UnavailableError
from ftckpt.extents import BLOCK
from ftckpt.findings import Finding
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.storage import open_store
from ftckpt.storage.local.store import LocalReader
from ftckpt.storage.source import Source
from ftckpt.verification.blocks import check_manifest
from ftckpt.verification.evidence import ContentResult
from ftckpt.workers import Work
from tests.builders.checkpoints import copy, flip, open_checkpoint, save_dcp

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_dcp(tmp_path_factory.mktemp("sealed") / "step-7")
    (path / "notes.txt").write_text("not part of it")
    with (path / "long").open("wb") as file:  # three blocks, mostly a hole
        file.truncate(2 * BLOCK + 1000)
    checkpoint = open_checkpoint(path)
    checkpoint.members = lambda: [".metadata", DATA, "long"]  # type: ignore[method-assign]
    seal(checkpoint)
    return path


@pytest.fixture
def sealed(original: Path, tmp_path: Path) -> Path:
    path = tmp_path / "step-7"
    path.mkdir()
    for name in (".metadata", DATA, "notes.txt", "ftckpt.manifest.json"):
        (path / name).write_bytes((original / name).read_bytes())
    with (path / "long").open("wb") as file:
        file.truncate(2 * BLOCK + 1000)
    return path


def source_of(path: Path) -> tuple[Source, Manifest]:
    source = Source.directory(open_store(str(path)))
    manifest = find(source)
    assert manifest is not None
    return source, manifest


def check(path: Path, **options: Any) -> tuple[ContentResult, list[Finding]]:
    found: list[Finding] = []
    source, manifest = source_of(path)
    result = check_manifest(source, manifest, emit=found.append, **options)
    return result, [f for f in found if f.kind != "not-covered"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_did_not_change_passes(sealed: Path, jobs: int) -> None:
    result, found = check(sealed, work=Work(threads=jobs))
    assert not found
    assert result.ok
    nbytes = 2 * BLOCK + 1000 + sum((sealed / n).stat().st_size for n in (".metadata", DATA))
    assert (result.evidence, result.bytes_read, result.bytes_covered) == (
        "manifest",
        nbytes,
        nbytes,
    )
    assert result.bytes_uncovered == len("not part of it")


def test_files_left_out_are_named(sealed: Path) -> None:
    found: list[Finding] = []
    source, manifest = source_of(sealed)
    check_manifest(source, manifest, emit=found.append)
    assert [f.kind for f in found] == ["not-covered"]
    assert "notes.txt" in found[0].message


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 999])
def test_a_flipped_bit_is_located_to_its_block(sealed: Path, place: int) -> None:
    with (sealed / "long").open("r+b") as file:
        file.seek(place)
        file.write(b"\x10")
    asked: list[tuple[str, int, int]] = []

    def owners(file: str, offset: int, length: int) -> list[tuple[str, int | None]]:
        asked.append((file, offset, length))
        return [(f"layers.{i}.weight", 5) for i in range(9)]

    result, found = check(sealed, owners=owners, work=Work(threads=2))
    (bad,) = found
    number = place // BLOCK
    length = BLOCK if number < 2 else 1000
    assert not result.ok
    assert (bad.kind, bad.file, bad.offset, bad.length) == (
        "bad-digest",
        "long",
        number * BLOCK,
        length,
    )
    assert (bad.tensor, bad.rank) == ("layers.0.weight", 5)
    assert "layers.2.weight (rank 5), 6 more" in bad.message
    assert asked == [("long", number * BLOCK, length)]


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def replace_by_fifo(path: Path) -> None:
    (path / "long").unlink()
    os.mkfifo(path / "long")


CHANGES: dict[str, tuple[Callable[[Path], object], list[tuple[str, str, int | None]]]] = {
    "missing": (lambda p: (p / "long").unlink(), [("missing-file", "long", None)]),
    "short": (lambda p: cut(p / "long", BLOCK + 5), [("truncated-file", "long", BLOCK + 5)]),
    "long": (lambda p: cut(p / "long", 3 * BLOCK), [("trailing-bytes", "long", 2 * BLOCK + 1000)]),
    "empty": (lambda p: cut(p / DATA, 0), [("truncated-file", DATA, 0)]),
    "fifo": (replace_by_fifo, [("special-file", "long", None)]),
    "added": (
        lambda p: (p / "__1_0.distcp").write_bytes(b"x"),
        [("added-file", "__1_0.distcp", None)],
    ),
    "beside": (lambda p: (p / "new.txt").write_bytes(b"x"), [("unmanaged-file", "new.txt", None)]),
    "own": (lambda p: copy(p, p / ".ftckpt"), []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_listing_are_found(sealed: Path, name: str) -> None:
    change, expected = CHANGES[name]
    if name == "own":
        (sealed / ".ftckpt").mkdir()
        (sealed / ".ftckpt" / "log.jsonl").write_bytes(b"{}")
    else:
        change(sealed)
    result, found = check(sealed, members=[".metadata", DATA, "long", "__1_0.distcp"])
    assert [(f.kind, f.file, f.offset) for f in found] == expected
    assert result.ok == (name in ("beside", "own"))


def test_swapped_files_are_found(sealed: Path) -> None:
    data = (sealed / DATA).read_bytes()
    (sealed / "long").write_bytes(data)
    flip(sealed / DATA, 3)
    kinds = sorted((f.kind, str(f.file)) for f in check(sealed)[1])
    assert kinds == [("bad-digest", DATA), ("truncated-file", "long")]


def test_a_sample_reads_every_files_first_block(sealed: Path) -> None:
    result, _ = check(sealed, sample=1e-12)
    assert result.bytes_read == BLOCK + sum(
        (sealed / n).stat().st_size for n in (".metadata", DATA)
    )
    assert result.sampled == 1e-12
    assert result.bytes_covered > result.bytes_read


def test_a_file_that_changes_meanwhile_is_not_called_damaged(sealed: Path) -> None:
    source, manifest = source_of(sealed)
    flip(sealed / DATA, 3)
    os.utime(sealed / DATA, (1, 1))
    found: list[Finding] = []
    check_manifest(source, manifest, emit=found.append)
    assert [(f.kind, f.code) for f in found if f.severity == "error"] == [("changed-file", 5)]


def broken_read(self: LocalReader, offset: int, view: memoryview) -> None:
    raise UnavailableError("the disk says no")


def test_one_unreadable_file_hides_no_other(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalReader.readinto

    def read(self: LocalReader, offset: int, view: memoryview) -> None:
        if self._key == "long":
            broken_read(self, offset, view)
        plain(self, offset, view)

    flip(sealed / DATA, 3)
    source, manifest = source_of(sealed)
    monkeypatch.setattr(LocalReader, "readinto", read)
    found: list[Finding] = []
    result = check_manifest(source, manifest, emit=found.append, work=Work(threads=1))
    errors = [(f.kind, f.file) for f in found if f.severity == "error"]
    assert sorted(errors) == [("bad-digest", DATA), ("unavailable", "long")]
    assert not result.ok


def test_storage_that_is_gone_ends_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.checkpoint import Topology
    from ftckpt.manifest import FileDigest

    names = [f"f{i:02}" for i in range(20)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    files = [FileDigest(name, 1, bytes(16)) for name in names]
    manifest = Manifest("dcp", None, Topology(), files)
    source = Source.directory(open_store(str(tmp_path)))
    monkeypatch.setattr(LocalReader, "readinto", broken_read)
    found: list[Finding] = []
    with pytest.raises(FtckptError) as caught:
        check_manifest(source, manifest, emit=found.append)
    assert caught.value.exit_code == 10
    assert len(found) == 7
