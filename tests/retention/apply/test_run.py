"""Plans carried out: exactly what was shown goes, and nothing that has changed since."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import (
    DeniedError,
    ExitCode,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ftckpt.retention.apply.purge import trashed
from ftckpt.retention.document import dump_plan, load_plan
from ftckpt.retention.locks import leases
from ftckpt.retention.locks.hold import hold
from ftckpt.retention.policy import DeleteLimit, Policy
from ftckpt.retention.records import log, pins, tags
from ftckpt.retention.trash.local import LocalTrash
from ftckpt.storage.local import folders
from ftckpt.storage.local.store import LocalStore
from tests.builders.small_format import read
from tests.retention.carrying import (
    DAY,
    FORMATS,
    HOUR,
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six saves, two of them files; the last two stay."""
    root = tmp_path / "root"
    root.mkdir()
    for step in (1, 2, 4, 5, 6):
        save(root, f"step-{step}", step)
    save(root, "step-3.pt", 3)
    return root


def test_what_the_plan_shows_goes_in_its_order_and_comes_back(root: Path) -> None:
    before = saved(root)
    plan = plan_of(root)
    applied = apply_to(root, plan)
    assert applied.code is ExitCode.OK
    assert dropped(applied) == ["step-1", "step-2", "step-3.pt", "step-4"]
    assert names_in(root) == {"step-5", "step-6"}
    assert (applied.freed, applied.waiting) == (0, plan.frees)
    assert [t.name for t in trashed(place_of(root), FORMATS)] == dropped(applied)
    assert [t.step for t in applied.trashed] == [1, 2, 3, 4]
    back = undelete_in(root, *dropped(applied))
    assert back.code is ExitCode.OK
    assert trashed(place_of(root), FORMATS) == []
    assert saved(root) == before
    assert apply_to(root).code is ExitCode.OK


def test_the_log_says_who_dropped_what_and_why(root: Path) -> None:
    plan = plan_of(root)
    applied = apply_to(root, plan)
    undelete_in(root, "step-2", now=NOW + 1)
    purged = purge_in(root, NOW + DAY)
    events = log.read(read(root))
    assert [e["event"] for e in events] == ["applying", "applied", "undeleted", "purged"]
    assert {e["actor"] for e in events} == {"tester"}
    before, after, undeleted, reclaimed = events
    assert before["plan"] == after["plan"] == dump_plan(plan)["plan"] == applied.plan
    assert before["drop"] == {n: ["expired: no rule keeps it"] for n in dropped(applied)}
    assert before["keep"] == {"step-6": ["newest", "keep-last"], "step-5": ["keep-last"]}
    assert (after["dropped"], after["failed"]) == (dropped(applied), {})
    assert undeleted["restored"] == [applied.trashed[1].id]
    assert reclaimed["erased"] == [t.id for t in purged.erased]
    assert log.last_applied(read(root)) == NOW


def test_a_plan_with_nothing_to_drop_touches_nothing_but_the_log(root: Path) -> None:
    apply_to(root, plan_of(root, Policy(keep_last=9)))
    assert len(names_in(root)) == 7
    assert [p.name for p in (root / ".ftckpt").iterdir()] == ["log.jsonl"]


def test_what_is_reclaimed_at_once_is_gone(root: Path) -> None:
    plan = plan_of(root)
    applied = apply_to(root, plan, purge_now=True)
    assert (applied.code, applied.waiting) == (ExitCode.OK, 0)
    assert applied.freed == plan.frees > 3000
    assert applied.trashed == ()
    assert list((root / ".ftckpt/trash").iterdir()) == []
    assert undelete_in(root, "step-1").code is ExitCode.NOT_FOUND


def test_floors_hold_whatever_is_asked(root: Path) -> None:
    before = snapshot(root)
    for policy in (Policy(keep_last=1), Policy(keep_last=2, max_delete=DeleteLimit(1)), Policy()):
        with pytest.raises(RefusedError):
            apply_to(root, plan_of(root, policy), purge_now=True)
    assert snapshot(root) == before


def claims() -> dict[str, Any]:
    """What may happen to `step-2` between plan and apply, by a word that the refusal says."""
    return {
        "pinned": lambda root: pins.pin(
            read(root), "step-2", owner="alice", reason="figure", now=NOW
        ),
        "lease": lambda root: leases.take(read(root), "step-2", holder="node7", now=NOW),
        "pointer": lambda root: (root / "latest").write_text("step-2"),
        "has changed": lambda root: (root / "step-2/deep/shard").write_text("x"),
        "depends on": lambda root: save(root, "step-7", 7, base="step-2"),
    }


@pytest.mark.parametrize("word", claims())
def test_a_stale_plan_is_refused_before_anything(root: Path, word: str) -> None:
    plan = plan_of(root)
    claims()[word](root)
    before = saved(root)
    with pytest.raises(RefusedError, match=rf"the plan is stale: step-.*{word}.*nothing was touch"):
        apply_to(root, plan)
    assert saved(root) == before


@pytest.mark.parametrize("word", claims())
def test_what_changes_in_the_middle_stays_and_is_said(
    root: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard = LocalTrash.discard

    def changing(self: LocalTrash, *args: Any, **more: Any) -> Any:
        if not (root / "step-1").exists():
            raise AssertionError("the second one went")
        claims()[word](root)
        monkeypatch.setattr(LocalTrash, "discard", discard)
        return discard(self, *args, **more)

    plan = plan_of(root)
    monkeypatch.setattr(LocalTrash, "discard", changing)
    applied = apply_to(root, plan)
    assert applied.code is ExitCode.PARTIAL
    assert list(applied.failed) == ["step-2"]
    assert "step-2 stays" in applied.failed["step-2"].message
    assert dropped(applied) == ["step-1", "step-3.pt", "step-4"]
    assert (root / "step-2/marker").exists()
    assert log.read(read(root))[-1]["failed"] == {"step-2": applied.failed["step-2"].message}


def test_a_tag_that_a_rule_asks_for_holds_in_the_middle_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(root, Policy(keep_last=2, keep_tags=("paper",)))
    discard = LocalTrash.discard

    def tagging(self: LocalTrash, *args: Any, **more: Any) -> Any:
        tags.tag(read(root), "step-4", "paper", owner="me", now=NOW)
        tags.tag(read(root), "step-2", "draft", owner="me", now=NOW)
        return discard(self, *args, **more)

    monkeypatch.setattr(LocalTrash, "discard", tagging)
    assert list(apply_to(root, plan).failed) == ["step-4"]


def test_what_has_gone_by_itself_is_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(root)
    (root / "step-2/marker").unlink()
    for path in ("step-2/deep/shard", "step-2/deep", "step-2"):
        (root / path).rmdir() if (root / path).is_dir() else (root / path).unlink()
    discard = LocalTrash.discard

    def rotating(self: LocalTrash, *args: Any, **more: Any) -> Any:
        if (root / "step-4").exists():
            os.rename(root / "step-4", root.parent / "elsewhere")
        return discard(self, *args, **more)

    monkeypatch.setattr(LocalTrash, "discard", rotating)
    applied = apply_to(root, plan)
    assert applied.code is ExitCode.OK
    assert applied.absent == ("step-2", "step-4")


def test_a_plan_is_carried_out_exactly_and_again(root: Path) -> None:
    plan = load_plan(json.dumps(dump_plan(plan_of(root))).encode(), "plan.json")
    for step in (7, 8, 9):  # more would go by the same rules, and was not shown
        save(root, f"step-{step}", step)
    applied = apply_to(root, plan)
    assert dropped(applied) == list(plan.order)
    assert names_in(root) == {f"step-{step}" for step in range(5, 10)}
    again = apply_to(root, plan)
    assert (again.code, again.absent, again.dropped) == (ExitCode.OK, plan.order, ())


def test_a_plan_for_another_root_is_refused(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for step in (11, 12, 13):
        save(other, f"step-{step}", step)
    with pytest.raises(RefusedError, match="nothing of the plan is at"):
        apply_to(other, plan_of(root))


def test_survivors_that_are_gone_break_a_floor(root: Path) -> None:
    plan = plan_of(root)
    before = set(names_in(root))
    os.rename(root / "step-6", root.parent / "elsewhere")
    with pytest.raises(RefusedError):
        apply_to(root, plan)
    assert names_in(root) == before - {"step-6"}


def test_floors_are_asked_again(root: Path) -> None:
    for step in (1, 2):
        tags.tag(read(root), f"step-{step}", "paper", owner="me", now=NOW)
    plan = plan_of(root, Policy(keep_tags=("paper",)))
    assert plan.order == ("step-3.pt", "step-4", "step-5")
    for step in (1, 2):
        os.rename(root / f"step-{step}", root.parent / f"elsewhere-{step}")
    before = saved(root)
    with pytest.raises(RefusedError, match="1 good checkpoint would be left") as error:
        apply_to(root, plan)
    assert error.value.hint == "--min-survivors 1 allows it"
    assert saved(root) == before


def test_a_wish_for_space_drops_no_more_than_it_needs(root: Path) -> None:
    plan = plan_of(root, Policy(keep_last=2, reclaim=500))
    applied = apply_to(root, plan)
    assert dropped(applied) == ["step-1"]
    assert applied.waiting == plan.frees


def test_a_base_stays_with_the_delta_that_could_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 3, 5, 6):
        save(tmp_path, f"step-{step}", step)
    save(tmp_path, "step-2", 2, base="step-1")
    save(tmp_path, "step-4", 4, base="step-2")
    plan = plan_of(tmp_path)
    assert plan.order == ("step-4", "step-2", "step-1", "step-3")
    applied = apply_to(tmp_path, plan)
    assert [t.name for t in trashed(place_of(tmp_path), FORMATS)] == list(plan.order)
    undelete_in(tmp_path, *plan.order)
    plan = plan_of(tmp_path)
    deny(monkeypatch, "step-2")
    applied = apply_to(tmp_path, plan)
    assert applied.code is ExitCode.PARTIAL
    assert dropped(applied) == ["step-4", "step-3"]
    assert isinstance(applied.failed["step-2"], DeniedError)
    assert applied.failed["step-1"].message == "step-1 stays: step-2 depends on it"
    monkeypatch.undo()
    assert dropped(apply_to(tmp_path)) == ["step-2", "step-1"]


def test_what_comes_back_without_its_base_is_said(tmp_path: Path) -> None:
    for step in (1, 3, 5, 6):
        save(tmp_path, f"step-{step}", step)
    save(tmp_path, "step-2", 2, base="step-1")
    save(tmp_path, "step-4", 4, base="step-2")
    apply_to(tmp_path)
    says = "{} is a delta based on {}, which lies in the trash too: have it back as well"
    pin = "the next gc by the same rules drops what came back again: pin it"
    assert undelete_in(tmp_path, "step-4").notes == (says.format("step-4", "step-2"), pin)
    assert undelete_in(tmp_path, "step-3").notes == (pin,)
    assert undelete_in(tmp_path, "step-2").notes == (says.format("step-2", "step-1"), pin)
    assert undelete_in(tmp_path, "step-1").notes == (pin,)
    apply_to(tmp_path)
    assert undelete_in(tmp_path, "step-2", "step-1").notes == (pin,)


def deny(monkeypatch: pytest.MonkeyPatch, *names: str, code: int = errno.EACCES) -> None:
    """Let the system refuse to rename these."""
    real = folders.renameat2

    def refusing(source_dir: int, source: str, target_dir: int, target: str) -> int:
        return code if source in names else real(source_dir, source, target_dir, target)

    monkeypatch.setattr(folders, "renameat2", refusing)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["step-2"], ExitCode.PARTIAL),
        (["step-1", "step-2", "step-3.pt", "step-4"], ExitCode.DENIED),
    ],
)
def test_what_the_system_refuses_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], code: ExitCode
) -> None:
    deny(monkeypatch, *names)
    applied = apply_to(root)
    assert applied.code is code
    assert list(applied.failed) == names
    assert all(f"cannot drop {root}/{n}" in applied.failed[n].message for n in names)


def test_a_link_that_is_put_in_the_place_of_an_entry_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = root.parent / "outside"
    os.rename(root / "step-2", outside)
    os.rename(outside, root / "step-2")
    discard = LocalTrash.discard

    def swapping(self: LocalTrash, found: Any, *args: Any, **more: Any) -> Any:
        if found.entry.name == "step-2":
            os.rename(root / "step-2", outside)
            (root / "step-2").symlink_to(outside)
        return discard(self, found, *args, **more)

    monkeypatch.setattr(LocalTrash, "discard", swapping)
    before = snapshot(root / "step-2")
    applied = apply_to(root, purge_now=True)
    assert applied.code is ExitCode.UNSAFE
    assert isinstance(applied.failed["step-2"], UnsafeError)
    assert snapshot(outside) == before
    assert (root / "step-2").is_symlink()


def test_two_at_once_are_told_apart(root: Path) -> None:
    plan = plan_of(root)
    with (
        hold([read(root)], "alice@node7:4711", NOW),
        pytest.raises(RefusedError, match=r"another gc is at work on .*: alice@node7:4711"),
    ):
        apply_to(root, plan)
    assert apply_to(root, plan).code is ExitCode.OK
    with hold([read(root)], "bob", NOW):
        for refused in (lambda: undelete_in(root, "step-1"), lambda: purge_in(root, NOW + DAY)):
            with pytest.raises(RefusedError, match="another gc"):
                refused()


@pytest.mark.parametrize("locked", [".", ".ftckpt/gc.lock"])
def test_either_lock_keeps_others_away(root: Path, locked: str) -> None:
    # Of a network filesystem other machines see the lock of the file alone; on a full disk there
    # may be no file.
    (root / ".ftckpt").mkdir()
    (root / ".ftckpt/gc.lock").touch()
    before = saved(root)
    other = os.open(root / locked, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="another gc is at work"):
            apply_to(root)
    finally:
        os.close(other)
    assert saved(root) == before
    assert apply_to(root).code is ExitCode.OK


def test_a_filesystem_without_locks_is_unsupported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlockable(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    before = saved(root)
    with pytest.raises(UnsupportedError, match="has no locks"):
        apply_to(root)
    assert saved(root) == before


def test_a_clock_that_goes_back_is_refused(root: Path) -> None:
    apply_to(root)
    for step in (7, 8, 9):
        save(root, f"step-{step}", step)
    plan = plan_of(root)
    before = saved(root)
    for now in (0.0, NOW - DAY, NOW - HOUR):
        with pytest.raises(RefusedError, match=r"the log of .* goes to 2027-01-15 08:00:00"):
            purge_in(root, now)
        with pytest.raises(RefusedError, match=r"the log of .* goes to 2027-01-15 08:00:00"):
            apply_to(root, plan, now)
    assert saved(root) == before
    # Coming back asks for no age; and the clocks of a cluster are never quite the same.
    assert undelete_in(root, "step-1", now=NOW - DAY).code is ExitCode.OK
    assert apply_to(root, plan, NOW - 60).code is ExitCode.OK


def test_a_trainer_that_points_to_its_new_save_is_no_stale_listing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = LocalStore.children
    plan = plan_of(root)

    def saving(self: LocalStore, path: str = "") -> Any:
        found = children(self, path)
        if path == "" and not (root / "step-7").exists():
            save(root, "step-7", 7)
            (root / "latest").write_text("step-7")
            found = [*found, self.stat("latest")]
        return found

    monkeypatch.setattr(LocalStore, "children", saving)
    assert dropped(apply_to(root, plan)) == list(plan.order)


def test_runs_of_one_place_go_together(tmp_path: Path) -> None:
    for run in ("alpha", "beta"):
        (tmp_path / run).mkdir()
        for step in range(1, 5):
            save(tmp_path / run, f"step-{step}", step)
    plan = plan_of(tmp_path)
    applied = apply_to(tmp_path, plan)
    assert applied.code is ExitCode.OK
    assert {t.entry for t in applied.trashed} == {
        f"{run}/step-{step}" for run in ("alpha", "beta") for step in (1, 2)
    }
    assert (tmp_path / "alpha/.ftckpt/trash").is_dir()
    assert not (tmp_path / ".ftckpt").exists()
    with pytest.raises(UsageError, match="step-1 was dropped from several runs") as error:
        undelete_in(tmp_path, "step-1")
    assert error.value.hint == "name one: alpha/step-1, beta/step-1"
    assert len(undelete_in(tmp_path, "alpha/step-1", "beta/step-2").restored) == 2
    assert log.last_applied(read(tmp_path / "beta")) == NOW


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        plan_of(tmp_path, KEEP_2)
