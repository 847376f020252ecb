"""What is reclaimed of the trash, and what is held although its time is up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, RefusedError
from ftckpt.retention.apply.purge import trashed
from ftckpt.retention.locks import leases
from ftckpt.retention.records import pins, write
from tests.builders.small_format import read
from tests.retention.carrying import (
    DAY,
    FORMATS,
    HOUR,
    NOW,
    apply_to,
    names_in,
    place_of,
    plan_of,
    purge_in,
    save,
    undelete_in,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two saves; `step-1` and `step-2` were dropped a day ago."""
    root = tmp_path / "root"
    root.mkdir()
    for step in (1, 2, 3, 4):
        save(root, f"step-{step}", step)
    apply_to(root)
    return root


def left(root: Path) -> list[str]:
    return [t.name for t in trashed(place_of(root), FORMATS)]


def test_a_day_must_pass(root: Path) -> None:
    for now in (NOW, NOW + DAY - 2):
        assert purge_in(root, now).erased == ()
    assert purge_in(root, NOW + HOUR, trash_ttl=HOUR).freed == 2 * 1028
    assert left(root) == []
    assert purge_in(root, NOW + HOUR).code is ExitCode.OK


def test_what_was_dropped_in_the_future_stays(root: Path) -> None:
    for thing in (root / ".ftckpt/trash").iterdir():
        os.rename(thing, thing.with_name("2099" + thing.name[4:]))
    purged = purge_in(root, NOW + 9 * DAY)
    assert (purged.code, purged.erased) == (ExitCode.OK, ())
    assert {r.rule for r in purged.held.values()} == {"future"}
    assert undelete_in(root, "step-1").code is ExitCode.OK


@pytest.mark.parametrize("rule", ["pinned", "lease", "pointer", "tracker", "base"])
def test_what_somebody_turns_out_to_need_stays(root: Path, rule: str) -> None:
    now = NOW + 2 * DAY
    os.rename(next((root / ".ftckpt/trash").glob("*step-2")), root / "step-2")
    match rule:
        case "pinned":
            pins.pin(read(root), "step-2", owner="alice", reason="figure", now=NOW)
        case "lease":
            leases.take(read(root), "step-2", holder="node7", now=now)
        case "pointer":
            (root / "latest").write_text("step-2\n")
        case "tracker":
            (root / "latest_checkpointed_iteration.txt").write_text("2")
        case "base":
            save(root, "step-9", 9, base="step-2")
    os.rename(root / "step-2", root / ".ftckpt/trash/20270115T080000.000000Z~step-2")
    purged = purge_in(root, now)
    assert [t.name for t in purged.erased] == ["step-1"]
    assert list(purged.held) == [".ftckpt/trash/20270115T080000.000000Z~step-2"]
    assert [r.rule for r in purged.held.values()] == ["pointer" if rule == "tracker" else rule]
    assert left(root) == ["step-2"]


def test_who_names_it_means_the_one_that_has_the_name_now(root: Path) -> None:
    save(root, "step-2", 2)
    pins.pin(read(root), "step-2", owner="alice", reason="the new one", now=NOW)
    (root / "latest").write_text("step-2")
    save(root, "step-9", 9, base="step-2")
    assert len(purge_in(root, NOW + DAY).erased) == 2
    assert names_in(root) == {"step-2", "step-3", "step-4", "step-9", "latest"}


def test_a_plan_reclaims_first_what_is_due(root: Path) -> None:
    for step in (5, 6):
        save(root, f"step-{step}", step)
    plan = plan_of(root, now=NOW + DAY)
    applied = apply_to(root, plan, NOW + DAY, trash_ttl=DAY)
    assert applied.purged is not None
    assert [t.name for t in applied.purged.erased] == ["step-1", "step-2"]
    assert left(root) == ["step-3", "step-4"]
    again = apply_to(root, now=NOW + 2 * DAY, trash_ttl=DAY)  # nothing to drop, and two to purge
    assert again.purged is not None
    assert len(again.purged.erased) == 2
    assert left(root) == []


def test_a_stale_plan_reclaims_nothing(root: Path) -> None:
    for step in (5, 6):
        save(root, f"step-{step}", step)
    plan = plan_of(root, now=NOW + DAY)
    write(read(root), "pins", "step-3", "alice", {"reason": "why not"})
    with pytest.raises(RefusedError, match="stale"):
        apply_to(root, plan, NOW + DAY, trash_ttl=DAY)
    assert left(root) == ["step-1", "step-2"]


def test_what_is_no_trash_of_ours_is_left(root: Path) -> None:
    strangers = ("notes", "20261121T031500.123456Z-step-1", ".ftckpt-trash-x")
    for name in strangers:
        (root / ".ftckpt/trash" / name).mkdir()
    (root / ".ftckpt-trash-mine").mkdir()
    assert len(purge_in(root, NOW + 9 * DAY).erased) == 2
    assert {p.name for p in (root / ".ftckpt/trash").iterdir()} == set(strangers)
    assert (root / ".ftckpt-trash-mine").is_dir()
