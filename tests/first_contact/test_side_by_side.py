"""Saves that lie side by side in one folder: several checkpoints, and never one.

Trainers of adapters: ostris/ai-toolkit `BaseSDTrainProcess.save`, Nerogar/OneTrainer
`GenericTrainer.__save`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ftckpt
from tests.json_run import ftckpt_json

SAVES = ("my_lora_000000250", "my_lora_000000500", "my_lora_000000750", "my_lora")


def lora(fill: float = 1.0, width: int = 4, prefix: str = "blocks") -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{n}.lora_{c}.weight": torch.full((width, 4), fill) for n in (0, 1) for c in "AB"
    }


def save(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata=metadata or None)


def optimizer() -> dict[str, object]:
    layer = torch.nn.Linear(4, 4)
    one = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4)).sum().backward()
    one.step()
    return one.state_dict()


def ai_toolkit(folder: Path) -> Path:
    """Write a run of ai-toolkit: every save in one folder, the optimizer of the last beside."""
    for n, name in enumerate(SAVES):
        step = json.dumps({"step": 250 * (n + 1), "epoch": n})
        path = folder / f"{name}.safetensors"
        save(path, lora(n), format="pt", training_info=step)
        os.utime(path, (1000 + n, 1000 + n))
    torch.save(optimizer(), folder / "optimizer.pt")
    (folder / "config.yaml").write_text("job: extension\n")
    return folder


def answer(*command: str) -> tuple[int, str]:
    said = ftckpt_json(*command)
    return said["result"]["code"], (said.get("path") or "").rpartition("/")[2]


def test_the_saves_of_ai_toolkit(tmp_path: Path) -> None:
    folder = ai_toolkit(tmp_path / "my_lora")
    rows = {row.path.rpartition("/")[2] for row in ftckpt.ls(str(folder))}
    assert rows == {f"{name}.safetensors" for name in SAVES}
    # The one without a number is the last, if its header says so; else nothing does.
    assert answer("latest", str(folder)) in [(0, "my_lora.safetensors"), (6, "")]
    last = folder / "my_lora.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    assert answer("verify", str(last))[0] == 4
    last.unlink()
    assert answer("latest", str(folder)) == (0, "my_lora_000000750.safetensors")
    assert not ftckpt.gc(str(folder), keep_last=1, min_survivors=1).plan.drop


@pytest.mark.parametrize(
    "names",
    [
        ("2026-11-01_10-00-00-save-250-2-50", "2026-11-01_12-00-00-save-500-5-0"),
        ("20261101-101010", "20261102-101010"),
        ("flux-best", "flux-last"),
        ("lora", "lora_7"),
        ("adapter_model", "adapter_model_100"),
    ],
)
@pytest.mark.parametrize("state", [(), ("optimizer.pt",), ("optimizer.pt", "rng_state.pth")])
def test_the_same_tensors_in_each_are_saves(
    names: tuple[str, ...], state: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        save(tmp_path / "run" / f"{name}.safetensors", lora())
    for name in state:
        torch.save(optimizer(), tmp_path / "run" / name)
    rows = [row.path.rpartition("/")[2] for row in ftckpt.ls(str(tmp_path / "run"))]
    assert sorted(rows) == sorted(f"{name}.safetensors" for name in names)
    assert answer("latest", str(tmp_path / "run"))[0] in (0, 6)
    assert answer("latest", str(tmp_path))[0] == 13  # no step is one of these


def test_a_long_list_of_tags_hides_no_tensor(tmp_path: Path) -> None:
    tags = json.dumps({f"tag {n}": n for n in range(5000)})
    for name in ("one_10", "one_20"):
        save(tmp_path / f"{name}.safetensors", lora(), tags=tags)
    assert len(ftckpt.ls(str(tmp_path))) == 2


@pytest.mark.parametrize(
    "files",
    [
        # Pieces of one model hold other tensors each.
        {"layers1": lora(prefix="a"), "layers2": lora(prefix="b")},
        # Two text encoders of a pipeline: the same names, in other shapes.
        {"text_encoder": lora(), "text_encoder_2": lora(width=8)},
        # One model in two dtypes.
        {"model.fp16": {n: t.half() for n, t in lora().items()}, "model.fp32": lora()},
        {"model": lora(), "ema": lora()},
    ],
)
def test_other_files_side_by_side_are_one(
    files: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    for name, tensors in files.items():
        save(tmp_path / f"{name}.safetensors", tensors)
    assert answer("verify", str(tmp_path))[0] == 0
    assert len(ftckpt.open_checkpoint(str(tmp_path)).tensors) == sum(map(len, files.values()))


def test_a_described_model_and_a_spare_copy_of_it_are_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path / "model.safetensors", lora())
    save(tmp_path / "model-old.safetensors", lora(2.0))
    assert len(ftckpt.open_checkpoint(str(tmp_path)).tensors) == 8


def test_models_of_one_save_that_are_numbered_stay_together(tmp_path: Path) -> None:
    """Of accelerate, which shows itself, and of a folder that is called by its step."""
    for name in ("model.safetensors", "model_1.safetensors"):
        save(tmp_path / "state" / name, lora())
        save(tmp_path / "step-10" / name, lora())
    torch.save({"step": 1}, tmp_path / "state" / "random_states_0.pkl")
    torch.save(optimizer(), tmp_path / "state" / "optimizer.bin")
    for folder in ("state", "step-10"):
        assert len(ftckpt.open_checkpoint(str(tmp_path / folder)).tensors) >= 8


def test_files_of_torch_side_by_side_are_no_parts_of_the_optimizer_beside(tmp_path: Path) -> None:
    for name in ("model_1000.pt", "model_2000.pt", "model.pt"):
        torch.save(lora(), tmp_path / name)
    torch.save(optimizer(), tmp_path / "optimizer.pt")
    rows = {row.path.rpartition("/")[2] for row in ftckpt.ls(str(tmp_path))}
    assert rows == {"model_1000.pt", "model_2000.pt", "model.pt"}


def test_a_workspace_of_onetrainer_is_not_its_folder_of_weights(tmp_path: Path) -> None:
    for n, step in enumerate((250, 500)):
        name = f"2026-11-0{n + 1}_10-00-00"
        backup = tmp_path / "backup" / f"{name}-backup-{step}-{n}-0"
        save(backup / "lora" / "lora.safetensors", lora(step))
        (backup / "optimizer").mkdir()
        torch.save(optimizer(), backup / "optimizer" / "optimizer.pt")
        (backup / "meta.json").write_text(json.dumps({"train_progress": {"global_step": step}}))
        save(tmp_path / "save" / f"{name}-save-{step}-{n}-0.safetensors", lora(step))
    for verb in ("latest", "verify", "ls"):
        assert answer(verb, str(tmp_path)) == (13, "")
    assert len(ftckpt.ls(str(tmp_path / "backup"))) == 2
    assert len(ftckpt.ls(str(tmp_path / "save"))) == 2


def test_the_link_of_composer_is_no_checkpoint_of_ranks(tmp_path: Path) -> None:
    """composer/callbacks/checkpoint_saver.py: `latest-rank{rank}.pt` points to the newest."""
    for batch in (10, 20, 30):
        state = {"model": lora(batch), "timestamp": {"Timestamp": {"epoch": 0, "batch": batch}}}
        torch.save({"state": state, "rng": []}, tmp_path / f"ep0-ba{batch}-rank0.pt")
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba30-rank0.pt")
    assert answer("latest", str(tmp_path)) == (0, "ep0-ba30-rank0.pt")
    assert len(ftckpt.ls(str(tmp_path))) == 3


@pytest.mark.parametrize("damage", [False, True])
def test_the_steps_below_a_final_model_are_checked_by_all(damage: bool, tmp_path: Path) -> None:
    """LLaMA-Factory, axolotl and the Trainer save the last model above its `checkpoint-N`."""
    for place in (tmp_path, *(tmp_path / f"checkpoint-{step}" for step in (10, 20))):
        save(place / "model.safetensors", lora())
        (place / "config.json").write_text("{}")
    newest = tmp_path / "checkpoint-20" / "model.safetensors"
    if damage:
        newest.write_bytes(newest.read_bytes()[:-8])
    said = ftckpt_json("verify", str(tmp_path), "--all")
    assert said["result"]["code"] == (4 if damage else 0)
    checked = [one["target"] for one in said["checkpoints"]]
    assert [one.rpartition("/")[2] for one in checked[1:]] == ["checkpoint-20", "checkpoint-10"]
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 0  # it was named
