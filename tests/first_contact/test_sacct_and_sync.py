"""A table of many jobs, and a source that was written in place with its old times."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from ftckpt.joblogs.reading.slurm import JobRow, lanes
from tests.builders.checkpoints import save_dcp
from tests.commands.saves import answer


def row(name: str, start: float, end: float | None, line: int = 0) -> JobRow:
    return JobRow(f"{line}", name, "FAILED", start, end, "", "1:0", line)


def plainly(rows: list[JobRow]) -> list[list[JobRow]]:
    """Divide rows as the rule says it, a look at every lane for every row."""
    found: list[list[JobRow]] = []
    last = float("inf")
    for one in sorted(rows, key=lambda row: (row.start or 0.0, row.end or 1e11)):
        free = [lane for lane in found if (lane[-1].end or last) <= (one.start or 0.0)]
        same = [lane for lane in free if lane[-1].name == one.name]
        chosen = max(same, key=lambda lane: lane[-1].end or 0.0, default=None)
        if chosen is None:
            found.append([one])
        else:
            chosen.append(one)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_lanes_are_those_of_the_rule(seed: int) -> None:
    draw = random.Random(seed)
    rows = []
    for line in range(draw.randint(1, 60)):
        start = float(draw.randint(1, 40))
        end = None if draw.random() < 0.1 else start + draw.randint(0, 12)
        rows.append(row(draw.choice("abc"), start, end, line))
    assert lanes(rows) == plainly(rows)


def test_a_row_looks_at_the_lanes_of_its_own_name_alone() -> None:
    """A job of a name of its own cost a look at every lane: 100,000 rows took 20 minutes."""

    def steps(count: int) -> int:
        rows = [row(f"job{n}", float(n), float(n) + 0.5, n) for n in range(1, count + 1)]
        done = 0

        def count_line(*_: Any) -> Any:
            nonlocal done
            done += 1
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            assert len(lanes(rows)) == count
        finally:
            sys.settrace(before)
        return done

    assert steps(400) < 2.5 * steps(200)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def test_a_file_written_in_place_with_its_old_time_is_another(root: Path) -> None:
    tier = str(root.parent / "tier")
    Path(tier).mkdir()
    assert answer("sync", str(root), tier)["result"]["code"] == 0
    again = answer("sync", str(root), tier)
    assert again["result"]["code"] == 0
    file = root / "step-2" / "__0_0.distcp"
    found = file.stat()
    data = file.read_bytes()
    with file.open("r+b") as opened:  # the same inode, size and time
        opened.seek(len(data) // 2)
        opened.write(bytes(byte ^ 1 for byte in data[len(data) // 2 :][:4]))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert answer("sync", str(root), tier)["result"]["code"] == 8
    assert (Path(tier) / "step-2" / "__0_0.distcp").read_bytes() == data


def test_another_mode_is_read_once_and_is_the_same(root: Path) -> None:
    tier = str(root.parent / "tier")
    Path(tier).mkdir()
    assert answer("sync", str(root), tier)["result"]["code"] == 0
    (root / "step-2" / "__0_0.distcp").chmod(0o600)
    for _ in range(2):
        assert answer("sync", str(root), tier)["result"]["code"] == 0
