"""What an absent or empty root means, and what names of no known layout mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ftckpt
from ftckpt.discovery import resolve as opening
from ftckpt.discovery import root_marker
from ftckpt.discovery.candidates import newest_child
from ftckpt.errors import ExitCode, FtckptError, MissingError, UnsafeError, UsageError
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions
from tests.builders.checkpoints import save_dcp
from tests.workers.forked import run


def code_of(root: Path) -> ExitCode:
    try:
        return ftckpt.latest(str(root)).code
    except FtckptError as error:
        return error.exit_code


def create(root: Path) -> None:
    root_marker.create_root(str(root), StoreOptions())


def test_a_marked_root_without_checkpoints_is_a_first_start(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert code_of(root) is ExitCode.MISSING
    root.mkdir()
    (root / "logs").mkdir()
    assert code_of(root) is ExitCode.MISSING
    create(root)
    create(root)
    assert code_of(root) is ExitCode.NOT_FOUND
    save_dcp(root / "step-1", step=1)
    assert code_of(root) is ExitCode.OK


def test_a_place_is_created_only_below_one_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="does not exist"):
        create(tmp_path / "not-mounted" / "run")
    assert not (tmp_path / "not-mounted").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        create(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / ".ftckpt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="is a link"):
        create(tmp_path / "run")
    (tmp_path / "elsewhere" / "root.json").write_text("{}")
    assert code_of(tmp_path / "run") is ExitCode.MISSING


def test_an_unmounted_filesystem_of_fstab_is_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "my disk"
    (mount / "run").mkdir(parents=True)
    fstab = tmp_path / "fstab"
    escaped = str(mount).replace(" ", "\\040")
    fstab.write_text(f"# a comment\nUUID=1 / ext4\nsrv:/x {escaped} nfs rw 0 0\nnone swap swap\n")
    create(mount / "run")
    assert code_of(mount / "run") is ExitCode.NOT_FOUND
    monkeypatch.setattr(root_marker, "_FSTAB", str(fstab))
    assert code_of(mount / "run") is ExitCode.MISSING
    assert code_of(mount) is ExitCode.MISSING
    with pytest.raises(MissingError, match="is not mounted"):
        create(mount / "other")
    assert code_of(tmp_path) is ExitCode.MISSING  # for want of a marker
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(mount))
    assert code_of(mount / "run") is ExitCode.NOT_FOUND


@pytest.mark.parametrize("trace", ["latest", "passed.json", "tracker"])
def test_a_root_that_lost_its_checkpoints_is_no_first_start(tmp_path: Path, trace: str) -> None:
    create(tmp_path)
    if trace == "passed.json":
        (tmp_path / ".ftckpt" / trace).write_text("{}")
    elif trace == "latest":
        (tmp_path / "latest").write_text("global_step7")
    else:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    found = ftckpt.latest(str(tmp_path))
    assert found.code is ExitCode.CORRUPT
    assert "any more" in found.message


def verbs(root: Path) -> dict[str, int]:
    lines = {
        "latest": ["latest", str(root)],
        "inspect": ["inspect", str(root)],
        "verify": ["verify", str(root)],
        "status": ["status", str(root)],
        "gc": ["gc", str(root), "--keep-last", "1"],
    }
    return {verb: run(words, os.environ).returncode for verb, words in lines.items()}


def test_a_missing_root(tmp_path: Path) -> None:
    found = verbs(tmp_path / "absent")
    assert found.pop("latest") == 15  # its 9 starts a run from scratch
    assert set(found.values()) == {9}


@pytest.mark.parametrize("name", ["step-3", "final"])
def test_a_format_that_is_not_read_is_the_same_in_every_verb(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.pdparams").write_text("{}")  # Paddle
    found = verbs(tmp_path)
    assert found.pop("gc") == 0  # a plan that keeps it
    assert set(found.values()) == {13}


def test_finished_saves_of_an_unknown_layout_are_unsupported(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "weights.xyz").write_bytes(b"abc")
    found = verbs(tmp_path)
    assert set(found.values()) == {13}
    chosen = ftckpt.latest(str(tmp_path))
    assert "layout that is not known" in chosen.message
    assert "--wait" not in chosen.hint
    # It may be a save in flight that nothing shows yet, so an older one is taken, aloud.
    save_dcp(tmp_path / "step-0", step=0)
    chosen = ftckpt.latest(str(tmp_path))
    assert (chosen.code, chosen.step) == (ExitCode.OK, 0)
    assert [s.code for s in chosen.skipped] == [ExitCode.UNSUPPORTED] * 2
    # What nobody has written to for a day is no save in flight.
    for one in [tmp_path / "step-2" / "weights.xyz", tmp_path / "step-2"]:
        os.utime(one, (1e9, 1e9))
    assert ftckpt.latest(str(tmp_path)).code is ExitCode.UNSUPPORTED


def test_a_root_means_its_newest_committed_checkpoint_in_every_verb(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_dcp(tmp_path / f"step-{step}", step=step)
    (tmp_path / "step-3" / ".metadata").unlink()
    for words in (["latest"], ["inspect"], ["verify"]):
        done = run([*words, str(tmp_path)], os.environ)
        assert done.returncode == 0, done.stderr
        assert "step-2" in done.stdout + done.stderr
        assert "step-3" in done.stderr
    at_latest = ftckpt.open_checkpoint(f"{tmp_path}@latest")
    assert at_latest.step == 2
    for step in (1, 2):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
    root = opening.open_root(opening.locate(str(tmp_path), StoreOptions()), FORMATS)
    assert newest_child(root).candidate.path == "step-3"
    assert run(["inspect", str(tmp_path)], os.environ).returncode == 5


def test_what_was_not_checked_is_said(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    done = run(["latest", str(tmp_path)], os.environ)
    assert done.stdout == f"{tmp_path}/step-1\n"
    assert "--level content reads every byte" in done.stderr
    assert run(["latest", str(tmp_path), "-q"], os.environ).stderr == ""
    assert run(["latest", str(tmp_path), "--level", "content"], os.environ).stderr == ""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FTCKPT_RETRY_SECOND", "FTCKPT_RETRY_SECONDS"),
        ("FTCKPT_ENDPONT", "FTCKPT_ENDPOINT"),
        ("FTCKPT_LATEST_LEVEL", "common and storage options alone"),
        ("FTCKPT_LATEST_SKIP_UNVERIFIED", "common and storage options alone"),
        ("FTCKPT_X", "ftckpt help environment"),
    ],
)
def test_an_unknown_variable_is_refused(tmp_path: Path, name: str, hint: str) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    done = run(["latest", str(tmp_path)], os.environ | {name: "content"})
    assert (done.returncode, done.stdout) == (2, "")
    assert name in done.stderr
    assert hint in done.stderr
    assert run(["help", "environment"], os.environ | {name: "x"}).returncode == 0


def test_variables_of_other_purposes_stay(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-1", step=1)
    others = ("REPLAY_LOG", "CONFIG", "SERVICE_HOST", "GC_PORT_80_TCP_ADDR", "PORT")
    known = {f"FTCKPT_{name}": "" for name in others} | {"FTCKPT_RETRY_SECONDS": "2"}
    assert run(["latest", str(tmp_path)], os.environ | known).returncode == 0
