"""Each call that changes something fails once, or from then on: nothing is lost, all is said."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode, FtckptError
from ftckpt.stores import renaming

from .carrying import DAY, NOW, apply_to, names_in, plan_of, purge_in, save, saved, undelete_in

_CALLS = ("open", "mkdir", "write", "pwrite", "ftruncate", "fsync", "unlink", "rmdir")


class Calls:
    """Counts calls that change something, and lets some of them fail.

    Args:
        first: the number of the first that fails, from 1.
        code: with what.
        forever: whether all after it fail too.
    """

    def __init__(self, first: int, code: int, *, forever: bool) -> None:
        self.first = first
        self.code = code
        self.forever = forever
        self.seen = 0

    def fails(self) -> bool:
        self.seen += 1
        return self.seen == self.first or (self.forever and self.seen > self.first)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Let them fail within."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            real = renaming.renameat2
            patch.setattr(
                renaming, "renameat2", lambda *names: self.code if self.fails() else real(*names)
            )
            yield

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if (name != "open" or args[1] & os.O_CREAT) and self.fails():
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **more)

        return call


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
    calls = Calls(0, 0, forever=False)
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
        calls = Calls(point, errno.EIO, forever=False)
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
