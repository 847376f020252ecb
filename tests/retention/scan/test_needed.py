"""What a kept checkpoint needs, and what the trainer will ask for: both stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.retention.carrying import KEEP_2, apply_to, names_in, plan_of, save


def _root(tmp_path: Path, name: str) -> Path:
    for number in range(1, 7):
        save(tmp_path, name.format(number), number)
    return tmp_path


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
    (root / "step-6" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": base})
    )
    assert {d.entry.name for d in plan_of(root, KEEP_2).keep} == {"step-5", "step-6"}


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
