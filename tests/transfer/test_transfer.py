"""A transfer, end to end: refusals, kills at every change, two at once, and object storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ftckpt.digests.blocks
import ftckpt.manifest
import ftckpt.manifest.parse
import ftckpt.storage.s3.upload
import ftckpt.transfer.staging.local
import ftckpt.transfer.write.blocks
import ftckpt.transfer.write.files
from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import open_target
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    FtckptError,
    IncompleteError,
    NoResourceError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)
from ftckpt.formats.safetensors import Safetensors
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.manifest.locate import find
from ftckpt.own_files import FOLDER, MANIFEST
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.run import TransferOptions, TransferReport, transfer
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.workers import Work
from tests.counting import Added
from tests.killing import kill_points

SHARD = 700  # bytes of tensors in a file: several files from little data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file
    from torch import arange, float32, int64

    path = tmp_path_factory.mktemp("source") / "step-3"
    path.mkdir()
    state = {f"layer.{i}.weight": arange(40 * i, 40 * i + 120, dtype=float32) for i in range(4)}
    state |= {"count": arange(7, dtype=int64), "empty": arange(0, dtype=float32)}
    save_file(state, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def _small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("s3"):
        return  # a part of an upload has a least size there
    modules: tuple[Any, ...] = (
        ftckpt.digests.blocks,
        ftckpt.manifest,
        ftckpt.manifest.parse,
        ftckpt.transfer.write.blocks,
        ftckpt.transfer.write.files,
        ftckpt.transfer.staging.local,
    )
    for module in modules:
        monkeypatch.setattr(module, "BLOCK", 512)
    monkeypatch.setattr(Gatherer, "chunk", 200)


def _open(path: Path | str) -> Checkpoint:
    return open_target(str(path), [Safetensors()], StoreOptions(retry_seconds=5)).open()


def _move(
    source: Path | str,
    destination: Path | str,
    *,
    shard: int = SHARD,
    change: Callable[[Layout], Layout] = lambda layout: layout,
    counter: Counter = NULL,
    **options: Any,
) -> TransferReport:
    content = Content.of(_open(source))
    layout = change(SafetensorsWriter().layout(content, LayoutRequest(max_shard_size=shard)))
    return transfer(
        content,
        layout,
        str(destination),
        Safetensors(),
        single=False,
        same_objects=SameObject,
        options=TransferOptions(Work(threads=2, counter=counter), **options),
        store_options=StoreOptions(retry_seconds=5),
    )


def _state(path: Path) -> Mapping[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(path)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def _require_good(path: Path | str, files: int) -> None:
    checkpoint = _open(path)
    report = verify(checkpoint, VerifyOptions(level=Level.CONTENT, require_content=True))
    assert report.code == 0, report.message
    assert report.evidence == "manifest"
    manifest = find(checkpoint.source)
    assert manifest is not None
    assert len(manifest.files) == files


def test_the_result_is_whole_proven_and_sealed(source: Path, tmp_path: Path) -> None:
    before = _state(source)
    report = _move(source, tmp_path / "out")
    assert (report.files, report.taken_over, report.already_there) == (5, 0, False)
    assert report.proof is not None
    assert report.proof.tensors == 6
    _require_good(tmp_path / "out", 5)
    assert os.listdir(tmp_path) == ["out"]
    assert _state(source) == before


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    for make in (Path.mkdir, Path.touch, lambda p: p.symlink_to("nowhere")):
        destination = tmp_path / "out"
        make(destination)
        with pytest.raises(ExistsError, match="exists already"):
            _move(source, destination)
        assert os.listdir(tmp_path) == ["out"]
        destination.rmdir() if destination.is_dir() else destination.unlink()


def test_the_directories_around_it_are_made(source: Path, tmp_path: Path) -> None:
    _move(source, tmp_path / "new" / "er" / "out")
    assert os.listdir(tmp_path / "new" / "er") == ["out"]
    with pytest.raises(NotFoundError, match="does not exist") as caught:
        _move(source, tmp_path / "s3:" / "bucket" / "out")
    assert "a URL has two slashes" in caught.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="is not a directory"):
        _move(source, tmp_path / "file" / "no" / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]


def test_directories_that_were_made_for_nothing_go_again(tmp_path: Path) -> None:
    place = tmp_path / "new" / "er" / "out"
    staging = ftckpt.transfer.staging.local.LocalStaging(str(place), single=False)
    staging.begin("a plan", {}, restart=False)
    assert place.parent.is_dir()
    staging.close()
    assert os.listdir(tmp_path) == []


def test_what_has_no_place_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no place for rng, and more"):
        _move(source, tmp_path / "out", change=lambda x: replace(x, unplaced=["rng", "and more"]))
    assert os.listdir(tmp_path) == []


def test_killed_at_every_change_it_is_absent_or_whole(source: Path, tmp_path: Path) -> None:
    before = _state(source)
    destination = tmp_path / "out"
    points = kills = taken = 0
    for point in kill_points(lambda: void(_move(source, destination))):
        points, kills = point, kills + 1
        if destination.exists():
            _require_good(destination, 5)
        try:
            report = _move(source, destination)
            taken += bool(report.taken_over)
        except ExistsError:
            assert os.listdir(tmp_path) == ["out"]  # killed after all was done
        _require_good(destination, 5)
        assert os.listdir(tmp_path) == ["out"]
        for file in destination.iterdir():
            file.unlink()
        destination.rmdir()
    assert _state(source) == before
    assert points > 40
    assert taken > kills / 3


def test_killed_again_and_again_it_gets_through(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    for _ in kill_points(lambda: void(_move(source, destination)), each=True):
        pass  # nothing is cleaned up in between: each run goes on where the last was killed
    _require_good(destination, 5)
    assert os.listdir(tmp_path) == ["out"]


def void(_: object) -> None:
    return


def test_what_another_transfer_has_left_is_not_mixed_in(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    points = kill_points(lambda: void(_move(source, destination)))
    assert [next(points) for _ in range(10)]
    points.close()
    with pytest.raises(RefusedError, match="another transfer") as caught:
        _move(source, destination, shard=2 * SHARD)
    assert "--restart" in caught.value.hint
    report = _move(source, destination, shard=2 * SHARD, restart=True)
    assert report.taken_over == 0
    _require_good(destination, report.files)
    assert os.listdir(tmp_path) == ["out"]


def test_two_at_once_do_not_share_a_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "out"
    refused: list[BaseException] = []
    real = ftckpt.transfer.staging.local.LocalStaging.publish

    def publish(*args: Any) -> None:
        with pytest.raises(RefusedError, match="another ftckpt is writing") as caught:
            _move(source, destination)
        refused.append(caught.value)
        real(*args)

    monkeypatch.setattr(ftckpt.transfer.staging.local.LocalStaging, "publish", publish)
    _move(source, destination)
    assert len(refused) == 1
    _require_good(destination, 5)


def test_a_destination_that_appears_meanwhile_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "out"
    real = os.rename

    def rename(old: Any, new: Any) -> None:
        destination.mkdir()
        (destination / "theirs").write_text("precious")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(ExistsError):
        _move(source, destination)
    assert [p.name for p in destination.iterdir()] == ["theirs"]


def test_a_failed_proof_leaves_nothing_visible(source: Path, tmp_path: Path) -> None:
    def spoil(layout: Layout) -> Layout:
        first = layout.files[0]
        segments = [*first.segments]
        last = segments[-1]
        segments[-1] = Literal(bytes(last.nbytes))
        return replace(layout, files=[OutputFile(first.path, segments), *layout.files[1:]])

    with pytest.raises(CorruptError, match="the proof failed: elements") as caught:
        _move(source, tmp_path / "out", change=spoil)
    assert caught.value.kind == "failed-proof"
    # Nothing is left that a later run could take over, or that would stand in its way.
    assert list(tmp_path.iterdir()) == []
    assert _move(source, tmp_path / "out").proof is not None


def test_what_would_be_read_back_otherwise_is_refused_before_the_work(
    source: Path, tmp_path: Path
) -> None:
    def lose(layout: Layout) -> Layout:
        content = Content.of(_open(source))
        kept = list(content.tensors.values())[:-1]
        return SafetensorsWriter().layout(content.with_tensors(kept), LayoutRequest())

    made = Added()
    with pytest.raises(UnsupportedError, match="cannot hold this as it is; read back, the result"):
        _move(source, tmp_path / "out", change=lose, counter=made)
    assert made.done == 0
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changes_meanwhile_is_no_result(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    real = ftckpt.transfer.staging.local.LocalStaging.source

    def touched(*args: Any) -> Source:
        os.utime(copy / "model.safetensors", (1, 1))
        return real(*args)

    monkeypatch.setattr(ftckpt.transfer.staging.local.LocalStaging, "source", touched)
    with pytest.raises(IncompleteError, match=r"model\.safetensors changed"):
        _move(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_known_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def little(path: Any) -> Any:
        found = real(path)
        return type("Found", (), {"f_bavail": 1, "f_frsize": found.f_frsize})

    monkeypatch.setattr(os, "statvfs", little)
    with pytest.raises(NoResourceError, match="are free"):
        _move(source, tmp_path / "out")
    monkeypatch.undo()
    _move(source, tmp_path / "out")


def test_a_disk_that_fills_up_costs_only_the_rerun(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 6:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NoResourceError, match="No space left"):
        _move(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(os, "pwrite", real)
    assert _move(source, tmp_path / "out").taken_over > 0


def test_a_staging_name_that_is_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".out.ftckpt-staging").symlink_to(elsewhere)
    with pytest.raises(FtckptError):
        _move(source, tmp_path / "out")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.s3
def test_on_s3_the_manifest_is_the_last_word(source: Path, s3_url: str) -> None:
    url = f"{s3_url}/out"
    report = _move(source, url)
    assert report.files == 5
    _require_good(url, 5)
    store = open_store(url, StoreOptions(retry_seconds=5))
    assert not [e.path for e in store.walk() if e.path.startswith(f"{FOLDER}/")]
    with pytest.raises(ExistsError):
        _move(source, url)


@pytest.mark.s3
def test_on_s3_a_killed_run_is_incomplete_and_goes_on(
    source: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ftckpt.transfer.staging.remote as remote

    url = f"{s3_url}/out"

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteStaging, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            _move(source, url)
    with pytest.raises(IncompleteError, match="transfer"):
        _open(url)
    with pytest.raises(RefusedError, match="another transfer"):
        _move(source, url, shard=2 * SHARD)
    store = open_store(url, StoreOptions(retry_seconds=5))
    store.put("theirs", b"precious")
    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteStaging, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            _move(source, url, shard=2 * SHARD, restart=True)
    assert store.read("theirs") == b"precious"
    store.delete(["theirs"])
    with pytest.raises(RefusedError, match="another transfer"):
        _move(source, url)
    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteStaging, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            _move(source, url, restart=True)
    with monkeypatch.context() as patch:
        patch.setattr(remote.RemoteStaging, "_sweep", die)
        with pytest.raises(KeyboardInterrupt):
            _move(source, url)
    _require_good(url, 5)  # the manifest stands; only the sweeping up is left
    again = _move(source, url)
    assert again.already_there
    assert MANIFEST in {e.path for e in store.walk()}
    assert not [e.path for e in store.walk() if e.path.startswith(f"{FOLDER}/")]
