"""The state of every optimizer of torch, against the tensors in memory: names, bytes, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftckpt import convert, open_checkpoint
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.stream import TorchStream, parse_stream
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.formats.torchsave import TorchSave
from ftckpt.inspection import inspect
from ftckpt.inspection.resume import Presence, resume_check
from tests.conformance.formats import open_path

T = torch.optim


class Net(torch.nn.Module):
    """Two matrices, one of them square, and vectors of both their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.square = torch.nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.square(self.norm(self.up(x)))
        return out


def _step(model: Net, optimizer: Any, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _trained(make: Callable[[Any], Any]) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed)
    return model, optimizer


EVERY: dict[str, Callable[[Any], Any]] = {
    "sgd-momentum": lambda p: T.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: T.Adafactor(p, lr=0.01),
    "adagrad": lambda p: T.Adagrad(p),
    "adadelta": lambda p: T.Adadelta(p),
    "adamax": lambda p: T.Adamax(p),
    "amsgrad": lambda p: T.AdamW(p, amsgrad=True),
    "asgd": lambda p: T.ASGD(p),
    "nadam": lambda p: T.NAdam(p),
    "radam": lambda p: T.RAdam(p),
    "rmsprop": lambda p: T.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: T.Rprop(p),
}


def _states(optimizer: Any) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, state in optimizer.state_dict()["state"].items():
        for leaf, value in state.items():
            yield number, leaf, value


def _key(name: str, leaf: str) -> str:
    own = leaf in ("exp_avg", "exp_avg_sq")
    return f"{leaf}:{name}" if own else f"optimizer:{name}.{leaf}"


def _opened(tmp_path: Path, optimizer: Any, model: Net) -> Checkpoint:
    path = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return open_path(TorchSave(), path)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", EVERY)
def test_every_state_is_of_its_parameter(name: str, tmp_path: Path) -> None:
    model, optimizer = _trained(EVERY[name])
    opened = _opened(tmp_path, optimizer, model)
    names = [name for name, _ in model.named_parameters()]
    states = list(_states(optimizer))
    assert states
    for number, leaf, value in states:
        info = opened.tensors[_key(names[number], leaf)]
        assert info.shape == tuple(value.shape)
        assert read_tensor(opened, info.key) == _bytes(value)
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert moments.presence is Presence.PRESENT
    by_kind = inspect(opened).bytes.by_kind
    assert sum(by_kind.values()) == sum(info.nbytes for info in opened.tensors.values())
    assert by_kind.get("other", 0) <= 8 * 3 * len(names)  # counters alone


def test_muon_beside_adam(tmp_path: Path) -> None:
    """Matrices have momentum alone and vectors two moments: neither lacks anything."""
    torch.manual_seed(0)
    model = Net()
    state: dict[int, Any] = {}
    for number, parameter in enumerate(model.parameters()):
        ones = torch.ones_like(parameter)
        adam = {"step": torch.tensor(2.0), "exp_avg": ones, "exp_avg_sq": ones}
        state[number] = {"momentum_buffer": ones} if parameter.dim() == 2 else adam
    groups = [{"params": list(state)}]
    path = tmp_path / "state.pt"
    optimizer = {"state": state, "param_groups": groups}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, path)
    opened = open_path(TorchSave(), path)
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert (moments.presence, moments.missing) == (Presence.PRESENT, ())
    del state[0]["momentum_buffer"], state[1]["exp_avg_sq"]
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, path)
    opened = open_path(TorchSave(), path)
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert (moments.presence, moments.missing) == (
        Presence.CANNOT_TELL, ("up.weight", "up.bias"),
    )  # fmt: skip


def test_a_preconditioner_is_no_proof_of_a_parameter(tmp_path: Path) -> None:
    """One of `(6, 6)` may be of the axis of 6 of another parameter than the square one."""
    model = Net()
    for leaf in ("pre_cond_0", "wobble"):
        state = {0: {leaf: torch.eye(6)}}
        optimizer = {"state": state, "param_groups": [{"params": [0]}]}
        path = tmp_path / f"{leaf}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer}, path)
        opened = open_path(TorchSave(), path)
        assert f"optimizer:0.0.{leaf}" in opened.tensors
        assert not any("square.weight." in key for key in opened.tensors)


REAL = Path(__file__).parents[2] / "data" / "optimizers"


def _truth(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors that were in memory, under our keys."""
    found = {}
    for path, tensor in load_file(REAL / f"{name}.safetensors").items():
        parameter, state, leaf = path.partition(".state.")
        found[_key(parameter, leaf) if state else path] = tensor
    return found


def _stream(file: Path) -> TorchStream:
    data = file.read_bytes()

    def read(at: int, length: int) -> bytes:
        return data[at : at + length]

    return parse_stream(read, len(data), file=file.name)


@pytest.mark.parametrize("name", ["torchao_adamw8bit", "bitsandbytes_adamw8bit", "torchao_int8"])
def test_quantised_state_equals_memory_and_comes_back(name: str, tmp_path: Path) -> None:
    """What lies in a tensor subclass is listed, carried, and put back into the subclass."""
    truth = _truth(name)
    places = [REAL / f"{name}.pt", tmp_path / "again.pt", tmp_path / "apart"]
    convert(str(places[0]), str(places[1]), to="torchsave")
    convert(str(places[0]), str(places[2]), to="safetensors")
    for place in places:
        opened = open_checkpoint(str(place))
        lacking = truth.keys() - opened.tensors.keys()
        assert not lacking
        for key, tensor in truth.items():
            assert read_tensor(opened, key) == _bytes(tensor)
    trees = []
    for place in places[:2]:
        stream = _stream(place)
        trees.append(
            [
                (path, value.type_name, sorted(value.state))
                for path, value in leaves(stream.tree)
                if type(value) is SubclassRef
            ]
        )
    assert trees[0] == trees[1]
    assert bool(trees[0]) == name.startswith("torchao")
    if name != "torchao_int8":
        moments = next(item for item in resume_check(opened) if item.key == "moments")
        assert moments.presence is Presence.PRESENT


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    """It is the optimizer's, in torch.save and in DCP, and comes back to its group."""
    model, optimizer = _trained(lambda p: T.AdamW(p, lr=torch.tensor(0.25)))
    path = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    convert(str(path), str(tmp_path / "dcp"), to="dcp")
    convert(str(tmp_path / "dcp"), str(tmp_path / "again.pt"), to="torchsave")
    key = "optimizer:param_groups.0.lr"
    for place in (path, tmp_path / "dcp", tmp_path / "again.pt"):
        opened = open_checkpoint(str(place))
        assert read_tensor(opened, key) == _bytes(torch.tensor(0.25))
    found = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]["param_groups"]
    assert found[0]["lr"] == torch.tensor(0.25)


def test_a_tensor_beside_a_parameter_is_not_lost(tmp_path: Path) -> None:
    """bitsandbytes' Params4bit keeps its scales there."""
    path = tmp_path / "state.pt"
    weight = torch.nn.Parameter(torch.ones(3))
    weight.scales = torch.full((2,), 7.0)  # type: ignore[attr-defined]
    torch.save({"model": {"weight": weight}}, path)
    convert(str(path), str(tmp_path / "again.pt"), to="torchsave")
    for place in (path, tmp_path / "again.pt"):
        opened = open_checkpoint(str(place))
        assert read_tensor(opened, "weight.scales") == _bytes(torch.full((2,), 7.0))
        loaded = torch.load(place, weights_only=False)["model"]["weight"]
        assert torch.equal(loaded.scales, weight.scales)  # type: ignore[attr-defined]
