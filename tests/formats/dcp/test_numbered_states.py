"""Optimizers that number their parameters: named where the file says the names, else left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.inspection.resume import Presence, resume_check
from tests.builders.checkpoints import flip, open_checkpoint
from tests.formats.dcp.writing import save

State = dict[str, Any]
ADAM = ("exp_avg", "exp_avg_sq")


def trained(named: bool, optimizer: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    """Return a model whose weights have one shape, and its optimizer, in two groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    found = list(model.named_parameters())
    split = [[(n, p) for n, p in found if n.endswith(end)] for end in ("bias", "weight")]
    groups = [{"params": g if named else [p for _, p in g], "lr": 0.1 * i}
              for i, g in enumerate(split, 1)]  # fmt: skip
    made = optimizer(groups, lr=0.1)
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
        made.step()
        made.zero_grad()
    return model, made


def saved(
    path: Path,
    change: Callable[[State], None] = lambda _: None,
    *,
    named: bool = True,
    optimizer: Any = torch.optim.AdamW,
    wrapped: bool = True,
) -> tuple[Path, Any, Any]:
    model, made = trained(named, optimizer)
    state = {"model": model.state_dict(), "optim": made.state_dict()}
    change(state["optim"])
    return save({"app": state} if wrapped else state, path), model, made


def moments(path: Path) -> Presence:
    return next(i.presence for i in resume_check(open_checkpoint(path)) if i.key == "moments")


def test_recorded_names_are_used(tmp_path: Path) -> None:
    path, model, made = saved(tmp_path / "step-2")
    checkpoint = open_checkpoint(path)
    assert moments(path) is Presence.PRESENT
    for name, parameter in model.named_parameters():
        for leaf in ADAM:
            want = made.state[parameter][leaf].numpy().tobytes()
            assert read_tensor(checkpoint, f"{leaf}:{name}") == want
        assert f"optimizer:{name}.step" in checkpoint.tensors
    assert api.verify(str(path), level="values").code is ExitCode.OK


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_is_written_loads_by_name_and_by_number(wrapped: bool, tmp_path: Path) -> None:
    path, model, made = saved(tmp_path / "step-2", wrapped=wrapped)
    for to in ("safetensors", "torchsave", "dcp"):
        out = tmp_path / (f"{to}.pt" if to == "torchsave" else to)
        api.convert(str(path), str(out), to, dp=3 if to == "dcp" else None)
        assert "exp_avg:1.weight" in open_checkpoint(out).tensors
        if to == "dcp":  # elsewhere the groups list the names
            assert api.diff(str(path), str(out)).code is ExitCode.OK
    whole = torch.load(tmp_path / "torchsave.pt", weights_only=True)
    again, fresh = trained(named=True)
    fresh.load_state_dict(whole["optimizer" if wrapped else "optim"])
    empty = trained(named=True)[1].state_dict()
    for state in empty["state"].values():
        for leaf in ADAM:
            state[leaf].zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it works without process groups
        wanted = {"app": {"optim": empty}} if wrapped else {"optim": empty}
        load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    numbers = [i for group in made.state_dict()["param_groups"] for i in group["params"]]
    for number, parameter in zip(numbers, (p for g in made.param_groups for p in g["params"]),
                                 strict=True):  # fmt: skip
        for leaf in ADAM:
            assert torch.equal(empty["state"][number][leaf], made.state[parameter][leaf])
    for (_, ours), (_, theirs) in zip(
        again.named_parameters(), model.named_parameters(), strict=True
    ):
        for leaf in ADAM:
            assert torch.equal(fresh.state[ours][leaf], made.state[theirs][leaf])


def test_momentum_is_named_too(tmp_path: Path) -> None:
    def sgd(groups: Any, lr: float) -> Any:
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)

    path, *_ = saved(tmp_path / "step-2", optimizer=sgd)
    assert "optimizer:0.weight.momentum_buffer" in open_checkpoint(path).tensors
    assert moments(path) is Presence.PRESENT


def without(state: State) -> None:
    del state["param_groups"][0]["param_names"]


def twice(state: State) -> None:
    state["param_groups"][1]["param_names"] = state["param_groups"][0]["param_names"]


def short(state: State) -> None:
    state["param_groups"][0]["param_names"].pop()


def swapped(state: State) -> None:
    one, two = state["param_groups"]
    one["param_names"], two["param_names"] = two["param_names"], one["param_names"]


def strange(state: State) -> None:
    state["param_groups"][0]["param_names"] = ["0.bias", "of another model"]


def same_number(state: State) -> None:
    state["param_groups"][1]["params"] = [0, 1]


def no_list(state: State) -> None:
    state["param_groups"][0]["param_names"] = {"0.bias": 0}


WRONG = (without, twice, short, swapped, strange, same_number, no_list)


@pytest.mark.parametrize("change", WRONG)
def test_a_record_that_does_not_fit_names_nothing(
    change: Callable[[State], None], tmp_path: Path
) -> None:
    path, *_ = saved(tmp_path / "step-2", change)
    keys = open_checkpoint(path).tensors.keys()
    assert {"exp_avg:0", "exp_avg_sq:3", "optimizer:2.step"} <= keys
    assert moments(path) is Presence.CANNOT_TELL


def test_numbers_alone_are_left_alone(tmp_path: Path) -> None:
    path, *_ = saved(tmp_path / "step-2", named=False)
    assert "exp_avg:0" in open_checkpoint(path).tensors
    assert moments(path) is Presence.CANNOT_TELL


def test_a_damaged_record_is_found_and_names_nothing(tmp_path: Path) -> None:
    path, *_ = saved(tmp_path / "step-2")
    extent = open_checkpoint(path).objects["app.optim.param_groups.0.param_names"].extent
    data = (path / extent.file).read_bytes()
    flip(path / extent.file, data.index(b"0.bias", extent.offset) + 2)
    assert api.verify(str(path)).code is ExitCode.CORRUPT
    assert "exp_avg:0" in open_checkpoint(path).tensors
