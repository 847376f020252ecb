"""A staging place that was emptied, filled up, or lies where nothing can be created just once."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from tests.commands.golden import DATA

from .answers import answer, small_blocks
from .test_copy import files, objects, part, records, source, staged, target
from .test_faults import codes, forked

__all__ = ["source", "target"]  # fixtures

PARTS = 3
_numbers = itertools.count()


@pytest.mark.parametrize("again", [False, True])
def test_files_that_were_removed_beside_the_journal(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """What parts have written before is gone, though the files have their sizes again."""
    small_blocks(monkeypatch)
    for number in (*range(PARTS), 0):
        assert part(source, target, number) is ExitCode.OK
    kept = staged(target)
    shutil.rmtree(kept)
    if again:  # somebody makes empty files of the right sizes
        for path in source.rglob("*"):
            made = kept / path.relative_to(source)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.touch()
            os.truncate(made, path.stat().st_size)
        assert part(source, target, None) is ExitCode.REFUSED
    else:  # a part that is run anew would make its files as large as they will be
        for record in target.parent.glob(".ftckpt/parts/*/1-3.write.json"):
            record.unlink()
        assert part(source, target, 1) is ExitCode.REFUSED
        assert not kept.exists()
    assert not target.exists()
    # As the hint says.
    shutil.rmtree(kept.parent)
    shutil.rmtree(target.parent / ".ftckpt")
    for number in range(PARTS):
        assert part(source, target, number) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert files(target) == files(source)


def test_a_full_disk_on_one_node(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    assert part(source, target, 0) is ExitCode.OK

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        assert part(source, target, 1) is ExitCode.NO_RESOURCE
    assert records(target, "1-3.*") == []
    assert part(source, target, 2) is ExitCode.OK
    assert part(source, target, None) is ExitCode.INCOMPLETE
    assert part(source, target, 1) is ExitCode.OK
    assert part(source, target, None) is ExitCode.OK
    assert files(target) == files(source)


@pytest.mark.s3
@pytest.mark.parametrize("service", ["rclone", "swift"])
def test_twins_and_finishers_where_no_condition_holds(
    source: Path, service: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ignores conditions, the other loses them in a race: nothing is visible too early."""
    request.getfixturevalue(service).enter(monkeypatch)
    url: Any = f"s3://ftckpt-tests/{service}-{os.getpid()}-{next(_numbers)}/step-2"
    ends = codes([forked(lambda: part(source, url, 0)) for _ in range(2)])
    assert set(ends) <= {int(ExitCode.OK), int(ExitCode.REFUSED)}
    assert int(ExitCode.OK) in ends
    for number in range(1, PARTS):
        assert part(source, url, number) is ExitCode.OK
    assert answer("verify", url)[0].code is ExitCode.INCOMPLETE
    good = {int(ExitCode.OK), int(ExitCode.INCOMPLETE), int(ExitCode.REFUSED)}
    ends = codes([forked(lambda: part(source, url, None)) for _ in range(2)])
    assert set(ends) <= good
    assert int(ExitCode.OK) in ends
    assert objects(url) == files(source)
    assert answer("verify", url, "--level", "content")[0].code is ExitCode.OK


def test_a_made_directory_of_the_same_name_is_kept(tmp_path: Path) -> None:
    """What parts call their place leaves nothing in the result."""
    source = shutil.copytree(DATA / "run/step-2", tmp_path / "a" / "step-2")
    made = tmp_path / "b" / "step-2"
    for number in (*range(PARTS), None):
        assert part(source, made, number) is ExitCode.OK
    assert not (made / ".ftckpt").exists()
