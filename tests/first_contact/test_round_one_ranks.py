"""What a step lost is never made up by what is left: the model, its owner, a part of the state.

The layouts are those of AReaL (`recover_checkpoint`: weights of Hugging Face's and an optimizer's
file a rank) and SkyRL (`policy` and `critic`, `data.pt`, `trainer_state.pt`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftckpt.errors import ExitCode
from tests.faults.cli import here

NAMES = ("embed.weight", "norm.weight")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 2), value) for name in NAMES}


def moments(step: int) -> dict[str, Any]:
    state = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.ones(4, 2),
            "exp_avg_sq": torch.ones(4, 2),
        }
        for number in range(len(NAMES))
    }
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": [*range(len(NAMES))]}]}


def recover(folder: Path) -> Path:
    """Write AReaL's save to go on from."""
    folder.mkdir(parents=True)
    save_file(weights(1.0), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    for rank in range(2):
        torch.save(moments(120), folder / f"optim_world_size_2_rank_{rank}.pt")
    return folder


def model_folder(folder: Path, step: int, value: float) -> None:
    folder.mkdir(parents=True)
    torch.save(weights(value), folder / "model_world_size_1_rank_0.pt")
    torch.save(moments(step), folder / "optim_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))


def skyrl(root: Path, *folders: str, steps: tuple[int, ...] = (5, 10, 15)) -> Path:
    """Write steps of SkyRL's or verl's: the first folder has ones as weights, the next twos."""
    for step in steps:
        place = root / f"global_step_{step}"
        for value, name in enumerate(folders, 1):
            model_folder(place / name, step, float(value))
        torch.save({"_num_yielded": step}, place / "data.pt")
        if "actor" not in folders:  # which is verl's name
            torch.save({"global_step": step}, place / "trainer_state.pt")
    return root


def test_an_optimizer_is_no_checkpoint_of_a_model(tmp_path: Path) -> None:
    root = tmp_path / "default"
    folder = recover(root / "recover_checkpoint")
    assert here("verify", folder).code == ExitCode.OK
    (folder / "model.safetensors").unlink()
    found = here("verify", folder, "--level", "content")
    assert (found.code, found.kinds & {"no-weights"}) == (ExitCode.INCOMPLETE, {"no-weights"})
    assert here("latest", root).code != ExitCode.OK
    (folder / "config.json").unlink()  # nothing else says that a model was there
    assert here("verify", folder).code == ExitCode.UNVERIFIED


def test_an_optimizer_that_was_asked_for_is_what_it_says(tmp_path: Path) -> None:
    folder = recover(tmp_path / "recover_checkpoint")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    shutil.move(folder, tmp_path / "optimizer")
    assert here("verify", tmp_path / "optimizer").code == ExitCode.OK
    assert here("verify", tmp_path / "optimizer" / "optim_world_size_2_rank_0.pt").code in (
        ExitCode.OK,
        ExitCode.UNSUPPORTED,
    )


@pytest.mark.parametrize(
    "folders", [("actor", "critic"), ("policy", "critic"), ("student", "teacher"), ("mine", "ref")]
)
def test_the_model_is_what_the_job_trains(folders: tuple[str, ...], tmp_path: Path) -> None:
    step = skyrl(tmp_path / "run", *folders, steps=(10,)) / "global_step_10"
    out = tmp_path / "out"
    assert here("convert", step, out, "--to", "safetensors", "--only", "model").code == ExitCode.OK
    (file,) = out.glob("*.safetensors")
    held = load_file(file)
    assert set(held) == set(NAMES)
    assert all(bool((tensor == 1).all()) for tensor in held.values())


@pytest.mark.parametrize("folders", [("one", "other"), ("critic", "reward"), ("critic",)])
def test_nobody_chooses_the_model_by_the_alphabet(folders: tuple[str, ...], tmp_path: Path) -> None:
    step = skyrl(tmp_path / "run", *folders, steps=(10,)) / "global_step_10"
    out = tmp_path / "out"
    found = here("convert", step, out, "--to", "safetensors", "--only", "model")
    assert found.code != ExitCode.OK
    assert not out.exists()


@pytest.mark.parametrize("main", ["actor", "policy"])
def test_a_critic_alone_is_no_step(main: str, tmp_path: Path) -> None:
    root = skyrl(tmp_path / "run", main, "critic")
    shutil.rmtree(root / "global_step_15" / main)
    found = here("verify", root / "global_step_15")
    assert found.code == ExitCode.INCOMPLETE
    assert main in found.told
    assert found.kinds >= {"missing-part"}
    picked = here("latest", root)
    assert (picked.code, "global_step_10" in picked.told) == (ExitCode.OK, True)
    alone = tmp_path / "elsewhere" / "global_step_15"
    shutil.copytree(root / "global_step_15", alone)
    lone = here("verify", alone)
    assert (lone.code, lone.kinds & {"no-weights"}) == (ExitCode.UNVERIFIED, {"no-weights"})


@pytest.mark.parametrize(
    ("folders", "lost"),
    [
        (("actor", "critic"), "data.pt"),
        (("policy", "critic"), "data.pt"),
        (("policy", "critic"), "trainer_state.pt"),
        (("policy",), "trainer_state.pt"),
    ],
)
def test_a_lost_file_makes_no_better_verdict(
    folders: tuple[str, ...], lost: str, tmp_path: Path
) -> None:
    root = skyrl(tmp_path / "run", *folders)
    (root / "global_step_15" / lost).unlink()
    found = here("verify", root / "global_step_15")
    assert found.code == ExitCode.INCOMPLETE
    assert lost in str(found.document["findings"])
    assert here("verify", root / "global_step_10").code != ExitCode.INCOMPLETE


def bundle(root: Path, steps: tuple[int, ...] = (5, 10, 15)) -> Path:
    """Write steps of accelerate's."""
    for step in steps:
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        save_file(weights(1.0), folder / "model.safetensors", metadata={"format": "pt"})
        torch.save(moments(step), folder / "optimizer.bin")
        torch.save({"last_epoch": step}, folder / "scheduler.bin")
        torch.save({"step": step}, folder / "random_states_0.pkl")
    return root


@pytest.mark.parametrize("lost", ["optimizer.bin", "scheduler.bin"])
def test_a_trainers_step_is_held_to_the_steps_before(lost: str, tmp_path: Path) -> None:
    root = bundle(tmp_path / "run")
    sound = here("verify", root / "step_15")
    (root / "step_15" / lost).unlink()
    found = here("verify", root / "step_15")
    assert (sound.code, found.code) == (ExitCode.OK, ExitCode.INCOMPLETE)
    assert lost in found.told


def test_more_ranks_and_another_library_lose_nothing(tmp_path: Path) -> None:
    root = bundle(tmp_path / "run")
    for step in (5, 10):
        folder = root / f"step_{step}"
        (folder / "random_states_0.pkl").rename(folder / "rng_state.pth")
        (folder / "model.safetensors").unlink()
        torch.save(weights(1.0), folder / "pytorch_model.bin")
    (root / "step_15" / "random_states_0.pkl").rename(root / "step_15" / "rng_state_0.pth")
    assert "missing-part" not in here("verify", root / "step_15").kinds
