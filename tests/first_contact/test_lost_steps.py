"""A save whose content has lost its step stays in the order; no count takes its place."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ftckpt
from ftckpt.discovery.siblings import PlaceAmongSiblings, among_siblings
from tests.faults.cli import here
from tests.workers.forked import run

STAMPS = (
    "2026-11-01_10-00-00",
    "2026-11-01_12-00-00",
    "2026-11-01_14-00-00",
    "2026-11-02_09-00-00",
)
OLD = time.time() - 7 * 86400


def trained(updates: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model's state and that of an optimizer which has made some updates."""
    torch.manual_seed(updates)
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(updates):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return layer.state_dict(), optimizer.state_dict()


def aged(path: Path, hours: float = 0) -> None:
    at = OLD + hours * 3600
    for one in (*path.rglob("*"), path):
        os.utime(one, (at, at))


def onetrainer(root: Path, *, last_count: int = 8) -> Path:
    """Write the backups of OneTrainer's modules/trainer/GenericTrainer.py; return the newest."""
    saved = (250, 2, 50), (500, 5, 0), (750, 7, 50), (1000, 10, 0)
    backup = root
    for n, (stamp, (step, epoch, inside)) in enumerate(zip(STAMPS, saved, strict=True)):
        backup = root / f"{stamp}-backup-{step}-{epoch}-{inside}"
        for part in ("optimizer", "ema", "lora", "onetrainer_config"):
            (backup / part).mkdir(parents=True)
        weights, state = trained(last_count if step == 1000 else 2 * n + 2)
        torch.save(state, backup / "optimizer" / "optimizer.pt")
        torch.save({"ema_parameters": list(weights.values())}, backup / "ema" / "ema.pt")
        save_file(weights, str(backup / "lora" / "lora.safetensors"))
        (backup / "onetrainer_config" / "args.json").write_text("{}")
        progress = {"epoch": epoch, "epoch_step": inside, "global_step": step}
        (backup / "meta.json").write_text(json.dumps({"train_progress": progress}, indent=4))
        aged(backup, 5 * n)
    return backup


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def steps_of(root: Path) -> dict[str, int | None]:
    return {Path(one.path).name: one.step for one in ftckpt.ls(str(root), all_=True)}


def test_onetrainers_step_is_that_of_its_meta_json(tmp_path: Path) -> None:
    newest = onetrainer(tmp_path)
    assert sorted(steps_of(tmp_path).values(), key=str) == [1000, 250, 500, 750]
    assert here("inspect", newest).document["step"] == 1000
    assert here("inspect", newest).document["optimizer_count"] == 8
    assert here("latest", tmp_path).document["path"] == str(newest)
    assert here("inspect", f"{tmp_path}@750").document["step"] == 750


def test_a_new_optimizer_moves_no_save_of_onetrainer(tmp_path: Path) -> None:
    newest = onetrainer(tmp_path, last_count=3)
    assert here("latest", tmp_path).document["path"] == str(newest)


@pytest.mark.parametrize(
    ("lose", "verdict"),
    [
        (lambda save: cut(save / "optimizer" / "optimizer.pt"), 4),
        (lambda save: cut(save / "meta.json"), 4),
        (lambda save: cut(save / "ema" / "ema.pt"), 4),
        (lambda save: shutil.rmtree(save / "lora"), 5),
        (lambda save: (save / "optimizer" / "optimizer.pt").unlink(), 5),
    ],
)
def test_a_damaged_newest_is_named_by_every_verb(
    tmp_path: Path, lose: Callable[[Path], None], verdict: int
) -> None:
    newest = onetrainer(tmp_path)
    lose(newest)
    aged(newest, 15)
    assert here("verify", tmp_path).code == verdict
    found = here("latest", tmp_path)
    assert found.document["step"] == 750
    assert found.document["skipped"][0]["path"] == str(newest)
    assert steps_of(tmp_path)[newest.name] == 1000
    alerts = ftckpt.status(str(tmp_path)).alerts
    assert any(newest.name in alert.message for alert in alerts)
    plan = here("gc", tmp_path, "--keep-last", "1", "--any-name", "--min-survivors", "1")
    decisions = plan.document["plan"]["decisions"]
    (kept,) = [one for one in decisions if one["name"] == newest.name]
    assert kept["keep"]


def test_a_lost_record_leaves_the_step_to_the_siblings(tmp_path: Path) -> None:
    newest = onetrainer(tmp_path)
    (newest / "meta.json").unlink()
    assert steps_of(tmp_path)[newest.name] == 1000
    assert here("latest", tmp_path).document["step"] == 750  # the steps beside have the record
    rows = here("inspect", tmp_path).document["root"]["checkpoints"]
    assert {row["step"] for row in rows} == {250, 500, 750, 1000}
    alone = here("inspect", newest).document
    assert (alone["step"], alone["step_by"]) == (1000, "siblings")


def test_every_verb_knows_the_step_beside_a_file(tmp_path: Path) -> None:
    weights, _ = trained(1)
    for epoch, step in enumerate((899, 1799, 2699)):
        torch.save(weights, tmp_path / f"epoch_{epoch}.pt")
        (tmp_path / f"epoch_{epoch}.yaml").write_text(f"epoch: {epoch}\nstep: {step}\n")
    assert here("latest", tmp_path).document["step"] == 2699
    assert steps_of(tmp_path)["epoch_1.pt"] == 1799
    shown = here("inspect", tmp_path / "epoch_1.pt").document
    assert (shown["step"], shown["step_by"]) == (1799, "siblings")
    plan = here("gc", tmp_path, "--keep-every", "899").document["plan"]
    assert {one["step"] for one in plan["decisions"]} >= {899, 1799, 2699}


def deepmd(path: Path, step: int, updates: int) -> None:
    """Write what DeePMD-kit's deepmd/pt/train/training.py saves: its step is one less."""
    weights, optimizer = trained(updates)
    extra = {"model_params": {}, "train_infos": {"lr": 0.001, "step": step - 1}}
    torch.save({"model": {**weights, "_extra_state": extra}, "optimizer": optimizer}, path)


def test_deepmds_step_is_that_of_its_extra_state(tmp_path: Path) -> None:
    for step, updates in ((1000, 2), (2000, 4), (3000, 6), (4000, 1)):  # of a new optimizer
        deepmd(tmp_path / f"model.ckpt-{step}.pt", step, updates)
    assert here("latest", tmp_path).document["path"].endswith("model.ckpt-4000.pt")
    shown = here("inspect", tmp_path / "model.ckpt-4000.pt").document
    assert (shown["step"], shown["step_by"], shown["optimizer_count"]) == (3999, "content", 1)
    cut(tmp_path / "model.ckpt-4000.pt")
    assert here("verify", tmp_path).code == 4
    found = here("latest", tmp_path)
    assert (found.document["step"], len(found.document["skipped"])) == (2999, 1)
    assert steps_of(tmp_path)["model.ckpt-4000.pt"] == 3999


def test_a_record_in_the_header_says_the_step(tmp_path: Path) -> None:
    weights, _ = trained(1)
    for metadata, step in (
        ({"training_info": json.dumps({"step": 750, "epoch": 37})}, 750),
        ({"ss_steps": "40", "ss_epoch": "2", "ss_max_train_steps": "900"}, 40),
        ({"training_info": "{", "format": "pt"}, None),
    ):
        save_file(weights, str(tmp_path / "lora.safetensors"), metadata=metadata)
        assert here("inspect", tmp_path / "lora.safetensors").document["step"] == step


def test_the_optimizers_count_is_shown_as_that(tmp_path: Path) -> None:
    weights, optimizer = trained(4)
    for name in ("alice.pt", "bob.pt", "step-9.pt"):
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / name)
    shown = here("inspect", tmp_path / "alice.pt")
    assert shown.document["step"] is None
    assert shown.document["optimizer_count"] == 4
    text = run(["inspect", str(tmp_path / "alice.pt")], os.environ).stdout
    assert "own count is 4" in text
    named = here("inspect", tmp_path / "step-9.pt").document
    assert (named["step"], named["step_by"]) == (9, "name")
    findings = here("verify", tmp_path / "step-9.pt").document["findings"]
    assert "step-name" not in {one["kind"] for one in findings}
    (tmp_path / "step-9.pt").unlink()
    assert here("latest", tmp_path).code == 6  # no count makes one of them the newest


def test_what_has_no_place_is_named_and_not_passed_over(tmp_path: Path) -> None:
    weights, _ = trained(1)
    for name, step in (("x7_1.pt", 200), ("x3_2.pt", 300), ("x5_3.pt", 100)):
        torch.save({"model": weights, "global_step": step}, tmp_path / name)
    assert here("latest", tmp_path).document["step"] == 300
    torch.save({"model": weights}, tmp_path / "x1_4.pt")
    found = here("latest", tmp_path)
    assert found.code == 6
    assert "x1_4.pt" in found.document["result"]["message"]


NOWHERE = PlaceAmongSiblings(None, None)


@pytest.mark.parametrize(
    ("told", "name", "place"),
    [
        ({"a-100": 100, "a-200": 200}, "a-300", PlaceAmongSiblings(300, 300)),
        ({"a-100": 99, "a-200": 199}, "a-300", PlaceAmongSiblings(299, 299)),
        ({"a-100": 100}, "a-300", PlaceAmongSiblings(300, 300)),
        ({"a-100": 99}, "a-300", NOWHERE),  # one may be one beside it by chance
        ({"epoch_1": 70, "epoch_2": 95}, "epoch_3", PlaceAmongSiblings(None, 95.5, True)),
        ({"epoch_1": 70}, "epoch_0", PlaceAmongSiblings(None, 69.5)),
        ({"epoch_1": 70, "epoch_3": 95}, "epoch_2", PlaceAmongSiblings(None, 70.5)),
        ({"a-1": 70, "a-2": 85, "a-3": 95}, "a-9", PlaceAmongSiblings(None, 95.5, True)),
        ({"a-1": 70, "a-3": 95}, "a-2", NOWHERE),  # two rise by chance
        ({"epoch_1": 90, "epoch_2": 70}, "epoch_3", NOWHERE),
        ({"x7_1": 300, "x3_2": 100}, "x1_4", NOWHERE),
        (
            {"x1_1": 19, "x2_2": 29, "x4_4": 35},
            "x1_3",
            NOWHERE,
        ),  # the two numbers say different places
    ],
)
def test_the_place_among_siblings(
    told: dict[str, int], name: str, place: PlaceAmongSiblings
) -> None:
    assert among_siblings({**told, name: None, "other-9": None, "b-7": 7})[name] == place


def test_names_without_a_sibling_have_no_place() -> None:
    assert among_siblings({"good": None, "paper-2": None, "step-10": 10}) == {}


def gan(root: Path) -> None:
    for number in (800, 1600, 2400):
        for half, width in (("G", 4), ("D", 3)):
            layer = torch.nn.Linear(width, 2)
            torch.save({"model": layer.state_dict()}, root / f"{half}_{number}.pth")


def test_one_half_of_the_newest_whole_pair(tmp_path: Path) -> None:
    gan(tmp_path)
    assert here("latest", tmp_path).code == 2
    for name in ("G", "G_N", "G_N.pth"):
        assert here("latest", tmp_path, "--series", name).document["path"].endswith("G_2400.pth")
    assert here("latest", tmp_path, "--series", "D").document["path"].endswith("D_2400.pth")
    (tmp_path / "D_2400.pth").unlink()
    cut(tmp_path / "G_1600.pth")
    for name in ("G", "D"):
        found = here("latest", tmp_path, "--series", name)
        assert found.document["path"].endswith(f"{name}_800.pth")
    skipped = here("latest", tmp_path, "--series", "D").document["skipped"]
    assert "G_1600.pth" in skipped[0]["message"]
    assert ftckpt.latest(str(tmp_path), series="D").path == str(tmp_path / "D_800.pth")
    assert here("latest", tmp_path, "--series", "X").code == 2
    assert here("latest", tmp_path, "--series", "G", "--wait").code == 2
    assert here("latest", tmp_path, tmp_path, "--series", "G").code == 2


def test_one_of_several_runs_in_a_root(tmp_path: Path) -> None:
    weights, optimizer = trained(2)
    for name in ("a_epoch_1", "a_epoch_2", "b_epoch_9"):
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / f"{name}.pt")
    assert here("latest", tmp_path).code == 6
    assert here("latest", tmp_path, "--series", "a_epoch").document["path"].endswith("a_epoch_2.pt")
