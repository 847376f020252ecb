"""Copies on this machine: whole, judged, refused, killed, resumed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftckpt.replication.copy
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    IncompleteError,
    NoResourceError,
    RefusedError,
    UnsafeError,
)
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import MANIFEST, SUFFIX, is_leftover
from ftckpt.storage.local.store import LocalReader
from ftckpt.storage.local.write_in_place import LocalUpload
from ftckpt.transfer.request.example import require_unchanged
from ftckpt.transfer.staging.local import LocalStaging
from tests.killing import kill_points
from tests.replication.replicas import (
    INSIDE,
    VICTIM,
    contents,
    copied,
    flip,
    opened,
    require_good,
    sealed,
    state,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the copy goes, in a directory of its own."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out"


def test_an_unsealed_checkpoint_is_held_to_its_crcs_and_gets_a_manifest(
    plain: Path, out: Path
) -> None:
    before = state(plain)
    report = copied(plain, out)
    assert (report.files, report.evidence, report.sealed, report.proven) == (
        3,
        "crc32",
        False,
        True,
    )
    assert 0 < report.covered < report.nbytes == 62_444
    assert {k: v for k, v in contents(out).items() if k != MANIFEST} == contents(plain)
    assert state(plain) == before
    require_good(out)
    manifest = parse_manifest((out / MANIFEST).read_bytes())
    assert [(c.level, c.evidence) for c in manifest.checks] == [("content", "crc32")]
    assert (manifest.step, manifest.format) == (2, "dcp")
    assert os.listdir(out.parent) == ["out"]


def test_a_sealed_checkpoint_keeps_its_manifest_and_its_times(source: Path, out: Path) -> None:
    os.utime(source / VICTIM, (1_700_000_000, 1_700_000_000))
    report = copied(source, out)
    assert (report.evidence, report.covered, report.sealed) == ("manifest", report.nbytes, True)
    assert contents(out) == contents(source)
    assert (out / VICTIM).stat().st_mtime == 1_700_000_000
    require_good(out)


def test_a_slash_means_the_same_name_inside(source: Path, out: Path) -> None:
    link = source.with_name("newest")
    link.symlink_to("step-2")
    assert copied(link, f"{out.parent}/").url == f"{out.parent}/step-2"
    require_good(out.parent / "step-2")
    # A directory that does not exist is made, with those above it.
    assert copied(source, f"{out}/deeper/").url == f"{out}/deeper/step-2"
    require_good(out / "deeper" / "step-2")


def test_the_same_checkpoint_is_there_already(plain: Path, out: Path) -> None:
    copied(plain, out)
    before = state(out)
    for source in (plain, sealed(plain)):
        again = copied(source, out)
        assert (again.already_there, again.evidence) == (True, "manifest")
    assert state(out) == before
    assert os.listdir(out.parent) == ["out"]


def test_what_is_there_and_damaged_is_said(source: Path, out: Path) -> None:
    copied(source, out)
    flip(out / VICTIM, INSIDE)
    with pytest.raises(CorruptError, match="there already, and damaged") as caught:
        copied(source, out)
    assert "repair" in caught.value.hint
    assert copied(source, out, proof=False).already_there


def test_a_source_saved_again_under_its_old_manifest_is_not_there(source: Path, out: Path) -> None:
    copied(source, out)
    path = source / VICTIM
    flip(path, INSIDE)
    os.utime(path)  # a trainer saves into the same directory: sizes are the same
    with pytest.raises(CorruptError, match=VICTIM) as caught:
        copied(source, out)
    assert "seal" in caught.value.hint


def test_files_beside_are_there_already_or_it_is_said(plain: Path, out: Path) -> None:
    copied(plain, out)
    (plain / "notes.log").write_text("a")
    assert copied(plain, out).already_there  # nobody asked for them
    with pytest.raises(ExistsError, match=r"notes\.log"):
        copied(plain, out, beside=True)
    (out / "notes.log").write_text("b")
    with pytest.raises(ExistsError, match=r"notes\.log"):
        copied(plain, out, beside=True)
    (out / "notes.log").write_text("a")
    assert copied(plain, out, beside=True).already_there


@pytest.mark.parametrize("kind", ["other", "unsealed", "empty", "file", "link"])
def test_nothing_is_overwritten(source: Path, out: Path, kind: str) -> None:
    if kind == "other":
        shutil.copytree(source, out)
        (out / MANIFEST).unlink()
        flip(out / VICTIM, INSIDE)
        from ftckpt.manifest.seal import seal

        seal(opened(out))
    elif kind == "unsealed":
        shutil.copytree(source, out)
        (out / MANIFEST).unlink()
    elif kind == "empty":
        out.mkdir()
    elif kind == "file":
        out.touch()
    else:
        out.symlink_to("nowhere")
    before = state(out.parent)
    with pytest.raises((ExistsError, UnsafeError)):
        copied(source, out)
    assert state(out.parent) == before


def test_a_copy_does_not_go_onto_or_into_its_source(source: Path) -> None:
    with pytest.raises(ExistsError, match="source itself"):
        copied(source, source)
    with pytest.raises(RefusedError, match="inside the source"):
        copied(source, source / "copy")


def test_what_does_not_belong_is_left_and_named(plain: Path, out: Path) -> None:
    (plain / "notes").mkdir()
    (plain / "notes" / "today.md").write_text("loss went up")
    (plain / ".ftckpt").mkdir()
    (plain / ".ftckpt" / "log.jsonl").write_text("{}")
    report = copied(plain, out)
    assert report.left == ["notes/today.md"]
    assert not (out / "notes").exists()
    everything = copied(plain, out.with_name("all"), beside=True)
    assert (everything.files, everything.left) == (4, [])
    assert (out.with_name("all") / "notes" / "today.md").read_text() == "loss went up"
    assert not (out.with_name("all") / ".ftckpt").exists()
    manifest = parse_manifest((out.with_name("all") / MANIFEST).read_bytes())
    assert manifest.unmanaged == ("notes/today.md",)
    assert len(manifest.files) == 3


def test_damage_at_rest_is_located_and_not_shown(source: Path, out: Path) -> None:
    flip(source / VICTIM, INSIDE)
    with pytest.raises(CorruptError, match=VICTIM) as caught:
        copied(source, out, proof=False)
    assert (caught.value.kind, caught.value.file) == ("bad-digest", VICTIM)
    assert caught.value.offset == INSIDE // 4096 * 4096
    assert not out.exists()


@pytest.mark.parametrize("at", ["inside", "across"])
def test_damage_in_an_unsealed_record_is_found(plain: Path, out: Path, at: str) -> None:
    from ftckpt.replication.trusted_manifest import record_evidence

    crcs = record_evidence(opened(plain), None).ranges(VICTIM)
    long = [r for r in crcs if r[0] // 4096 != (r[1] - 1) // 4096]
    short = [r for r in crcs if r not in long]
    assert long
    assert short
    start, _ = (short if at == "inside" else long)[0]
    flip(plain / VICTIM, start)
    with pytest.raises(CorruptError, match="CRC-32") as caught:
        copied(plain, out)
    assert caught.value.file == VICTIM
    assert not out.exists()


@pytest.mark.parametrize("evidence", ["manifest", "inside", "across"])
def test_a_bit_that_flips_on_the_way_is_read_again(
    plain: Path, out: Path, monkeypatch: pytest.MonkeyPatch, evidence: str
) -> None:
    from ftckpt.replication.trusted_manifest import record_evidence

    crcs = record_evidence(opened(plain), None).ranges(VICTIM)
    spans = [r for r in crcs if (r[0] // 4096 != (r[1] - 1) // 4096) == (evidence == "across")]
    place = spans[0][0]
    if evidence == "manifest":
        sealed(plain)
    real = LocalReader.readinto
    flipped: list[int] = []

    def readinto(self: LocalReader, offset: int, view: memoryview) -> None:
        real(self, offset, view)
        ours = self._path == str(plain / VICTIM) and len(view) > 1000
        if ours and offset <= place < offset + len(view) and not flipped:
            view[place - offset] ^= 1
            flipped.append(offset)

    # The structure check reads headers before; the flip is to hit what is copied.
    monkeypatch.setattr(ftckpt.replication.copy, "_require_structure", lambda checkpoint: None)
    monkeypatch.setattr(LocalReader, "readinto", readinto)
    copied(plain, out, jobs=1)
    assert len(flipped) == 1
    assert (out / VICTIM).read_bytes() == (plain / VICTIM).read_bytes()


def test_files_that_came_went_or_shrank_since_sealing_are_refused(source: Path, out: Path) -> None:
    for change, kind in (
        (lambda: os.truncate(source / VICTIM, 100), "truncated-file"),
        (lambda: (source / VICTIM).write_bytes(bytes(99_999)), "trailing-bytes"),
        (lambda: (source / VICTIM).unlink(), "missing-file"),
    ):
        change()
        with pytest.raises(CorruptError) as caught:
            copied(source, out)
        assert caught.value.kind == kind
    assert os.listdir(out.parent) == []


def test_a_source_that_changes_meanwhile_is_no_result(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ftckpt.replication.copy.require_unchanged",
        _after(lambda: (source / VICTIM).write_bytes(b"the next save")),
    )
    with pytest.raises(IncompleteError, match="changed while it was being read"):
        copied(source, out)
    assert os.listdir(out.parent) == []  # of what is no more nothing can be gone on with


def _after(change: Callable[[], object]) -> Callable[..., None]:
    """Return the last look at the source, with a change that comes just before it."""

    def call(*args: Any) -> None:
        change()
        require_unchanged(*args)

    return call


def test_links_are_followed_and_noted(source: Path, out: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (source / VICTIM).rename(blob)
    (source / VICTIM).symlink_to(blob)
    report = copied(source, out)
    assert [(note.kind, note.file) for note in report.notes] == [("link-followed", VICTIM)]
    assert not (out / VICTIM).is_symlink()
    require_good(out)


def test_a_fifo_is_refused(source: Path, out: Path) -> None:
    (source / VICTIM).unlink()
    os.mkfifo(source / VICTIM)
    with pytest.raises(UnsafeError):
        copied(source, out)


def test_the_proof_sees_what_was_written_wrongly(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalUpload.write

    def write(self: LocalUpload, offset: int, view: memoryview) -> None:
        data = bytearray(view)
        data[-1] ^= offset == 0
        real(self, offset, memoryview(data))

    with monkeypatch.context() as patch:
        patch.setattr(LocalUpload, "write", write)
        with pytest.raises(CorruptError, match="proof failed"):
            copied(source, out)
    assert not out.exists()
    copied(source, out)  # what lies there is hashed before it is taken over
    require_good(out)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_killed_at_every_change_it_is_absent_or_whole(
    source: Path, out: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "file":
        source = _single(tmp_path)
    before = state(source.parent)
    points = kills = taken = 0
    for point in kill_points(lambda: void(copied(source, out))):
        points, kills = point, kills + 1
        if out.exists():
            require_good(out)
        report = copied(source, out)
        taken += bool(report.taken_over)
        require_good(out)
        extra = [] if kind == "directory" else [f"out{SUFFIX}"]
        left = sorted(name for name in os.listdir(out.parent) if not is_leftover(name))
        assert left == ["out", *extra]
        for path in out.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert state(source.parent) == before
    assert points > 20
    assert taken > kills / 4


def test_killed_again_and_again_it_gets_through(plain: Path, out: Path) -> None:
    for _ in kill_points(lambda: void(copied(plain, out)), each=True):
        pass  # nothing is cleaned up in between: each run goes on where the last was killed
    require_good(out)
    assert os.listdir(out.parent) == ["out"]


def test_two_at_once_do_not_share_a_place(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[object] = []
    real = LocalStaging.publish

    def publish(*args: Any) -> None:
        with pytest.raises(RefusedError, match="another ftckpt is writing") as caught:
            copied(source, out)
        refused.append(caught.value)
        real(*args)

    monkeypatch.setattr(LocalStaging, "publish", publish)
    copied(source, out)
    assert len(refused) == 1
    require_good(out)


def test_a_disk_that_fills_up_costs_only_the_rerun(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.pwrite, [5]

    def pwrite(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(NoResourceError):
            copied(source, out, jobs=1)
    assert not out.exists()
    assert copied(source, out).taken_over >= 3 * 4096
    require_good(out)


def test_one_file_under_another_name(tmp_path: Path, out: Path) -> None:
    path = _single(tmp_path)
    renamed = out.with_name("other.safetensors")
    assert copied(path, renamed).files == 1
    assert renamed.read_bytes() == path.read_bytes()
    require_good(renamed)
    assert copied(path, renamed).already_there
    assert copied(renamed, f"{out.parent}/third.safetensors").evidence == "manifest"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ExistsError):
        copied(path, renamed)


def _single(tmp_path: Path) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "single").mkdir()
    path = tmp_path / "single" / "model.safetensors"
    save_file({"w": np.arange(5000, dtype=np.float32)}, path)
    return path


def void(_: object) -> None:
    return
