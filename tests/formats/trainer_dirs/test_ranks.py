"""Accelerate's directories with one file a rank (`use_dcp=False`), and random states of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.findings import Strictness
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.checkpoints import open_checkpoint
from tests.formats.ranks.jobs import DATA, truth_file
from tests.json_run import ftckpt_json

TRAINER_DIRS = Path(__file__).parents[2] / "data" / "trainer_dirs"


def checked(folder: Path) -> VerifyReport:
    return verify(open_checkpoint(folder), VerifyOptions(level=Level.CONTENT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a real FSDP job of four ranks holds, under the names that accelerate 1.15 gives."""
    folder = tmp_path / "step-2"
    folder.mkdir()
    for rank in range(4):
        for role, name in (("model", "pytorch_model_fsdp_0"), ("optim", "optimizer_0")):
            file = DATA / "fsdp1" / "actor" / f"{role}_world_size_4_rank_{rank}.pt"
            (folder / f"{name}_rank{rank}.bin").write_bytes(file.read_bytes())
        torch.save({"step": 2, "torch": torch.ones(3)}, folder / f"random_states_{rank}.pkl")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    return folder


def test_the_directory_is_one_checkpoint(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.topology.world_size) == ("bundle", 4)
    truth = truth_file(DATA / "fsdp1" / "truth.safetensors")
    for key, (dtype, shape, data) in truth.items():
        info = checkpoint.tensors[key]
        assert (info.dtype.name, info.shape) == (dtype, shape)
        assert read_tensor(checkpoint, key) == data
    assert set(checkpoint.members()) == set(checkpoint.source.entries)
    assert "scheduler" in checkpoint.objects
    assert checked(folder).code is ExitCode.OK


@pytest.mark.parametrize(
    "name", ["pytorch_model_fsdp_0_rank3.bin", "optimizer_0_rank1.bin", "random_states_3.pkl"]
)
def test_a_lost_file_of_a_rank_is_found(folder: Path, name: str) -> None:
    (folder / name).unlink()
    report = checked(folder)
    assert report.code is ExitCode.INCOMPLETE, report.findings
    assert [f.file for f in report.findings if f.kind == "missing-rank"] == [name]


def test_the_hint_of_one_file_leads_to_what_can_be_read(folder: Path) -> None:
    answer = ftckpt_json("verify", str(folder / "pytorch_model_fsdp_0_rank0.bin"))
    assert answer["result"]["code"] == ExitCode.UNSUPPORTED
    assert "name its directory" in answer["result"]["hint"]
    assert ftckpt_json("verify", str(folder))["result"]["code"] == 0


def test_a_gap_among_the_random_states_of_a_trainer(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    for rank in (0, 1, 3):
        torch.save({"cpu": torch.ones(2)}, tmp_path / f"rng_state_{rank}.pth")
    report = checked(tmp_path)
    assert report.code is ExitCode.CORRUPT
    assert [f.file for f in report.findings if f.kind == "missing-rank"] == ["rng_state_2.pth"]


def test_a_gap_in_numbered_files_is_found(folder: Path) -> None:
    for name in ("custom_checkpoint_0.pkl", "custom_checkpoint_2.pkl", "scheduler_1.bin"):
        torch.save({"last_epoch": 2}, folder / name)
    report = checked(folder)
    assert report.code is ExitCode.CORRUPT
    lost = [f.file for f in report.findings if f.kind == "missing-file"]
    assert lost == ["custom_checkpoint_1.pkl"]
    (folder / "scheduler.bin").unlink()
    lost = [f.file for f in checked(folder).findings if f.kind == "missing-file"]
    assert lost == ["custom_checkpoint_1.pkl", "scheduler.bin"]


def test_random_states_of_all_ranks_that_are_gone_are_warned_of(folder: Path) -> None:
    for file in folder.glob("random_states_*"):
        file.unlink()
    report = checked(folder)
    assert report.code is ExitCode.OK
    (found,) = (f for f in report.findings if f.kind == "state-unknown")
    assert (found.file, found.severity) == ("random_states_0.pkl", "warning")
    strict = VerifyOptions(strict=frozenset({Strictness.COUNTS}))
    assert verify(open_checkpoint(folder), strict).code is ExitCode.UNVERIFIED


@pytest.mark.parametrize(("name", "code"), [("trainer", 4), ("accelerate", 5)])
def test_lost_weights_do_not_make_a_root_of_what_is_left(
    name: str, code: int, tmp_path: Path
) -> None:
    """The optimizer's file was taken for the newest checkpoint of a root, and passed."""
    place = Path(shutil.copytree(TRAINER_DIRS / name, tmp_path / "root" / "checkpoint-3"))
    (place / "model.safetensors").unlink()
    answer = ftckpt_json("verify", str(place))
    assert answer["result"]["code"] == code
    assert "no weights: they are lost" in answer["result"]["message"]
    for level in ("structure", "content"):
        answer = ftckpt_json("latest", str(place.parent), "--level", level)
        assert answer["result"]["code"] == code
    torch.save({"w": torch.ones(2)}, place / "projector.bin")
    assert ftckpt_json("verify", str(place))["result"]["code"] == ExitCode.UNSUPPORTED


def test_a_lost_model_beside_its_optimizer_is_never_ok(folder: Path) -> None:
    for file in folder.glob("pytorch_model_fsdp_*"):
        file.unlink()
    report = checked(folder)
    assert report.code is ExitCode.UNVERIFIED
    assert "the model is not there" in " ".join(f.message for f in report.findings)


@pytest.mark.parametrize(
    ("lost", "kind"),
    [("model.safetensors", "missing-file"), ("model_1.safetensors", "state-unknown")],
)
def test_a_lost_model_of_two_is_missed(lost: str, kind: str, tmp_path: Path) -> None:
    """What was left passed without a word."""
    place = Path(shutil.copytree(TRAINER_DIRS / "accelerate_two", tmp_path / "checkpoint"))
    assert not any(f.kind == "state-unknown" for f in checked(place).findings)
    (place / lost).unlink()
    report = verify(open_checkpoint(place), VerifyOptions(level=Level.STRUCTURE))
    error = kind == "missing-file"
    assert report.code is (ExitCode.CORRUPT if error else ExitCode.OK)
    found = [f.severity for f in report.findings if f.kind == kind]
    assert found == ["error" if error else "warning"]


def test_a_second_models_files_are_its_own(folder: Path) -> None:
    for rank in range(4):
        for name in ("pytorch_model_fsdp", "optimizer"):
            file = folder / f"{name}_0_rank{rank}.bin"
            shutil.copy(file, folder / f"{name}_1_rank{rank}.bin")
    checkpoint = open_checkpoint(folder)
    assert checked(folder).code is ExitCode.OK
    truth = truth_file(DATA / "fsdp1" / "truth.safetensors")
    for key, (_, _, data) in truth.items():
        kind = ":" in key and not key.startswith("optimizer:")
        second = f"extra:model_1:{key if kind else key.removeprefix('optimizer:')}"
        assert read_tensor(checkpoint, key) == data
        assert read_tensor(checkpoint, second) == data
    (folder / "pytorch_model_fsdp_1_rank2.bin").unlink()
    found = checked(folder).findings
    assert {f.file for f in found if f.kind == "missing-rank"} == {"pytorch_model_fsdp_1_rank2.bin"}


def test_flattened_slices_are_not_called_damage(folder: Path) -> None:
    # FSDP's LOCAL_STATE_DICT: a slice under the parameter's name, of another length on each rank.
    for rank in range(4):
        flat = {"_flat_param": torch.ones(8), "a.weight": torch.ones(8 * (rank == 0))}
        torch.save(flat, folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    report = checked(folder)
    assert report.code is ExitCode.OK, report.findings
    assert any("LOCAL_STATE_DICT" in found.message for found in report.findings)
    held = open_checkpoint(folder).tensors
    assert "a.weight" not in held
    assert held["extra:rank0:a.weight"].shape == (8,)
    assert held["extra:rank1:a.weight"].shape == (0,)


def test_gathered_weights_that_the_trainer_saves_twice(tmp_path: Path) -> None:
    # Its FULL_STATE_DICT: accelerate's file, from which it resumes, and model.safetensors.
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    torch.save(net.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    torch.save({"cpu": torch.ones(2)}, tmp_path / "rng_state_0.pth")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    save_file(net.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.members()) == set(checkpoint.source.entries)
    assert [p.replica for p in checkpoint.tensors["weight"].pieces] == [0, 1]
    values = VerifyOptions(level=Level.VALUES)
    assert verify(open_checkpoint(tmp_path), values).code is ExitCode.OK
    other = {key: value + 1 for key, value in net.state_dict().items()}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    report = verify(open_checkpoint(tmp_path), values)
    assert {f.kind for f in report.findings if f.code is ExitCode.CORRUPT} == {"copy-differs"}
