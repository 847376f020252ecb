"""Two users at one root, links in place of ftckpt's folder, and checkpoints that go meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.discovery.roots import Child, Root
from ftckpt.errors import DeniedError, ExitCode, UnsafeError
from ftckpt.retention.locks.local import lock_beside
from ftckpt.storage.local import ownership
from ftckpt.storage.local.atomic import write_new, write_over
from ftckpt.verification.places import PlaceCheck, PlaceReport
from tests.builders.checkpoints import save_dcp
from tests.first_contact.lines import printed

OWNER = 12345
superuser = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def owned(root: Path, mode: int = 0o2770) -> Path:
    """Give a root to another user, as a trainer's is."""
    for path in (root, *root.rglob("*")):
        os.chown(path, OWNER, OWNER)
    root.chmod(mode)
    return root


@superuser
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_what_the_superuser_makes_in_a_root_is_its_owners(root: Path, mask: int) -> None:
    """Root's cron ran gc first, and from then on the trainer's own guard could not lock."""
    owned(root)
    before = os.umask(mask)
    try:
        assert printed("gc", str(root), "--keep-last", "2", "--apply").code == 0
        assert printed("pin", str(root), "step-4", "--reason", "x").code == 0
        assert printed("promote", str(root / "step-4")).code == 0
        assert printed("seal", str(root / "step-3")).code == 0
        assert printed("scrub", str(root)).code == 0
    finally:
        os.umask(before)
    made = [
        path for path in root.rglob("*") if ".ftckpt" in str(path) or path.name == "last-known-good"
    ]
    assert len(made) > 5
    for path in made:
        found = path.lstat()
        assert (found.st_uid, found.st_gid) == (OWNER, OWNER), path
        if "trash" not in str(path):
            assert stat.S_IMODE(found.st_mode) & 0o600 == 0o600, path
            assert stat.S_IMODE(found.st_mode) & 0o070, path


@superuser
def test_a_file_that_stood_there_is_not_given_away(tmp_path: Path) -> None:
    """Its owner may have moved another file of the superuser's to that name."""
    folder = tmp_path / "root"
    folder.mkdir()
    os.chown(folder, OWNER, OWNER)
    (folder / "log").write_text("of the superuser")
    os.close(ownership.open_or_make(str(folder / "log"), os.O_RDWR))
    assert (folder / "log").stat().st_uid == 0
    os.close(ownership.open_or_make(str(folder / "new"), os.O_RDWR))
    assert (folder / "new").stat().st_uid == OWNER


@superuser
def test_the_message_names_what_keeps_the_owner_out_and_whose_it_is(root: Path) -> None:
    owned(root, 0o755)
    os.chmod(root.parent, 0o755)
    (root / ".ftckpt").mkdir(mode=0o700)
    (root / ".ftckpt" / "guard.lock").touch()
    reads, writes = os.pipe()
    folder = os.open(root, os.O_RDONLY)
    child = os.fork()
    if child == 0:  # the owner
        said = "nothing was refused"
        try:
            os.setresgid(OWNER, OWNER, OWNER)
            os.setresuid(OWNER, OWNER, OWNER)
            with lock_beside(folder, str(root), "me", name="guard.lock", work="guard"):
                pass
        except DeniedError as error:
            said = f"{error.message}; {error.hint}"
        finally:
            os.write(writes, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(folder)
    said = os.read(reads, 4096).decode()
    assert f"{root}/.ftckpt/guard.lock" in said
    # A folder above may hide it from this user, too: then that one is named.
    assert "belongs to" in said
    assert "chown" in said


@pytest.mark.parametrize("below", ["", "/pins", "/pins/step-4"])
def test_nothing_is_written_behind_a_link_in_place_of_our_folder(
    below: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    link = Path(f"{tmp_path}/root/.ftckpt{below}")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    for write in (write_over, write_new):
        with pytest.raises(UnsafeError):
            write(f"{tmp_path}/root/.ftckpt/pins/step-4/x.json", b"planted")
    assert not any(victim.iterdir())


def test_a_scrub_does_not_write_behind_a_planted_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (root / ".ftckpt").symlink_to(tmp_path / "victim")
    assert printed("scrub", str(root)).code == ExitCode.UNSAFE
    assert not any((tmp_path / "victim").iterdir())


def test_what_gc_drops_while_all_is_verified_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = PlaceCheck._child

    def dropped(self: PlaceCheck, root_: Root, child: Child) -> PlaceReport:
        if child.candidate.path == "step-2":
            (root / ".ftckpt/trash").mkdir(parents=True)
            (root / "step-2").rename(root / ".ftckpt/trash/20270115T080000.000000Z~step-2")
        return check(self, root_, child)

    monkeypatch.setattr(PlaceCheck, "_child", dropped)
    found = ftckpt.verify(str(root), all_=True)
    assert found.code is ExitCode.OK, found.message
    assert [Path(one.url).name for one in found.checkpoints] == ["step-4", "step-3", "step-1"]
    said = printed("verify", str(root), "--all")
    assert said.code == 0


def test_what_stands_and_is_bad_is_not_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check: Any = PlaceCheck._child

    def torn(self: PlaceCheck, root_: Root, child: Child) -> PlaceReport:
        if child.candidate.path == "step-2":
            (root / "step-2/__0_0.distcp").write_bytes(b"")
        return check(self, root_, child)  # type: ignore[no-any-return]

    monkeypatch.setattr(PlaceCheck, "_child", torn)
    assert ftckpt.verify(str(root), all_=True).code is not ExitCode.OK
