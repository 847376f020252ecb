"""A restart from the user's checkpoint has its own copy of it; the original is never written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import NoResourceError, UnsafeError, UsageError
from ftckpt.replay.processes import Settings, can_make_read_only
from ftckpt.replay.run import copies
from ftckpt.replay.run import folders as runs
from ftckpt.replay.run.copies import changed, copy_checkpoint, fingerprint, require_room
from ftckpt.replay.run.folders import COPY, FailedRunError, Runs
from ftckpt.replay.run.one_run import End, run
from ftckpt.replay.run.question import Trial
from ftckpt.replay.run.trial import check, remove_left_copies
from tests.commands.golden import ftckpt
from tests.replay.trainings import run_lists, training

TRAIN = Path(__file__).parent / "train.py"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Make a checkpoint with links: inside, out to a file, out to a directory, to nothing."""
    root = tmp_path / "run" / "step-4"
    (root / "parts").mkdir(parents=True)
    (root / "parts" / "a.bin").write_bytes(b"a" * 5000)
    os.utime(root / "parts" / "a.bin", (1000, 1000))
    (root / "latest").symlink_to(root / "parts")  # absolute: leads back if it is copied as it is
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "b.bin").write_bytes(b"b" * 10)
    (root / "b.bin").symlink_to(blobs / "b.bin")
    (root / "blobs").symlink_to("../../blobs")
    (root / "gone").symlink_to("nothing")
    (root / "parts" / "a.bin").chmod(0o444)
    return root


def test_nothing_in_a_copy_leads_back(original: Path, tmp_path: Path) -> None:
    before = fingerprint(original)
    copy = tmp_path / "trial" / "copy" / "step-4"
    report = copy_checkpoint(original, copy, "restart-1")
    assert (report.files, report.nbytes) == (3, 5020)
    assert (report.method, report.written) in {("copy", 5020), ("reflink", 0)}
    assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*")) == [
        "b.bin", "blobs", "blobs/b.bin", "latest", "parts", "parts/a.bin",
    ]  # fmt: skip
    assert os.readlink(copy / "latest") == "parts"
    assert (copy / "parts" / "a.bin").stat().st_mtime == 1000
    for name in ("latest/a.bin", "b.bin", "blobs/b.bin", "parts/new"):
        (copy / name).write_bytes(b"other")
    shutil.rmtree(copy / "parts")
    assert changed(before, fingerprint(original)) == []
    assert (tmp_path / "blobs" / "b.bin").read_bytes() == b"b" * 10


def test_a_single_file_is_copied_too(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"x")
    copy_checkpoint(file, tmp_path / "copy" / "model.pt", "restart-1")
    assert (tmp_path / "copy" / "model.pt").read_bytes() == b"x"


def test_what_cannot_be_copied_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs" / "back").symlink_to(tmp_path / "blobs")
    with pytest.raises(UnsafeError, match="leads in a circle"):
        require_room(original, tmp_path)
    (tmp_path / "blobs" / "back").unlink()
    os.mkfifo(original / "fifo")
    with pytest.raises(UnsafeError, match="neither a file nor a directory"):
        require_room(original, tmp_path)


def test_a_filesystem_that_clones_is_used(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(file: int, request: int, source: int) -> None:
        assert request == 0x40049409
        os.write(file, os.pread(source, 1 << 20, 0))

    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr(copies, "_SPARE", 1 << 62)  # a clone takes no room
    require_room(original, tmp_path)
    report = copy_checkpoint(original, tmp_path / "copy", "restart-1")
    assert (report.method, report.files, report.written) == ("reflink", 3, 0)
    assert (tmp_path / "copy" / "latest" / "a.bin").read_bytes() == b"a" * 5000


def test_room_is_looked_at_before_anything_runs(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(copies, "_SPARE", 1 << 62)
    with pytest.raises(NoResourceError, match=r"its own copy of .*step-4 \(3 files, 4\.9 KiB\)"):
        require_room(original, tmp_path)
    assert not list(tmp_path.glob(".clone-probe*"))


def trial(original: Path, tmp_path: Path, *words: str, **more: Any) -> Trial:
    words = words or ("python", "{checkpoint}")
    return Trial(words, tmp_path / "trial", at=4, checkpoint=str(original), reference="l", **more)


def test_a_run_that_writes_into_the_original_is_named(original: Path, tmp_path: Path) -> None:
    made = Runs(trial(original, tmp_path), lambda text: None)
    place = tmp_path / "trial" / "restart-1"

    def write() -> None:
        with made._own_checkpoint(place, "restart-1", "restart A") as state:
            assert state == place / COPY / "step-4"  # trainers read the step out of the name
            (original / "parts" / "a.bin").unlink()

    with pytest.raises(FailedRunError, match=r"step-4 was written while restart A ran \(parts/a"):
        write()
    assert not (place / COPY).exists()


@pytest.mark.parametrize("words", [
    ("python", "train.py", "--resume", "{original}", "{checkpoint}"),
    ("python", "train.py", "--resume={original}/parts", "{checkpoint}"),
    ("python", "train.py"),
])  # fmt: skip
def test_the_original_is_not_named_to_the_training(
    original: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    filled = tuple(word.replace("{original}", str(original)) for word in words)
    with pytest.raises(UsageError) as error:
        check(trial(original, tmp_path, *filled))
    assert "{checkpoint}" in error.value.hint
    with pytest.raises(UsageError, match="lies in the checkpoint"):
        check(Trial(("python", "{checkpoint}"), original / "trial", at=4,
                    checkpoint=str(original), reference="l"))  # fmt: skip


def test_where_the_system_allows_it_the_original_is_read_only(
    original: Path, tmp_path: Path
) -> None:
    if not can_make_read_only(str(original)):
        pytest.skip("no mounts of one's own here")
    outcome = run(
        ["sh", "-c", f"rm -rf {original}; touch {original}/new; mv {original} {tmp_path}/x"],
        Settings(log=str(tmp_path / "log")), cwd=tmp_path, output=tmp_path / "output.txt",
        timeout=60, read_only=str(original),
    )  # fmt: skip
    assert (outcome.end, (original / "parts" / "a.bin").exists()) == (End.CRASHED, True)
    assert "cannot" in outcome.last_words
    assert not can_make_read_only(str(tmp_path / "absent"))


def test_what_a_killed_run_left_is_found_by_the_next(original: Path, tmp_path: Path) -> None:
    left, busy, other = (tmp_path / f"ftckpt-replay-{n}" for n in range(3))
    for folder in (left, busy, other):
        copy_checkpoint(original, folder / "restart-1" / COPY / "step-4", "restart-1")
        spec = {"checkpoint": str(original)} if folder != other else {}
        (folder / "trial.json").write_text(json.dumps(spec))
    with (busy / "trial.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_left_copies(tmp_path) == [left]
    found = [folder.joinpath("restart-1", COPY).exists() for folder in (left, busy, other)]
    assert found == [False, True, True]
    assert remove_left_copies(tmp_path) == [busy]


def test_restarts_from_a_checkpoint_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "run" / "step-4"
    settings = Settings(log=str(tmp_path / "u"))
    run_lists(tmp_path, [training(settings, mine, 4, save_at=4)])
    shutil.rmtree(tmp_path / "u")
    run_lists(tmp_path, [training(settings, tmp_path / "none", 7)])
    before = fingerprint(mine)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the runs above
    # Each restart saves, to where it has resumed from: the second one began there once.
    words = ("replay", "run", "--checkpoint", str(mine), "--at", "4", "--steps", "3", "--dir",
             "trial", "--reference", "u", "--json", "--", sys.executable, str(TRAIN),
             "--dir", "{checkpoint}", "--save-at", "6")  # fmt: skip
    # Killed while restart A ran: its copy is there, and the same command goes on.
    copy_checkpoint(mine, tmp_path / "trial" / "restart-1" / COPY / "step-4", "restart-1")
    (tmp_path / "trial" / "trial.lock").touch()
    done = ftckpt(*words, cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 0, answer["result"]
    assert changed(before, fingerprint(mine)) == []
    assert [copy["run"] for copy in answer["copies"]] == ["restart-1", "restart-2"]
    assert all(copy["files"] == 1 for copy in answer["copies"])
    assert answer["read_only"] is can_make_read_only(str(mine))
    assert not list((tmp_path / "trial").glob(f"*/{COPY}"))
    # The checkpoint is another one by now: what was run says nothing of it.
    (mine / "more").touch()
    refused = ftckpt(*words, cwd=tmp_path)
    assert refused.returncode == 8, refused.stdout


def test_a_copy_goes_though_the_run_fails(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", fail)
    made = Runs(trial(original, tmp_path), lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        made.restart(0, 4, 8)
    assert not list(tmp_path.glob(f"trial/*/{COPY}"))
