"""How many ranks saved is never what is left: the steps beside one show what it lost.

The layouts are those of gsplat (`ckpt_S_rankR.pt`, each rank its own Gaussians; examples/
simple_trainer.py), of trainers that write `step-S/rank_R.pt` or a folder a rank, of nanochat
(an optimizer a rank), and of DINOv2 (local shards of FSDP1, `model_N.rank_R.pth`; dinov2/fsdp).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from ftckpt.errors import ExitCode
from tests.formats.safetensors.test_reader import split_by_rank

from .lines import printed

OK, CORRUPT, INCOMPLETE = ExitCode.OK, ExitCode.CORRUPT, ExitCode.INCOMPLETE
UNSUPPORTED = ExitCode.UNSUPPORTED
ROWS = 240
RANKLOCAL = Path(__file__).parents[1] / "data" / "dcp" / "ranklocal" / "step-3"


def here(*words: str) -> tuple[int, str]:
    """Run a command line; return its exit code and all that it says."""
    done = printed(*words)
    return done.code, done.out + done.err


def latest(root: Path) -> tuple[str, set[str]]:
    """Return the name of the newest that passes, and the kinds of what is said of it."""
    answer = json.loads(printed("latest", str(root), "--json").out)
    assert answer["result"]["code"] == OK
    return Path(answer["path"]).name, {one["kind"] for one in answer["findings"]}


def write(path: Path, *, rows: int, step: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    model = {f"layer.{n}.weight": torch.randn(rows, 4, generator=made) for n in range(3)}
    torch.save({"model": model, "step": step}, path)


def side_by_side(root: Path, step: int, rank: int) -> Path:
    return root / f"ckpt_{step}_rank{rank}.pt"


def in_folders(root: Path, step: int, rank: int) -> Path:
    return root / f"step-{step}" / f"rank_{rank}.pt"


def folder_of_rank(root: Path, step: int, rank: int) -> Path:
    return root / f"step-{step}" / f"rank{rank}" / "state.pt"


Place = Callable[[Path, int, int], Path]
PLACES: tuple[Place, ...] = (side_by_side, in_folders, folder_of_rank)


def growing(root: Path, place: Place, worlds: Mapping[int, int]) -> Path:
    """Write steps; each rank holds a number of rows of its own, that grows with the step."""
    for step, world in worlds.items():
        for rank in range(world):
            write(place(root, step, rank), rows=9 * step + rank, step=step, seed=step + rank)
    return root


def cut(root: Path, place: Place, worlds: Mapping[int, int]) -> Path:
    """Write steps of one model that is cut over as many ranks as a step has."""
    for step, world in worlds.items():
        for rank in range(world):
            write(place(root, step, rank), rows=ROWS // world, step=step, seed=step + rank)
    return root


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("lost", [10, 20, 30])
def test_the_last_rank_of_a_step_is_missed(tmp_path: Path, place: Place, lost: int) -> None:
    root = growing(tmp_path, place, {10: 2, 20: 2, 30: 2})
    place(root, lost, 1).unlink()
    if place is folder_of_rank:
        place(root, lost, 1).parent.rmdir()
    code, out = here("verify", str(root) + f"@{lost}")
    assert code == INCOMPLETE, out
    assert "has 2" in out
    assert "has 1 file" in out
    if place is not folder_of_rank:  # nothing says how those are joined: 13
        assert ("20" if lost == 30 else "30") in latest(root)[0]


@pytest.mark.parametrize("place", [side_by_side, in_folders])
def test_a_step_that_is_named_alone_is_held_to_its_neighbours(tmp_path: Path, place: Place) -> None:
    root = growing(tmp_path / "run", place, {10: 2, 20: 2, 30: 2})
    place(root, 30, 1).unlink()
    alone = place(root, 30, 0) if place is side_by_side else place(root, 30, 0).parent
    link = tmp_path / ("link.pt" if place is side_by_side else "link")
    link.symlink_to(alone)
    for path in (alone, link):
        code, out = here("verify", str(path))
        assert code == INCOMPLETE, out
        assert printed("copy", str(path), str(tmp_path / "copy")).code == INCOMPLETE
        out = printed("convert", str(path), str(tmp_path / "out"), "--only", "model").err
        assert "nothing was written" in out
    assert "missing-part" in here("inspect", str(alone))[1]


@pytest.mark.parametrize("place", [side_by_side, in_folders])
def test_a_job_that_goes_on_with_fewer_ranks_lost_nothing(tmp_path: Path, place: Place) -> None:
    root = cut(tmp_path, place, {10: 4, 20: 4, 30: 2})
    code, out = here("verify", f"{root}@30")
    assert code == OK, out
    assert "missing" not in out
    assert "30" in latest(root)[0]


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    # Two steps in a row with fewer ranks, of which each has content of its own: nothing decides.
    root = growing(tmp_path, side_by_side, {10: 3, 20: 3, 30: 2, 40: 2})
    for step in (30, 40):
        answer = printed("verify", f"{root}@{step}", "--json")
        found = json.loads(answer.out)["findings"]
        assert answer.code == OK
        said = [one["message"] for one in found if one["kind"] == "count-unknown"]
        assert any("nothing records which" in one for one in said)
    chosen, said_of_it = latest(root)
    assert "40" in chosen
    assert "count-unknown" in said_of_it
    assert printed("verify", f"{root}@40", "--strict=counts").code == ExitCode.UNVERIFIED


def test_ranks_that_hold_the_same_are_not_lost_with_a_file(tmp_path: Path) -> None:
    for step, world in {10: 2, 20: 2, 30: 1}.items():
        for rank in range(world):
            write(in_folders(tmp_path, step, rank), rows=ROWS, step=step, seed=step)
    code, out = here("verify", f"{tmp_path}@30")
    assert code == OK, out
    assert "nothing records which" in out


@pytest.mark.parametrize("lost", [False, True])
def test_weights_that_all_ranks_keep_do_not_hide_a_lost_part(tmp_path: Path, lost: bool) -> None:
    """Each rank saves all weights, and its part of the optimizer's state."""
    for step, world in {10: 4, 20: 4, 30: 4 if lost else 2}.items():
        for rank in range(world):
            weights = {"w": torch.full((ROWS, 4), float(step))}
            part = {"moments": torch.randn(2 * ROWS // world, 4)}
            path = in_folders(tmp_path, step, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": weights, "state": part, "step": step}, path)
    if lost:
        for rank in (2, 3):
            in_folders(tmp_path, 30, rank).unlink()
    code, out = here("verify", f"{tmp_path}@30")
    assert code == (INCOMPLETE if lost else OK), out


def test_the_only_step_has_a_warning_that_latest_repeats(tmp_path: Path) -> None:
    root = growing(tmp_path, side_by_side, {10: 2})
    assert latest(root) == ("ckpt_10_rank0.pt", {"count-unknown"})


def test_the_world_that_a_name_records_is_believed(tmp_path: Path) -> None:
    for step, world in {10: 4, 20: 4, 30: 2}.items():
        for rank in range(world):
            path = tmp_path / f"step-{step}" / f"shard_{rank}_of_{world}.pt"
            write(path, rows=9 * step + rank, step=step, seed=rank)
    code, out = here("verify", f"{tmp_path}@30")
    assert code == OK, out
    assert "count-unknown" not in out


def test_the_optimizer_of_the_last_rank_is_missed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        weights = {f"h.{n}.weight": torch.full((8, 4), float(step + n)) for n in range(2)}
        torch.save(weights, tmp_path / f"model_{step:06d}.pt")
        (tmp_path / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}))
        for rank in range(2):
            moments = {n: {"exp_avg": torch.full((4, 4), float(step + n + rank))} for n in range(2)}
            state = {"state": moments, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
            torch.save(state, tmp_path / f"optim_{step:06d}_rank{rank}.pt")
    assert here("verify", f"{tmp_path}@30")[0] == OK
    (tmp_path / "optim_000030_rank1.pt").unlink()
    code, out = here("verify", f"{tmp_path}@30")
    assert code == INCOMPLETE, out


@pytest.mark.parametrize("rank", [0, 1])
def test_the_optimizer_of_a_rank_beside_gathered_weights_is_read(tmp_path: Path, rank: int) -> None:
    from safetensors.torch import save_file

    weights = {"embed.weight": torch.ones(4, 2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for number in range(2):
        state = {"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}
        torch.save(state, tmp_path / f"optim_world_size_2_rank_{number}.pt")
    assert here("verify", str(tmp_path))[0] == OK
    (tmp_path / f"optim_world_size_2_rank_{rank}.pt").unlink()
    code, out = here("verify", str(tmp_path))
    assert code == INCOMPLETE, out
    assert f"optim_world_size_2_rank_{rank}.pt is missing" in out


def flat_slices(root: Path, step: int, **more: torch.Tensor) -> None:
    """Write what FSDP1 gives as LOCAL_STATE_DICT, of two ranks, without its ShardedTensor."""
    root.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        flat = torch.arange(6.0) + 10 * rank + step
        slices = {"a.weight": flat[: 6 - 2 * rank], "a.bias": flat[6 - 2 * rank :]}
        model = {"a._flat_param": flat, "b.weight": flat[:2], **slices, **more}
        moments = {0: {"exp_avg": flat[:2] + 1, "step": torch.tensor(float(step))}}
        optimizer = {"state": moments, "param_groups": [{"params": [0], "lr": 0.1}]}
        whole = {"model": model, "optimizer": optimizer, "iteration": step}
        torch.save(whole, root / f"model_{step:07d}.rank_{rank}.pth")


def test_slices_of_flattened_parameters_are_no_damage(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (99, 199):
        flat_slices(root, step)
    for level in ("structure", "content", "values"):
        code, out = here("verify", f"{root}@199", "--level", level)
        assert code == OK, out
    assert "LOCAL_STATE_DICT" in out
    assert "model_0000199" in latest(root)[0]
    shown = printed("inspect", f"{root}@199", "--tensors").out
    assert "extra:rank0:a.weight" in shown
    assert "extra:rank1:b.weight" in shown
    assert "error" not in shown
    refused = printed("convert", f"{root}@199", str(tmp_path / "out"), "--only", "model")
    assert refused.code == UNSUPPORTED
    assert not (tmp_path / "out").exists()


def test_other_shapes_beside_shards_are_no_damage(tmp_path: Path) -> None:
    """What is whole beside sharded tensors is the same on all ranks, unless its shape says no."""
    flat_slices(tmp_path, 9)
    for rank in range(2):
        path = tmp_path / f"model_0000009.rank_{rank}.pth"
        held = torch.load(path, weights_only=True)
        held["model"] = {"seen": torch.ones(3 + rank), "w": torch.ones(2, 2)}
        torch.save(held, path)
    code, out = here("verify", f"{tmp_path}@9")
    assert code == OK, out


def test_weights_that_nothing_joins_are_refused_as_inspect_says(tmp_path: Path) -> None:
    root = growing(tmp_path / "run", side_by_side, {10: 2, 20: 2})
    shown = printed("inspect", f"{root}@20").out
    assert "cannot tell  model weights" in shown
    refused = printed("convert", f"{root}@20", str(tmp_path / "out"), "--only", "model")
    assert refused.code == UNSUPPORTED
    assert "nothing tells which weights" in refused.err


def test_the_mark_of_an_unfinished_save_counts_for_its_file_alone(tmp_path: Path) -> None:
    for epoch in (1, 2):
        model = {"state_dict": {"w": torch.ones(2, 2)}, "global_step": epoch}
        torch.save(model, tmp_path / f"Net--epoch={epoch}.ckpt")
    (tmp_path / "Net--epoch=2-unfinished").touch()
    code, out = here("verify", str(tmp_path / "Net--epoch=2.ckpt"))
    assert code == INCOMPLETE, out
    assert "Net--epoch=2-unfinished" in out
    assert here("verify", str(tmp_path / "Net--epoch=1.ckpt"))[0] == OK


def test_stores_that_record_no_world_are_held_to_their_neighbours(tmp_path: Path) -> None:
    """DCP's Hugging Face shards, and DCP without collectives: a metadata file of each rank."""
    model = {f"layers.{n}.weight": torch.arange(96.0).reshape(24, 4) + n for n in range(3)}
    for step, world in {10: 3, 20: 3, 30: 3}.items():
        split_by_rank(tmp_path / "hf" / f"step-{step}", model, world)
        shutil.copytree(RANKLOCAL, tmp_path / "dcp" / f"step-{step}")
    assert here("verify", f"{tmp_path / 'hf'}@30")[0] == OK
    assert here("verify", f"{tmp_path / 'dcp'}@30")[0] == OK
    (tmp_path / "hf" / "step-30" / "shard-00003-model-00001-of-00001.safetensors").unlink()
    code, out = here("verify", f"{tmp_path / 'hf'}@30")
    assert code == INCOMPLETE, out
    last = max(int(p.name[2:-9]) for p in (tmp_path / "dcp" / "step-30").glob("__*.metadata"))
    for path in (tmp_path / "dcp" / "step-30").glob(f"__{last}*"):
        path.unlink()
    code, out = here("verify", f"{tmp_path / 'dcp'}@30")
    assert code == CORRUPT, out  # its other ranks say how large the tensors are
    assert "has 1 file __R_#.distcp" in out
    # A job that goes on with two ranks cuts the same model anew.
    shutil.rmtree(tmp_path / "hf" / "step-30")
    split_by_rank(tmp_path / "hf" / "step-30", model, 2)
    code, out = here("verify", f"{tmp_path / 'hf'}@30")
    assert code == OK, out
