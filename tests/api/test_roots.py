"""The functions about a root answer as their verbs do: gc, trash, pins, tags, status, sync."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.commands.cli.render import plain
from ftckpt.errors import ExitCode, MissingError, NotFoundError, RefusedError, UsageError
from ftckpt.observer import Observer
from ftckpt.replication.sync import SyncItem
from tests.commands.saves import HOUR, answer, save, tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (100, 200, 300, 400):
        save(run, f"checkpoint-{step}", (500 - step) * HOUR / 10)
    return run


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("checkpoint-*"))


def without(document: Any, *keys: str) -> Any:
    """Leave out what differs from run to run, at any depth."""
    if isinstance(document, dict):
        return {k: without(v, *keys) for k, v in document.items() if k not in keys}
    return [without(v, *keys) for v in document] if isinstance(document, list) else document


def test_gc_plans_what_the_verb_plans(root: Path) -> None:
    from ftckpt.retention.document import dump_plan

    before = tree(root)
    found = ftckpt.gc(str(root), keep_last=2, min_survivors=1)
    assert found.applied is None
    assert tree(root) == before
    document = answer("gc", str(root), "--keep-last", "2", "--min-survivors", "1")
    mine = json.loads(json.dumps(plain(dump_plan(found.plan))))
    assert without(mine, "now", "plan") == without(document["plan"], "now", "plan")
    assert [d.entry.name for d in found.plan.drop] == ["checkpoint-100", "checkpoint-200"]


def test_a_plan_is_carried_out_exactly_undone_and_purged(root: Path, tmp_path: Path) -> None:
    plan = ftckpt.gc(str(root), keep_last=2, min_survivors=1).plan
    done = ftckpt.gc(str(root), plan, apply=True)
    assert done.applied is not None
    assert (done.plan, done.applied.code) == (plan, ExitCode.OK)
    assert names(root) == ["checkpoint-300", "checkpoint-400"]
    listed = ftckpt.gc_undelete(str(root))
    assert listed.undeleted is None
    assert [t.entry for t in listed.trash] == [
        one["name"] for one in answer("gc", "undelete", str(root))["trash"]
    ]
    back = ftckpt.gc_undelete(str(root), 100)
    assert back.undeleted is not None
    assert back.paths == [f"{root}/checkpoint-100"]
    assert ftckpt.gc_undelete(str(root), all_=True).paths == [f"{root}/checkpoint-200"]
    assert len(names(root)) == 4
    again = tmp_path / "plan.json"
    again.write_text(json.dumps(answer("gc", str(root), "--keep-last", "3", "--min-survivors=1")))
    assert ftckpt.gc(str(root), str(again), apply=True).applied is not None
    assert names(root) == ["checkpoint-200", "checkpoint-300", "checkpoint-400"]
    assert ftckpt.gc_purge(str(root)).erased == ()
    assert [t.entry for t in ftckpt.gc_purge(str(root), trash_ttl=0, yes=True).erased] == [
        "checkpoint-100"
    ]


def test_what_gc_refuses_nothing_loses(root: Path, tmp_path: Path) -> None:
    before = tree(root)
    path = str(root)
    plan = ftckpt.gc(path, keep_last=2, min_survivors=1).plan
    for call in (
        lambda: ftckpt.gc(path),
        lambda: ftckpt.gc(path, keep_last=2, purge_now=True),
        lambda: ftckpt.gc(path, keep_last=2, apply=True, purge_now=True),
        lambda: ftckpt.gc(path, keep_last=2, apply=True, trash_ttl=60.0),
        lambda: ftckpt.gc(path, plan, keep_last=2),
        lambda: ftckpt.gc(path, keep_last=2, tier="nvme"),
        lambda: ftckpt.gc(path, keep_within="soon"),
        lambda: ftckpt.gc(f"{path}@100", keep_last=2),
        lambda: ftckpt.gc(path, str(tmp_path / "none.json")),
        lambda: ftckpt.gc_undelete(path, 100, all_=True),
        lambda: ftckpt.gc_purge(path, trash_ttl="1h"),
    ):
        with pytest.raises(UsageError):
            call()
    broken = ftckpt.gc(path, keep_last=1)
    assert broken.plan.broken
    with pytest.raises(RefusedError):
        ftckpt.gc(path, keep_last=1, apply=True)
    with pytest.raises(NotFoundError):
        ftckpt.gc(str(tmp_path / "absent"), keep_last=1)
    # That whole checkpoints passed is remembered, as by the verb.
    assert {name: seen for name, seen in tree(root).items() if ".ftckpt" not in name} == before


def test_rules_are_numbers_or_the_texts_of_the_flags(root: Path) -> None:
    from ftckpt.operations.retaining import asked_policy

    assert asked_policy("", {"keep_within": 7200.0, "free": 1000, "max_delete": 20}) == (
        asked_policy("", {"keep_within": "2h", "free": "1kB", "max_delete": "20"})
    )


def test_pins_and_tags(root: Path) -> None:
    path = str(root)
    (made,) = ftckpt.pin(path, 100, reason="figure 3", owner="alice")
    assert (made.pin.entry, made.pin.owner, made.path, made.present) == (
        "checkpoint-100", "alice", f"{root}/checkpoint-100", True
    )  # fmt: skip
    (tagged,) = ftckpt.tag(path, "latest", ["milestone", "released"])
    assert tagged[:3] == ("checkpoint-400", ("milestone", "released"), f"{root}/checkpoint-400")
    assert ftckpt.tag(path, 300, "milestone")[0].tags == ("milestone",)
    rows = {row.path: row for row in ftckpt.ls(path)}
    assert [p.reason for p in rows[f"{root}/checkpoint-100"].pins] == ["figure 3"]
    assert set(rows[f"{root}/checkpoint-400"].tags) == {"milestone", "released"}
    kept = ftckpt.gc(path, keep_tag=["released"], min_survivors=1).plan
    assert {d.entry.name for d in kept.keep} == {"checkpoint-100", "checkpoint-400"}
    assert [one.tags for one in ftckpt.tag(path, "latest", "milestone", remove=True)] == [
        ("milestone",)
    ]
    with pytest.raises(NotFoundError, match="not tagged milestone"):
        ftckpt.tag(path, 400, ["milestone"], remove=True)
    with pytest.raises(NotFoundError, match="is not pinned by") as caught:
        ftckpt.pin(path, 100, remove=True)
    assert caught.value.hint == "pinned by alice: --owner says whose"
    with pytest.raises(UsageError):
        ftckpt.pin(path, 100, remove=True, owner="alice", all_=True)
    with pytest.raises(NotFoundError):
        ftckpt.pin(path, 999, reason="figure 3")
    assert [one.pin.owner for one in ftckpt.pin(path, 100, remove=True, all_=True)] == ["alice"]
    assert not any(row.pins for row in ftckpt.ls(path))


def test_status_answers_as_the_verb_does(root: Path, tmp_path: Path) -> None:
    tier, policy = tmp_path / "tier", tmp_path / "retention.toml"
    save(tier, "checkpoint-100", HOUR)
    policy.write_text(f'[[tier]]\nname = "here"\nroots = ["{root}"]\nkeep-last = 2\n')
    metrics = tmp_path / "m.prom"
    found = ftckpt.status(
        str(root), expect_interval="1h", tier=str(tier), policy=str(policy),
        prometheus=str(metrics),
    )  # fmt: skip
    verb = answer(
        "status", str(root), "--expect-interval", "1h", "--tier", str(tier), "--policy",
        str(policy),
    )  # fmt: skip
    moving = ("now", "age_s", "verified_age_s", "free", "message")
    mine = without(json.loads(json.dumps(plain(found))), *moving)
    assert mine == without({key: verb[key] for key in mine}, *(m for m in moving if m != "now"))
    kept = {held.entry.name: held.keep for held in found.runs[0].survey.held}
    assert kept == {"checkpoint-100": False, "checkpoint-200": False,
                          "checkpoint-300": True, "checkpoint-400": True}  # fmt: skip
    assert "ftckpt_status_up" in metrics.read_text()
    assert found.alerts
    for wrong in (0, "often"):
        with pytest.raises(UsageError):
            ftckpt.status(str(root), expect_interval=wrong)
    with pytest.raises(NotFoundError):
        ftckpt.status(str(tmp_path / "absent"), prometheus=str(metrics))
    assert f'ftckpt_status_up{{root="{tmp_path}/absent"}} 0' in metrics.read_text()


def test_sync_answers_as_the_verb_does(root: Path, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with pytest.raises(NotFoundError):
        ftckpt.sync(str(root), str(tier))
    tier.mkdir()
    planned = ftckpt.sync(str(root), str(tier), newest=2, dry_run=True)
    verb = answer("sync", str(root), str(tier), "--newest", "2", "--dry-run")
    assert [(i.name, i.step, str(i.state), i.why, i.nbytes) for i in planned.items] == [
        (i["name"], i["step"], i["state"], i["why"], i["bytes"]) for i in verb["items"]
    ]
    assert list(tier.iterdir()) == []
    told: list[str] = []

    class Ears(Observer):
        def end(self, report: SyncItem) -> None:
            told.append(report.name)

    report = ftckpt.sync(str(root), str(tier), newest=2, on=Ears())
    assert (report.code, told) == (ExitCode.OK, ["checkpoint-300", "checkpoint-400"])
    assert names(tier) == told
    assert [str(i.state) for i in ftckpt.sync(str(root), str(tier), newest=2).items] == [
        "there", "there"
    ]  # fmt: skip
    with pytest.raises(RefusedError, match="not apart"):
        ftckpt.sync(str(root), str(root))
    with pytest.raises(UsageError):
        ftckpt.sync(f"{root}@100", str(tier))
    with pytest.raises(UsageError, match="is a checkpoint"):
        ftckpt.sync(str(root), f"{root}/checkpoint-100")


def test_latest_of_no_root_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        ftckpt.latest(str(tmp_path / "absent"))
