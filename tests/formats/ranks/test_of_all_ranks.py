"""Settings that every rank holds alike are one object where a format keeps the whole state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ftckpt import convert, diff, open_checkpoint
from ftckpt.errors import ExitCode
from ftckpt.verification import verify

HSDP = Path(__file__).parents[2] / "data" / "ranks" / "hsdp" / "actor"
OPTIMIZER = "optim_world_size_4_rank_0.pt"


def parameters(place: Path) -> list[torch.nn.Parameter]:
    """Return parameters of the sample's shapes, in the order of its optimizer."""
    states = torch.load(place, weights_only=False)
    shapes = [states["optimizer"]["state"][n]["exp_avg"].shape
              for n in states["optimizer"]["param_groups"][0]["params"]]  # fmt: skip
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_an_optimizer_of_torch_loads_what_ranks_numbered(tmp_path: Path) -> None:
    convert(str(HSDP), str(tmp_path / "one.pt"), to="torchsave")
    held = torch.load(tmp_path / "one.pt", weights_only=False)
    wanted = parameters(tmp_path / "one.pt")
    optimizer = torch.optim.AdamW(wanted)
    optimizer.load_state_dict(held["optimizer"])
    for one in wanted:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert {"rank_0.rng", "rank_3.rng"} <= held.keys()  # each rank's own


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_load_finds_the_settings(tmp_path: Path) -> None:
    convert(str(HSDP), str(tmp_path / "store"), to="dcp")
    own = torch.load(HSDP / OPTIMIZER, weights_only=False)["param_groups"][0]
    state = {"optimizer": {"param_groups": [{"betas": None, "lr": None, "params": None}]}}
    load(state, checkpoint_id=tmp_path / "store", no_dist=True)
    loaded = state["optimizer"]["param_groups"][0]
    assert (loaded["betas"], loaded["lr"]) == (own["betas"], own["lr"])
    assert loaded["params"] is not None
    assert all(type(name) is str for name in loaded["params"])  # as get_state_dict has them


@pytest.mark.parametrize("to", ["dcp", "torchsave"])
def test_nothing_is_lost_or_changed(to: str, tmp_path: Path) -> None:
    written = tmp_path / ("one.pt" if to == "torchsave" else "store")
    convert(str(HSDP), str(written), to=to)
    assert verify(open_checkpoint(str(written))).code is ExitCode.OK
    assert diff(str(HSDP), str(written)).code is ExitCode.OK


def test_ranks_have_their_own_again(tmp_path: Path) -> None:
    """A store keeps a rank's state under a key of its own; the rank's file has it as it was."""
    convert(str(HSDP), str(tmp_path / "store"), to="dcp")
    convert(str(tmp_path / "store"), str(tmp_path / "again"), to="ranks")
    assert diff(str(HSDP), str(tmp_path / "again")).code is ExitCode.OK
    for rank in range(4):
        name = f"extra_state_world_size_4_rank_{rank}.pt"
        held = torch.load(tmp_path / "again" / name, weights_only=False)
        own = torch.load(HSDP / name, weights_only=False)
        assert held.keys() == own.keys()
        assert held["rng"].keys() == own["rng"].keys()
        assert held["rng"]["random"] == own["rng"]["random"]
        assert torch.equal(held["rng"]["cpu"], own["rng"]["cpu"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({}, True),
        ({"step": 7}, True),
        ({"rng": {"seed": "shared"}}, False),
        ({"rng": {"seed": {"a": "shared"}}}, False),
        ({"rng": "shared"}, False),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_what_has_its_place_keeps_it(
    more: dict[str, object], own: bool, nested: bool, tmp_path: Path
) -> None:
    """Where two would have one place in a rank's file, a rank's own stays under its key."""
    state: dict[str, object] = {"model": {"w": torch.ones(4, 4)}, **more}
    for rank in range(2):
        ranks = {"rng": {"seed": f"of {rank}", "list": [rank]}}
        state |= {f"rank_{rank}": ranks} if nested else {f"rank_{rank}.rng": ranks["rng"]}
    save(state, checkpoint_id=tmp_path / "store", no_dist=True)
    convert(str(tmp_path / "store"), str(tmp_path / "ranks"), to="ranks", dp=2)
    for rank in range(2):
        name = f"extra_state_world_size_2_rank_{rank}.pt"
        held = torch.load(tmp_path / "ranks" / name, weights_only=False)
        if own:
            assert held == {"rng": {"seed": f"of {rank}", "list": [rank]}, **more}
        else:
            first = "rank_0" if nested else "rank_0.rng"
            inside = held[first]["rng"] if nested else held[first]
            assert inside == {"seed": "of 0", "list": [0]}


def test_of_other_ranks_every_one_keeps_what_all_had(tmp_path: Path) -> None:
    convert(str(HSDP), str(tmp_path / "store"), to="dcp")
    convert(str(tmp_path / "store"), str(tmp_path / "two"), to="ranks", dp=2, drop=["extra:rank*"])
    held = torch.load(tmp_path / "two" / "extra_state_world_size_2_rank_1.pt", weights_only=False)
    assert {f"rank_{n}.rng" for n in range(4)} <= held.keys()


def test_what_differs_stays_of_each_rank(tmp_path: Path) -> None:
    shutil.copytree(HSDP, tmp_path / "ranks")
    file = tmp_path / "ranks" / OPTIMIZER
    held = torch.load(file, weights_only=False)
    held["param_groups"][0]["lr"] = 0.5
    torch.save(held, file)
    convert(str(tmp_path / "ranks"), str(tmp_path / "one.pt"), to="torchsave")
    held = torch.load(tmp_path / "one.pt", weights_only=False)
    assert held["rank_0.optimizer.param_groups"][0]["lr"] == 0.5
    assert "rank_2.optimizer.param_groups" in held
