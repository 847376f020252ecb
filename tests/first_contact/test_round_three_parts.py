"""Third round: what is taken for nothing, a step, the model, and the whole of a save."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_saver as dcp

from ftckpt.errors import ExitCode
from tests.faults.cli import here

from .lines import printed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD = time.time() - 7 * 86400


def aged(path: Path, hours: float = 0) -> None:
    at = OLD + hours * 3600
    for one in (*path.rglob("*"), path):
        os.utime(one, (at, at))


def stored(folder: Path, state: dict[str, Any]) -> None:
    """Write a DCP store as torch does."""
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def marked(root: Path) -> Path:
    """Return a root that `latest` knows to be empty."""
    root.mkdir()
    assert printed("latest", str(root), "--create-root").code == ExitCode.OK
    return root


# --- a root that is surely empty


def test_dcp_files_below_two_folders_are_not_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    stored(root / "run" / "save-a" / "model", {"w": torch.ones(4)})
    for verb in ("latest", "ls", "verify", "gc"):
        told = printed(verb, str(root), *(("--keep-last", "2") if verb == "gc" else ()))
        assert told.code == ExitCode.UNSUPPORTED, verb
        assert "run/" in told.err, verb


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("run/a/.metadata", b"\x80\x04\x00\x01"),
        ("run/a/__0_0.distcp", b""),
        ("run/a/.weights/part-0", b"\x00\x01\x02"),
        ("run/__saves__/data", b"\x00\x01\x02"),
        ("run/a/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("run/a/model.safetensors.index.json", b"{}"),
        ("run/a/ftckpt.manifest.json", b"{}"),
        ("run/a/brain.ckpt", b"a counter: 3\n"),
    ],
)
def test_a_name_says_nothing_about_what_is_in_it(tmp_path: Path, path: str, content: bytes) -> None:
    root = marked(tmp_path / "R")
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(content)
    assert printed("latest", str(root)).code == ExitCode.UNSUPPORTED


def test_a_link_to_what_is_not_mounted_is_not_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    (root / "run").mkdir()
    (root / "run" / "saves").symlink_to(tmp_path / "gone")
    assert printed("latest", str(root)).code == ExitCode.UNSUPPORTED


def test_what_tools_leave_is_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    for path in (".git/objects/aa/bb", ".DS_Store", "a/._run.log", "a/.run.py.swp", "a/.nfs0001"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"\x00\x01\x02")
    (root / "a" / ".hydra").mkdir()
    (root / "a" / ".hydra" / "overrides").write_text("- lr=1\n")
    (root / "a" / "run.log").write_text("epoch 1\n")
    assert printed("latest", str(root)).code == ExitCode.NOT_FOUND


# --- a step that lost a part


def steps_of_parts(root: Path) -> Path:
    """Write steps as TorchEasyRec does; return the newest."""
    for hours, step in enumerate((1000, 2000, 3712)):
        save = root / f"tower.ckpt-{step}"
        weights = {"mlp.weight": torch.full((4, 4), float(step)), "mlp.bias": torch.ones(4)}
        stored(save / "model", weights)
        stored(save / "optimizer", {"state": {"mlp.weight": {"exp_avg": torch.ones(4, 4)}}})
        stored(save / "dense_ema", {name: one * 0.5 for name, one in weights.items()})
        aged(save, hours)
    return root / "tower.ckpt-3712"


def test_siblings_tell_that_a_step_lost_its_parts(tmp_path: Path) -> None:
    newest = steps_of_parts(tmp_path / "R")
    assert here("latest", tmp_path / "R").document["path"] == str(newest)
    for part in ("optimizer", "dense_ema"):
        shutil.rmtree(newest / part)
        told = here("latest", tmp_path / "R").document
        assert told["path"].endswith("tower.ckpt-2000")
        assert [Path(one["path"]).name for one in told["skipped"]] == ["tower.ckpt-3712"]
        assert printed("verify", str(newest)).code == ExitCode.INCOMPLETE


def test_a_number_in_a_name_is_no_absent_step(tmp_path: Path) -> None:
    steps_of_parts(tmp_path / "R")
    told = printed("verify", f"{tmp_path / 'R'}@3712")
    assert told.code == ExitCode.UNVERIFIED
    assert "tower.ckpt-3712" in told.err


def test_an_average_is_never_the_model(tmp_path: Path) -> None:
    newest = steps_of_parts(tmp_path / "R")
    shutil.rmtree(newest / "model")
    assert printed("verify", str(newest)).code == ExitCode.INCOMPLETE
    told = printed("convert", str(newest), str(tmp_path / "o"), "--to=safetensors", "--only=model")
    assert told.code == ExitCode.NOT_FOUND
    assert not (tmp_path / "o").exists()


# --- the file of one rank


def test_a_step_that_its_root_refuses_is_no_root(tmp_path: Path) -> None:
    for step in (100, 200):
        (tmp_path / "R" / str(step)).mkdir(parents=True)
        for tp in range(2):
            for pp in range(2):
                name = f"weights_tp_rank_world_size={tp}_2_pp_rank_world_size={pp}_2.pth"
                state = {"model": {f"layer{pp}.weight": torch.ones(2, 2)}, "trained_steps": step}
                torch.save(state, tmp_path / "R" / str(step) / name)
    for verb in ("latest", "verify", "ls"):
        assert printed(verb, str(tmp_path / "R" / "200")).code == ExitCode.UNSUPPORTED, verb
    (tmp_path / "R" / "200").rename(tmp_path / "final")
    assert printed("latest", str(tmp_path / "final")).code == ExitCode.UNSUPPORTED


def test_a_numbered_folder_of_a_series_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "R" / "7").mkdir(parents=True)
    for epoch in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / "R" / "7" / f"epoch_{epoch}.pt")
    assert here("latest", tmp_path / "R" / "7").document["path"].endswith("epoch_2.pt")


@pytest.mark.parametrize(("axis", "whole"), [("h", False), ("data", True)])
def test_a_file_of_a_grid_is_one_of_several(tmp_path: Path, axis: str, whole: bool) -> None:
    for rank in range(2):
        grid = {axis: {"size": 2, "rank": rank}, "w": {"size": 1, "rank": 0}}
        state = {"model_state": {"w": torch.ones(2, 2)}, "comm_grid": grid, "iters": 10}
        torch.save(state, tmp_path / f"ckpt_mp{rank}_v0.tar")
    out = tmp_path / "o"
    one = str(tmp_path / "ckpt_mp0_v0.tar")
    told = printed("convert", one, str(out), "--to=safetensors", "--only=model")
    # By their names both are pieces; alone, the grid in the file decides.
    assert told.code == ExitCode.UNSUPPORTED
    (tmp_path / "ckpt_mp1_v0.tar").unlink()
    alone = printed("convert", one, str(out), "--to=safetensors", "--only=model")
    assert alone.code == (ExitCode.OK if whole else ExitCode.UNSUPPORTED)
    assert out.exists() == whole
