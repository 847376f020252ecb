"""State below a key of its own, as torch's example saves it, and optimizers saved flattened."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.run import TransferOptions, transfer
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.writers import assert_same_tensors

MOMENTS = {"exp_avg:0.weight", "exp_avg_sq:0.weight", "optimizer:0.weight.step"}


def _trained(*, names: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    parameters: Any = model.named_parameters() if names else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


class _App(Stateful):
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def _state(kind: str) -> dict[str, Any]:
    model, optimizer = _trained(names=kind == "named")
    options = StateDictOptions(flatten_optimizer_state_dict="flat" in kind)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if kind == "named":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    state = {"model": weights, "optim": moments}
    return {"app": _App(state)} if kind.startswith("app") else state


KINDS = ("app", "app-flat", "flat", "named")


@pytest.mark.parametrize("to", ["torchsave", "safetensors", "dcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_distributed_checkpoint_of_it_converts(kind: str, to: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(_state(kind), storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    source = open_checkpoint(tmp_path / "dcp")
    assert {"0.weight", "1.bias"} <= source.tensors.keys()
    if kind != "named":  # whose state is under numbers
        assert source.tensors.keys() >= MOMENTS
    content = Content.of(source)
    target, writer = format_and_writer(to)
    report = transfer(
        content,
        writer.layout(content, LayoutRequest()),
        str(tmp_path / "out"),
        target,
        single=writer.single,
        same_objects=SameObject,
        options=TransferOptions(),
        store_options=StoreOptions(),
    )
    assert report.proof is not None
    assert report.proof.cast is None
    assert_same_tensors(open_checkpoint(tmp_path / "out"), source)


@pytest.mark.parametrize("kind", ["app", "app-flat", "flat"])
def test_one_file_of_it_is_a_model_and_its_optimizer(kind: str, tmp_path: Path) -> None:
    state = _state(kind)
    if "app" in state:
        state = {"app": state["app"].state_dict(), "epoch": 2}
    torch.save(state, tmp_path / "one.pt")
    checkpoint = open_checkpoint(tmp_path / "one.pt")
    assert {"0.weight", "1.bias", *MOMENTS} <= checkpoint.tensors.keys()
    if "epoch" in state:
        assert checkpoint.load_object("epoch") == 2


def test_beside_a_model_at_the_top_a_wrapper_is_other_state(tmp_path: Path) -> None:
    inner = {"model": {"w": torch.zeros(2)}}
    torch.save({"model": {"w": torch.ones(2)}, "app": inner}, tmp_path / "one.pt")
    checkpoint = open_checkpoint(tmp_path / "one.pt")
    assert list(checkpoint.tensors) == ["w", "extra:app:model.w"]
