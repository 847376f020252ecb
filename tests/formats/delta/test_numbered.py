"""Deltas of torch.save files, whose optimizers number their parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt as api
from ftckpt.delta import NAME
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.errors import ExitCode
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.own_files import MANIFEST as MANIFEST
from ftckpt.storage import StoreOptions
from tests.builders.checkpoints import open_checkpoint
from tests.delta.on_disk import index_of

GROUPS = "optimizer.param_groups.0.params"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The second save of a training, one file, which is packed against the first as `delta`."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made: list[Path] = []
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        path = tmp_path / f"step-{step}.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path)
        made.append(path)
    base, target = map(open_checkpoint, made)
    pack_checkpoint(
        target,
        base,
        str(tmp_path / "delta"),
        options=PackOptions(),
        store_options=StoreOptions(),
    )
    return made[1]


def test_parameters_have_their_names_in_the_groups(saved: Path, tmp_path: Path) -> None:
    found = api.diff(str(tmp_path / "delta"), str(saved))
    assert (found.code, list(found.state)) == (ExitCode.OK, [])


def test_a_delta_that_kept_no_stored_names_is_read(saved: Path, tmp_path: Path) -> None:
    index = index_of(tmp_path / "delta")
    assert any(tensor.stored_name for tensor in index.tensors)
    old = replace(index, tensors=[replace(t, stored_name="") for t in index.tensors])
    (tmp_path / "delta" / NAME).write_bytes(old.dump())
    (tmp_path / "delta" / MANIFEST).unlink()  # it is of the other index
    found = api.diff(str(tmp_path / "delta"), str(saved))
    assert ([one.name for one in found.state], found.total.changed) == ([GROUPS], 0)


def test_torch_loads_what_a_delta_is_converted_to(saved: Path, tmp_path: Path) -> None:
    api.convert(str(tmp_path / "delta"), str(tmp_path / "back"), to="torchsave")
    state: dict[str, Any] = torch.load(tmp_path / "back", weights_only=True)
    wanted: dict[str, Any] = torch.load(saved, weights_only=True)
    assert state["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert state["optimizer"]["state"].keys() == wanted["optimizer"]["state"].keys() == {0, 1, 2, 3}
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    torch.optim.AdamW(model.parameters()).load_state_dict(state["optimizer"])
