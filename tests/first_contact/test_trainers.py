"""Trainers' layouts that were judged by one sign, or of which one part was read."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from ftckpt.errors import ExitCode
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

# `no_dist` says what torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OK, CORRUPT, INCOMPLETE = ExitCode.OK, ExitCode.CORRUPT, ExitCode.INCOMPLETE


def code(*arguments: object) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


def kinds(place: object) -> dict[str, str | None]:
    found = ftckpt_json("verify", str(place))["findings"]
    return {one["kind"]: one.get("file") for one in found}


def trained(rows: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(rows, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, rows)).sum().backward()
    optimizer.step()
    return net, optimizer


def weights(path: Path, **more: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.contiguous() for k, v in trained()[0].state_dict().items()}
    save_file(state, path, metadata={"format": "pt", **more})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# --- whose save it is ---------------------------------------------------------------------------


def openpi(folder: Path, step: int) -> Path:
    """As openpi's scripts/train_pytorch.py writes it."""
    weights(folder / "model.safetensors")
    torch.save(trained()[1].state_dict(), folder / "optimizer.pt")
    torch.save({"global_step": step, "config": {"lr": 1}}, folder / "metadata.pt")
    (folder / "assets").mkdir()
    (folder / "assets" / "norm_stats.json").write_text("{}")
    return folder


def test_two_file_names_are_no_sign_of_the_trainer(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        openpi(tmp_path / "run" / str(step), step)
    assert code("verify", tmp_path / "run" / "30") == OK
    answer = ftckpt_json("latest", str(tmp_path / "run"))
    assert answer["result"]["code"] == OK
    found = open_checkpoint(tmp_path / "run" / "20")
    assert (found.step, found.dialect) == (20, "")
    assert "metadata.pt" in set(found.members())
    cut(tmp_path / "run" / "20" / "metadata.pt")
    assert code("verify", tmp_path / "run" / "20") == CORRUPT


def test_gc_drops_none_of_them_as_abandoned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        openpi(run / str(step), step)
    long_ago = time.time() - 3 * 86400
    for path in run.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    weights(run / "40" / "model.safetensors")
    plan = ftckpt_json("gc", str(run), "--keep-last", "2", "--min-survivors", "1")
    assert not [row for row in plan["plan"]["decisions"] if row["entry_class"] == "ABANDONED"]


def hugging_face(folder: Path, arguments: object) -> Path:
    weights(folder / "model.safetensors")
    torch.save(arguments, folder / "training_args.bin")
    torch.save(trained()[1].state_dict(), folder / "optimizer.pt")
    return folder


class TrainingArguments(dict[str, Any]):
    """Stands for the class of that name."""


def test_the_trainers_arguments_and_one_more_file_show_it(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "checkpoint-5", {"output_dir": "x"})
    assert code("verify", folder) == INCOMPLETE
    (folder / "trainer_state.json").write_text('{"global_step": 5, "last_model_checkpoint": "x"}')
    (folder / "args.json").write_text('{"swift_version": "4.0", "tuner_type": "lora"}')
    assert code("verify", folder) == OK


def test_a_scripts_own_arguments_do_not(tmp_path: Path) -> None:
    """As transformers' examples of 2019 and many scripts since then write them."""
    folder = hugging_face(tmp_path / "checkpoint-5", argparse.Namespace(lr=1))
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    assert code("verify", folder) == OK


def test_schedule_and_random_state_show_the_trainer(tmp_path: Path) -> None:
    folder = openpi(tmp_path / "step", 3)
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    assert code("verify", folder) == OK
    torch.save({"cpu": torch.ones(2)}, folder / "rng_state.pth")
    assert code("verify", folder) == INCOMPLETE


def test_accelerates_rules_hold_for_accelerate_alone(tmp_path: Path) -> None:
    """A program that counts its optimizers from 1 has lost none, and saves no `random_states`."""
    weights(tmp_path / "model.safetensors")
    for number in (1, 2):
        torch.save(trained()[1].state_dict(), tmp_path / f"optimizer_{number}.pt")
    assert "state-unknown" not in kinds(tmp_path)
    assert code("verify", tmp_path) == OK
    torch.save({"step": 2}, tmp_path / "random_states_0.pkl")
    assert kinds(tmp_path)["missing-file"] == "optimizer.pt"


def test_a_file_called_common_is_no_sign_of_megatron(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, checkpoint_id=str(tmp_path), no_dist=True)
    torch.save({"vocabulary": ["a"]}, tmp_path / "common.pt")
    (tmp_path / "run_config.yaml").write_text("a: 1\n")
    assert code("verify", tmp_path) == OK
    torch.save({"checkpoint_version": 3.0, "iteration": 5}, tmp_path / "common.pt")
    assert code("verify", tmp_path) == INCOMPLETE


# --- last files ---------------------------------------------------------------------------------


def cosmos(step: Path) -> Path:
    """As cosmos_rl/utils/checkpoint.py of 2026 writes it."""
    policy = step / "policy"
    policy.mkdir(parents=True)
    (policy / "cosmos_config").write_text("{}")
    net, optimizer = trained()
    for rank in range(2):
        torch.save(net.state_dict(), policy / f"model_rank_{rank}.pth")
        torch.save(optimizer.state_dict(), policy / f"optimizer_rank_{rank}.pth")
        torch.save({"last_epoch": 1}, policy / f"scheduler_rank_{rank}.pth")
        torch.save({"step": 5, "total_steps": 9}, policy / f"extra_info_rank_{rank}.pth")
        (policy / f".rank_{rank}_complete").touch()
    return policy


def test_each_rank_of_cosmos_marks_its_end(tmp_path: Path) -> None:
    policy = cosmos(tmp_path / "step_5")
    found = open_checkpoint(policy)
    assert found.commit.marker == ".rank_0_complete"
    assert {".rank_1_complete", "cosmos_config"} <= set(found.members())
    assert code("verify", policy) == OK
    cosmos(tmp_path / "step_4")
    (policy / ".rank_1_complete").unlink()
    assert code("verify", policy) == INCOMPLETE
    answer = ftckpt_json("latest", str(tmp_path))
    assert answer["path"].endswith("step_4")


def test_a_save_without_any_mark_may_be_of_an_older_version(tmp_path: Path) -> None:
    policy = cosmos(tmp_path / "step_5")
    for name in policy.glob(".rank_*"):
        name.unlink()
    assert code("verify", policy) == OK
    assert "state-unknown" in kinds(policy)
    (policy / "cosmos_config").unlink()
    (policy / ".rank_0_complete").touch()
    assert code("verify", policy) == OK  # one sign: it may be anybody's


def olmo(step: Path, number: int) -> Path:
    """As olmo_core/train/checkpoint.py writes it."""
    net, _ = trained()
    (step / "train").mkdir(parents=True)
    for rank in range(2):
        state = {"global_step": number, "world_size": 2, "epoch": 1}
        torch.save(state, step / "train" / f"rank{rank}.pt")
    store = step / "model_and_optim"
    save({"model": net.state_dict()}, checkpoint_id=str(store), no_dist=True)
    (step / "config.json").write_text("{}")
    (step / ".metadata.json").write_text('{"version": "2.3.0"}')
    return step


def test_a_step_of_olmo_core_is_one_checkpoint(tmp_path: Path) -> None:
    step = olmo(tmp_path / "run" / "step20", 20)
    found = open_checkpoint(step)
    assert (found.format, found.step, found.commit.marker) == ("bundle", 20, ".metadata.json")
    assert set(found.members()) == set(found.source.entries)
    assert code("verify", step) == OK
    assert code("copy", step, tmp_path / "copy") == OK
    assert (tmp_path / "copy" / "train" / "rank1.pt").exists()


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (".metadata.json", INCOMPLETE),
        ("train/rank0.pt", CORRUPT),
        ("train/rank1.pt", CORRUPT),
        ("train", CORRUPT),
        ("model_and_optim", CORRUPT),
        ("model_and_optim/.metadata", INCOMPLETE),
        ("model_and_optim/__0_0.distcp", CORRUPT),
    ],
)
def test_a_lost_part_of_it_is_noticed(tmp_path: Path, lost: str, expected: ExitCode) -> None:
    olmo(tmp_path / "step10", 10)
    step = olmo(tmp_path / "step20", 20)
    victim = step / lost
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert code("verify", step) == expected
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("step10")


def test_a_ranks_state_of_another_step_is_noticed(tmp_path: Path) -> None:
    older, step = olmo(tmp_path / "step10", 10), olmo(tmp_path / "step20", 20)
    shutil.copy(older / "train" / "rank1.pt", step / "train" / "rank1.pt")
    assert "mixed-steps" in kinds(step)
    assert code("verify", step) == CORRUPT


# --- Lightning's meta.pt ------------------------------------------------------------------------


def lightning(folder: Path, optimizer: str = "optimizer") -> Path:
    net, _ = trained()
    state = {"model": net.state_dict(), optimizer: {"state": {"0.weight": torch.ones(2)}}}
    save(state, checkpoint_id=str(folder), no_dist=True)
    torch.save({"iter_num": 10, "step_count": 10}, folder / "meta.pt")
    return folder


def test_meta_goes_with_its_store(tmp_path: Path) -> None:
    store = lightning(tmp_path / "lit_model.pth")
    assert "meta.pt" in set(open_checkpoint(store).members())
    for verb, to in (("copy", []), ("convert", ["--to", "dcp"]), ("reshard", ["--dp", "2"])):
        made = tmp_path / verb
        assert code(verb, store, made, *to) == OK
        assert (made / "meta.pt").read_bytes() == (store / "meta.pt").read_bytes()
    cut(store / "meta.pt")
    assert code("verify", store) == CORRUPT


@pytest.mark.parametrize(
    ("name", "optimizer", "expected"),
    [
        ("lit_model.pth", "optimizer", INCOMPLETE),
        ("epoch=0-step=10.ckpt", "optimizer_0", INCOMPLETE),
        ("own-name.ckpt", "optimizer", OK),  # Fabric's, or anybody's
        ("step-10", "optimizer", OK),
    ],
)
def test_a_lost_meta_is_missed_where_two_signs_show_lightning(
    tmp_path: Path, name: str, optimizer: str, expected: ExitCode
) -> None:
    store = lightning(tmp_path / name, optimizer)
    assert code("verify", store) == OK
    (store / "meta.pt").unlink()
    assert code("verify", store) == expected
    if name == "own-name.ckpt":
        assert kinds(store)["state-unknown"] == "meta.pt"


# --- weights in folders -------------------------------------------------------------------------


def diffusers(folder: Path) -> Path:
    """As diffusers' examples write it: the models' own classes, then accelerate's state."""
    for name in ("unet", "unet_ema"):
        weights(folder / name / "diffusion_pytorch_model.safetensors")
        (folder / name / "config.json").write_text("{}")
    torch.save(trained()[1].state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    torch.save({"step": 5}, folder / "random_states_0.pkl")
    return folder


def test_weights_below_a_trainers_folder_are_weights(tmp_path: Path) -> None:
    folder = diffusers(tmp_path / "checkpoint-5")
    found = open_checkpoint(folder)
    assert {"0.weight", "ema:0.weight"} <= set(found.tensors)
    assert set(found.members()) == set(found.source.entries)
    assert code("verify", folder) == OK
    cut(folder / "unet" / "diffusion_pytorch_model.safetensors")
    assert code("verify", folder) == CORRUPT


def test_an_average_is_not_taken_for_the_model(tmp_path: Path) -> None:
    folder = diffusers(tmp_path / "checkpoint-5")
    shutil.rmtree(folder / "unet")
    assert code("verify", folder) == INCOMPLETE
    assert kinds(folder)["missing-file"] == "unet"


def test_a_named_adapter_belongs_to_the_trainers_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    for place in (folder, folder / "reference"):
        place.mkdir(parents=True)
        save_file({"q.lora_A.weight": torch.ones(2, 4)}, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    torch.save(trained()[1].state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    weights(folder / "checkpoint-4" / "model.safetensors")  # a step of its own
    weights(folder / "best_model" / "model.safetensors")
    found = open_checkpoint(folder)
    assert {"q.lora_A.weight", "extra:reference:q.lora_A.weight"} <= set(found.tensors)
    assert "reference/adapter_config.json" in set(found.members())
    others = ("checkpoint-4/", "best_model/")
    assert not any(name.startswith(others) for name in found.members())


def sentence_transformer(folder: Path) -> Path:
    weights(folder / "model.safetensors")
    weights(folder / "2_Dense" / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    for place in (folder, folder / "1_Pooling", folder / "2_Dense"):
        (place / "config.json").write_text("{}")
    names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"))
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def pipeline(folder: Path) -> Path:
    parts = {
        "unet": ("diffusers", "UNet2DConditionModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "scheduler": ("diffusers", "DDIMScheduler"),
        "tokenizer": ("transformers", "CLIPTokenizer"),
        "safety_checker": (None, None),
    }
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.31.0", **parts}
    for name, stem in (("unet", "diffusion_pytorch_model"), ("vae", "diffusion_pytorch_model"),
                       ("text_encoder", "model")):  # fmt: skip
        weights(folder / name / f"{stem}.safetensors")
        (folder / name / "config.json").write_text("{}")
    for name in ("scheduler", "tokenizer"):
        (folder / name).mkdir()
        (folder / name / f"{name}_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


Make = Callable[[Path], Path]


@pytest.mark.parametrize("make", [sentence_transformer, pipeline])
def test_named_folders_are_the_checkpoint(tmp_path: Path, make: Make) -> None:
    folder = make(tmp_path / "model")
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert code("verify", folder) == OK
    assert set(open_checkpoint(folder).members()) == files
    for verb, to in (("copy", []), ("convert", ["--to", "safetensors"])):
        made = tmp_path / verb
        assert code(verb, folder, made, *to) == OK
        held = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
        assert held == files | {"ftckpt.manifest.json"}
        for name in files:
            if name.endswith(".safetensors"):
                loaded, truth = load_file(made / name), load_file(folder / name)
                assert loaded.keys() == truth.keys()
                assert all(torch.equal(loaded[key], truth[key]) for key in truth)
        assert code("verify", made) == OK


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (sentence_transformer, "2_Dense"),
        (sentence_transformer, "2_Dense/model.safetensors"),
        (sentence_transformer, "1_Pooling"),
        (sentence_transformer, "model.safetensors"),
        (pipeline, "vae"),
        (pipeline, "vae/diffusion_pytorch_model.safetensors"),
        (pipeline, "unet"),
        (pipeline, "scheduler"),
        (pipeline, "text_encoder/config.json"),
    ],
)
def test_a_lost_module_is_damage(tmp_path: Path, make: Make, lost: str) -> None:
    folder = make(tmp_path / "model")
    victim = folder / lost
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert code("verify", folder) == CORRUPT


def test_a_seal_covers_the_modules(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "model")
    assert code("seal", folder) == OK
    victim = folder / "2_Dense" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert code("verify", folder, "--level", "content") == CORRUPT


def test_weights_of_some_modules_alone_are_refused(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "model")
    answer = ftckpt_json("convert", str(folder), str(tmp_path / "out"), "--to", "safetensors",
                         "--only", "model")  # fmt: skip
    assert answer["result"]["code"] == ExitCode.UNSUPPORTED
    assert "2_Dense" in answer["result"]["message"]


def test_a_module_outside_is_refused(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["path"] = "../other"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert code("verify", folder) == ExitCode.UNSAFE


# --- files of one step --------------------------------------------------------------------------


def nanochat(folder: Path, step: int, ranks: int = 2) -> None:
    """As nanochat/checkpoint_manager.py writes it; `ranks` 0 for that of 2025."""
    net, optimizer = trained()
    folder.mkdir(exist_ok=True)
    torch.save(net.state_dict(), folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}))
    for rank in range(ranks):
        torch.save(optimizer.state_dict(), folder / f"optim_{step:06d}_rank{rank}.pt")
    if not ranks:
        torch.save(optimizer.state_dict(), folder / f"optim_{step:06d}.pt")


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_nanochats_files_of_a_step_are_one_checkpoint(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "d20"
    for step in (10, 20, 30):
        nanochat(run, step, ranks)
    answer = ftckpt_json("latest", str(run))
    assert answer["path"].endswith("model_000030.pt")
    rows = ftckpt_json("ls", str(run))["checkpoints"]
    assert [row["step"] for row in rows] == [30, 20, 10]
    found = open_checkpoint(run / "model_000020.pt")
    assert found.step == 20
    assert len(set(found.members())) == 2 + max(ranks, 1)
    assert "0.weight" in found.tensors
    assert "meta.step" in set(found.fields())
    if ranks < 2:
        assert "exp_avg:0.weight" in found.tensors
    assert code("verify", f"{run}@20") == OK


@pytest.mark.parametrize("lost", ["model_000030.pt", "optim_000030_rank0.pt", "meta_000030.json"])
def test_a_lost_file_of_a_set_is_noticed(tmp_path: Path, lost: str) -> None:
    for step in (10, 20, 30):
        nanochat(tmp_path, step)
    (tmp_path / lost).unlink()
    assert code("verify", f"{tmp_path}@30") == INCOMPLETE
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("model_000020.pt")


def test_a_cut_file_of_a_set_is_noticed(tmp_path: Path) -> None:
    for step in (10, 20):
        nanochat(tmp_path, step)
    cut(tmp_path / "model_000020.pt")
    assert code("verify", f"{tmp_path}@20") == CORRUPT
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("model_000010.pt")


def test_gc_never_drops_a_file_of_a_set(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        nanochat(tmp_path, step)
    plan = ftckpt_json("gc", str(tmp_path), "--keep-last", "1")
    assert all(row["keep"] for row in plan["plan"]["decisions"])


def test_one_number_is_no_set(tmp_path: Path) -> None:
    """A lone `model_000030.pt` is a whole checkpoint, as detectron2's `model_0000059.pth` is."""
    net, _ = trained()
    torch.save({"model": net.state_dict(), "iteration": 9}, tmp_path / "model_000030.pt")
    assert open_checkpoint(tmp_path / "model_000030.pt").format == "torchsave"


def test_guided_diffusions_files_of_a_step_are_one_checkpoint(tmp_path: Path) -> None:
    net, optimizer = trained()
    for step in (1000, 2000):
        torch.save(net.state_dict(), tmp_path / f"model{step:06d}.pt")
        torch.save(net.state_dict(), tmp_path / f"ema_0.9999_{step:06d}.pt")
        torch.save(optimizer.state_dict(), tmp_path / f"opt{step:06d}.pt")
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("model002000.pt")
    found = open_checkpoint(tmp_path / "model001000.pt")
    assert {"0.weight", "ema:0.weight", "exp_avg:0.weight"} <= set(found.tensors)
    (tmp_path / "opt002000.pt").unlink()
    assert code("verify", tmp_path / "model002000.pt") == INCOMPLETE


# --- roots --------------------------------------------------------------------------------------


def test_state_of_the_newest_epoch_is_not_foreign(tmp_path: Path) -> None:
    """torchtune: epoch_N/ with weights, and recipe_state/ with the optimizer of the newest."""
    run = tmp_path / "run"
    for epoch in (0, 1):
        weights(run / f"epoch_{epoch}" / "model.safetensors")
    (run / "recipe_state").mkdir()
    torch.save({"epochs_run": 2}, run / "recipe_state" / "recipe_state.pt")
    plan = ftckpt_json("gc", str(run), "--keep-last", "1")
    assert {row["name"] for row in plan["plan"]["decisions"]} == {"epoch_0", "epoch_1"}
    answer = ftckpt_json("copy", str(run / "epoch_1"), str(tmp_path / "copy"))
    assert "recipe_state" in json.dumps(answer["findings"])


def test_kohyas_steps_are_checkpoints_of_their_own(tmp_path: Path) -> None:
    for step in (500, 1000, 1500):
        weights(tmp_path / f"mylora-step{step:08d}.safetensors", ss_steps=str(step))
    weights(tmp_path / "mylora.safetensors", ss_steps="2000")
    rows = ftckpt_json("ls", str(tmp_path))["checkpoints"]
    assert [row["step"] for row in rows] == [2000, 1500, 1000, 500]
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("mylora.safetensors")


def test_kohyas_epochs_are_too(tmp_path: Path) -> None:
    for epoch in (1, 2):
        weights(tmp_path / f"mylora-{epoch:06d}.safetensors", ss_steps=str(100 * epoch))
    assert len(ftckpt_json("ls", str(tmp_path))["checkpoints"]) == 2
    other = tmp_path / "other"
    for number in (1, 2):
        weights(other / f"part-{number:06d}.safetensors")
    assert open_checkpoint(other).format == "safetensors"


@pytest.mark.parametrize(
    "name", ["model.rank_{}.pth", "model_final.rank{}.pth", "resnet50.rank_{}.pt"]
)
def test_a_rank_after_a_dot_is_a_rank(tmp_path: Path, name: str) -> None:
    for rank in range(3):
        state = {"model": {"w": torch.ones(2) * rank}, "rank": rank, "world_size": 3}
        torch.save(state, tmp_path / name.format(rank))
    found = open_checkpoint(tmp_path)
    assert (found.format, found.topology.world_size) == ("ranks", 3)
    assert code("verify", tmp_path) == OK
    (tmp_path / name.format(2)).unlink()
    assert code("verify", tmp_path) == INCOMPLETE


@pytest.mark.parametrize("name", ["model_{:07d}.rank_{}.pth", "checkpoint_1_{}-shard{}.pt"])
def test_ranks_of_several_steps_in_one_directory(tmp_path: Path, name: str) -> None:
    for step in (50, 100):
        for rank in range(2):
            state = {"model": {"w": torch.ones(2)}, "iteration": step, "world_size": 2}
            torch.save(state, tmp_path / name.format(step, rank))
    assert [r["step"] for r in ftckpt_json("ls", str(tmp_path))["checkpoints"]] == [100, 50]
    assert code("verify", f"{tmp_path}@50") == OK
    (tmp_path / name.format(100, 1)).unlink()
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith(name.format(50, 0))


def test_an_average_in_a_folder_of_that_name(tmp_path: Path) -> None:
    folder = diffusers(tmp_path / "checkpoint-5")
    (folder / "unet_ema").rename(folder / "ema")
    assert {"0.weight", "ema:0.weight"} <= set(open_checkpoint(folder).tensors)
    (folder / "unet").rename(tmp_path / "unet")
    assert code("verify", folder) == INCOMPLETE


def test_modules_beside_the_trainers_state(tmp_path: Path) -> None:
    """sentence-transformers' own Trainer saves both; older models have no weights at the top."""
    folder = sentence_transformer(tmp_path / "checkpoint-5")
    torch.save(trained()[1].state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    found = open_checkpoint(folder)
    assert found.step == 5
    assert {"0.weight", "extra:2_Dense:0.weight", "exp_avg:0.0"} & set(found.tensors)
    assert set(found.members()) == set(found.source.entries)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "0_Transformer").mkdir()
    (folder / "model.safetensors").rename(folder / "0_Transformer" / "model.safetensors")
    assert "0.weight" in open_checkpoint(folder).tensors
    assert code("verify", folder) == OK
    shutil.rmtree(folder / "0_Transformer")
    assert code("verify", folder) == CORRUPT
