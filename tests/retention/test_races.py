"""A trainer that saves and rotates while gc runs, and several gcs at once."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ftckpt.errors import ExitCode, RefusedError
from ftckpt.retention.apply.purge import trashed
from tests.retention.carrying import (
    DAY,
    FORMATS,
    NOW,
    apply_to,
    names_in,
    place_of,
    plan_of,
    save,
    saved,
)

_SAVES, _KEPT = 80, 4
LONG_AGO = NOW - 10 * DAY


def in_a_fork(work: Callable[[], ExitCode]) -> int:
    """Start `work` in a process of its own, which ends with its code; return the process."""
    child = os.fork()
    if child:
        return child
    gc.disable()  # it would touch every page that the fork shares
    code = 1
    try:
        code = int(work())
    except RefusedError:
        code = int(ExitCode.REFUSED)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train(root: Path) -> ExitCode:
    """Save as trainers do, into a staging name and by a rename; point to it; rotate."""
    for step in range(10, 10 + _SAVES):
        staging = root / "making"
        staging.mkdir()
        save(staging, f"step-{step}", step, LONG_AGO)
        os.rename(staging / f"step-{step}", root / f"step-{step}.tmp")
        staging.rmdir()
        os.rename(root / f"step-{step}.tmp", root / f"step-{step}")
        (root / "latest.new").write_text(f"step-{step}")
        os.rename(root / "latest.new", root / "latest")
        time.sleep(0.01)
        if step % 10 == 0:  # it rotates too, and finds that somebody else may have been faster
            for path in root.glob("step-*"):
                if int(path.name[5:].split(".")[0]) < step - _KEPT:
                    shutil.rmtree(path, ignore_errors=True)
    return ExitCode.OK


def test_a_trainer_that_saves_and_rotates_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for step in range(1, 10):
        save(root, f"step-{step}", step, LONG_AGO)
    trainer = in_a_fork(lambda: train(root))
    codes: list[ExitCode] = []
    while os.waitpid(trainer, os.WNOHANG) == (0, 0):
        applied = apply_to(root)
        codes.append(applied.code)
    assert set(codes) == {ExitCode.OK}
    last = 10 + _SAVES - 1
    assert (root / "latest").read_text() == f"step-{last}"
    live = {int(n[5:]) for n in names_in(root) if n.startswith("step-")}
    assert live >= {last, last - 1}
    content = saved(root)
    for step in live:
        assert f"step-{step}/marker" in content
        assert f"step-{step}/deep/shard" in content
    assert apply_to(root).code is ExitCode.OK


def test_several_at_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for number in range(8):
        for step in range(1 + 10 * number, 11 + 10 * number):
            save(root, f"step-{step}", step)
        plan = plan_of(root)
        children = [in_a_fork(lambda: apply_to(root, plan).code) for _ in range(4)]  # noqa: B023
        codes = [ended(child) for child in children]
        assert set(codes) <= {ExitCode.OK, ExitCode.REFUSED}
        assert ExitCode.OK in codes
        newest = 10 + 10 * number
        assert names_in(root) == {f"step-{newest}", f"step-{newest - 1}"}
        names = [t.name for t in trashed(place_of(root), FORMATS)]
        assert len(names) == len(set(names)) == newest - 2
