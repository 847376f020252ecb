"""Directories of several parts: the Hugging Face Trainer's and accelerate's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ftckpt.checkpoint import CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery.recognise import recognise
from ftckpt.errors import CorruptError, IncompleteError
from ftckpt.findings import finding
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.safetensors import Safetensors
from ftckpt.formats.torchsave import TorchSave
from ftckpt.formats.trainer_dirs import Bundle
from ftckpt.formats.trainer_dirs.checkpoint import OpenedPart, in_part
from ftckpt.inspection.resume import resume_check
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.archives import extract
from tests.builders.raw_checkpoint import RawCheckpoint
from tests.conformance.formats import (
    FormatTests,
    Made,
    Truth,
    findings_of,
    listing_of_path,
    open_path,
)

CHECKPOINTS = Path(__file__).parents[4] / "shared" / "checkpoints"
FORMAT = Bundle((Dcp(), Safetensors(), TorchSave()))


def truth_of(tensor: torch.Tensor) -> Truth:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return Truth(name, tuple(tensor.shape), flat.numpy().tobytes())


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Two groups, as the Trainer makes them: weights with decay, biases and norms without."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(7):
        optimizer.zero_grad()
        net(torch.randn(2, 5)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }


def trainer(folder: Path, *, ranks: int = 2) -> tuple[Path, dict[str, Truth]]:
    folder.mkdir(parents=True)
    net, optimizer, scheduler = trained()
    save_file(net.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    truth = {name: truth_of(tensor) for name, tensor in net.state_dict().items()}
    for rank in range(ranks):
        state = rng_state()
        torch.save(state, folder / f"rng_state_{rank}.pth")
        truth[f"extra:rng_state_{rank}:cpu"] = truth_of(state["cpu"])
    # safetensors sorts by name, so that numbers cannot be turned into names.
    numbered = [f"0.{i}" for i in range(2)] + [f"1.{i}" for i in range(4)]
    for place, name in enumerate(numbered):
        state = optimizer.state_dict()["state"][place]
        truth[f"exp_avg:{name}"] = truth_of(state["exp_avg"])
        truth[f"exp_avg_sq:{name}"] = truth_of(state["exp_avg_sq"])
        truth[f"optimizer:{name}.step"] = truth_of(state["step"])
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 0.5}))
    return folder, truth


def accelerate(folder: Path) -> tuple[Path, dict[str, Truth]]:
    folder.mkdir(parents=True)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    torch.save({"step": 1, "random_state": random.getstate()}, folder / "random_states_0.pkl")
    truth = {name: truth_of(tensor) for name, tensor in net.state_dict().items()}
    for place, name in enumerate(net.state_dict()):
        state = optimizer.state_dict()["state"][place]["momentum_buffer"]
        truth[f"optimizer:{name}.momentum_buffer"] = truth_of(state)
    return folder, truth


class TestBundle(FormatTests):
    format = FORMAT
    construct = (
        "from ftckpt.formats.trainer_dirs import Bundle\n"
        "from ftckpt.formats.dcp import Dcp\n"
        "from ftckpt.formats.safetensors import Safetensors\n"
        "from ftckpt.formats.torchsave import TorchSave\n"
        "form = Bundle((Dcp(), Safetensors(), TorchSave()))"
    )
    truncated = frozenset({"bad-zip", "truncated-file"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        return [Made(*trainer(root / "checkpoint-7")), Made(*accelerate(root / "acc"))]

    def test_a_missing_file_is_corrupt(self, made: list[Made], tmp_path: Path) -> None:
        pytest.skip("nothing in these layouts says which parts a save had")


def test_a_trainer_directory_is_one_checkpoint(tmp_path: Path) -> None:
    folder, _ = trainer(tmp_path / "checkpoint-7")
    checkpoint = open_path(FORMAT, folder)
    assert checkpoint.step == 7
    assert checkpoint.commit.state is CommitState.COMMITTED
    assert checkpoint.topology.world_size == 2
    assert checkpoint.load_object("scheduler")["last_epoch"] == 7
    assert checkpoint.load_object("trainer_state")["epoch"] == 0.5
    assert checkpoint.objects["rng_state_1"].rank == 1
    verdicts = {item.key: item for item in resume_check(checkpoint)}
    for key in ("weights", "scheduler", "rng-python", "rng-numpy", "rng-torch", "step"):
        assert verdicts[key].presence == "present", verdicts[key]
    assert verdicts["rng-torch"].ranks == 2
    winner = recognise(FORMATS, listing_of_path(folder))
    assert winner is not None
    assert winner[1].format == "bundle"


def test_moments_get_names_only_from_weights_that_keep_the_order(tmp_path: Path) -> None:
    folder, _ = trainer(tmp_path / "checkpoint-7")
    assert "exp_avg:1.0" in open_path(FORMAT, folder).tensors
    torch.save(trained()[0].state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    # Biases and norms share a shape but not a group, and groups keep the model's order.
    assert "exp_avg:1.weight" in open_path(FORMAT, folder).tensors


def test_without_its_last_file_a_trainer_save_is_incomplete(tmp_path: Path) -> None:
    folder, _ = trainer(tmp_path / "checkpoint-7")
    (folder / "trainer_state.json").unlink()
    found = FORMAT.recognise(listing_of_path(folder))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    with pytest.raises(IncompleteError, match=r"trainer_state\.json"):
        open_path(FORMAT, folder)


def test_weights_alone_are_no_bundle(tmp_path: Path) -> None:
    folder, _ = trainer(tmp_path / "checkpoint-7")
    for name in folder.iterdir():
        if name.name not in ("model.safetensors", "config.json"):
            name.unlink()
    assert FORMAT.recognise(listing_of_path(folder)) is None


def test_damage_is_reported_with_the_whole_path(tmp_path: Path) -> None:
    folder, _ = trainer(tmp_path / "checkpoint-7")
    data = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(data[:-5])
    found = findings_of(FORMAT, folder)
    assert {(f.kind, f.file) for f in found} == {("bad-zip", "optimizer.pt")}


@pytest.mark.parametrize("name", ["accelerate_fsdp1", "accelerate_fsdp2"])
def test_accelerate_fsdp(tmp_path: Path, name: str) -> None:
    archive = CHECKPOINTS / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    extract(archive, tmp_path)
    folder = next(tmp_path.rglob("ckpt")) / "checkpoint_3"
    winner = recognise(FORMATS, listing_of_path(folder))
    assert winner is not None
    assert winner[1].format == "bundle"
    checkpoint = open_path(FORMAT, folder)
    truth = folder.parents[1] / "truth"
    expected = {k: truth_of(t) for k, t in load_file(truth / "state.safetensors").items()}
    for stored, tensor in load_file(truth / "optim.safetensors").items():
        parameter, _, leaf = stored.rpartition(".")
        key = f"optimizer:{stored}" if leaf == "step" else f"{leaf}:{parameter}"
        expected[key] = truth_of(tensor)
    assert set(checkpoint.tensors) == set(expected)
    for key, (dtype, shape, data) in expected.items():
        info = checkpoint.tensors[key]
        assert (info.dtype.name, info.shape) == (dtype, shape)
        assert read_tensor(checkpoint, key) == data, key
    assert (checkpoint.step, checkpoint.optimizer_count) == (None, 3)
    assert checkpoint.topology.world_size == 2
    assert winner[1].commit is checkpoint.commit.state is CommitState.COMMITTED
    assert [f for f in findings_of(FORMAT, folder) if f.code] == []
    victim = folder / "optimizer_0" / "__1_0.distcp"
    victim.write_bytes(victim.read_bytes()[:-3])
    found = [f for f in findings_of(FORMAT, folder) if f.code]
    assert {f.file for f in found} == {"optimizer_0/__1_0.distcp"}
    (folder / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(IncompleteError, match=r"^optimizer_0/\.metadata is absent") as caught:
        open_path(FORMAT, folder)
    assert caught.value.file == "optimizer_0/.metadata"


def test_what_was_wrong_with_a_part_as_it_was_opened_is_said_once(tmp_path: Path) -> None:
    for shard in ("model-00001-of-00002", "model-00002-of-00002"):
        save_file({f"{shard}.w": torch.ones(8)}, tmp_path / f"{shard}.safetensors")
    index = {f"{s}.w": f"{s}.safetensors" for s in ("model-00001-of-00002", "model-00002-of-00002")}
    weights = json.dumps({"metadata": {}, "weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(weights)
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 5}')
    cut = tmp_path / "model-00002-of-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    checkpoint = open_path(FORMAT, tmp_path)
    assert [(f.kind, f.file) for f in checkpoint.open_findings] == [("truncated-file", cut.name)]
    assert [f.kind for f in checkpoint.check()].count("truncated-file") == 1


def test_a_finding_says_in_which_part_its_file_is() -> None:
    """Two parts have files of one name."""
    source = Source(open_store("memory://parts"), "", {})
    found = finding("truncated-file", "a.bin and data.bin, not xa.bin: a.bin is cut", file="a.bin")
    moved = OpenedPart("optimizer_0/", RawCheckpoint(source=source, tensors={}, objects={})).moved(
        found
    )
    assert moved.file == "optimizer_0/a.bin"
    assert moved.message == ("optimizer_0/a.bin and data.bin, not xa.bin: optimizer_0/a.bin is cut")
    with pytest.raises(CorruptError, match=r"^b/a\.bin ends early") as caught, in_part("b/"):
        raise CorruptError("a.bin ends early", kind="truncated-file", file="a.bin", hint="rm a.bin")
    assert caught.value.file == "b/a.bin"
    assert caught.value.hint == "rm b/a.bin"
