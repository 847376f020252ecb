"""slime, RLinf and miles over Megatron: their roots, and what a step of them lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, UsageError
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.checkpoints import flip, open_checkpoint
from tests.builders.rl_roots import (
    miles_lora_step,
    rlinf_step,
    slime_release,
    slime_root,
    store,
)
from tests.json_run import ftckpt_json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("made"))


def checked(path: Path, level: Level = Level.VALUES) -> VerifyReport:
    return verify(open_checkpoint(path), VerifyOptions(level=level))


def test_the_positions_of_slime_are_no_checkpoints(made: Path, tmp_path: Path) -> None:
    root = slime_root(tmp_path / "run", made)
    assert ftckpt_json("latest", str(root))["path"].endswith("iter_0000002")
    decided = ftckpt_json("gc", str(root), "--keep-last", "1", "--min-survivors", "1")
    assert {d["name"]: (d["entry_class"], d["keep"]) for d in decided["plan"]["decisions"]} == {
        "iter_0000002": ("COMMITTED", True),
        "rollout": ("FOREIGN", True),
    }
    assert ftckpt_json("verify", str(root), "--all")["result"]["code"] == 0


def test_a_released_model_of_slime_is_found(made: Path, tmp_path: Path) -> None:
    root = slime_release(tmp_path / "model", made)
    assert ftckpt_json("latest", str(root))["path"].endswith("release")


def test_a_step_of_rlinf_with_megatron_is_one_checkpoint(made: Path, tmp_path: Path) -> None:
    step = rlinf_step(tmp_path / "run/global_step_2", made)
    checkpoint, alone = open_checkpoint(step), open_checkpoint(made)
    assert (checkpoint.format, checkpoint.dialect) == ("bundle", "written by RLinf")
    critic = {k for k, i in alone.tensors.items() if i.component in ("model", "optimizer")}
    assert alone.tensors.keys() <= checkpoint.tensors.keys()
    assert {f"extra:critic:{key}" for key in critic} <= checkpoint.tensors.keys()
    files = {f.relative_to(step).as_posix() for f in step.rglob("*") if f.is_file()}
    assert files == set(checkpoint.members())
    assert checked(step).code is ExitCode.OK
    assert ftckpt_json("latest", str(step.parent))["path"].endswith("global_step_2")
    found = {item.key: item.presence for item in resume_check(checkpoint)}
    assert found["weights"] is found["moments"] is found["data"] is Presence.PRESENT


@pytest.mark.parametrize("data", [False, True])
def test_roots_of_megatron_side_by_side_are_no_step_of_rlinf(
    data: bool, made: Path, tmp_path: Path
) -> None:
    two = rlinf_step(tmp_path / "run", made)
    (two / "actor/iter_0000002").rename(two / "actor/iter_0000001")
    (two / "actor/latest_checkpointed_iteration.txt").write_text("1")
    if data:  # RLinf has one iteration in each role's folder
        shutil.copytree(two / "actor/iter_0000001", two / "actor/iter_0000003")
    else:
        shutil.rmtree(two / "data")
    with pytest.raises(UsageError, match="several roots"):
        open_checkpoint(two)


def test_damage_of_a_step_of_rlinf_with_megatron(made: Path, tmp_path: Path) -> None:
    step = rlinf_step(tmp_path / "global_step_2", made)
    checkpoint = open_checkpoint(step)
    key = next(k for k in checkpoint.tensors if k.startswith("extra:critic:"))
    extent = checkpoint.payload(checkpoint.tensors[key].pieces[0]).extent
    flip(step / extent.file, extent.offset)
    report = checked(step, Level.CONTENT)
    assert report.code is ExitCode.CORRUPT
    assert extent.file.startswith("critic/iter_0000002/")
    assert extent.file in {f.file for f in report.findings}
    shutil.rmtree(step / "actor")
    assert checked(step, Level.STRUCTURE).code is ExitCode.CORRUPT
    (step / "critic/iter_0000002/metadata.json").unlink()
    assert ftckpt_json("verify", str(step))["result"]["code"] in (4, 5)


@pytest.mark.parametrize("miles", [False, True])
def test_an_adapter_is_a_step_of_miles_by_its_states(miles: bool, tmp_path: Path) -> None:
    step = miles_lora_step(tmp_path / "run")
    state = torch.load(step / "adapter/training_state_rank0.pt")
    for file in step.glob("adapter/*_rank?.pt"):
        file.unlink()
    if not miles:  # what PEFT saves, in a folder that somebody called adapter
        assert ftckpt_json("latest", str(step))["path"] == str(step / "adapter")
        return
    torch.save(state, step / "adapter/training_state_named_tp0_pp0_dp0.pt")
    torch.save({"w": torch.zeros(2)}, step / "adapter/adapter_dp_invariant_tp0_pp0.pt")
    checkpoint = open_checkpoint(step)
    files = {f.relative_to(step).as_posix() for f in step.rglob("*") if f.is_file()}
    assert files == set(checkpoint.members())
    assert not [f for f in checked(step).findings if f.kind == "stray-file"]


def test_a_step_of_miles_with_lora_is_its_adapter(tmp_path: Path) -> None:
    step = miles_lora_step(tmp_path / "run/iter_0000003")
    moments = {"param": torch.randn(4), "exp_avg": torch.randn(4), "exp_avg_sq": torch.rand(4)}
    buffers = {0: {(torch.bfloat16, torch.float32): moments}}
    torch.save(buffers, step / "adapter/optimizer_param_state_rank0_optimizer0.pt")
    checkpoint = open_checkpoint(step)
    weights = torch.load(step / "adapter/adapter_model.bin")
    for name, tensor in weights.items():
        assert read_tensor(checkpoint, name) == tensor.numpy().tobytes()
    files = {f.relative_to(step).as_posix() for f in step.rglob("*") if f.is_file()}
    assert files == set(checkpoint.members())
    assert checkpoint.step == 3
    assert checked(step).code is ExitCode.OK
    found = {item.key: item.presence for item in resume_check(checkpoint)}
    assert found["moments"] is not Presence.ABSENT
    (step / "adapter/training_state_rank0.pt").unlink()
    lost = [f.file for f in checked(step).findings if f.kind == "missing-rank"]
    assert lost == ["adapter/training_state_rank0.pt"]
