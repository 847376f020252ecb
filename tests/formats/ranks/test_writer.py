from __future__ import annotations

import fnmatch
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.formats.ranks.writer import RanksWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.builders.jobs import run_job
from tests.builders.megatron_files import write as write_megatron
from tests.builders.megatron_model import Job
from tests.builders.real_sets import real_set
from tests.conformance.writers import as_bytes, assert_same_tensors, assert_sound, write
from tests.formats.ranks.jobs import DATA, JOBS, job, write_plain

WRITER = RanksWriter()
OPTIMIZER = "optim_world_size_2_rank_1.pt"


def saved(path: Path, state: Any) -> Checkpoint:
    torch.save(state, path)
    return open_checkpoint(path)


def loaded(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that no process group is there
        return torch.load(path, weights_only=False)


def without(content: Content, *patterns: str) -> Content:
    """Return content less what is named, as `--drop` does it."""
    gone = {n for p in patterns for n in fnmatch.filter((*content.tensors, *content.objects), p)}
    kept = [wanted for key, wanted in content.tensors.items() if key not in gone]
    objects = {name: info for name, info in content.objects.items() if name not in gone}
    return replace(content.with_tensors(kept), objects=objects)


def assert_as(result: Checkpoint, content: Content) -> None:
    """Compare with the part of a source that content has."""
    source = replace_tensors(content.checkpoint, content)
    assert_same_tensors(result, source)


def replace_tensors(checkpoint: Checkpoint, content: Content) -> Checkpoint:
    import copy

    part = copy.copy(checkpoint)
    part.tensors = {key: checkpoint.tensors[key] for key in content.tensors}
    return part


@pytest.mark.parametrize("world", [2, 4, 5])
@pytest.mark.parametrize("name", JOBS)
def test_rank_files_are_divided_anew(name: str, world: int, tmp_path: Path) -> None:
    source = open_checkpoint(job(tmp_path / "source", name))
    lost = [f"*rank{r}:*" for r in range(world, 4)] + [f"rank_{r}.*" for r in range(world, 4)]
    content = without(Content.of(source), *lost)
    result = write(WRITER, content, tmp_path / "out", dp=world)
    assert_as(result, content)
    assert_sound(result)
    assert (result.step, result.topology.world_size) == (source.step, world)
    assert result.dialect == source.dialect == "verl"
    config = json.loads((tmp_path / "out/actor/fsdp_config.json").read_text())
    assert config["world_size"] == world
    # What every rank held alike, every new rank has.
    groups = {
        as_bytes(result.load_object(f"rank_{r}.optimizer.param_groups")) for r in range(world)
    }
    assert groups == {as_bytes(source.load_object("rank_0.optimizer.param_groups"))}


def test_there_and_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    source = open_checkpoint(job(tmp_path / "source", "fsdp1"))
    one = write(WRITER, source, tmp_path / "one", dp=4)
    wide = write(WRITER, one, tmp_path / "wide", dp=6)
    back = write(WRITER, wide, tmp_path / "back", dp=4)
    assert_same_tensors(back, source)
    for path in sorted((tmp_path / "one/actor").iterdir()):
        assert path.read_bytes() == (tmp_path / "back/actor" / path.name).read_bytes()


def test_state_of_ranks_that_are_gone_is_named(tmp_path: Path) -> None:
    source = open_checkpoint(job(tmp_path / "source", "hsdp"))
    layout = WRITER.layout(Content.of(source), LayoutRequest(dp=2))
    assert set(layout.unplaced) >= {"extra:rank2:rng.cpu", "extra:rank3:rng.cpu"}
    assert not any(name.startswith(("rank_0", "rank_1", "extra:rank0")) for name in layout.unplaced)


def test_torch_loads_shards_that_join_to_the_whole(tmp_path: Path) -> None:
    full = {"w": torch.randn(5, 3), "thin": torch.randn(2), "seen": torch.tensor(7)}
    source = saved(tmp_path / "s.pt", {"model": full, "lr_scheduler": {"last_epoch": 3}})
    result = write(WRITER, source, tmp_path / "out", dp=4)
    assert_same_tensors(result, source)
    parts = [loaded(tmp_path / "out" / f"model_world_size_4_rank_{r}.pt") for r in range(4)]
    for name in ("w", "thin"):
        shards = [part[name] for part in parts]
        assert all(type(shard) is DTensor for shard in shards)
        assert shards[1].placements == (Shard(0),)
        assert shards[1].shape == full[name].shape
        assert shards[1].device_mesh.mesh.tolist() == [0, 1, 2, 3]
        assert shards[1].device_mesh.mesh_dim_names == ("fsdp",)
        assert [s._local_tensor.shape[0] for s in shards] == [
            chunk.shape[0] for chunk in padded(full[name].chunk(4), full[name])
        ]
        assert torch.equal(torch.cat([s._local_tensor for s in shards]), full[name])
    assert all(torch.equal(part["seen"], full["seen"]) for part in parts)
    extra = loaded(tmp_path / "out/extra_state_world_size_4_rank_3.pt")
    assert extra == {"lr_scheduler": {"last_epoch": 3}}
    assert json.loads((tmp_path / "out/fsdp_config.json").read_text()) == {
        "FSDP_version": 2, "world_size": 4,
    }  # fmt: skip


def padded(chunks: Any, full: torch.Tensor) -> list[torch.Tensor]:
    return [*chunks, *[full[:0]] * (4 - len(chunks))]


def test_fsdp2_loads_the_files_of_another_world(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = real_set("verl_fsdp", "global_step_3", tmp_path_factory)
    content = without(Content.of(open_checkpoint(folder)), "*rank[23]:*", "rank_[23].*")
    result = write(WRITER, content, tmp_path / "out", dp=2)
    assert_as(result, content)
    assert_sound(result)
    truth = folder.parents[1] / "truth/state.safetensors"
    texts = run_job(2, Path(__file__).with_name("loading.py"), tmp_path / "out/actor", truth)
    assert "equal 39" in texts[0]


def test_a_distributed_checkpoint_becomes_rank_files(tmp_path: Path) -> None:
    source = open_checkpoint(save_dcp(tmp_path / "source"))
    result = write(WRITER, source, tmp_path / "out", dp=3)
    assert_same_tensors(result, source)
    assert_sound(result)
    assert {result.load_object(f"rank_{r}.step") for r in range(3)} == {7}


@pytest.mark.parametrize("world", [1, 3])
def test_an_optimizer_is_under_its_parameters_names(world: int, tmp_path: Path) -> None:
    names = ["a.weight", "b"]
    moments = {n: {"exp_avg": torch.randn(4, 2), "step": torch.tensor(2.0)} for n in names}
    groups = [{"lr": 0.1, "params": names}]
    state = {
        "model": {n: torch.randn(4, 2) for n in names},
        "optimizer": {"state": moments, "param_groups": groups},
    }
    source = saved(tmp_path / "s.pt", state)
    result = write(WRITER, source, tmp_path / "out", dp=world)
    assert_same_tensors(result, source)
    optimizer = loaded(tmp_path / f"out/optim_world_size_{world}_rank_0.pt")
    assert optimizer["param_groups"] == groups
    assert list(optimizer["state"]) == names


def test_what_is_nowhere_divided_says_that_it_is_whole(tmp_path: Path) -> None:
    source = saved(tmp_path / "s.pt", {"count": torch.tensor(3), "mask": torch.ones(2) > 0})
    result = write(WRITER, source, tmp_path / "out", dp=2)
    assert_same_tensors(result, source)
    part = loaded(tmp_path / "out/model_world_size_2_rank_1.pt")
    assert part["count"].placements == (Replicate(),)


def test_a_critic_stays_beside_its_actor(tmp_path: Path) -> None:
    folder = job(tmp_path / "source", "tp_fsdp2")
    (folder / "critic").mkdir()
    for file in sorted((DATA / "hsdp/actor").glob("[mof]*")):
        (folder / "critic" / file.name).write_bytes(file.read_bytes())
    (folder / "actor/huggingface").mkdir()
    (folder / "actor/huggingface/config.json").write_text("{}")
    torch.save({"position": 5}, folder / "data.pt")
    source = open_checkpoint(folder)
    assert any(key.startswith("extra:critic:exp_avg:") for key in source.tensors)
    result = write(WRITER, source, tmp_path / "out", dp=4)
    assert_same_tensors(result, source)
    assert set(result.objects) == set(source.objects)
    assert set(result.members()) == set(source.members())
    assert (tmp_path / "out/data.pt").read_bytes() == (folder / "data.pt").read_bytes()


def test_one_file_a_rank_with_a_record_keeps_both(tmp_path: Path) -> None:
    full = {"rows": torch.randn(6, 4), "columns": torch.randn(3, 8), "same": torch.randn(3)}
    parts = [
        {
            "rows": full["rows"].chunk(2)[rank],
            "columns": full["columns"].chunk(2, 1)[rank].contiguous(),
            "same": full["same"],
        }
        for rank in range(2)
    ]
    splits = {
        "rows": {"shape": [6, 4], "dim": 0},
        "columns": {"shape": [3, 8], "dim": 1},
        "same": {"shape": [3], "dim": None},
    }
    record = {"world_size": 2, "step": 9, "tensors": splits}
    source = open_checkpoint(write_plain(tmp_path / "source", parts, record))
    result = write(WRITER, source, tmp_path / "out", dp=4)
    assert_same_tensors(result, source)
    assert result.step == 9
    assert json.loads((tmp_path / "out/metadata.json").read_text()) == {**record, "world_size": 4}
    part = loaded(tmp_path / "out/shard_00003.pt")
    assert torch.equal(part["columns"], full["columns"][:, 6:])
    assert torch.equal(part["same"], full["same"])


def test_files_that_nothing_can_divide_stay_as_they_are(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = [
        {"model": {"w": torch.full((3,), rank)}, "lists": [{"t": torch.ones(1)}], "n": rank}
        for rank in range(2)
    ]
    folder = write_plain(tmp_path / "source", parts, name="shard_{:05d}_of_{:05d}.pt")
    source = open_checkpoint(folder)
    result = write(WRITER, source, tmp_path / "out")
    assert_same_tensors(result, source)
    for rank in range(2):
        back = loaded(tmp_path / f"out/shard_0000{rank}_of_00002.pt")
        assert back["n"] == rank
        assert torch.equal(back["model"]["w"], parts[rank]["model"]["w"])
        assert back["lists"] == [{"t": torch.ones(1)}]
    with pytest.raises(UnsupportedError, match="nothing says how w is divided") as caught:
        WRITER.layout(Content.of(source), LayoutRequest(dp=1))
    assert caught.value.kind == "unknown-rule"
    content = without(Content.of(source), "*:w")
    layout = WRITER.layout(content, LayoutRequest(dp=1))
    assert set(layout.unplaced) == {"extra:rank1:rank1.lists.0.t", "rank_1.n"}


def test_tied_weights_share_a_storage_in_every_rank(tmp_path: Path) -> None:
    shared = torch.randn(5, 3)
    source = saved(tmp_path / "s.pt", {"embed": shared, "head": shared})
    result = write(WRITER, source, tmp_path / "out", dp=2)
    assert dict(result.aliases) == {"head": "embed"}
    part = loaded(tmp_path / "out/model_world_size_2_rank_1.pt")
    assert part["head"]._local_tensor.data_ptr() == part["embed"]._local_tensor.data_ptr()


@pytest.mark.parametrize("optimizer", ["fp32", "masters"])
def test_moments_that_stages_share_are_no_state_of_one_rank(tmp_path: Path, optimizer: Any) -> None:
    """The last stage has a tied embedding's moments too, under a number of its own."""
    path = write_megatron(tmp_path / "in", Job(pp=2, tied=True, optimizer=optimizer)).path
    source = open_checkpoint(path)
    result = write(WRITER, source, tmp_path / "out", dp=2)
    assert set(result.tensors) - set(source.aliases) == set(source.tensors)
    assert all(type(key) is str for key in loaded(tmp_path / f"out/{OPTIMIZER}")["state"])


def test_other_components_have_no_place(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}
    layout = WRITER.layout(Content.of(saved(tmp_path / "s.pt", state)), LayoutRequest(dp=2))
    assert layout.unplaced == ["ema:w"]


@given(
    shapes=st.lists(
        st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4
    ),
    first=st.integers(1, 4),
    second=st.integers(1, 4),
)
@settings(deadline=None, max_examples=20)
def test_any_shapes_over_any_worlds_and_back(
    shapes: list[tuple[int, ...]], first: int, second: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("worlds")
    state = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    source = saved(folder / "s.pt", state)
    one = write(WRITER, source, folder / "one", dp=first)
    two = write(WRITER, one, folder / "two", dp=second)
    assert_same_tensors(two, source)
    assert_sound(two)
    back = write(WRITER, two, folder / "back", dp=first)
    assert_same_tensors(back, source)
