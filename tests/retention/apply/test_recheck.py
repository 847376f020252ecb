"""What is looked at before each entry goes: little, and all that can have changed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.retention.policy import DeleteLimit, Policy
from ftckpt.retention.records import tags
from ftckpt.retention.trash.local import LocalTrash
from ftckpt.storage.local.store import LocalStore
from tests.builders.small_format import read
from tests.retention.carrying import NOW, apply_to, dropped, names_in, plan_of, save

_LOOKS = ("stat", "children", "names", "walk", "open")


def make(root: Path, number: int) -> Path:
    """Save so many; all but the last two are to go. Two pointers name the last."""
    root.mkdir()
    for step in range(1, number + 1):
        save(root, f"step-{step}", step)
    (root / "latest").write_text(f"step-{number}")
    (root / "newest").symlink_to(f"step-{number}")
    return root


def after(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], object]) -> None:
    """Let something change right after an entry went."""
    discard = LocalTrash.discard

    def changing(self: LocalTrash, found: Any, *args: Any, **more: Any) -> Any:
        done = discard(self, found, *args, **more)
        if found.entry.name == name:
            change()
        return done

    monkeypatch.setattr(LocalTrash, "discard", changing)


def test_a_drop_asks_no_more_where_more_stands(tmp_path: Path) -> None:
    policy = Policy(keep_last=2, max_delete=DeleteLimit(100, percent=True))
    per_drop: list[float] = []
    for number in (8, 32):
        root = make(tmp_path / str(number), number)
        for label in range(number):
            tags.tag(read(root), f"step-{number}", f"tag{label}", owner="me", now=NOW)
        plan = plan_of(root, policy)
        looks: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            after(patch, "step-1", looks.clear)
            for name in _LOOKS:
                patch.setattr(LocalStore, name, counted(getattr(LocalStore, name), looks))
            # What goes last ends the count: after it the log is written.
            after(patch, plan.order[-1], partial(note, looks, per_drop))
            assert len(apply_to(root, plan).dropped) == number - 2
        per_drop[-1] /= number - 3
    assert per_drop[0] == per_drop[1]


def note(looks: Counter[str], seen: list[float]) -> None:
    seen.append(looks.total())


def counted(real: Callable[..., Any], looks: Counter[str]) -> Callable[..., Any]:
    def look(*args: Any, **more: Any) -> Any:
        looks[real.__name__] += 1
        return real(*args, **more)

    return look


def test_a_name_that_is_saved_again_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "root", 6)
    after(monkeypatch, "step-1", partial(save, root, "step-1", 1, base="step-3"))
    applied = apply_to(root)
    assert applied.code is ExitCode.PARTIAL
    assert applied.failed["step-3"].message == "step-3 stays: step-1 depends on it"
    assert dropped(applied) == ["step-1", "step-2", "step-4"]
    assert names_in(root) >= {"step-1", "step-3"}


@pytest.mark.parametrize("before", ["absent", "empty", "unfinished"])
def test_a_save_that_is_finished_meanwhile_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    root = make(tmp_path / "root", 6)

    def begin() -> None:
        (root / "step-7").mkdir()
        if before == "unfinished":
            (root / "step-7/data").write_text("half")

    def finish() -> None:
        (root / "step-7").mkdir(exist_ok=True)
        (root / "step-7/base").write_text("step-4")
        (root / "step-7/marker").write_text(json.dumps({"step": 7, "state": "good"}))

    if before != "absent":
        after(monkeypatch, "step-1", begin)
    after(monkeypatch, "step-2", finish)
    applied = apply_to(root)
    assert applied.failed["step-4"].message == "step-4 stays: step-7 depends on it"
    assert dropped(applied) == ["step-1", "step-2", "step-3"]


def relinked(root: Path) -> None:
    (root / "newest").unlink()
    (root / "newest").symlink_to("step-3")


def tracked(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("3")


def exchanged(root: Path) -> None:
    (root / "other").symlink_to("step-3")
    os.replace(root / "other", root / "newest")


def of_its_step(root: Path) -> None:
    """Write a tracker: every checkpoint of its step is meant."""
    (root / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.parametrize("claim", [relinked, tracked, exchanged, of_its_step])
def test_a_pointer_that_moves_meanwhile_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: Callable[[Path], None]
) -> None:
    root = make(tmp_path / "root", 6)
    if claim is of_its_step:
        save(root, "global_step3", 3)
    after(monkeypatch, "step-2", partial(claim, root))
    applied = apply_to(root)
    assert "step-3" in applied.failed
    assert "somebody has claimed it" in applied.failed["step-3"].message
    assert (root / "step-3/marker").exists()
    assert {"step-1", "step-2", "step-4"} <= set(dropped(applied))
