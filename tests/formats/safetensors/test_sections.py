"""A whole training state, flat in safetensors: recognised by what fits together, never by words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.builders.checkpoints import open_checkpoint
from tests.commands.golden import ftckpt
from tests.conformance.writers import assert_same_tensors

NAMES = ("layers.0.weight", "layers.1.weight", "head.bias")


def _flat(
    *, model: str = "model.", master: bool = True, moments: str = ""
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    state: dict[str, torch.Tensor] = {"model.rope.freq": torch.arange(3)} if model else {}
    for name in NAMES:
        weight = torch.randn(4, 6, generator=generator)
        state[model + name] = weight.bfloat16() if master else weight
        if master:
            state[f"master.{name}"] = weight
        for leaf in ("exp_avg", "exp_avg_sq"):
            state[f"{leaf}.{moments}{name}"] = torch.rand(4, 6, generator=generator)
    return state


def _keys(state: dict[str, torch.Tensor], tmp_path: Path) -> set[str]:
    save_file(state, tmp_path / "one.safetensors")
    return set(open_checkpoint(tmp_path / "one.safetensors").tensors)


def _parts(*kinds: str) -> set[str]:
    return {f"{kind}:{name}" if kind else name for name in NAMES for kind in kinds}


def test_sections_are_weights_masters_and_moments(tmp_path: Path) -> None:
    found = _keys(_flat(), tmp_path)
    assert found == _parts("", "master", "exp_avg", "exp_avg_sq") | {"rope.freq"}


def test_weights_without_a_section_keep_their_names(tmp_path: Path) -> None:
    found = _keys(_flat(model="", master=False), tmp_path)
    assert found == _parts("", "exp_avg", "exp_avg_sq")


def test_a_module_called_model_stays_a_part_of_the_name(tmp_path: Path) -> None:
    found = _keys(_flat(master=False, moments="model."), tmp_path)
    assert {"model.layers.0.weight", "exp_avg:model.layers.0.weight", "model.rope.freq"} <= found


@pytest.mark.parametrize("lost", ["exp_avg_sq.head.bias", "model.head.bias", "another-shape"])
def test_what_does_not_fit_throughout_stays_as_it_is_named(lost: str, tmp_path: Path) -> None:
    state = _flat(master=False)
    if lost == "another-shape":
        state["model.head.bias"] = torch.zeros(2)
    else:
        del state[lost]
    assert _keys(state, tmp_path) == set(state)


def test_two_tensors_never_get_one_name(tmp_path: Path) -> None:
    state = _flat()
    state["rope.freq"] = torch.arange(5)
    assert _keys(state, tmp_path) == set(state)


def test_it_converts_and_is_read_as_the_same(tmp_path: Path) -> None:
    save_file(_flat(), tmp_path / "one.safetensors")
    for to in ("safetensors", "dcp", "torchsave"):
        done = ftckpt("convert", "one.safetensors", to, "--to", to, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert_same_tensors(
            open_checkpoint(tmp_path / to), open_checkpoint(tmp_path / "one.safetensors")
        )


def _trained(kind: str, tmp_path: Path) -> None:
    """Save two consecutive steps of a small model, `0.…` and `1.…`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 256)
    optimizer: torch.optim.Optimizer
    if kind == "flat":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        nesterov = kind == "nesterov"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        if step < 3:
            continue
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if kind != "flat":
            state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, tmp_path / f"{step - 3}.pt")
            continue
        flat = {f"model.{name}": tensor for name, tensor in weights.items()}
        for name, parameter in model.named_parameters():
            for leaf in ("exp_avg", "exp_avg_sq"):
                flat[f"{leaf}.{name}"] = optimizer.state[parameter][leaf].clone()
        save_file(flat, tmp_path / f"{step - 3}.safetensors")


@pytest.mark.parametrize(
    ("kind", "ratio"), [("flat", 2.5), ("sgd", 2.0), ("nesterov", 2.0)]
)  # without predictions: 1.3 to 1.6
def test_the_next_step_is_predicted(kind: str, ratio: float, tmp_path: Path) -> None:
    _trained(kind, tmp_path)
    ending = "safetensors" if kind == "flat" else "pt"
    line = ("delta", "pack", f"0.{ending}", f"1.{ending}", "packed")
    packed = ftckpt(*line, "--json", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    assert json.loads(packed.stdout)["ratio"] > ratio
    done = ftckpt("delta", "unpack", "packed", f"again.{ending}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again, target = tmp_path / f"again.{ending}", tmp_path / f"1.{ending}"
    assert again.read_bytes() == target.read_bytes()
