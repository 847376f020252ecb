"""Saves of F5-TTS, of a pipeline without ZeRO beside exports, and of ranks that nothing joins.

F5-TTS counts `update` and writes `model_last.pt` between its numbered saves; diffusion-pipe saves
the layers of a DeepSpeed pipeline and exports an adapter each epoch; NxD writes a file a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.json_run import ftckpt_json


def weights(fill: float) -> dict[str, torch.Tensor]:
    return {"proj.weight": torch.full((6, 4), fill), "out.weight": torch.full((4, 4), fill)}


def adam(state: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
    moments = {
        n: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(one, 0.5, dtype=torch.float32),
            "exp_avg_sq": torch.full_like(one, 0.25, dtype=torch.float32),
        }
        for n, one in enumerate(state.values())
    }
    return {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(moments)}]}


def newest(root: Path, *words: str) -> tuple[int, str]:
    """Return the code of `latest` and the name that it prints."""
    said = ftckpt_json("latest", str(root), *words)
    return int(said["result"]["code"]), Path(said.get("path") or "").name


def code(*words: str) -> int:
    return int(ftckpt_json(*words)["result"]["code"])


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    root = tmp_path / "my_speak"
    root.mkdir()

    def save(name: str, update: int) -> None:
        model = weights(float(update))
        state = {
            "model_state_dict": model,
            "optimizer_state_dict": adam(model, update),
            "ema_model_state_dict": {"initted": torch.tensor(True), "step": torch.tensor(update)}
            | {f"ema_model.{key}": one * 0.9 for key, one in model.items()},
            "update": update,
        }
        torch.save(state, root / name)

    for update in (9000, 9500, 10000):
        save(f"model_{update}.pt", update)
    save("model_last.pt", 10700)
    torch.save(
        {"ema_model_state_dict": {"step": torch.tensor(1)} | weights(7.0)},
        root / "pretrained_model_1250000.pt",
    )
    return root


def test_the_last_save_has_its_place_by_the_count_of_its_siblings(speech: Path) -> None:
    assert newest(speech) == (0, "model_last.pt")
    assert newest(speech, "--verify", "content") == (0, "model_last.pt")
    assert ftckpt_json("status", str(speech))["runs"][0]["newest"]["name"] == "model_last.pt"


def test_the_last_save_is_not_of_a_step_below_its_count(speech: Path) -> None:
    assert newest(speech, "--step-at-most", "10600") == (0, "model_10000.pt")


def test_a_cut_last_save_is_passed_over(speech: Path) -> None:
    last = speech / "model_last.pt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert newest(speech) == (0, "model_10000.pt")
    assert code("verify", str(last)) == 4


def test_a_last_save_that_counts_nothing_beside_steps_is_no_order(speech: Path) -> None:
    model = weights(1.0)
    state = {"model_state_dict": model, "optimizer_state_dict": adam(model, 5)}
    torch.save(state | {"ema_model_state_dict": weights(2.0)}, speech / "model_last.pt")
    assert newest(speech)[0] == 6
    assert "model_last.pt" in ftckpt_json("latest", str(speech))["result"]["message"]


def test_weights_alone_are_an_export_beside_saves_with_steps(speech: Path) -> None:
    torch.save(weights(1.0), speech / "model_last.pt")
    assert newest(speech) == (0, "model_10000.pt")


LAYERS = 4


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Return a run of a pipeline of two stages; the first and last layers are frozen."""
    root = tmp_path / "20261127_18-04-11"

    def layer(number: int, fill: float) -> dict[str, torch.Tensor]:
        if number in (0, LAYERS - 1):
            return {}
        halves = {"lora_A": (2, 6), "lora_B": (6, 2)}
        return {
            f"block.q.{key}.default.weight": torch.full(shape, fill + number, dtype=torch.bfloat16)
            for key, shape in halves.items()
        }

    for epoch in (1, 2, 3):
        step = epoch * 500
        tag = root / f"global_step{step}"
        tag.mkdir(parents=True)
        for number in range(LAYERS):
            torch.save(layer(number, step), tag / f"layer_{number:02d}-model_states.pt")
        for stage in (0, 1):
            state: dict[str, Any] = {
                "module": None, "buffer_names": [], "param_shapes": None, "shared_params": {},
                "optimizer": adam(layer(1 + stage, step), step), "skipped_steps": 0,
                "global_steps": step, "dp_world_size": 1, "mp_world_size": 2, "ds_config": {},
                "ds_version": "0.17.0", "step": step, "lr_scheduler": {"last_epoch": step},
            }  # fmt: skip
            torch.save(state, tag / f"mp_rank_{stage:02d}_model_states.pt")
        adapter = root / f"epoch{epoch}"
        adapter.mkdir()
        held = {
            f"diffusion_model.blocks.{number}.{key}": one
            for number in (1, 2)
            for key, one in layer(number, 1.0).items()
        }
        save_file(held, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (root / "latest").write_text("global_step1500")
    return root


def test_a_pipeline_without_zero_is_sound(pipeline: Path) -> None:
    assert newest(pipeline) == (0, "global_step1500")
    assert code("verify", str(pipeline), "--all") == 0


@pytest.mark.parametrize("number", range(LAYERS))
def test_a_layer_that_is_lost_is_no_doubt_because_a_pointer_names_the_step(
    pipeline: Path, number: int
) -> None:
    (pipeline / f"global_step1500/layer_{number:02d}-model_states.pt").unlink()
    assert code("verify", str(pipeline / "global_step1500")) == 5
    assert newest(pipeline) == (0, "global_step1000")


def test_files_of_ranks_may_be_fewer_from_the_pointed_step_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (10, 20, 30):
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        torch.save({"model": weights(float(step)), "step": step}, folder / "model.pt")
        for rank in range(2 if step == 30 else 4):
            (folder / f"train_state_{rank}.json").write_text(json.dumps({"rank": rank}))
    (root / "latest").write_text("step_30")
    assert newest(root) == (0, "step_30")


def test_a_damaged_step_that_a_pointer_names_gives_way_to_the_one_before(pipeline: Path) -> None:
    cut = pipeline / "global_step1500/layer_01-model_states.pt"
    cut.write_bytes(cut.read_bytes()[:700])
    assert newest(pipeline) == (0, "global_step1000")


def test_layers_without_the_rest_are_a_save_that_is_not_finished(pipeline: Path) -> None:
    begun = pipeline / "global_step2000"
    begun.mkdir()
    for path in (pipeline / "global_step1500").glob("layer_*"):
        shutil.copy(path, begun)
    assert code("verify", str(begun)) == 5
    assert newest(pipeline) == (0, "global_step1500")
    kept = ftckpt_json("gc", str(pipeline), "--keep-last", "1")["plan"]["decisions"]
    assert {one["name"]: one["keep"] for one in kept}["global_step2000"]


def test_without_a_pointer_exports_and_steps_are_in_no_order(pipeline: Path) -> None:
    (pipeline / "latest").unlink()
    assert newest(pipeline)[0] == 6


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    for step in (500, 1000, 1500):
        tag = root / f"step_{step}"
        (tag / "model").mkdir(parents=True)
        for rank in (0, 1):
            name = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
            torch.save(weights(float(step + rank)), tag / "model" / name)
        torch.save({"epoch": 0, "global_step": step}, tag / "user_content.pt")
        (tag / "done").write_text("1")
        for path in tag.rglob("*"):  # a save each hour
            os.utime(path, (time.time() - (2000 - step) * 7.2,) * 2)
    return root


def test_a_newest_save_that_was_read_in_part_is_a_doubt_of_status(ranks: Path) -> None:
    assert newest(ranks)[0] == 13
    said = ftckpt_json("status", str(ranks))
    assert said["result"]["code"] == 6, said
    assert "dp_rank_00_tp_rank_01_pp_rank_00.pt" in said["runs"][0]["doubt"]
    shutil.rmtree(ranks / "step_1500/model")
    assert ftckpt_json("status", str(ranks))["result"]["code"] != 0


def test_inspect_names_the_ranks_that_it_did_not_read(ranks: Path) -> None:
    notes = ftckpt_json("inspect", str(ranks / "step_1500"))["notes"]
    unread = [one["file"] for one in notes if one["kind"] == "unknown-part"]
    assert unread == ["model/dp_rank_00_tp_rank_01_pp_rank_00.pt"]


def flat_shard(path: Path, updates: int, rank: int) -> None:
    state = {
        "model": {"flat_param_0": torch.full((12,), float(updates + rank))},
        "shard_metadata": {"param_metadata": [], "rank": rank},
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": {"epoch": 3},
    }
    torch.save(state, path)


def test_the_best_is_not_taken_in_silence_where_a_shard_of_the_last_is_lost(tmp_path: Path) -> None:
    for rank in (0, 1):
        flat_shard(tmp_path / f"checkpoint_best-shard{rank}.pt", 8000, rank)
        flat_shard(tmp_path / f"checkpoint_last-shard{rank}.pt", 10000, rank)
    assert newest(tmp_path) == (0, "checkpoint_last-shard0.pt")
    (tmp_path / "checkpoint_last-shard1.pt").unlink()
    assert newest(tmp_path)[0] == 13
    assert code("verify", str(tmp_path)) == 13
    health = ftckpt_json("status", str(tmp_path))
    assert health["result"]["code"] == 6
    assert "checkpoint_last-shard0.pt" in health["runs"][0]["doubt"]


def test_an_export_of_the_last_save_stops_nothing(tmp_path: Path) -> None:
    for name in ("epoch1.pt", "last.pt"):
        torch.save({"model": weights(1.0), "epoch": 1}, tmp_path / name)
    (tmp_path / "last.torchscript").write_bytes(b"PK\3\4" + bytes(60))
    assert newest(tmp_path) == (0, "last.pt")


def test_a_series_of_optimizers_alone_has_no_newest_checkpoint(tmp_path: Path) -> None:
    for thousand in (20, 40):
        save_file(weights(1.0), tmp_path / f"generator_{thousand}k.safetensors")
        torch.save(adam(weights(1.0), thousand), tmp_path / f"generator_optim_{thousand}k.pt")
    assert newest(tmp_path, "--series", "generator_optim_Nk.pt")[0] == 6
    assert newest(tmp_path, "--series", "generator_Nk.safetensors") == (
        0,
        "generator_40k.safetensors",
    )


def trainer_save(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    save_file(weights(float(step)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    torch.save(adam(weights(1.0), step), folder / "optimizer.pt")
    torch.save({"last_epoch": step, "_last_lr": [1e-4]}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


@pytest.mark.parametrize("by", ["name", "pointer"])
def test_a_root_whose_finished_newest_lost_its_step_is_not_sound(tmp_path: Path, by: str) -> None:
    for step in (10, 20, 30):
        trainer_save(tmp_path / f"step_{step}", step)
    last = tmp_path / ("latest" if by == "name" else "step_35")
    trainer_save(last, 35)
    if by == "pointer":
        (tmp_path / "latest").write_text(last.name)
    assert code("verify", str(tmp_path)) == 0
    (last / "trainer_state.json").unlink()
    assert code("verify", str(tmp_path)) == 5
    assert newest(tmp_path) == (0, "step_30")


def test_a_save_in_flight_does_not_make_a_root_unsound(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        trainer_save(tmp_path / f"step_{step}", step)
    (tmp_path / "step_30/trainer_state.json").unlink()
    assert code("verify", str(tmp_path)) == 0


def networks(seed: int, steps: int = 4) -> list[dict[str, torch.Tensor]]:
    """Return a network at several saves: it goes on from where it began, and not straight."""
    made = torch.Generator().manual_seed(seed)
    one = {name: torch.randn(held.shape, generator=made) for name, held in weights(0.0).items()}
    way = {name: torch.randn(held.shape, generator=made) for name, held in one.items()}
    found = []
    for _ in range(steps):
        one = {
            name: held + 0.3 * way[name] + 0.05 * torch.randn(held.shape, generator=made)
            for name, held in one.items()
        }
        found.append(one)
    return found


def averaged(saves: list[dict[str, torch.Tensor]], keep: float) -> list[dict[str, torch.Tensor]]:
    found = [saves[0]]
    for one in saves[1:]:
        before = found[-1]
        found.append({name: keep * before[name] + (1 - keep) * one[name] for name in one})
    return found


def write_series(root: Path, name: str, saves: list[dict[str, torch.Tensor]], **more: Any) -> None:
    for number, one in enumerate(saves, 1):
        torch.save({"params": one} | more, root / name.format(number * 1000))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("names", [("student_{}.pth", "teacher_{}.pth"), ("b_{}.pth", "a_{}.pth")])
def test_an_average_is_told_by_its_values(
    tmp_path: Path, keep: float, names: tuple[str, str]
) -> None:
    saves = networks(1)
    write_series(tmp_path, names[0], saves)
    write_series(tmp_path, names[1], averaged(saves, keep))
    assert newest(tmp_path) == (0, names[0].format(4000))
    (tmp_path / names[0].format(4000)).write_bytes(b"PK")
    assert newest(tmp_path)[1] != names[1].format(4000)


@pytest.mark.parametrize("case", ["two networks", "two ways from one base", "a frozen reference"])
def test_what_is_no_average_is_half_a_save(tmp_path: Path, case: str) -> None:
    first, second = networks(1), networks(2)
    if case == "two ways from one base":
        base, other = first[0], second[0]
        second = [{n: one[n] - other[n] + base[n] for n in one} for one in second[1:]]
        first = first[1:]
    if case == "a frozen reference":
        second = [first[0]] * len(first)
    write_series(tmp_path, "net_a_{}.pth", first)
    write_series(tmp_path, "net_b_{}.pth", second)
    assert newest(tmp_path)[0] == 2
