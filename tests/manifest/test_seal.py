"""Sealing: one atomic write, nothing overwritten, nothing sealed that is still being written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from ftckpt.checkpoint import Commit, CommitState
from ftckpt.errors import CorruptError, DeniedError, FtckptError, IncompleteError, RefusedError
from ftckpt.manifest import PassedCheck
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import SealReport, locate, seal
from ftckpt.own_files import MANIFEST, is_leftover
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.verification.blocks import check_manifest
from ftckpt.workers import Work
from tests.builders.checkpoints import copy, flip, open_checkpoint, save_dcp


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(tmp_path_factory.mktemp("saved") / "step-7")


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return copy(saved, tmp_path / "step-7")


def test_what_a_manifest_lists_beyond_the_format_stays_listed(path: Path) -> None:
    """As `convert` lists `config.json`: sealing again finds the same content."""
    (path / "config.json").write_text("{}")
    first = seal(open_checkpoint(path)).manifest
    digest = first.files[0]._replace(path="config.json", size=2, blocks=xxh3_128_digest(b"{}"))
    (path / MANIFEST).write_bytes(replace(first, files=[*first.files, digest]).dump())
    assert not seal(open_checkpoint(path)).written
    (path / "config.json").write_text("[]")
    with pytest.raises(RefusedError):
        seal(open_checkpoint(path))


def test_the_manifest_says_what_is_there(path: Path) -> None:
    (path / "notes.txt").write_text("hello")
    check = PassedCheck("content", "crc32", "2026-01-31T12:00:00Z")
    checkpoint = open_checkpoint(path)
    report = seal(checkpoint, checks=[check], work=Work(threads=2))
    assert report.written
    assert report.url == str(path / MANIFEST)
    manifest = find(Source.directory(open_store(str(path))))
    assert manifest == report.manifest
    assert manifest is not None
    assert [(f.path, f.size) for f in manifest.files] == [
        (name, (path / name).stat().st_size) for name in (".metadata", "__0_0.distcp")
    ]
    assert manifest.unmanaged == ("notes.txt",)
    assert manifest.checks == (check,)
    assert (manifest.format, manifest.step) == ("dcp", checkpoint.step)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", manifest.created)
    assert report.bytes_read == manifest.nbytes
    assert not [n for n in os.listdir(path) if is_leftover(n)]


def test_data_files_are_not_touched(path: Path) -> None:
    def states() -> dict[str, tuple[bytes, int]]:
        names = (".metadata", "__0_0.distcp")
        return {n: ((path / n).read_bytes(), (path / n).stat().st_mtime_ns) for n in names}

    before = states()
    seal(open_checkpoint(path))
    assert states() == before


def test_sealing_again_writes_nothing(path: Path) -> None:
    first = seal(open_checkpoint(path))
    state = (path / MANIFEST).stat().st_mtime_ns, (path / MANIFEST).read_bytes()
    second = seal(open_checkpoint(path))
    assert not second.written
    assert second.manifest == first.manifest
    assert ((path / MANIFEST).stat().st_mtime_ns, (path / MANIFEST).read_bytes()) == state


def test_other_content_is_refused_without_force(path: Path) -> None:
    seal(open_checkpoint(path))
    before = (path / MANIFEST).read_bytes()
    flip(path / "__0_0.distcp", 5000)
    with pytest.raises(RefusedError):
        seal(open_checkpoint(path))
    assert (path / MANIFEST).read_bytes() == before
    assert seal(open_checkpoint(path), force=True).written
    source = Source.directory(open_store(str(path)))
    manifest = find(source)
    assert manifest is not None
    assert check_manifest(source, manifest, emit=lambda found: None).ok


def test_a_damaged_manifest_is_refused_without_force(path: Path) -> None:
    seal(open_checkpoint(path))
    flip(path / MANIFEST, 100)
    with pytest.raises(RefusedError):
        seal(open_checkpoint(path))
    assert seal(open_checkpoint(path), force=True).written


def test_what_is_not_committed_is_not_sealed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    checkpoint.commit = Commit(CommitState.UNCOMMITTED, ".metadata", "the marker is absent")
    with pytest.raises(IncompleteError, match="marker is absent"):
        seal(checkpoint)
    assert not (path / MANIFEST).exists()


def rewrite(path: Path) -> None:
    flip(path, 7000)
    os.utime(path, (1, 1))


def replaced(path: Path) -> None:
    """Rename another file of the same size and times over it."""
    known = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    "change",
    [rewrite, lambda p: os.truncate(p, p.stat().st_size + 5), lambda p: p.unlink(), replaced],
)
def test_a_file_that_changes_meanwhile_is_not_sealed(
    path: Path, change: Callable[[Path], object]
) -> None:
    checkpoint = open_checkpoint(path)

    class ChangeAtTheEnd:
        """A counter that changes a file when all has been hashed."""

        done = 0

        def start(self, label: str, total: int | None, unit: str = "B") -> None:
            self.total = total

        def add(self, amount: int) -> None:
            self.done += amount
            if self.done == self.total:
                change(path / "__0_0.distcp")

    with pytest.raises(IncompleteError) as caught:
        seal(checkpoint, work=Work(counter=ChangeAtTheEnd()))
    assert (caught.value.kind, caught.value.file) == ("changed-file", "__0_0.distcp")
    assert not (path / MANIFEST).exists()


def test_a_missing_file_is_not_sealed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    checkpoint.members = lambda: [".metadata", "gone"]  # type: ignore[method-assign]
    with pytest.raises(CorruptError, match="gone is missing"):
        seal(checkpoint)


def test_a_read_only_place_says_where_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.storage.local.store import LocalStore

    def denied(path: str, data: bytes, **more: bool) -> None:
        raise DeniedError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr("ftckpt.manifest.seal.write_new", denied)
    monkeypatch.setattr("ftckpt.storage.local.atomic.write_new", denied)
    with pytest.raises(DeniedError) as caught:
        seal(open_checkpoint(path))
    assert "--manifest" in caught.value.hint
    with pytest.raises(DeniedError) as caught:  # that was another place already
        seal(open_checkpoint(path), place=(LocalStore(str(path.parent)), "elsewhere.json"))
    assert caught.value.hint == ""


def test_two_sealers_at_once_both_succeed(path: Path) -> None:
    barrier = threading.Barrier(6)
    reports: list[SealReport | FtckptError] = []

    def one() -> None:
        checkpoint = open_checkpoint(path)
        barrier.wait(30)
        try:
            reports.append(seal(checkpoint))
        except FtckptError as error:
            reports.append(error)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [r.written for r in reports if isinstance(r, SealReport)]
    assert sorted(written) == [False] * 5 + [True]


SEALER = """
import os, sys
from pathlib import Path
import ftckpt.storage.local.atomic as atomic
from tests.builders.checkpoints import open_checkpoint
from ftckpt.manifest.seal import seal
step, target = sys.argv[1], sys.argv[2]
def dying(name):
    call = getattr(os, name)
    def wrapper(*args, **options):
        if step == "before " + name:
            os._exit(9)
        result = call(*args, **options)
        if step == "after " + name:
            os._exit(9)
        return result
    return wrapper
checkpoint = open_checkpoint(target)
for name in ("open", "write", "fsync", "link", "unlink"):
    setattr(atomic.os, name, dying(name))
seal(checkpoint)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "unlink"])
def test_killed_at_any_instant_there_is_no_manifest_or_a_whole_one(
    path: Path, when: str, call: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SEALER, f"{when} {call}", str(path)], check=False, cwd=os.getcwd()
    )
    assert ended.returncode == 9
    source = Source.directory(open_store(str(path)))
    manifest = find(source)  # raises for half a manifest
    assert (manifest is not None) == (
        f"{when} {call}" in ("after link", "before unlink", "after unlink")
    )
    again = seal(open_checkpoint(path))
    assert again.written == (manifest is None)


def test_a_manifest_elsewhere(path: Path, tmp_path: Path) -> None:
    place = locate(str(tmp_path / "seals" / "a.json"), "step-7")
    report = seal(open_checkpoint(path), place=place)
    assert report.url == str(tmp_path / "seals" / "a.json")
    assert not (path / MANIFEST).exists()
    assert (tmp_path / "seals" / "a.json").read_bytes() == report.manifest.dump()


def where(place: tuple[Store, str]) -> str:
    return place[0].describe(place[1])


def test_places_for_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        str(tmp_path / "there"): str(tmp_path / "there" / "step-7.ftckpt.json"),
        f"{tmp_path}/new/": f"{tmp_path}/new/step-7.ftckpt.json",
        str(tmp_path / "new"): str(tmp_path / "new"),
        str(tmp_path / "file"): str(tmp_path / "file"),
        "memory://seals/a.json": "memory://seals/a.json",
    }
    for url, expected in cases.items():
        assert where(locate(url, "step-7")) == expected
    monkeypatch.chdir(tmp_path)
    locate("plain.json", "step-7")[0].create("plain.json", b"x")
    assert (tmp_path / "plain.json").read_bytes() == b"x"


def test_one_file_is_sealed_beside_itself(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    report = seal(open_checkpoint(tmp_path / "model.safetensors"))
    assert report.url == str(tmp_path / "model.safetensors.ftckpt.json")
    assert [f.path for f in report.manifest.files] == ["model.safetensors"]


@pytest.mark.s3
def test_object_storage(path: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    for name in (".metadata", "__0_0.distcp"):
        store.put(name, (path / name).read_bytes())
    assert seal(open_checkpoint(s3_url)).written
    assert not seal(open_checkpoint(s3_url)).written
    source = Source.directory(open_store(s3_url))
    manifest = find(source)
    assert manifest is not None
    assert check_manifest(source, manifest, emit=lambda found: None, work=Work(threads=4)).ok
    store.put("__0_0.distcp", (path / "__0_0.distcp").read_bytes()[:-1] + b"!")
    with pytest.raises(RefusedError):
        seal(open_checkpoint(s3_url))


def test_what_a_killed_seal_left_a_day_ago_is_removed_by_the_next_one(path: Path) -> None:
    begun = b'{\n"schema": "ftckpt.manifest/1",\n"no'
    left = {
        ".ftckpt-tmp-0000000000000001": (begun, 25, True),
        ".ftckpt-tmp-0000000000000002": (b"", 25, True),
        ".ftckpt-tmp-0000000000000003": (begun, 23, False),  # somebody may be at work
        ".ftckpt-tmp-0000000000000004": (b"not ours", 25, False),
        "notes": (begun, 25, False),
    }
    for name, (data, hours, _) in left.items():
        (path / name).write_bytes(data)
        os.utime(path / name, (time.time() - hours * 3600,) * 2)
    (path / ".ftckpt-tmp-link").symlink_to("notes")
    before = set(os.listdir(path))
    report = seal(open_checkpoint(path))
    assert report.manifest.unmanaged == ("notes",)
    gone = {name for name, (_, _, goes) in left.items() if goes}
    assert set(os.listdir(path)) == before - gone | {MANIFEST}
    # Sealed already, it is swept all the same.
    (path / ".ftckpt-tmp-0000000000000001").write_bytes(begun)
    os.utime(path / ".ftckpt-tmp-0000000000000001", (1, 1))
    assert not seal(open_checkpoint(path)).written
    assert set(os.listdir(path)) == before - gone | {MANIFEST}


def test_a_leftover_that_cannot_be_removed_hinders_no_seal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = path / ".ftckpt-tmp-0000000000000001"
    left.write_bytes(b"")
    os.utime(left, (1, 1))
    real = os.unlink

    def unlink(name: str, **more: int) -> None:
        if name == str(left):
            raise PermissionError(13, "no")
        real(name, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    assert seal(open_checkpoint(path)).written
    assert left.exists()
