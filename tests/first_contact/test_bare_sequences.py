"""What a file holds without a name is there: bare tuples and lists, sets, objects' attributes.

3D Gaussian splatting saves `torch.save((gaussians.capture(), iteration), "chkpntN.pth")`, a tuple
in a tuple (graphdeco-inria/gaussian-splatting train.py, scene/gaussian_model.py).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftckpt.errors import ExitCode
from tests.builders.checkpoints import open_checkpoint

from .lines import printed

NET = torch.nn.Linear(4, 3)
OPTIMIZER = torch.optim.Adam(NET.parameters())
NET(torch.ones(2, 4)).sum().backward()
OPTIMIZER.step()


class Shadow:
    """What another library keeps of a model, as an attribute."""

    def __init__(self) -> None:
        self.shadow = [torch.ones(3, 4)]


Shadow.__module__ = "a_library_that_is_not_here"


def saved(path: Path, value: Any) -> Path:
    module = ModuleType(Shadow.__module__)
    module.Shadow = Shadow  # type: ignore[attr-defined]
    sys.modules[Shadow.__module__] = module
    try:
        torch.save(value, path)
    finally:
        del sys.modules[Shadow.__module__]
    return path


def names(path: Path) -> dict[str, str]:
    return {key: str(info.kind) for key, info in open_checkpoint(path).tensors.items()}


def gaussians(path: Path, iteration: int) -> Path:
    """Write `(capture, iteration)` with as many Gaussians as the iteration has hundreds."""
    count = iteration // 100
    shapes = {"xyz": (3,), "f_dc": (1, 3), "f_rest": (15, 3), "scaling": (3,), "rotation": (4,)}
    weights = [torch.nn.Parameter(torch.randn(count, *shape)) for shape in shapes.values()]
    optimizer = torch.optim.Adam([{"params": [one], "lr": 0.1} for one in weights])
    torch.stack([one.sum() for one in weights]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    radii = torch.zeros(count)
    return saved(path, ((3, *weights, radii, optimizer.state_dict(), 0.5), iteration))


def test_the_parameters_of_a_bare_tuple_are_read_by_their_places(tmp_path: Path) -> None:
    for iteration in (7000, 30000):
        gaussians(tmp_path / f"chkpnt{iteration}.pth", iteration)
    path = tmp_path / "chkpnt30000.pth"
    done = printed("verify", str(path), "--level", "values")
    assert done.code == ExitCode.OK
    assert "warning" not in done.out
    assert "found as chkpnt30000.pth:item.1" in printed("inspect", str(path), "--resume").out
    opened = open_checkpoint(path)
    assert opened.step == 30000  # the second member, as the name says it too
    held = names(path)
    assert [key for key, kind in held.items() if kind == "param"] == [f"0.{n}" for n in range(1, 6)]
    assert sum(kind == "exp_avg" for kind in held.values()) == 5
    out = tmp_path / "out"
    done = printed("convert", str(path), str(out), "--to", "safetensors", "--only", "model")
    assert done.code == ExitCode.OK, done.err
    truth = torch.load(path, weights_only=False)[0]
    written = load_file(out / "model.safetensors")
    assert written.keys() == {f"0.{n}" for n in range(1, 6)}
    assert all(torch.equal(written[f"0.{n}"], truth[n]) for n in range(1, 6))
    answer = json.loads(printed("latest", str(tmp_path), "--json").out)
    assert answer["path"].endswith("chkpnt30000.pth")


def test_a_number_of_a_tuple_is_no_step_unless_the_name_says_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.pth", (NET.state_dict(), 30000))
    assert open_checkpoint(path).step is None


BOTH = {"weight": "param", "bias": "param"}
MOMENTS = {
    f"{kind}:{name}": kind for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")
}


@pytest.mark.parametrize(
    "value",
    [
        (NET.state_dict(), OPTIMIZER.state_dict(), 7),
        [NET.state_dict(), [OPTIMIZER.state_dict()]],
        {"pair": (NET.state_dict(), OPTIMIZER.state_dict())},
        [{"model": NET.state_dict(), "optimizer": OPTIMIZER.state_dict()}],
    ],
)
def test_a_model_and_its_optimizer_without_names_are_told_apart(tmp_path: Path, value: Any) -> None:
    path = saved(tmp_path / "a.pt", value)
    held = names(path)
    assert held.items() >= (BOTH | MOMENTS).items()
    assert not {key for key, kind in held.items() if kind == "param"} - BOTH.keys()


def test_several_models_in_a_list_have_their_places_before_their_names(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", [NET.state_dict(), NET.state_dict()])
    assert names(path).keys() == {f"{n}.{name}" for n in (0, 1) for name in BOTH}


def test_a_list_of_tensors_is_read_and_state_beside_weights_stays_state(tmp_path: Path) -> None:
    assert names(saved(tmp_path / "a.pt", [torch.ones(2, 2), torch.ones(3)])).keys() == {"0", "1"}
    state = (NET.state_dict(), random.getstate(), torch.get_rng_state())
    held = names(saved(tmp_path / "b.pt", state))
    assert held == {**BOTH, "extra:item:2": "other"}


def test_tensors_in_a_tuple_under_a_name_are_read(tmp_path: Path) -> None:
    state = {"model": NET.state_dict(), "moments": (torch.ones(3, 4), torch.ones(3))}
    path = saved(tmp_path / "a.pt", state)
    assert names(path).keys() >= {"extra:moments:0", "extra:moments:1"}
    out = tmp_path / "out.pt"
    assert printed("convert", str(path), str(out), "--to", "torchsave").code == ExitCode.OK
    back = torch.load(out, weights_only=False)
    assert type(back["moments"]) is tuple
    assert torch.equal(back["moments"][0], torch.ones(3, 4))


@pytest.mark.parametrize("value", [{torch.ones(2, 2)}, frozenset([torch.ones(2)]), Shadow()])
def test_tensors_that_no_name_leads_to_are_not_understood(tmp_path: Path, value: Any) -> None:
    path = saved(tmp_path / "a.pt", value)
    for words in (
        ("verify", str(path)),
        ("inspect", str(path)),
        ("convert", str(path), str(tmp_path / "out"), "--only", "model"),
    ):
        done = printed(*words)
        assert done.code == ExitCode.UNSUPPORTED
        assert "no name leads" in done.err


def test_an_object_beside_weights_is_said_to_hold_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"model": NET.state_dict(), "shadow": Shadow()})
    done = printed("verify", str(path))
    assert done.code == ExitCode.OK
    assert "keeps 1 storage of tensors, 48 B, where no name leads" in done.out


def test_an_average_alone_is_named_with_the_way_to_it(tmp_path: Path) -> None:
    state = {"ema": NET.state_dict(), "optimizer": OPTIMIZER.state_dict(), "epoch": 3}
    path = saved(tmp_path / "last.pt", state)
    out = tmp_path / "out"
    done = printed("convert", str(path), str(out), "--to", "safetensors", "--only", "model")
    assert done.code == ExitCode.NOT_FOUND
    assert "--drop 'optimizer:*'" in done.err
    words = ("convert", str(path), str(out), "--to", "safetensors", "--drop", "optimizer:*")
    assert printed(*words).code == ExitCode.OK
    assert {key for key in names(out) if key.startswith("ema:")} == {f"ema:{n}" for n in BOTH}
