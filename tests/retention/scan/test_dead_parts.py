"""Records of divided operations that nobody went on with: named, and removed after a week."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from tests.commands.golden import DATA
from tests.parts.answers import answer
from tests.retention.carrying import DAY, NOW, apply_to, purge_in, save

DEAD, ALIVE, ODD = "d" * 32, "a" * 32, "0" * 32
FILES = ("0-3.json", "1-3.write.json", "2-3.running.json", "finish-1.json", "finished.json")


def fill(root: Path, plan: str, names: tuple[str, ...], age: float, now: float = 0.0) -> Path:
    now = now or min(NOW, time.time())  # the store says how old they are
    place = root / ".ftckpt/parts" / plan
    place.mkdir(parents=True, exist_ok=True)
    for name in names:
        (place / name).write_text("{}")
        os.utime(place / name, (now - age, now - age))
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    for step in (98, 99):
        save(root, f"step-{step}", step)
    return root


@pytest.mark.parametrize("how", ["apply", "purge"])
def test_dead_ones_are_removed_and_nothing_else(root: Path, how: str) -> None:
    dead = fill(root, DEAD, FILES, 8 * DAY)
    alive = fill(root, ALIVE, FILES, 8 * DAY)
    fill(root, ALIVE, ("2-3.running.json",), 6 * DAY)  # one part still says that it runs
    odd = fill(root, ODD, (*FILES, "notes.txt"), 8 * DAY)
    other = fill(root, "mine", FILES, 8 * DAY)
    done = apply_to(root, trash_ttl=DAY).purged if how == "apply" else purge_in(root, NOW)
    assert done is not None
    assert done.code is ExitCode.OK
    assert done.notes == (
        f"removed the records of 1 divided operation that nobody went on with in {root}",
    )
    assert not dead.exists()
    assert len(list(alive.iterdir())) == len(list(other.iterdir())) == len(FILES)
    assert len(list(odd.iterdir())) == len(FILES) + 1


def test_a_clock_that_is_ahead_removes_nothing(root: Path) -> None:
    """The files are dated by the store."""
    now = time.time()
    young = fill(root, ALIVE, FILES, 60, now)
    assert purge_in(root, now + 8 * DAY).notes == ()
    assert len(list(young.iterdir())) == len(FILES)


@pytest.mark.parametrize("where", ["parts", DEAD, "file"])
def test_links_are_not_followed(root: Path, tmp_path: Path, where: str) -> None:
    away = fill(tmp_path / "away", DEAD, FILES, 8 * DAY)
    here = root / ".ftckpt"
    here.mkdir()
    if where == "parts":
        (here / "parts").symlink_to(away.parent)
    elif where == DEAD:
        (here / "parts").mkdir()
        (here / "parts" / DEAD).symlink_to(away)
    else:
        place = fill(root, DEAD, FILES[1:], 8 * DAY)
        (place / FILES[0]).symlink_to(away / FILES[0])
        os.utime(place / FILES[0], (min(NOW, time.time()) - 8 * DAY,) * 2, follow_symlinks=False)
    assert purge_in(root, NOW).notes == ()
    assert len(list(away.iterdir())) == len(FILES)


def test_gc_and_status_name_them(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(DATA / "run/step-1", root / "step-1")
    fill(root, DEAD, FILES, 8 * DAY)
    _, plan = answer("gc", root, "--keep-last", "1")
    assert any("1 divided operation" in note for note in plan["plan"]["notes"])
    _, status = answer("status", root)
    assert status["runs"][0]["leftovers"] == [f".ftckpt/parts/{DEAD}"]
