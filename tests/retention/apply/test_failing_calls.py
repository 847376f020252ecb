"""Each call that changes something fails once, or from then on: nothing is lost, all is said."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, FtckptError
from tests.retention.calls import Calls
from tests.retention.carrying import (
    DAY,
    NOW,
    apply_to,
    names_in,
    plan_of,
    purge_in,
    save,
    saved,
    undelete_in,
)


def make(root: Path) -> None:
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    for name in ("step-1", "step-2.pt", "step-3", "step-4"):
        save(root, name, int(name[5]))


def dropped_at_once(root: Path) -> ExitCode:
    return apply_to(root, purge_now=True).code


def dropped_and_back(root: Path) -> ExitCode:
    code = apply_to(root).code
    return code or undelete_in(root, "step-1", "step-2.pt").code


def dropped_and_purged(root: Path) -> ExitCode:
    code = apply_to(root).code
    return code or purge_in(root, NOW + DAY).code


WORKS = [dropped_at_once, dropped_and_back, dropped_and_purged]


def points(work: Callable[[Path], ExitCode], root: Path) -> int:
    """Return how many calls a run makes that nothing hinders."""
    make(root)
    calls = Calls(0, 0)
    with calls.failing():
        assert work(root) is ExitCode.OK
    return calls.seen


@pytest.mark.parametrize("work", WORKS)
def test_what_recovers_is_not_noticed(tmp_path: Path, work: Callable[[Path], ExitCode]) -> None:
    root = tmp_path / "root"
    number = points(work, root)
    after = names_in(root)
    assert number > 15
    for point in range(1, number + 1):
        make(root)
        calls = Calls(point, errno.EIO)
        with calls.failing():
            assert work(root) is ExitCode.OK, point
        assert names_in(root) == after


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EIO, {ExitCode.UNAVAILABLE, ExitCode.PARTIAL}),
        (errno.EACCES, {ExitCode.DENIED, ExitCode.PARTIAL}),
    ],
)
@pytest.mark.parametrize("work", WORKS)
def test_what_does_not_recover_is_said_and_a_later_run_finishes(
    tmp_path: Path, work: Callable[[Path], ExitCode], code: int, says: set[ExitCode]
) -> None:
    root = tmp_path / "root"
    number = points(work, root)
    for point in range(1, number + 1):
        make(root)
        before = saved(root)
        calls = Calls(point, code, forever=True)
        with calls.failing():
            try:
                found = work(root)
            except FtckptError as error:
                found = error.exit_code
        assert found in says, point
        now = saved(root)
        assert {k: before[k] for k in now} == now
        assert names_in(root) >= {"step-3", "step-4"}
        assert apply_to(root).code is ExitCode.OK
        assert not plan_of(root).drop
        assert purge_in(root, NOW + 2 * DAY).code is ExitCode.OK
        assert list((root / ".ftckpt/trash").iterdir()) == []
