"""Saves that are sound and look odd: integers as text in an index, text under a suffix of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ExitCode
from tests.faults.cli import here

# What ColossalAI writes of an optimizer (colossalai/checkpoint_io, 0.5): shards of a dict a
# parameter by its number, an index that names the numbers as text, and the groups beside.
INDEX = "pytorch_optim.bin.index.json"
GROUPS = "pytorch_optim_group.bin"


def colossal(folder: Path, parameters: int = 4) -> Path:
    folder.mkdir(parents=True)
    shards: dict[str, dict[int, Any]] = {}
    for number in range(parameters):
        name = f"pytorch_optim-0000{1 + number % 2}.bin"
        state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}
        shards.setdefault(name, {})[number] = state | {"exp_avg_sq": torch.ones(2, 3)}
    for name, held in shards.items():
        torch.save(held, folder / name)
    torch.save([{"lr": 1e-3, "params": [*range(parameters)]}], folder / GROUPS)
    names = {str(n): name for name, held in shards.items() for n in held}
    metadata = {"param_groups": GROUPS, "total_size": parameters * 52}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": names}))
    return folder


def test_an_index_that_names_integers_as_text(tmp_path: Path) -> None:
    found = here("verify", colossal(tmp_path / "optimizer"), "--level", "content")
    assert found.code == ExitCode.OK
    assert not found.kinds & {"stray-file", "missing-tensor", "unindexed-tensor", "total-size"}


@pytest.mark.parametrize("lost", ["pytorch_optim-00002.bin", GROUPS])
def test_what_such_an_index_names_is_missed(lost: str, tmp_path: Path) -> None:
    folder = colossal(tmp_path / "optimizer")
    (folder / lost).unlink()
    found = here("verify", folder)
    assert found.code == ExitCode.CORRUPT
    assert "missing-file" in found.kinds


def test_an_integer_that_no_shard_holds_is_missed(tmp_path: Path) -> None:
    folder = colossal(tmp_path / "optimizer")
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"0": ', '"7": "pytorch_optim-00001.bin", "0": '))
    found = here("verify", folder)
    assert found.code == ExitCode.CORRUPT
    assert "missing-tensor" in found.kinds


def test_gc_keeps_sound_saves_of_that_kind(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        colossal(tmp_path / f"epoch0-global_step{step}" / "optimizer")
    here("gc", tmp_path, "--keep-last", "2", "--delete-corrupt", "--apply")
    left = {p.name for p in tmp_path.iterdir() if p.name.startswith("epoch")}
    assert left >= {"epoch0-global_step200", "epoch0-global_step300"}


def test_a_prefix_of_a_name_holds_no_tensor(tmp_path: Path) -> None:
    # Names of a model: the index means tensors, and a shard has no dict of that name.
    torch.save({"a.b": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    names = {"a": "pytorch_model-00001-of-00001.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert here("verify", tmp_path).kinds >= {"missing-tensor", "unindexed-tensor"}


# --- text ---------------------------------------------------------------------------------------

YAML = "avg_train_loss: 3.25\noptimizer_step: 11\nstep: 11\n"  # SpeechBrain's brain.ckpt


@pytest.mark.parametrize(
    "text", [YAML, "Größe: 1\n", "x\n" * 100_000, "ü\n" * 50_001, '{"step": 1}']
)
def test_text_is_not_understood_and_no_damage(text: str, tmp_path: Path) -> None:
    (tmp_path / "brain.ckpt").write_text(text, encoding="utf-8")
    found = here("verify", tmp_path / "brain.ckpt")
    assert found.code == ExitCode.UNSUPPORTED
    assert "holds text" in found.told


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:40],
        lambda data: bytes(len(data)),
        lambda data: data[:100] + bytes(len(data) - 100),
        lambda data: b"\0" + data[1:],
        lambda data: YAML.encode() + bytes(len(data)),
        lambda data: b"\xff" * len(data),
        lambda _: b"\x80",
        lambda _: b"xxxx",
        lambda _: "ü".encode()[1:] * 9,
    ],
)
def test_a_file_that_lost_its_bytes_is_damage(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(99)}, path)
    path.write_bytes(damage(path.read_bytes()))
    assert here("verify", path).code == ExitCode.CORRUPT


def test_a_hostile_pickle_that_is_text_is_hostile(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    assert here("verify", path).code == ExitCode.UNSAFE
