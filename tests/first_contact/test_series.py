"""Names of trainers and of people: what gc may drop, and which checkpoint is the newest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ftckpt
from ftckpt.discovery.series import members, place_of
from ftckpt.errors import UsageError
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from tests.json_run import ftckpt_json

DAY = 86400.0
NOW = 1_800_000_000.0


def save(path: Path, fill: float = 1.0, age: float = 3600.0, **state: Any) -> None:
    """Save a model of one layer as a file of torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"layer.weight": torch.full((8, 8), fill)}, **state}, path)
    moment = path.stat().st_mtime - age
    os.utime(path, (moment, moment))


def dropped(root: Path, **rules: Any) -> set[str]:
    plan = ftckpt.gc(str(root), **{"min_survivors": 1, **rules}).plan
    return {d.entry.name for d in plan.drop}


def reasons(root: Path, name: str, **rules: Any) -> set[str]:
    plan = ftckpt.gc(str(root), **{"min_survivors": 1, **rules}).plan
    found = next(d for d in plan.decisions if d.entry.name == name)
    return {reason.rule for reason in found.reasons}


def newest(root: Path, *flags: str) -> tuple[int, str]:
    answer = ftckpt_json("latest", str(root), *flags)
    return answer["result"]["code"], (answer.get("path") or "").rpartition("/")[2]


# ---------------------------------------------------------------------------------------------
# What a series is


@pytest.mark.parametrize(
    ("name", "series", "numbers"),
    [
        ("epoch_10", "epoch_N", (10,)),
        ("epoch-012.pt", "epoch-N.pt", (12,)),
        ("12epoch", "Nepoch", (12,)),
        ("ep0-ba100", "epN-baN", (0, 100)),
        ("ep0-ba100-rank0.pt", "epN-baN-rank0.pt", (0, 100)),
        ("checkpoint3.pt", "checkpointN.pt", (3,)),
        ("checkpoint_3_1200.pt", "checkpoint_N_N.pt", (3, 1200)),
        ("G_1600.pth", "G_N.pth", (1600,)),
        ("model_0000059.pth", "model_N.pth", (59,)),
        ("epoch=1-loss=4.707.ckpt", "epoch=N.ckpt", (1, 0)),
        ("epoch=1-acc=0.5-v1.ckpt", "epoch=N.ckpt", (1, 1)),
        ("epoch_5_loss_0.3.pt", "epoch_N.pt", (5,)),
        ("mylora-000002.safetensors", "mylora-N.safetensors", (2,)),
        ("ema_0.9999_010000.pt", "ema_0.9999_N.pt", (10000,)),
        ("fold1_epoch5", "fold1_epochN", (5,)),
        ("10_net_G_A.pth", "N_net_G_A.pth", (10,)),
        ("epoch_3.tmp", "epoch_N", (3,)),
    ],
)
def test_the_number_that_counts(name: str, series: str, numbers: tuple[int, ...]) -> None:
    place = place_of(name)
    assert place is not None
    assert (place.series, place.numbers) == (series, numbers)


@pytest.mark.parametrize("name", ["good", "run3", "seed42", "v10", "checkpoint_best.pt", "fold2"])
def test_a_name_without_a_number_that_counts(name: str) -> None:
    assert place_of(name) is None


_TRAINED = [f"step-{n}" for n in range(5, 65, 5)]
_PERSONS = [
    "paper-submission", "before-lr-change", "milestone-1", "milestone-2", "milestone-3", "good",
    "good-1", "good-2", "my-step-30-copy", "my-step-35-copy", "step-40 (copy)", "step-45 (copy)",
    "Copy_of_step-15", "Copy of step-20", "step-50_consolidated", "step-55_consolidated",
    "alice-20", "alice-30", "alice-40", "keep_10", "step-30-keep", "experiment7", "backup-40",
]  # fmt: skip


def test_names_of_people_are_of_no_series() -> None:
    steps = {name: 5 * n for n, name in enumerate([*_TRAINED, *_PERSONS])}
    assert members(steps).keys() == set(_TRAINED)


def test_a_series_of_one_is_none() -> None:
    assert members({"epoch_3": 30}) == {}
    assert members({"epoch_3": 30, "epoch_03": 30}) == {}  # no number differs
    assert members({"step-3": 3}).keys() == {"step-3"}  # as a trainer spells a step


def test_a_runs_name_before_the_number_is_borne_out_by_the_content() -> None:
    borne_out = {f"mylora-{n:06}.safetensors": 500 * n for n in (2, 4, 6)}
    assert members(borne_out).keys() == borne_out.keys()
    assert members(dict(list(borne_out.items())[:2])) == {}  # two always lie on a line
    assert members({"llama-1": 3000, "llama-2": 3000, "llama-3": 2500}) == {}
    assert members({**borne_out, "mylora-000008.safetensors": None}) == {}
    assert members({**borne_out, "step-2000": 2000}).keys() == {"step-2000"}
    assert members({f"copy-{n}": n for n in (1, 2, 3)}) == {}


@pytest.mark.parametrize("seed", range(50))
def test_what_is_gone_makes_no_name_a_trainers(seed: int) -> None:
    choose = Random(seed)
    names = [
        *(f"epoch_{n}" for n in range(4)), *(f"G_{n}.pth" for n in range(3)), "step-1", "good",
        "checkpoint_3_40.pt", "checkpoint_4_50.pt", "best-1", "step-1 (copy)", "epoch_1.bad",
    ]  # fmt: skip
    left = choose.sample(names, choose.randint(0, len(names)))
    steps = {name: choose.choice((None, 5)) for name in names}
    assert members({n: steps[n] for n in left}).keys() <= members(steps).keys()


# ---------------------------------------------------------------------------------------------
# What a person named


def test_copies_of_a_person_stay(tmp_path: Path) -> None:
    for step in range(5, 65, 5):
        save(tmp_path / f"step-{step}.pt", step=step)
    copies = ["paper-submission.pt", "good.pt", "step-40 (copy).pt", "milestone-1.pt"]
    for copy in copies:
        save(tmp_path / copy, step=20, age=30 * DAY)
    left = {f"step-{step}.pt" for step in (50, 55, 60)}
    assert dropped(tmp_path, keep_last=3) == {f"step-{s}.pt" for s in range(5, 50, 5)}
    assert reasons(tmp_path, "good.pt", keep_last=3) == {"not-of-the-series"}
    # They count in no rule, and so take no place of the run's own.
    save(tmp_path / "from-elsewhere.pt", step=5000)
    assert not dropped(tmp_path, keep_last=3) & left


def test_a_flag_lets_them_go(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path / f"step-{step}.pt", step=step)
    save(tmp_path / "good.pt", step=5, age=DAY)
    save(tmp_path / "model_best.pt", step=5, age=DAY)
    assert dropped(tmp_path, keep_last=2) == {"step-5.pt"}
    assert dropped(tmp_path, keep_last=2, any_name=True) == {"step-5.pt", "good.pt"}


@pytest.mark.parametrize("damage", ["unfinished", "cut", "sound"])
def test_what_is_put_aside_or_named_stays_in_any_state(tmp_path: Path, damage: str) -> None:
    for step in (10, 20, 30):
        save(tmp_path / f"step-{step}.pt", step=step)
    for name in ("step-15.bad.pt", "old-step-15.pt", "paper.pt"):
        save(tmp_path / name, step=15, age=9 * DAY)
        if damage == "cut":
            os.truncate(tmp_path / name, 700)
            os.utime(tmp_path / name, (NOW - 9e8, NOW - 9e8))
    if damage == "unfinished":
        for name in ("step-15.bad", "paper"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__0_0.distcp").write_bytes(b"x" * 99)
            for path in (tmp_path / name / "__0_0.distcp", tmp_path / name):
                os.utime(path, (1e9, 1e9))
    assert dropped(tmp_path, keep_last=2, delete_corrupt=True) == {"step-10.pt"}


def test_names_that_trainers_load_by_stay_wherever_the_word_stands(tmp_path: Path) -> None:
    # fairseq: checkpointN.pt an epoch, checkpoint_N_U.pt after so many updates.
    for epoch in range(1, 13):
        save(tmp_path / f"checkpoint{epoch}.pt", extra_state={"num_updates": epoch * 5})
    for epoch in (4, 8):
        state = {"num_updates": epoch * 5}
        save(tmp_path / f"checkpoint_{epoch}_{epoch * 5}.pt", extra_state=state, age=DAY)
    roles = ["checkpoint_best.pt", "checkpoint.best_loss_2.31.pt", "model_final.pt", "x-last.pt"]
    for name in roles:
        save(tmp_path / name, extra_state={"num_updates": 15}, age=5 * DAY)
    gone = {f"checkpoint{n}.pt" for n in range(1, 11)}
    assert dropped(tmp_path, keep_last=2) == gone | {"checkpoint_4_20.pt", "checkpoint_8_40.pt"}


def test_the_target_of_a_hard_link_stays(tmp_path: Path) -> None:
    # timm: model_best.pth.tar is a second name of the best epoch's file.
    for epoch in range(1, 6):
        save(tmp_path / f"checkpoint-{epoch}.pth.tar", float(epoch), global_step=epoch * 3)
    os.link(tmp_path / "checkpoint-2.pth.tar", tmp_path / "model_best.pth.tar")
    gone = dropped(tmp_path, keep_last=2)
    assert gone == {"checkpoint-1.pth.tar", "checkpoint-3.pth.tar"}
    assert "pointer" in reasons(tmp_path, "checkpoint-2.pth.tar", keep_last=2)


# ---------------------------------------------------------------------------------------------
# What trainers' files name


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("last_checkpoint", "model_0000004.pth"),  # fvcore
        ("last_checkpoint", "/work/run/model_0000004.pth"),  # mmengine
        ("latest.txt", "model_0000004.pth\n"),
        ("latest-rank0.pt.symlink", "runs/a/model_0000004.pth"),  # composer
        (
            "checkpoint_manager_snapshot.json",  # Ray Train
            json.dumps(
                {
                    "latest_checkpoint_result": {"checkpoint_dir_name": "model_0000019.pth"},
                    "checkpoint_results": [{"checkpoint_dir_name": "model_0000004.pth"}],
                }
            ),
        ),
    ],
)
def test_what_a_trainers_file_names_stays(tmp_path: Path, file: str, says: str) -> None:
    for step in (4, 9, 14, 19):
        save(tmp_path / f"model_{step:07}.pth", iteration=step)
    assert dropped(tmp_path, keep_last=1) == {f"model_{s:07}.pth" for s in (4, 9, 14)}
    (tmp_path / file).write_text(says)
    assert dropped(tmp_path, keep_last=1) == {f"model_{s:07}.pth" for s in (9, 14)}


def test_a_text_that_names_nothing_is_no_pointer(tmp_path: Path) -> None:
    save(tmp_path / "step-5.pt", step=5)
    (tmp_path / "latest.txt").write_text("step 5, loss 2.3: all is well\n")
    (tmp_path / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_results": [1, {}]}')
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 0
    (tmp_path / "last_checkpoint").write_text("model_0000004.pth")
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 4


def test_a_pointer_is_not_read_through_a_link(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root / "model_0000004.pth", iteration=4)
    (tmp_path / "elsewhere").write_text("secret")
    for name in ("last_checkpoint", "latest.txt", "checkpoint_manager_snapshot.json"):
        (root / name).symlink_to(tmp_path / "elsewhere")
    answer = ftckpt_json("latest", str(root))
    assert (answer["result"]["code"], "secret" in json.dumps(answer)) == (0, False)


def test_the_best_that_lightning_records_stays(tmp_path: Path) -> None:
    for epoch in range(5):
        callback: Any = {"best_model_path": "/elsewhere/epoch=1-loss=4.707.ckpt"}
        name = f"epoch={epoch}-loss={4.9 if epoch != 1 else 4.707}.ckpt"
        state: Any = {"callbacks": {"ModelCheckpoint{'monitor': 'loss'}": callback}}
        save(tmp_path / name, global_step=epoch * 4, **state)
    assert dropped(tmp_path, keep_last=2) == {"epoch=0-loss=4.9.ckpt", "epoch=2-loss=4.9.ckpt"}


# ---------------------------------------------------------------------------------------------
# Order without a step


@pytest.mark.parametrize(
    ("names", "last"),
    [
        ([f"epoch_{n}" for n in range(11)], "epoch_10"),  # torchtune
        ([f"{n}epoch.pt" for n in (1, 2, 12)], "12epoch.pt"),
        ([f"epoch-{n}.pt" for n in (9, 10, 2)], "epoch-10.pt"),
        ([f"ep0-ba{n}.pt" for n in (100, 20, 3)], "ep0-ba100.pt"),
        (["ep1-ba5.pt", "ep0-ba100.pt"], "ep1-ba5.pt"),
        ([*(f"epoch_{n}.pt" for n in (8, 9, 10)), "paper.pt", "model_best.pt"], "epoch_10.pt"),
        ([*(f"epoch_{n}.pt" for n in (8, 9, 10)), "last.pt"], "last.pt"),
        (["best.pt", "last.pt"], "last.pt"),
        (["only.pt"], "only.pt"),
    ],
)
def test_the_numbers_of_a_series_are_its_order(
    tmp_path: Path, names: Iterable[str], last: str
) -> None:
    for n, name in enumerate(names):
        if name.endswith(".pt"):
            save(tmp_path / name, float(n), age=n * 60.0)
        else:
            (tmp_path / name).mkdir()
            save_file({"layer.weight": torch.ones(8)}, tmp_path / name / "model.safetensors")
    assert newest(tmp_path) == (0, last)
    inspected = ftckpt_json("inspect", f"{tmp_path}@latest")
    assert last in json.dumps(inspected)


@pytest.mark.parametrize(
    "names", [["llama.pt", "qwen.pt"], ["epoch_3.pt", "model_7.pt"], ["run1.pt", "run2.pt"]]
)
def test_the_first_by_name_is_never_the_newest(tmp_path: Path, names: Iterable[str]) -> None:
    for name in names:
        save(tmp_path / name)
    assert newest(tmp_path) == (6, "")
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 6
    (tmp_path / "latest").write_text(max(names))
    assert newest(tmp_path) == (0, max(names))


def test_gc_keeps_the_last_of_a_series_without_steps(tmp_path: Path) -> None:
    for epoch in range(11):
        save(tmp_path / f"epoch_{epoch}.pt", age=(20 - epoch) * 60.0)
    assert dropped(tmp_path, keep_last=2) == {f"epoch_{n}.pt" for n in range(9)}
    assert dropped(tmp_path, keep_last=2, keep_every=100) == set()  # of a step nobody knows
    for epoch in range(3):
        save(tmp_path / f"model_{epoch}.pt")  # no word says that the number counts up
    assert not {n for n in dropped(tmp_path, keep_last=1) if n.startswith("model")}


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"batch_idx_train": 60}, 60),  # icefall
        ({"state": {"timestamp": {"iteration": 0, "epoch": 1, "batch": 60}}}, 60),  # composer
        ({"state": {"timestamp": {"Timestamp": {"iteration": 0, "batch": 60}}}}, 60),
        ({"meta": {"epoch": 3, "iter": 60}}, 60),  # mmengine
        ({"epoch": 3, "iter": 60}, 60),  # BasicSR
        ({"epoch": 3, "iters": 60}, 60),  # StyleTTS2
        ({"epoch": 3, "steps": 60}, 60),  # HiFi-GAN
        ({"epochs_run": 3, "steps_run": 60}, 60),  # torchtune
    ],
)
def test_steps_of_more_trainers(tmp_path: Path, state: Mapping[str, Any], step: int) -> None:
    save(tmp_path / "a.pt", **state)
    assert ftckpt.open_checkpoint(str(tmp_path / "a.pt")).step == step


def test_two_series_of_one_run_are_ordered_by_their_content(tmp_path: Path) -> None:
    for epoch in (8, 11, 12):
        save(tmp_path / f"epoch-{epoch}.pt", epoch, batch_idx_train=epoch * 5)
    for step in (8, 53, 58):
        save(tmp_path / f"checkpoint-{step}.pt", step, age=DAY, batch_idx_train=step)
    assert newest(tmp_path) == (0, "epoch-12.pt")
    assert dropped(tmp_path, keep_last=2) == {
        "epoch-8.pt", "checkpoint-8.pt", "checkpoint-53.pt"
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Pairs


def pair(root: Path, steps: Iterable[int], **state: Any) -> None:
    """so-vits-svc: a generator and a discriminator, whose `iteration` is the epoch."""
    for n, step in enumerate(steps):
        for fill, half in enumerate("GD"):
            path, value = root / f"{half}_{step}.pth", 10.0 * n + fill
            save(path, value, age=(9 - n) * 60, iteration=n, **state)


def test_one_half_of_a_pair_is_never_the_newest(tmp_path: Path) -> None:
    pair(tmp_path, (0, 800, 1600, 2400))
    answer = ftckpt_json("latest", str(tmp_path))
    assert (answer["result"]["code"], answer["path"]) == (2, None)
    assert "D_N.pth, G_N.pth are saved together" in answer["result"]["message"]
    assert "G_2400.pth" in answer["result"]["hint"]
    (tmp_path / "D_2400.pth").unlink()
    lost = ftckpt_json("latest", str(tmp_path))
    assert lost["result"]["code"] == 2
    assert "G_1600.pth" in lost["result"]["hint"]
    with pytest.raises(UsageError):
        ftckpt.verify(f"{tmp_path}@latest")


def test_copies_and_weights_beside_a_save_are_no_pair(tmp_path: Path) -> None:
    for epoch in (1, 2):
        save(tmp_path / f"epoch_{epoch}.pt", epoch, step=epoch * 10)
        shutil.copy(tmp_path / f"epoch_{epoch}.pt", tmp_path / f"model_{epoch}.pt")
    code, name = newest(tmp_path)
    assert code == 0
    assert name in ("epoch_2.pt", "model_2.pt")


def test_gc_counts_whole_pairs_alone(tmp_path: Path) -> None:
    pair(tmp_path, (0, 800, 1600, 2400))
    assert dropped(tmp_path, keep_last=2) == {"G_800.pth", "D_800.pth"}
    assert reasons(tmp_path, "G_0.pth", keep_last=2) == {"start"}
    (tmp_path / "D_2400.pth").unlink()
    assert dropped(tmp_path, keep_last=1) == {"G_800.pth", "D_800.pth"}
    assert reasons(tmp_path, "G_2400.pth", keep_last=1) == {"half"}


def entry(name: str, step: int | None, time: float = 0.0, **more: Any) -> RootEntry:
    values: dict[str, Any] = {"checked": True, **more}
    return RootEntry(name, "", EntryClass.COMMITTED, step, NOW - 9e6 + time, **values)


@pytest.mark.parametrize("seed", range(200))
def test_plans_of_mixed_roots_keep_what_they_kept(seed: int) -> None:
    choose = Random(seed)
    entries: dict[str, RootEntry] = {}
    spellings = choose.sample(
        ["step-{}", "epoch_{}", "G_{}.pth", "D_{}.pth", "checkpoint{}.pt", "paper-{}", "lora-{}",
         "step-{} (copy)", "step-{}.bad", "model_best_{}"], 4
    )  # fmt: skip
    stepless = {s: choose.random() < 0.4 for s in spellings}
    for spelling in spellings:
        for n in choose.sample(range(9), choose.choice((1, 3, 6))):
            name, known = spelling.format(n), spelling.startswith("step-") or not stepless[spelling]
            kind = choose.choice([EntryClass.COMMITTED] * 6 + [EntryClass.CORRUPT])
            entries[name] = RootEntry(
                name, "", kind, n * 10 if known else None, NOW - 9e6 + choose.randrange(9) * 3600.0,
                checked=True, named="best" in name,
            )  # fmt: skip
    policy = Policy(keep_last=choose.choice((1, 2)), min_survivors=1)
    plan = decide(entries.values(), policy, NOW)
    gone = {d.entry.name for d in plan.drop}
    for name in gone:
        assert not name.startswith(("paper", "model_best")), name
        assert not name.endswith(("(copy)", ".bad")), name
    again = decide([d.entry for d in plan.keep], policy, NOW)
    assert not again.drop
    more = Policy(keep_last=policy.keep_last, keep_every=20, min_survivors=1)
    assert {d.entry.name for d in decide(entries.values(), more, NOW).drop} <= gone
    halves = {name[2:]: name for name in gone if name.startswith("G_")}
    both = {n[2:] for n in entries if n.startswith("G_")} & {n[2:] for n in entries if n[0] == "D"}
    if not stepless.get("G_{}.pth") and not stepless.get("D_{}.pth"):
        for number in halves.keys() & both:
            assert f"D_{number}" in gone or entries[f"D_{number}"].entry_class != "COMMITTED"
