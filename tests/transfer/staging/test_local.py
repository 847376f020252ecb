"""The staging directory of this machine: who holds it, what is whose, and what is never touched."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)
from ftckpt.transfer.layout import Literal, OutputFile
from ftckpt.transfer.staging.local import LocalStaging
from ftckpt.transfer.write.blocks import BlockMade

DATA = b"a few bytes"


def _file(single: bool) -> OutputFile:
    return OutputFile("out" if single else "data", [Literal(DATA)])


def _begun(out: Path, plan: str = "one", *, single: bool = False, restart: bool = False) -> Any:
    staging = LocalStaging(str(out), single=single)
    try:
        assert not staging.begin(plan, {"data": len(DATA)}, restart=restart)
    except BaseException:
        staging.close()
        raise
    return staging


def _built(out: Path, plan: str = "one", *, single: bool = False, restart: bool = False) -> Any:
    """Return a staging with its one file made and journaled."""
    import xxhash

    staging = _begun(out, plan, single=single, restart=restart)
    file = _file(single)
    upload = staging.open(file).upload
    upload.write(0, memoryview(DATA))
    upload.finish()
    staging.add(BlockMade(file.path, 0, xxhash.xxh3_128_digest(DATA), ()))
    return staging


def _kill(staging: Any) -> None:
    """End as a killed process does: the lock goes, everything else stays."""
    staging._lock.release()


def _finish(out: Path, plan: str = "one", *, single: bool = False) -> None:
    staging = _built(out, plan, single=single)
    staging.publish({}, b"{}")
    staging.close()


def test_another_that_finishes_while_this_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    other = _built(out)
    staging = LocalStaging(str(out), single=False)
    real = staging._lock.acquire

    def acquire() -> bytes:
        other.publish({}, b"{}")
        other.close()
        return real()

    monkeypatch.setattr(staging._lock, "acquire", acquire)
    with pytest.raises(ExistsError):
        staging.begin("two", {"data": 1}, restart=False)
    staging.close()
    assert os.listdir(tmp_path) == ["out"]


def test_a_place_that_is_swept_away_while_it_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ".out.ftckpt-staging"
    real = os.open
    swept: list[Any] = []

    def swept_away(path: Any, *more: Any, **named: Any) -> int:
        if str(path).startswith(str(place)) and not swept:
            swept.append(path)
            place.rmdir()
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", swept_away)
    _finish(tmp_path / "out")
    assert swept
    assert (tmp_path / "out" / "data").read_bytes() == DATA


@pytest.mark.parametrize("single", [False, True])
def test_what_somebody_else_put_there_is_not_taken_for_ours(tmp_path: Path, single: bool) -> None:
    out = tmp_path / "out"
    staging = _begun(out, single=single)
    (tmp_path / ".out.ftckpt-staging" / "state").rmdir()  # killed as it swept up
    _kill(staging)
    out.write_bytes(b"theirs") if single else out.mkdir()
    with pytest.raises(ExistsError):
        _begun(out, single=single)


@pytest.mark.parametrize("single", [False, True])
def test_killed_before_it_swept_up_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    out = tmp_path / "out"
    staging = _built(out, single=single)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStaging, "_sweep", lambda self: None)
        staging.publish({}, b"{}")
    _kill(staging)
    again = LocalStaging(str(out), single=single)
    assert again.begin("one", {"data": 1}, restart=False)
    again.close()
    assert ".out.ftckpt-staging" not in os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO])
def test_what_cannot_be_looked_at_keeps_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = tmp_path / "out"
    _built(out).close()
    staging = _begun(out)

    def scandir(path: Any) -> Any:
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        staging.close()
        with pytest.raises(FtckptError):
            _begun(out)
    resumed = _begun(out)
    assert set(resumed.open(_file(single=False)).earlier) == {0}
    resumed.close()


def test_restart_builds_anew_what_this_transfer_has_built(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _built(out).close()
    resumed = _begun(out)
    assert set(resumed.open(_file(single=False)).earlier) == {0}
    resumed.close()
    anew = _begun(out, restart=True)
    assert not anew.open(_file(single=False)).earlier
    assert (tmp_path / ".out.ftckpt-staging/state/data").read_bytes() == bytes(len(DATA))
    anew.close()


def test_a_line_that_a_kill_has_torn_costs_only_itself(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _built(out).close()
    journal = tmp_path / ".out.ftckpt-staging" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    second = _begun(out)
    assert not second.open(_file(single=False)).earlier
    second.add(BlockMade("data", 0, bytes(16), ()))
    second.close()
    third = _begun(out)
    assert third.open(_file(single=False)).earlier[0].digest == bytes(16)
    third.close()


@pytest.mark.parametrize("name", ["", "/journal.jsonl", "/state"])
def test_what_stands_in_the_way_is_named_and_kept(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / f".out.ftckpt-staging{name}"
    theirs.parent.mkdir(exist_ok=True)
    if name == "/journal.jsonl":
        os.mkfifo(theirs)
    else:
        theirs.write_bytes(b"theirs")
    with pytest.raises(RefusedError, match=f"{theirs.name} is no"):
        _begun(tmp_path / "out", restart=True)
    assert theirs.exists()


def test_a_link_inside_the_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    place = tmp_path / ".out.ftckpt-staging"
    place.mkdir()
    (place / "state").symlink_to(elsewhere)
    for restart in (False, True):
        with pytest.raises(RefusedError):
            _begun(tmp_path / "out", restart=restart)
        assert os.listdir(elsewhere) == ["precious"]


def test_a_filesystem_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*given: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UnsupportedError, match="no locks"):
        _begun(tmp_path / "out")


def test_a_filesystem_without_hard_links_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*given: Any, **named: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UnsupportedError, match="no hard links"):
        _begun(tmp_path / "out", single=True)
    assert os.listdir(tmp_path) == []
    _finish(tmp_path / "out")  # a directory is shown by a rename


def test_a_manifest_that_somebody_else_put_beside_one_file_is_kept(tmp_path: Path) -> None:
    beside = tmp_path / "out.ftckpt.json"
    staging = _built(tmp_path / "out", single=True)
    beside.write_text("theirs")
    with pytest.raises(ExistsError, match=r"out\.ftckpt\.json exists"):
        staging.publish({}, b"{}")
    staging.close()
    assert beside.read_text() == "theirs"
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_a_killed_run_put_beside_one_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, beside = tmp_path / "out", tmp_path / "out.ftckpt.json"

    def die(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    for plan, restart in (("one", False), ("one", False), ("two", True)):
        staging = _built(out, plan, single=True, restart=restart)
        with monkeypatch.context() as patch:
            patch.setattr("ftckpt.transfer.staging.local.sync_directory", die)
            real = os.link

            def link(old: Any, new: Any, real: Any = real, **named: Any) -> None:
                if str(new) == str(out):
                    raise KeyboardInterrupt
                real(old, new, **named)

            patch.setattr(os, "link", link)
            with pytest.raises(KeyboardInterrupt):
                staging.publish({}, plan.encode())
        _kill(staging)
        assert beside.read_text() == plan
    _finish(out, "two", single=True)
    assert beside.read_bytes() == b"{}"
    assert sorted(os.listdir(tmp_path)) == ["out", "out.ftckpt.json"]


def test_a_transfer_is_of_one_place(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from ftckpt import open_checkpoint
    from ftckpt.transfer.layout import Layout
    from ftckpt.transfer.write.blocks import fingerprint

    plans = set()
    for step in ("step-1", "step-2", "step-1"):
        path = tmp_path / step
        path.mkdir(exist_ok=True)
        save_file({}, path / "model.safetensors")
        os.utime(path / "model.safetensors", (1, 1))  # as an archive that keeps seconds leaves it
        plans.add(fingerprint(open_checkpoint(str(path)), Layout(files=[_file(single=False)])))
    assert len(plans) == 2


def test_what_a_killed_write_has_left_is_not_shown(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _built(out).close()
    left = tmp_path / ".out.ftckpt-staging" / "state" / "deep" / ".ftckpt-tmp-0123"
    left.parent.mkdir()
    left.write_bytes(b"half")
    _finish(out)
    assert not list(out.rglob(".ftckpt-tmp-*"))
    assert (out / "data").read_bytes() == DATA


def test_a_filesystem_that_takes_no_new_names_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(os, "mkdir", mkdir)  # as procfs answers
    staging = LocalStaging(str(tmp_path / "out"), single=False)
    with pytest.raises(DeniedError, match=r"cannot make \S+/out:"):
        staging.begin("plan", {}, restart=False)


def test_a_name_that_cannot_be_made_is_named_as_typed(tmp_path: Path) -> None:
    name = "x" * 250  # with what the staging directory adds, longer than names may be
    staging = LocalStaging(str(tmp_path / name), single=False)
    with pytest.raises(UnsupportedError, match=f"cannot write {tmp_path}/{name}: File name too"):
        staging.begin("plan", {}, restart=False)


@pytest.mark.parametrize("below", ["out", "and/more/out"])
def test_a_file_in_the_place_of_a_directory_around_it_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    staging = LocalStaging(str(tmp_path / "file" / below), single=False)
    with pytest.raises(NotFoundError, match="file is not a directory") as caught:
        staging.begin("plan", {}, restart=False)
    assert "mkdir" not in caught.value.hint
