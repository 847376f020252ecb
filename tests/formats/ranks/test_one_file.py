"""Shards of several ranks in one file: read as the whole tensors; what one lacks is damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from ftckpt.errors import ExitCode
from ftckpt.formats.torchsave import TorchSave
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import FormatTests, Made, Truth
from tests.data.by_hand import make_by_hand
from tests.formats.ranks.jobs import truth_of
from tests.formats.ranks.test_by_hand import generated_alike, loaded
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
FILES = ("by_rank.pt", "listed.pt", "by_tensor.pt")


def truth_in(name: str) -> dict[str, Truth]:
    """Return the truth of a file: the one that lists states has the optimizer too."""
    whole = load_file(DATA / "truth.safetensors")
    return {
        key: truth_of(value)
        for key, value in whole.items()
        if "qkv" not in key and (name == "listed.pt" or ":" not in key)
    }


class TestOneFile(FormatTests):
    """As the trainer wrote it, with the truth beside it."""

    format = TorchSave()
    truncated = frozenset({"bad-zip", "truncated-file"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        return [Made(Path(shutil.copy(DATA / "one_file" / n, root)), truth_in(n)) for n in FILES]


def verified(path: Path) -> tuple[int, set[str]]:
    """Return the exit code of `verify`, and the kinds of what it found."""
    answer = ftckpt_json("verify", str(path))
    kinds = {one["kind"] for one in answer.get("findings", []) if one["severity"] == "error"}
    return answer["result"]["code"], kinds


def changed(root: Path, name: str, change: Callable[[Any], Any]) -> Path:
    state = loaded(DATA / "one_file" / name)
    change(state)
    torch.save(state, root / name)
    return root / name


def test_the_samples_are_what_the_generator_writes(tmp_path: Path) -> None:
    make_by_hand.make(tmp_path / "new", 2)
    for name in FILES:
        ours = loaded(DATA / "one_file" / name)
        assert generated_alike(ours, loaded(tmp_path / "new" / "one_file" / name)), name


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["safetensors", "torchsave", "dcp"])
def test_they_convert_to_whole_tensors(name: str, target: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.pt" if target == "torchsave" else "out")
    done = ftckpt_json("convert", str(DATA / "one_file" / name), str(out), "--to", target)
    assert done["result"]["code"] == 0
    result = open_checkpoint(out)
    assert {k: (t.dtype.name, t.shape) for k, t in result.tensors.items()} == {
        key: (one.dtype, one.shape) for key, one in truth_in(name).items()
    }
    same = ftckpt_json("diff", str(DATA / "one_file" / name), str(out), "--component", "model")
    assert same["result"]["code"] == 0


def test_it_is_the_same_model_as_one_file_a_rank() -> None:
    by_rank, files = str(DATA / "one_file" / "by_rank.pt"), str(DATA / "offsets")
    answer = ftckpt_json("diff", by_rank, files, "--component", "model")
    assert answer["result"]["code"] == 0


def test_what_it_says_of_itself() -> None:
    for name in FILES:
        checkpoint = open_checkpoint(DATA / "one_file" / name)
        assert (checkpoint.format, checkpoint.step) == ("torchsave", 100)
        assert checkpoint.topology.world_size == 2
    schedule = open_checkpoint(DATA / "one_file" / "by_tensor.pt").load_object("scheduler")
    assert schedule == {"last_epoch": 100}


class TestDamage:
    """Twins of the samples: a lost shard, two steps, a flipped bit."""

    def test_a_lost_rank(self, tmp_path: Path) -> None:
        ranks, _ = make_by_hand.states(4)
        make_by_hand.one_file(tmp_path / "four", ranks)
        state = loaded(tmp_path / "four" / "by_rank.pt")
        for lost in range(4):
            kept = {rank: part for rank, part in state["shards"].items() if rank != lost}
            torch.save({**state, "shards": kept}, tmp_path / "lost.pt")
            code, kinds = verified(tmp_path / "lost.pt")
            assert code == ExitCode.CORRUPT
            assert {"hole", "world-size"} <= kinds
        states = loaded(tmp_path / "four" / "listed.pt")
        torch.save(states[:3], tmp_path / "short.pt")
        assert verified(tmp_path / "short.pt")[0] == ExitCode.CORRUPT

    def test_a_lost_shard_of_one_tensor(self, tmp_path: Path) -> None:
        path = changed(tmp_path, "by_tensor.pt", lambda s: s["model"]["up.weight"].pop())
        assert verified(path) == (ExitCode.CORRUPT, {"hole"})

    def test_a_lost_shard_of_one_rank(self, tmp_path: Path) -> None:
        path = changed(tmp_path, "by_rank.pt", lambda s: s["shards"][1].pop("up.weight"))
        assert verified(path) == (ExitCode.CORRUPT, {"hole"})

    def test_two_steps(self, tmp_path: Path) -> None:
        path = changed(tmp_path, "listed.pt", lambda states: states[1].update(step=90))
        assert verified(path) == (ExitCode.CORRUPT, {"mixed-steps"})

    def test_another_step_at_the_top(self, tmp_path: Path) -> None:
        def change(state: Any) -> None:
            for part in state["shards"].values():
                part["step"] = 90

        assert verified(changed(tmp_path, "by_rank.pt", change))[0] == ExitCode.CORRUPT

    @pytest.mark.parametrize("name", FILES)
    def test_a_flipped_bit(self, name: str, tmp_path: Path) -> None:
        path = Path(shutil.copy(DATA / "one_file" / name, tmp_path))
        pieces = open_checkpoint(path).tensors["up.weight"].pieces
        data = bytearray(path.read_bytes())
        data[pieces[-1].extent.offset] ^= 4
        path.write_bytes(data)
        answer = ftckpt_json("verify", str(path), "--level", "content")
        assert answer["result"]["code"] == ExitCode.CORRUPT

    def test_a_world_that_the_parts_contradict(self, tmp_path: Path) -> None:
        path = changed(tmp_path, "by_rank.pt", lambda state: state["shards"][0].update(world=4))
        assert verified(path)[0] == ExitCode.CORRUPT
        path = changed(tmp_path, "by_rank.pt", lambda state: state.update(world_size=1))
        assert verified(path)[0] == ExitCode.CORRUPT

    def test_two_parts_of_one_rank(self, tmp_path: Path) -> None:
        path = changed(tmp_path, "listed.pt", lambda states: states[1].update(rank=0))
        assert verified(path)[0] == ExitCode.CORRUPT

    def test_a_part_under_another_rank_than_it_records(self, tmp_path: Path) -> None:
        def change(state: Any) -> None:
            for rank, part in state["shards"].items():
                part["rank"] = 1 - rank

        assert verified(changed(tmp_path, "by_rank.pt", change))[0] == ExitCode.CORRUPT

    def test_a_shard_that_cannot_be(self, tmp_path: Path) -> None:
        def change(state: Any) -> None:
            state["model"]["up.weight"][1]["offsets"] = [12, 0]

        assert verified(changed(tmp_path, "by_tensor.pt", change))[0] == ExitCode.CORRUPT


def entry(rank: int, /, **more: Any) -> dict[str, Any]:
    return {"data": torch.full((2, 4), rank + 1.0), "global_shape": [4, 4], **more}


WHOLE = torch.tensor([[1.0] * 4] * 2 + [[2.0] * 4] * 2)
SPELLINGS: dict[str, Any] = {
    "named ranks": {"shards": {f"rank_{r}": {"w": entry(r, dim=0)} for r in range(2)}},
    "counted from 1": {
        "world_size": 2, "shards": {r + 1: {"w": entry(r, dim=0)} for r in range(2)},
    },
    "out of order": {"shards": [{"w": entry(r, dim=0), "rank": r} for r in (1, 0)]},
    "below the model": {"model": {f"rank_{r}": {"w": entry(r, dim=0)} for r in range(2)}},
    "one mapping": {
        "dims": {"w": 0}, "global_shapes": {"w": [4, 4]},
        "shards": [{"w": entry(r)["data"]} for r in range(2)],
    },
    "one shape a tensor": {
        "model": {"w": {"global_shape": (4, 4), "dim": 0,
                        "shards": [entry(r)["data"] for r in range(2)]}},
    },
    "by tensor, out of order": {"w": [entry(r, dim=0, rank=r) for r in (1, 0)]},
    "offsets in any order": {"tensors": {"w": [entry(r, offsets=(2 * r, 0)) for r in (1, 0)]}},
    "written by rank 0": {
        "rank": 0, "meta": {"rank": 0, "world_size": 2},
        "shards": [{"w": entry(r, dim=0)} for r in range(2)],
    },
    "placements": {"shards": [{"w": entry(r, placements=["Shard(0)"])} for r in range(2)]},
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, tmp_path: Path) -> None:
    torch.save(SPELLINGS[spelling], tmp_path / "checkpoint.pt")
    assert verified(tmp_path / "checkpoint.pt") == (0, set())
    out = tmp_path / "out.pt"
    done = ftckpt_json("convert", str(tmp_path / "checkpoint.pt"), str(out), "--to", "torchsave")
    assert done["result"]["code"] == 0
    state = loaded(out)
    assert torch.equal((state.get("model") or state)["w"], WHOLE)


NOT_RANKS: dict[str, Any] = {
    "numbered layers of one rank": {
        "model": {str(n): {"weight": entry(n, dim=0)} for n in range(2)},
    },
    "a list of layers of one rank": {"model": {"experts": [entry(n, dim=0) for n in range(2)]}},
    "one rank alone": {"world_size": 2, "shards": {0: {"w": entry(0, dim=0)}}},
    "the same offsets": {"model": {"experts": [entry(n, offsets=(0, 0)) for n in range(2)]}},
    "an optimizer's": {
        "model": {"w": WHOLE},
        "optimizer": {"state": {0: {"exp_avg": [entry(r, offsets=(2 * r, 0)) for r in range(2)]}},
                      "param_groups": [{"params": [0]}]},
    },
    "one rank's in other state": {"model": {"w": WHOLE}, "more": {"v": entry(0, dim=0)}},
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_RANKS)
def test_what_may_be_one_rank_alone_is_refused(what: str, tmp_path: Path) -> None:
    """Layers have numbers as ranks do: nothing is merged that no record calls shards."""
    torch.save(NOT_RANKS[what], tmp_path / "checkpoint.pt")
    assert verified(tmp_path / "checkpoint.pt")[0] == ExitCode.UNSUPPORTED


ONE = torch.ones(4, 3)
MESH = [[0, 1], [2, 3]]
RANKS = range(3)  # of four: what passes as whole here hides a lost rank
UNPLACED: dict[str, Any] = {
    "a mesh and placements": {"mesh": MESH, "placements": ["Shard(0)", "Shard(1)"],
                              "model": {"w": ONE}},
    "placements by name": {"mesh": [0, 1], "placements": {"w": ["Shard(0)"]}, "model": {"w": ONE}},
    "a larger shape": {"global_shapes": {"w": [8, 6]}, "model": {"w": ONE}},
    "one rank's shards": {"device_mesh": MESH, "model_shard": {"w": ONE}},
    "a mesh that is a tensor": {"device_mesh": torch.arange(4), "shards": {"w": ONE}},
    "a world": {"config": {"world_size": 8}, "rank": 1, "shards": {"w": ONE}},
    "the shards of ranks": {"mesh": {"tp": 4}, "shards": {r: {"w": ONE} for r in RANKS}},
    "states of ranks": {"world_size": 4,
                        "ranks": {f"rank_{r}": {"model": {"w": ONE}} for r in RANKS}},
    "a model of ranks": {"world_size": 4, "model": {f"rank_{r}": {"w": ONE} for r in RANKS}},
    "a dim without a shape": {"shards": [{"w": {"data": ONE, "dim": 0}} for _ in RANKS]},
    "a mesh and a dim": {"mesh": [0, 1, 2, 3],
                         "shards": {r: {"w": {"data": ONE, "dim": 0}} for r in RANKS}},
    "by tensor": {"world_size": 4,
                  "model": {"w": [{"data": ONE, "dim": 0, "rank": r} for r in RANKS]}},
}  # fmt: skip


@pytest.mark.parametrize("what", UNPLACED)
def test_what_it_calls_shards_does_not_pass_for_whole(what: str, tmp_path: Path) -> None:
    torch.save(UNPLACED[what], tmp_path / "checkpoint.pt")
    assert verified(tmp_path / "checkpoint.pt")[0] == ExitCode.UNSUPPORTED


WHOLES: dict[str, Any] = {
    "replicated": {"world_size": 8, "rank": 3, "model": {"w": ONE}},
    "gathered over a mesh": {"mesh": MESH, "model": {"w": ONE}},
    "its own shape": {"mesh": MESH, "global_shapes": {"w": [4, 3]}, "dims": {"w": 0},
                      "model": {"w": ONE}},
    "on one rank": {"mesh": [1, 1], "placements": {"w": ["Shard(0)"]}, "model": {"w": ONE}},
    "replicated on a mesh": {"mesh": MESH, "placements": {"w": ["Replicate()"]},
                             "model": {"w": ONE}},
    "random states of ranks": {"world_size": 2, "model": {"w": ONE},
                               "shards": [{"rng": torch.ones(5)} for _ in range(2)]},
    "shards of data": {"shards": {"a": torch.ones(3), "b": torch.ones(2)}},
}  # fmt: skip


@pytest.mark.parametrize("what", WHOLES)
def test_a_whole_model_of_a_large_job_is_whole(what: str, tmp_path: Path) -> None:
    torch.save(WHOLES[what], tmp_path / "checkpoint.pt")
    assert verified(tmp_path / "checkpoint.pt") == (0, set())


def test_a_pickled_mesh_counts(tmp_path: Path) -> None:
    for mesh, code in ((torch.arange(4).reshape(2, 2), 13), (torch.zeros(1), 0)):
        pickled = object.__new__(DeviceMesh)
        pickled.__dict__["mesh"] = mesh
        torch.save({"device_mesh": pickled, "model_shard": {"w": ONE}}, tmp_path / "checkpoint.pt")
        assert verified(tmp_path / "checkpoint.pt")[0] == code


def test_a_list_of_whole_tensors_is_left_as_it_is(tmp_path: Path) -> None:
    torch.save({"model": {"a": [torch.ones(2), torch.zeros(2)]}}, tmp_path / "checkpoint.pt")
    assert set(open_checkpoint(tmp_path / "checkpoint.pt").tensors) == {"a.0", "a.1"}
