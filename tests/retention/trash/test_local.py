"""The trash of a local root: names, links, other filesystems, full disks, what a kill left."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import ExistsError, ExitCode, NoResourceError, RefusedError, UnsafeError
from ftckpt.own_files import SUFFIX
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import trashed
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.trash import BESIDE, Trashed, parse_trash_name, trash_name
from ftckpt.storage.local import folders
from ftckpt.storage.local.folders import Removal, rename_new
from tests.retention.calls import Calls, Killed
from tests.retention.carrying import (
    DAY,
    FORMATS,
    KEEP_2,
    NOW,
    apply_to,
    dropped,
    names_in,
    place_of,
    plan_of,
    purge_in,
    save,
    saved,
    snapshot,
    undelete_in,
)


@given(
    st.text(st.characters(exclude_characters="/\0"), min_size=1),
    st.floats(0, 4e9),
    st.booleans(),
)
def test_names_in_the_trash_come_back(name: str, time: float, erasing: bool) -> None:
    text = trash_name(name, time, erasing=erasing)
    parsed = parse_trash_name(text)
    assert parsed is not None
    assert (parsed[0], parsed[2]) == (name, erasing)
    assert abs(parsed[1] - time) < 1e-5
    assert trash_name(*parsed[:2], erasing=parsed[2]) == text
    assert parse_trash_name(BESIDE + text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "step-1",
        "20261121T031500.123456Z-step-1",
        "20261321T031500.123456Z~x",
        "20261121T031500.123456Z~",
    ],
)
def test_other_names_are_none_of_ours(text: str) -> None:
    assert parse_trash_name(text) is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four saves of which two stay; `step-2.pt` is one file."""
    root = tmp_path / "root"
    root.mkdir()
    for name in ("step-1", "step-2.pt", "step-3", "step-4"):
        save(root, name, int(name[5]))
    return root


def trash_of(root: Path) -> list[Trashed]:
    return trashed(place_of(root), FORMATS)


def test_a_manifest_goes_and_comes_with_its_file(root: Path) -> None:
    apply_to(root)
    assert [t.name for t in trash_of(root)] == ["step-1", "step-2.pt"]
    assert names_in(root) == {"step-3", "step-4"}
    assert undelete_in(root, "2").code is ExitCode.OK
    assert (root / ("step-2.pt" + SUFFIX)).exists()


def test_the_trash_is_shown_as_what_it_was(root: Path) -> None:
    apply_to(root)
    plan = plan_of(root)
    found = [d.entry for d in plan.decisions if d.entry.entry_class is EntryClass.TRASH]
    assert [(e.step, e.why) for e in found] == [
        (2, "dropped before; it was step-2.pt"),
        (1, "dropped before; it was step-1"),
    ]
    assert [round(e.time or 0, 3) for e in found] == [NOW, NOW]


def test_of_several_the_last_dropped_comes_back(root: Path) -> None:
    apply_to(root)
    save(root, "step-1", 1)
    (root / "step-1/marker").write_text('{"step": 1, "state": "good", "second": true}')
    apply_to(root)  # at the very same time
    first, second = (t for t in trash_of(root) if t.name == "step-1")
    assert first.id != second.id
    undelete_in(root, "step-1")
    assert "second" in (root / "step-1/marker").read_text()
    assert [t.id for t in trash_of(root) if t.name == "step-1"] == [first.id]
    taken = undelete_in(root, first.id)
    assert isinstance(taken.failed[first.id], ExistsError)
    assert taken.code is ExitCode.REFUSED


@pytest.mark.parametrize("kind", ["file", "empty directory", "dangling link"])
def test_what_stands_there_is_never_replaced(root: Path, kind: str) -> None:
    apply_to(root)
    match kind:
        case "file":
            (root / "step-1").write_text("mine")
        case "empty directory":
            (root / "step-1").mkdir()
        case _:
            (root / "step-1").symlink_to("nowhere")
    before = saved(root)
    assert undelete_in(root, "step-1").code is ExitCode.REFUSED
    assert saved(root) == before
    assert [t.name for t in trash_of(root)] == ["step-1", "step-2.pt"]


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_rename_takes_no_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, supported: bool
) -> None:
    if not supported:
        monkeypatch.setattr(folders, "renameat2", lambda *names: errno.EINVAL)
    for name in ("a", "b"):
        (tmp_path / name).mkdir() if kind == "directory" else (tmp_path / name).write_text(name)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileExistsError):
            rename_new("a", "b", source_dir=folder, target_dir=folder)
        rename_new("a", "c", source_dir=folder, target_dir=folder)
        with pytest.raises(FileNotFoundError):
            rename_new("a", "d", source_dir=folder, target_dir=folder)
    finally:
        os.close(folder)
    assert {p.name for p in tmp_path.iterdir()} == {"b", "c"}


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EEXIST])
def test_a_rename_whose_answer_was_lost_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = folders.renameat2

    def repeated(*names: Any) -> int:
        real(*names)
        return code

    monkeypatch.setattr(folders, "renameat2", repeated)
    (tmp_path / "a").write_text("a")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        rename_new("a", "b", source_dir=folder, target_dir=folder)
        os.link(tmp_path / "b", tmp_path / "c")  # the same file, and no rename of ours
        with pytest.raises(FileExistsError if code == errno.EEXIST else FileNotFoundError):
            rename_new("b", "c", source_dir=folder, target_dir=folder)
    finally:
        os.close(folder)
    assert {p.name for p in tmp_path.iterdir()} == {"b", "c"}


def test_a_manifest_that_finds_its_name_taken_goes_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_to(root)
    real = folders.renameat2

    def racing(source_dir: int, source: str, target_dir: int, target: str) -> int:
        if target == "step-2.pt":
            (root / target).write_text("a trainer was faster")
        return real(source_dir, source, target_dir, target)

    monkeypatch.setattr(folders, "renameat2", racing)
    assert undelete_in(root, "step-2.pt").code is ExitCode.REFUSED
    assert names_in(root) == {"step-3", "step-4", "step-2.pt"}
    (root / "step-2.pt").unlink()
    monkeypatch.undo()
    assert undelete_in(root, "step-2.pt").code is ExitCode.OK
    assert (root / ("step-2.pt" + SUFFIX)).exists()


def test_what_is_being_reclaimed_cannot_be_had_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_to(root)
    monkeypatch.setattr(Removal, "remove", lambda *args: None)
    purge_in(root, NOW + DAY)
    monkeypatch.undo()
    assert all(t.erasing for t in trash_of(root))
    refused = undelete_in(root, "step-1")
    assert isinstance(refused.failed["step-1"], RefusedError)
    assert "being reclaimed" in refused.failed["step-1"].message
    # What was begun is finished, whatever its age.
    assert len(purge_in(root, NOW + DAY, trash_ttl=9 * DAY).erased) == 2
    assert list((root / ".ftckpt/trash").iterdir()) == []


@pytest.mark.parametrize("place", [".ftckpt", ".ftckpt/trash"])
def test_a_link_in_the_place_of_our_own_is_never_followed(root: Path, place: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    plan = plan_of(root)
    if "/" in place:
        (root / ".ftckpt").mkdir()
    (root / place).symlink_to(outside)
    before = saved(root)
    with pytest.raises(UnsafeError):
        apply_to(root, plan)
    assert list(outside.iterdir()) == []
    assert saved(root) == before


def test_a_run_that_is_swapped_for_a_link_is_not_entered(tmp_path: Path) -> None:
    for run in ("root/alpha", "root/beta", "outside"):
        (tmp_path / run).mkdir(parents=True)
        for step in (1, 2, 3, 4):
            save(tmp_path / run, f"step-{step}", step)
    plan = plan_of(tmp_path / "root")
    os.rename(tmp_path / "root/alpha", tmp_path / "alpha")
    (tmp_path / "root/alpha").symlink_to(tmp_path / "outside")
    before = snapshot(tmp_path / "outside")
    try:
        applied = apply_to(tmp_path / "root", plan)
        assert not any(name.startswith("alpha/") for name in dropped(applied))
    except (UnsafeError, RefusedError):
        pass
    assert snapshot(tmp_path / "outside") == before


def test_links_in_what_is_reclaimed_are_removed_and_not_followed(root: Path) -> None:
    outside = root.parent / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "below/precious").write_text("precious")
    (root / "step-1/deep/up").symlink_to(outside)
    (root / "step-1/file").symlink_to(outside / "below/precious")
    os.link(outside / "below/precious", root / "step-1/hard")
    before = {k: v[:3] for k, v in snapshot(outside).items()}
    plan = plan_of(root)
    applied = apply_to(root, plan, purge_now=True)
    assert applied.code is ExitCode.OK
    assert applied.freed == plan.frees > 1000
    assert {k: v[:3] for k, v in snapshot(outside).items()} == before
    assert (outside / "below/precious").read_text() == "precious"
    assert (outside / "below/precious").stat().st_nlink == 1


def test_a_directory_that_becomes_a_link_is_not_emptied(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    apply_to(root)
    real = os.stat

    def racing(path: Any, *args: Any, **more: Any) -> os.stat_result:
        found = real(path, *args, **more)
        if path == "deep" and "dir_fd" in more:
            thing = next((root / ".ftckpt/trash").glob("*!step-1"))
            if (thing / "deep").is_dir() and not (thing / "deep").is_symlink():
                os.rename(thing / "deep", root.parent / "was deep")
                (thing / "deep").symlink_to(outside)
        return found

    monkeypatch.setattr(os, "stat", racing)
    purged = purge_in(root, NOW + DAY)
    monkeypatch.undo()
    assert purged.code is ExitCode.UNSAFE
    assert (outside / "precious").read_text() == "precious"
    again = purge_in(root, NOW + DAY)
    assert again.code is ExitCode.OK
    assert list((root / ".ftckpt/trash").iterdir()) == []


def test_what_cannot_be_removed_is_said_and_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_to(root)
    real = os.unlink

    def refusing(path: Any, *args: Any, **more: Any) -> None:
        if path == "shard":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(path, *args, **more)

    monkeypatch.setattr(os, "unlink", refusing)
    purged = purge_in(root, NOW + DAY)
    assert purged.code is ExitCode.PARTIAL
    assert [t.name for t in purged.erased] == ["step-2.pt"]
    (failure,) = purged.failed.values()
    assert failure.message == f"cannot remove {root}/step-1/deep/shard: Permission denied"
    assert trash_of(root)[0].erasing
    monkeypatch.undo()
    assert purge_in(root, NOW + DAY).code is ExitCode.OK


def test_a_tree_without_end_is_left(root: Path) -> None:
    path = root / "step-1"
    for _ in range(150):
        path /= "d"
        path.mkdir()
    applied = apply_to(root, purge_now=True)
    assert applied.code is ExitCode.PARTIAL
    assert "nested too deeply" in applied.failed["step-1"].message
    assert names_in(root) == {"step-3", "step-4"}


def full(monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
    """Let nothing be made any more; what is there can be renamed and removed."""
    for name in calls:
        real = getattr(os, name)

        def refusing(*args: Any, _real: Any = real, _name: str = name, **more: Any) -> Any:
            if _name == "open" and not args[1] & os.O_CREAT:
                return _real(*args, **more)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, name, refusing)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "calls",
    [
        ("mkdir",),
        ("open",),
        ("write", "pwrite"),
        ("fsync",),
        ("mkdir", "open", "write", "pwrite", "fsync", "ftruncate"),
    ],
)
def test_a_full_disk_does_not_matter(
    root: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], at_once: bool
) -> None:
    before = saved(root)
    plan = plan_of(root)
    full(monkeypatch, *calls)
    applied = apply_to(root, plan, purge_now=at_once)
    assert applied.code is ExitCode.OK
    assert names_in(root) == {"step-3", "step-4"}
    assert applied.notes == (f"there was no room in the log of {root} for what was done",)
    monkeypatch.undo()
    assert not plan_of(root).drop
    if at_once:
        assert trash_of(root) == []
    else:
        assert [t.name for t in trash_of(root)] == ["step-1", "step-2.pt"]
        found = [d.entry for d in plan_of(root).decisions]
        assert sum(e.entry_class is EntryClass.TRASH for e in found) == 2
        assert not any(e.entry_class is EntryClass.FOREIGN for e in found)
        assert undelete_in(root, "step-1", "step-2.pt").code is ExitCode.OK
        assert saved(root) == before
        apply_to(root)
        assert len(purge_in(root, NOW + DAY).erased) == 2
    assert trash_of(root) == []


def test_a_trash_beside_is_purged_and_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, "mkdir")
    apply_to(root)
    assert {p.name[:14] for p in root.iterdir()} == {".ftckpt-trash-", "step-3", "step-4"}
    purged = purge_in(root, NOW + DAY)
    assert len(purged.erased) == 2
    assert {p.name for p in root.iterdir()} == {"step-3", "step-4"}


def test_where_nothing_can_be_renamed_everything_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "renameat2", lambda *names: errno.ENOSPC)
    before = saved(root)
    applied = apply_to(root)
    assert applied.code is ExitCode.NO_RESOURCE
    assert all(isinstance(e, NoResourceError) for e in applied.failed.values())
    assert saved(root) == before


def test_a_trash_on_another_filesystem_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders.renameat2

    def across(source_dir: int, source: str, target_dir: int, target: str) -> int:
        far = "~step" in target and not target.startswith(BESIDE)
        return errno.EXDEV if far else real(source_dir, source, target_dir, target)

    monkeypatch.setattr(folders, "renameat2", across)
    assert apply_to(root).code is ExitCode.OK
    assert undelete_in(root, "step-1").code is ExitCode.OK


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 256 KiB and few names."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no filesystem may be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("what", ["bytes", "names", "both"])
def test_a_disk_that_is_really_full(small_disk: Path, what: str, at_once: bool) -> None:
    root = small_disk / "root"
    root.mkdir()
    for step in range(1, 7):
        save(root, f"step-{step}", step)
    (small_disk / "filler").touch()
    plan = plan_of(root)
    if what != "bytes":
        with suppress(OSError):
            for number in range(100):
                (small_disk / f"more-{number}").touch()
        assert os.statvfs(small_disk).f_ffree == 0
    if what != "names":
        with suppress(OSError):
            (small_disk / "filler").write_bytes(bytes(1 << 20))
        assert os.statvfs(small_disk).f_bavail == 0
    applied = apply_to(root, plan, purge_now=at_once)
    assert applied.code is ExitCode.OK
    assert dropped(applied) == list(plan.order)
    assert names_in(root) == {"step-5", "step-6"}
    if not at_once:
        assert undelete_in(root, "step-4").code is ExitCode.OK
        assert apply_to(root).code is ExitCode.OK
        assert purge_in(root, NOW + DAY).code is ExitCode.OK
    assert trash_of(root) == []
    assert os.statvfs(small_disk).f_ffree > 10


def test_a_filesystem_that_is_mounted_in_a_checkpoint_is_not_emptied(
    root: Path, small_disk: Path
) -> None:
    (small_disk / "precious").write_text("precious")
    apply_to(root)
    trash = next((root / ".ftckpt/trash").glob("*~step-1"))
    (trash / "mounted").mkdir()
    bind = ["mount", "--bind", str(small_disk), str(trash / "mounted")]
    subprocess.run(bind, check=True)
    try:
        purged = purge_in(root, NOW + DAY)
    finally:
        renamed = next((root / ".ftckpt/trash").glob("*step-1"))
        subprocess.run(["umount", str(renamed / "mounted")], check=True)
    assert purged.code is ExitCode.PARTIAL
    assert "another filesystem is mounted there" in next(iter(purged.failed.values())).message
    assert (small_disk / "precious").read_text() == "precious"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_checkpoint_that_is_another_filesystem_stays(
    root: Path, small_disk: Path, at_once: bool
) -> None:
    save(small_disk, "step-1", 1)
    bind = ["mount", "--bind", str(small_disk / "step-1"), str(root / "step-1")]
    subprocess.run(bind, check=True)
    try:
        before = snapshot(small_disk)
        applied = apply_to(root, purge_now=at_once)
        assert (applied.code, dropped(applied)) == (ExitCode.PARTIAL, ["step-2.pt"])
        assert "another filesystem is mounted there" in applied.failed["step-1"].message
        assert apply_to(root, purge_now=at_once).code is ExitCode.REFUSED
        assert snapshot(small_disk) == before
    finally:
        subprocess.run(["umount", str(root / "step-1")], check=True)
    assert apply_to(root).code is ExitCode.OK


def test_a_root_that_the_user_named_by_a_link_is_the_root(root: Path) -> None:
    link = root.parent / "run"
    link.symlink_to(root)
    place = place_of(link)
    plan: RetentionPlan = prepare(place, FORMATS, KEEP_2, NOW).plan
    assert apply(plan, place, FORMATS, actor="me", now=lambda: NOW).code is ExitCode.OK
    assert names_in(root) == {"step-3", "step-4"}


class Stuck:
    """A filesystem without room for one more name, until so many files have been removed.

    With `EDQUOT` it is a quota that has no room, and the filesystem is half empty.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, removals: int, code: int = errno.ENOSPC
    ) -> None:
        self.removed: list[str] = []
        self.removals = removals
        self.code = code
        self.rename, self.unlink = folders.renameat2, os.unlink
        full(monkeypatch, "mkdir", "open", "write", "pwrite")
        monkeypatch.setattr(folders, "renameat2", self._rename)
        monkeypatch.setattr(os, "unlink", self._unlink)
        free = 0 if code == errno.ENOSPC else 500
        system = os.statvfs_result((4096, 4096, 1000, free, free, 1000, 10, 10, 0, 255))
        monkeypatch.setattr(os, "fstatvfs", lambda folder: system)

    def _rename(self, *names: Any) -> int:
        return self.code if len(self.removed) < self.removals else self.rename(*names)

    def _unlink(self, *args: Any, **more: Any) -> None:
        self.unlink(*args, **more)
        self.removed.append(args[0])


@pytest.mark.parametrize("removals", [1, 3, 100])
def test_a_quota_without_room_for_a_name_stops_only_what_is_to_be_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    before, plan = saved(root), plan_of(root)
    Stuck(monkeypatch, removals, errno.EDQUOT)
    assert apply_to(root, plan).code is ExitCode.NO_RESOURCE
    assert saved(root) == before
    applied = apply_to(root, plan, purge_now=True)
    assert applied.code is ExitCode.OK
    assert names_in(root) == {"step-3", "step-4"}
    assert applied.freed == plan.frees
    monkeypatch.undo()
    assert trash_of(root) == []


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("removals", [1, 2, 3, 100])
def test_where_not_even_a_name_fits_the_first_makes_room(
    root: Path, monkeypatch: pytest.MonkeyPatch, removals: int, at_once: bool
) -> None:
    plan = plan_of(root)
    Stuck(monkeypatch, removals)
    applied = apply_to(root, plan, purge_now=at_once)
    assert applied.code is ExitCode.OK
    assert dropped(applied) == ["step-1", "step-2.pt"]
    assert names_in(root) == {"step-3", "step-4"}
    said = [n for n in applied.notes if "reclaimed at once" in n]
    lost = ["step-1"] if removals < 3 else ["step-1", "step-2.pt"]
    assert [n.partition(" ")[0] for n in said] == ([] if at_once else lost)
    assert applied.freed + applied.waiting == plan.frees
    monkeypatch.undo()
    assert {t.name for t in trash_of(root)} == (
        set() if at_once else {"step-1", "step-2.pt"} - set(lost)
    )
    assert not plan_of(root).drop


def test_what_commits_it_goes_first_where_nothing_can_be_renamed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch, 100)
    apply_to(root)
    assert stuck.removed[:2] == ["marker", "shard"]


def test_what_is_half_reclaimed_is_marked_where_it_cannot_be_renamed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_to(root)
    monkeypatch.setattr(Removal, "remove", lambda *args: None)
    Stuck(monkeypatch, 100)
    purge_in(root, NOW + DAY)
    monkeypatch.undo()
    refused = undelete_in(root, "step-1", now=NOW + DAY)
    assert "step-1 is being reclaimed" in refused.failed["step-1"].message
    assert len(purge_in(root, NOW + DAY).erased) == 2
    assert trash_of(root) == []


def test_killed_while_it_makes_room(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for point in range(1, 100):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for name in ("step-1", "step-2.pt", "step-3", "step-4"):
            save(root, name, int(name[5]))
        before = saved(root)
        calls = Calls(point, None)
        try:
            with pytest.MonkeyPatch.context() as patch:
                Stuck(patch, 100)
                with calls.failing():
                    apply_to(root)
            break
        except Killed:
            pass
        now = saved(root)
        assert {k: v[3] for k, v in now.items()} == {k: before[k][3] for k in now}
        finished = [
            d.entry.name
            for d in plan_of(root, Policy(keep_last=9)).decisions
            if d.entry.entry_class is EntryClass.COMMITTED
        ]
        for name in finished:  # what looks like a checkpoint is whole
            assert {k for k in before if k.split("/")[0] == name} <= now.keys()
        assert set(finished) >= {"step-3", "step-4"}
        assert apply_to(root).code is ExitCode.OK
    assert point > 4
