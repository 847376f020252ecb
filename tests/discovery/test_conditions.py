"""`latest --require`, `--world` and `--level values`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.checkpoint import Topology
from ftckpt.discovery.conditions import Part, grid_for, lacking, not_at_world, parse_parts
from ftckpt.errors import UsageError
from tests.builders.real_sets import real_set
from tests.workers.forked import run


def latest(root: Path, *flags: str) -> dict[str, Any]:
    done = run(["latest", str(root), "--json", *flags], os.environ)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document | {"stderr": done.stderr}


def test_parts_are_parsed() -> None:
    assert parse_parts("model, rng,model") == (Part.MODEL, Part.RNG)
    for wrong in ("", "weights", "model,,rng"):
        with pytest.raises(UsageError):
            parse_parts(wrong)


def save(path: Path, state: dict[str, Any]) -> None:
    import torch

    torch.save(state, path)


def test_a_checkpoint_that_lacks_a_part_is_passed_over_aloud(tmp_path: Path) -> None:
    import torch

    weights = {"w.weight": torch.ones(4, 4)}
    save(
        tmp_path / "step-1.pt",
        {"model": weights, "step": 1, "rng": {"torch": torch.get_rng_state()}},
    )
    save(tmp_path / "step-2.pt", {"model": weights, "step": 2, "rng_states": "a blob"})
    save(tmp_path / "step-3.pt", {"model": weights, "step": 3})
    assert latest(tmp_path, "--require", "model,step")["step"] == 3
    found = latest(tmp_path, "--require", "rng")
    assert found["step"] == 1
    assert [s["code"] for s in found["skipped"]] == [6, 6]
    assert "rng: absent" in found["skipped"][0]["message"]
    assert "step-3.pt lacks" in found["stderr"]
    nothing = latest(tmp_path, "--require", "optimizer")
    assert (nothing["path"], nothing["result"]["code"]) == (None, 6)
    assert latest(tmp_path, "--require", "weights")["result"]["code"] == 2


def test_what_cannot_be_told_is_not_present(tmp_path: Path) -> None:
    import torch

    save(tmp_path / "m.pt", {"model": {"w.weight": torch.ones(2)}, "rng": "opaque", "step": 1})
    said = lacking(api.open_checkpoint(str(tmp_path / "m.pt")), [Part.RNG])
    assert "rng: cannot tell" in said


# Of each set: the world that wrote it (None: it loads at any).
WORLDS = {
    ("ds_z2_w2_bf16", "global_step3"): 2,
    ("verl_fsdp", "global_step_3"): 4,
    ("mcore_torch_tp2dp2_distopt_bf16", "iter_0000003"): 4,
    ("dcp_fsdp2_titan", "step-3"): None,
    ("lightning_ddp", "last.ckpt"): None,
    ("mcore_torchdist_tp2dp2_fullyreshard_bf16", "iter_0000003"): None,
}


@pytest.mark.parametrize("name", WORLDS, ids=lambda name: name[0])
def test_real_checkpoints_load_at_their_own_world_or_at_any(
    name: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = real_set(*name, tmp_path_factory)
    if not place.exists():
        pytest.skip(f"no {name[1]}")
    checkpoint = api.open_checkpoint(str(place))
    for world in (2, 3, 4):
        loads = WORLDS[name] in (None, world)
        assert (not not_at_world(checkpoint, world)) is loads


@pytest.mark.parametrize(
    ("topology", "world", "grid"),
    [
        (Topology(world_size=8), 3, {"dp": 3}),
        (Topology(world_size=8, tp=2, pp=2, dp=2), 16, {"tp": 2, "pp": 2, "dp": 4}),
        (Topology(world_size=8, tp=8), 16, {"tp": 8, "dp": 2}),
        (Topology(world_size=8, tp=8), 4, {"tp": 4}),
    ],
)
def test_a_grid_for_another_world(topology: Topology, world: int, grid: dict[str, int]) -> None:
    assert grid_for(topology, world) == grid


def test_a_grid_that_must_be_chosen() -> None:
    with pytest.raises(UsageError, match="3 ranks cannot be"):
        grid_for(Topology(world_size=8, tp=2, pp=2, dp=2), 3)


def test_what_other_ranks_wrote_is_passed_over(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil

    root = tmp_path / "run"
    shutil.copytree(real_set("ds_z2_w2_bf16", "", tmp_path_factory), root)
    assert latest(root, "--world", "2")["result"]["code"] == 0
    away = latest(root, "--world", "4")
    assert (away["path"], away["result"]["code"]) == (None, 6)


def test_values_are_checked(tmp_path: Path) -> None:
    import torch

    for step, value in ((1, 1.0), (2, float("nan"))):
        weights = {"w.weight": torch.full((4, 4), value)}
        save(tmp_path / f"step-{step}.pt", {"model": weights, "step": step})
    assert latest(tmp_path, "--level", "content")["step"] == 2
    assert latest(tmp_path, "--level", "values")["step"] == 1
    done = run(["verify", str(tmp_path / "step-2.pt"), "--level", "values"], os.environ)
    assert done.returncode == 4
    assert "--level values" in done.stderr  # the hint leads to another checkpoint than this one


def test_values_need_evidence_for_the_content(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "checkpoint-1").mkdir()
    save_file({"w": np.zeros(3)}, str(tmp_path / "checkpoint-1" / "model.safetensors"))
    assert latest(tmp_path, "--level", "values")["result"]["code"] == 6
