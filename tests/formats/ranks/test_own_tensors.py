"""Tensors that one rank alone has, from files of ranks to a DCP store and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import ftckpt as api
from ftckpt.formats.state.paths import recorded_paths
from tests.builders.checkpoints import open_checkpoint

SOURCE = Path(__file__).parents[2] / "data" / "ranks" / "fsdp1" / "actor"
EXTRA = "extra_state_world_size_4_rank_{}.pt"


def load(place: Path) -> Any:
    return torch.load(place, weights_only=False)


def test_they_come_back_as_they_were_nested(tmp_path: Path) -> None:
    """A trainer asks for `rng["cpu"]`, and a key that is called `rng.cpu` is nothing to it."""
    source, back = tmp_path / "source", tmp_path / "back"
    shutil.copytree(SOURCE, source)
    for rank in range(4):
        state = load(source / EXTRA.format(rank))
        state["rng"]["cuda"] = [torch.full((3,), rank), torch.full((2,), rank + 1)]
        state["rng"]["dotted.key"] = torch.full((1,), rank)
        torch.save(state, source / EXTRA.format(rank))
    api.convert(str(source), str(tmp_path / "store"), to="dcp")
    api.convert(str(tmp_path / "store"), str(back), to="ranks")
    for rank in range(4):
        was, now = (load(place / EXTRA.format(rank)) for place in (source, back))
        assert was.keys() == now.keys()
        assert was["rng"].keys() == now["rng"].keys()
        assert torch.equal(was["rng"]["cpu"], now["rng"]["cpu"])
        assert torch.equal(was["rng"]["dotted.key"], now["rng"]["dotted.key"])
        assert type(now["rng"]["cuda"]) is list
        assert all(map(torch.equal, was["rng"]["cuda"], now["rng"]["cuda"]))


def test_numbers_that_are_keys_stay_flat(tmp_path: Path) -> None:
    """A store says `0` of a list and of such a key alike, and would be taken for a list."""
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    for rank in range(4):
        state = load(source / EXTRA.format(rank))
        state["rng"]["devices"] = {0: torch.full((3,), rank)}
        torch.save(state, source / EXTRA.format(rank))
    api.convert(str(source), str(tmp_path / "store"), to="dcp")
    paths = recorded_paths(open_checkpoint(tmp_path / "store")).tensors
    assert paths["extra:rank1:rng.devices.0"] == ("rank1", "rng.devices.0")
    assert paths["extra:rank1:rng.cpu"] == ("rank1", "rng", "cpu")
