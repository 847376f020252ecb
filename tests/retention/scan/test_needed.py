"""What a kept checkpoint needs, and what the trainer will ask for: both stay."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.retention.records import pins
from tests.builders.small_format import read
from tests.retention import remote_roots
from tests.retention.apply.test_recheck import after
from tests.retention.carrying import (
    DAY,
    KEEP_2,
    NOW,
    apply_to,
    names_in,
    plan_of,
    purge_in,
    save,
)


def _root(tmp_path: Path, name: str) -> Path:
    for number in range(1, 7):
        save(tmp_path, name.format(number), number)
    return tmp_path


def _adapt(entry: Path, base: object) -> None:
    said = json.dumps({"base_model_name_or_path": base})
    (entry / "adapter_config.json").write_text(said)


def _link(root: Path, name: str) -> None:
    os.symlink("../step-1/deep/shard", root / "step-6" / "frozen")


def _link_of_a_folder(root: Path, name: str) -> None:
    os.symlink(root / "step-1" / "deep", root / "step-6" / "frozen")


def _link_to_a_link(root: Path, name: str) -> None:
    os.symlink("deep/shard", root / "step-1" / "again")
    os.symlink("../step-1/again", root / "step-6" / "frozen")


def _folder_of_links(root: Path, name: str) -> None:
    (root / "milestones").mkdir()
    os.symlink("../step-1", root / "milestones" / "paper")


def _link_beside_to_a_file(root: Path, name: str) -> None:
    os.symlink("step-1/marker", root / "best.pt")


@pytest.mark.parametrize(
    "make", [_link, _link_of_a_folder, _link_to_a_link, _folder_of_links, _link_beside_to_a_file]
)
def test_what_links_of_kept_entries_lead_into_stays(tmp_path: Path, make: object) -> None:
    root = _root(tmp_path, "step-{}")
    assert callable(make)
    make(root, "step-1")
    plan = plan_of(root, KEEP_2)
    kept = {d.entry.name: [r.rule for r in d.reasons] for d in plan.keep}
    assert kept["step-1"] == ["base"]
    assert "step-2" not in kept
    apply_to(root, plan)
    assert (root / "step-1" / "deep" / "shard").exists()
    assert "step-2" not in names_in(root)


@pytest.mark.parametrize("base", ["{}/step-1", "step-1", "/elsewhere/{name}/step-1/"])
def test_what_a_kept_adapter_was_trained_on_stays(tmp_path: Path, base: str) -> None:
    root = _root(tmp_path, "step-{}")
    said = {"base_model_name_or_path": base.format(root, name=root.name)}
    (root / "step-6" / "adapter_config.json").write_text(json.dumps(said))
    kept = {d.entry.name: [str(r) for r in d.reasons] for d in plan_of(root, KEEP_2).keep}
    assert kept["step-1"] == ["base: step-6 depends on it"]


@pytest.mark.parametrize("base", ["/other/run/step-1", "org/step-1", "step-6", 7, "meta/llama"])
def test_an_adapter_of_something_else_keeps_nothing(tmp_path: Path, base: object) -> None:
    root = _root(tmp_path, "step-{}")
    for own in ("step-6", "step-3"):
        _adapt(root / own, base)
    assert {d.entry.name for d in plan_of(root, KEEP_2).keep} == {"step-5", "step-6"}
    assert apply_to(root).code == ExitCode.OK
    assert names_in(root) == {"step-5", "step-6"}


def test_an_adapter_that_names_its_own_place_goes(tmp_path: Path) -> None:
    root = _root(tmp_path, "step-{}")
    _adapt(root / "step-1", f"/my/base-run/{root.name}/step-1")
    assert apply_to(root).code == ExitCode.OK
    assert names_in(root) == {"step-5", "step-6"}


@pytest.mark.parametrize("ring", [(1, 2), (2, 4, 1)])
def test_what_leads_to_each_other_goes_whole(tmp_path: Path, ring: tuple[int, ...]) -> None:
    root = _root(tmp_path, "step-{}")
    for one, other in zip(ring, (*ring[1:], ring[0]), strict=True):
        os.symlink(f"../step-{other}/deep/shard", root / f"step-{one}" / "frozen")
    assert apply_to(root).code == ExitCode.OK
    assert names_in(root) == {"step-5", "step-6"}


def test_what_leads_to_each_other_stays_whole_if_one_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _root(tmp_path, "step-{}")
    os.symlink("../step-3/deep/shard", root / "step-2" / "frozen")
    os.symlink("../step-2/deep/shard", root / "step-3" / "frozen")
    claim = partial(pins.pin, read(root), "step-2", owner="me", reason="mine", now=NOW)
    after(monkeypatch, "step-1", claim)
    applied = apply_to(root)
    assert applied.failed.keys() == {"step-2", "step-3"}
    assert names_in(root) == {"step-2", "step-3", "step-5", "step-6"}


def _deep_below(root: Path) -> None:
    (root / "exports" / "v1").mkdir(parents=True)
    os.symlink("../../step-1/deep/shard", root / "exports" / "v1" / "model.safetensors")


def _of_any_name(root: Path) -> None:
    os.symlink("step-1/deep/shard", root / "best.weights")


def _hidden(root: Path) -> None:
    (root / ".milestones").mkdir()
    os.symlink("../step-1", root / ".milestones" / "paper")


def _unfinished(root: Path) -> None:
    (root / "step-7.tmp").mkdir()
    os.symlink("../step-1/deep/shard", root / "step-7.tmp" / "frozen")
    (root / "step-7.tmp" / "shard").touch()
    os.utime(root / "step-7.tmp" / "shard", (NOW, NOW))


@pytest.mark.parametrize("make", [_deep_below, _of_any_name, _hidden, _unfinished])
def test_links_beside_the_checkpoints_keep_what_they_lead_into(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    root = _root(tmp_path, "step-{}")
    make(root)
    assert apply_to(root).code == ExitCode.OK
    assert {"step-1"} == names_in(root) & {f"step-{number}" for number in range(1, 5)}


def _new_link(root: Path) -> None:
    save(root, "step-7", 7)
    os.symlink("../step-4/deep/shard", root / "step-7" / "frozen")


def _new_adapter(root: Path) -> None:
    save(root, "step-7", 7)
    _adapt(root / "step-7", "step-4")


def _new_folder(root: Path) -> None:
    (root / ".milestones").mkdir()
    os.symlink("../step-4", root / ".milestones" / "paper")


ARRIVALS = pytest.mark.parametrize("come", [_new_link, _new_adapter, _new_folder])


@ARRIVALS
def test_what_needs_it_and_comes_while_others_go_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come: Callable[[Path], None]
) -> None:
    root = _root(tmp_path, "step-{}")
    after(monkeypatch, "step-1", partial(come, root))
    assert apply_to(root).failed.keys() == {"step-4"}
    assert (root / "step-4" / "deep" / "shard").exists()


@ARRIVALS
def test_what_needs_it_and_comes_before_a_purge_holds_it(
    tmp_path: Path, come: Callable[[Path], None]
) -> None:
    root = _root(tmp_path, "step-{}")
    apply_to(root)
    come(root)
    purged = purge_in(root, NOW + 3 * DAY)
    assert [thing.entry for thing in purged.erased] == ["step-1", "step-2", "step-3"]
    assert [str(why).partition(":")[0] for why in purged.held.values()] == ["base"]


@pytest.mark.parametrize(
    "base", ["step-1", "/elsewhere/{name}/step-1", "/elsewhere/{name}/step-1/hf"]
)
@pytest.mark.parametrize("inside", ["", "policy/"])
def test_what_an_adapter_in_a_bucket_was_trained_on_stays(base: str, inside: str) -> None:
    store = remote_roots.TimedStore()
    remote_roots.saves(store, range(1, 7))
    name = store.url.rpartition("/")[2]
    said = json.dumps({"base_model_name_or_path": base.format(name=name)}).encode()
    store.now = remote_roots.NOW - remote_roots.DAY
    store.put(f"step-6/{inside}adapter_config.json", said)
    store.now = remote_roots.NOW
    kept = {
        d.entry.name: [r.rule for r in d.reasons] for d in remote_roots.planned(store).plan.keep
    }
    assert kept.keys() == {"step-1", "step-5", "step-6"}
    assert kept["step-1"] == ["base"]


@pytest.mark.parametrize("how", ["dot", "link"])
def test_the_name_of_a_run_is_not_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "run").mkdir()
    root = _root(tmp_path / "run", "step-{}")
    _adapt(root / "step-6", "/elsewhere/run/step-1")
    (tmp_path / "current").symlink_to("run")
    monkeypatch.chdir(root)
    kept = plan_of(Path(".") if how == "dot" else tmp_path / "current", KEEP_2).keep
    assert "step-1" in {d.entry.name for d in kept}


@pytest.mark.parametrize("base", ["../sft/step-1", "/elsewhere/sft/step-1", "../now/step-1"])
def test_an_adapter_holds_a_step_of_another_run(tmp_path: Path, base: str) -> None:
    for run in ("sft", "dpo"):
        (tmp_path / run).mkdir()
        _root(tmp_path / run, "step-{}")
    _adapt(tmp_path / "dpo" / "step-6", base)
    if base.startswith("../now"):
        (tmp_path / "dpo" / "by").mkdir()
        os.symlink("../../sft", tmp_path / "dpo" / "by" / "now")
        _adapt(tmp_path / "dpo" / "step-6", "by/now/step-1")
    kept = {d.entry.name for d in plan_of(tmp_path, KEEP_2).keep}
    assert "sft/step-1" in kept
    assert "dpo/step-1" not in kept


def test_the_states_of_many_runs_are_asked_for_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = remote_roots.TimedStore()
    for run in ("a", "b"):
        for number in range(1, 4):
            store.now = NOW - DAY + number
            remote_roots.save(store, f"{run}/checkpoint-{number}", number)
    store.now = NOW
    store.traits = store.traits._replace(parallel=2)
    together = threading.Barrier(2)

    def best(root: object, folder: str) -> str:
        together.wait(timeout=60)
        return ""

    monkeypatch.setattr(sys.modules["ftckpt.retention.apply.prepare"], "best_of", best)
    assert len(remote_roots.planned(store).plan.keep) == 4


def test_a_link_in_what_goes_keeps_nothing(tmp_path: Path) -> None:
    root = _root(tmp_path, "step-{}")
    os.symlink("../step-1/marker", root / "step-2" / "frozen")
    os.symlink("deep/shard", root / "step-6" / "own")
    assert {d.entry.name for d in plan_of(root, KEEP_2).keep} == {"step-5", "step-6"}


@pytest.mark.parametrize("place", ["checkpoint-6", "."])
def test_the_best_of_transformers_stays(tmp_path: Path, place: str) -> None:
    root = _root(tmp_path, "checkpoint-{}")
    state = {"best_model_checkpoint": "./results/checkpoint-1", "global_step": 6}
    (root / place / "trainer_state.json").write_text(json.dumps(state))
    older = {"best_model_checkpoint": "results/checkpoint-2/", "global_step": 3}
    (root / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(older))
    os.utime(root / "checkpoint-6", (os.stat(root / "checkpoint-5").st_atime,) * 2)
    plan = plan_of(root, KEEP_2)
    assert plan_of(root, KEEP_2) == plan
    kept = {d.entry.name: [str(r) for r in d.reasons] for d in plan.keep}
    said = "trainer_state.json" if place == "." else f"{place}/trainer_state.json"
    assert kept["checkpoint-1"] == [f"pointer: {said} names it"]
    assert kept.keys() - {"trainer_state.json"} == {"checkpoint-1", "checkpoint-5", "checkpoint-6"}


@pytest.mark.parametrize("text", ["{", "[]", '{"best_model_checkpoint": null}', "9" * 5000])
def test_a_state_that_names_nothing_holds_nothing(tmp_path: Path, text: str) -> None:
    root = _root(tmp_path, "checkpoint-{}")
    (root / "checkpoint-6" / "trainer_state.json").write_text(text)
    assert "checkpoint-1" not in {d.entry.name for d in plan_of(root, KEEP_2).keep}


def test_what_is_put_aside_stays_and_stands_for_no_good_one(tmp_path: Path) -> None:
    root = _root(tmp_path, "step-{}")
    save(root, "step-9.bad", 9)
    kept = {d.entry.name: [r.rule for r in d.reasons] for d in plan_of(root, KEEP_2).keep}
    assert kept.keys() == {"step-5", "step-6", "step-9.bad"}
    assert kept["step-9.bad"] == ["put-aside"]
