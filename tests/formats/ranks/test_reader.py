"""One file a rank: sets written by real jobs of four processes, whole and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import CommitState, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, NotFoundError, worst
from ftckpt.formats.ranks import Ranks
from ftckpt.inspection.resume import Presence, resume_check
from tests.builders.archives import extract
from tests.conformance.formats import FormatTests, Made, listing_of_path
from tests.formats.ranks.jobs import (
    DATA,
    JOBS,
    SHARED,
    job,
    kinds,
    opened,
    rng_truth,
    truth_file,
    truth_of,
    write_plain,
)


def plain(root: Path) -> Made:
    """A training state in plain shards with a record of how it is cut; uneven on axis 1."""
    import torch

    torch.manual_seed(3)
    weight, bias = torch.randn(4, 10), torch.randn(5)
    moments = [torch.randn(4, 10), torch.rand(4, 10)]
    pieces = [weight[:, 0:4], weight[:, 4:7], weight[:, 7:10]]
    parts: list[dict[str, Any]] = []
    for rank, piece in enumerate(pieces):
        cut = slice(*((0, 4), (4, 7), (7, 10))[rank])
        state = {"step": torch.tensor(5.0), "exp_avg": moments[0][:, cut].clone(),
                 "exp_avg_sq": moments[1][:, cut].clone()}  # fmt: skip
        parts.append(
            {
                "model": {"w": piece.clone(), "b": bias},
                "optimizer": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
                "step": 5,
                "scheduler": {"last_epoch": 5},
            }
        )
    record = {
        "world_size": 3,
        "step": 5,
        "tensors": {
            "w": {"shape": [4, 10], "dim": 1},
            "b": {"shape": [5], "dim": None},
            "optimizer.state.0.step": {"shape": [], "dim": None},
        },
    }
    truth = {"w": truth_of(weight), "b": truth_of(bias), "exp_avg:w": truth_of(moments[0]),
             "exp_avg_sq:w": truth_of(moments[1]),
             "optimizer:w.step": truth_of(parts[0]["optimizer"]["state"][0]["step"])}  # fmt: skip
    return Made(write_plain(root / "plain", parts, record), truth)


class TestRanks(FormatTests):
    format = Ranks()
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        made = [plain(root)]
        for name in JOBS:
            truth = truth_file(DATA / name / "truth.safetensors") | rng_truth(DATA / name / "actor")
            made.append(Made(job(root, name), truth))
        return made


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = SHARED / "verl_fsdp.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    root = tmp_path_factory.mktemp("verl")
    extract(archive, root)
    return root / "verl_fsdp"


class TestVerl:
    def test_every_tensor_equals_the_gathered_one(self, verl: Path) -> None:
        truth = truth_file(verl / "truth" / "state.safetensors")
        truth |= truth_file(verl / "truth" / "optim.safetensors", "optim:")
        for place in ("global_step_3", "global_step_3/actor"):
            checkpoint = opened(verl / "ckpt" / place)
            mine = {k for k in checkpoint.tensors if not k.startswith("extra:")}
            assert mine == set(truth)
            for key, (dtype, shape, data) in truth.items():
                tensor = checkpoint.tensors[key]
                assert (tensor.dtype.name, tensor.shape) == (dtype, shape)
                assert read_tensor(checkpoint, key) == data, key
            assert [*checkpoint.check(), *checkpoint.notes] == []
            assert checkpoint.topology.world_size == checkpoint.topology.dp == 4
            assert checkpoint.commit.state is CommitState.NO_MARKER
            assert (checkpoint.step, checkpoint.optimizer_count) == (None, 3)

    def test_buffers_stay_whole_on_every_rank(self, verl: Path) -> None:
        checkpoint = opened(verl / "ckpt" / "global_step_3")
        buffers = {k for k, t in checkpoint.tensors.items() if t.kind is Kind.BUFFER}
        assert buffers == {"rope_freq", "tokens_seen"}
        assert [p.replica for p in checkpoint.tensors["rope_freq"].pieces] == [0, 1, 2, 3]

    def test_what_a_resume_finds(self, verl: Path) -> None:
        items = {i.key: i for i in resume_check(opened(verl / "ckpt" / "global_step_3"))}
        for key in ("weights", "moments", "scheduler", "rng-python", "rng-numpy", "rng-torch"):
            assert items[key].presence is Presence.PRESENT, items[key]
        assert items["rng-numpy"].ranks == items["rng-numpy"].world_size == 4
        assert items["rng-cuda"].presence is items["data"].presence is Presence.ABSENT
        assert items["moments"].missing == ()


class TestEvidence:
    def test_every_piece_lies_in_a_record_of_its_tensor(self) -> None:
        for name in JOBS:
            checkpoint = opened(DATA / name / "actor")
            records = list(checkpoint.records())
            assert all(r.crc32 is not None for r in records)
            for key, tensor in checkpoint.tensors.items():
                for piece in tensor.pieces:
                    if not piece.extent.length:
                        continue
                    (own,) = (
                        r
                        for r in records
                        if r.extent.file == piece.extent.file
                        and r.extent.offset <= piece.extent.offset < r.extent.end
                    )
                    assert own.extent.end >= piece.extent.end
                    assert (own.owner, own.rank) == (key, piece.rank)

    def test_objects_are_inert_data_of_their_rank(self) -> None:
        checkpoint = opened(DATA / "hsdp" / "actor")
        info = checkpoint.objects["rank_2.lr_scheduler"]
        assert (info.rank, info.extent.file) == (2, "extra_state_world_size_4_rank_2.pt")
        assert checkpoint.load_object("rank_2.lr_scheduler")["last_epoch"] == 2
        groups = checkpoint.load_object("rank_0.optimizer.param_groups")
        assert groups[0]["params"] == list(range(5))
        assert "rank_2.lr_scheduler.last_epoch" in checkpoint.fields()
        with pytest.raises(NotFoundError):
            checkpoint.load_object("rank_9.lr_scheduler")

    def test_counters_of_optimizer_and_scheduler(self) -> None:
        for name in JOBS:
            checkpoint = opened(DATA / name / "actor")
            scalars = list(checkpoint.scalars(2))
            assert {s.value for s in scalars} == {2.0}
            assert len({s.file for s in scalars}) == 8
            assert max([s.file for s in scalars].count(s.file) for s in scalars) == 2

    def test_the_mesh_gives_the_topology(self) -> None:
        topology = opened(DATA / "tp_fsdp2" / "actor").topology
        assert (topology.world_size, topology.tp, topology.dp) == (4, 2, 2)


class TestSets:
    """Names and contents that are not one complete set."""

    @pytest.fixture(params=JOBS)
    def step(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return job(tmp_path, request.param)

    def test_swapped_ranks_are_told_by_their_content(self, step: Path) -> None:
        one, two = (step / "actor" / f"model_world_size_4_rank_{r}.pt" for r in (1, 2))
        one.rename(step / "aside")
        two.rename(one)
        (step / "aside").rename(two)
        found = [f for f in opened(step).check() if f.kind == "wrong-rank"]
        assert {f.rank for f in found} == {1, 2}
        assert worst(f.code for f in found) is ExitCode.CORRUPT

    def test_a_copied_rank_is_told_by_its_content(self, step: Path) -> None:
        one, two = (step / "actor" / f"optim_world_size_4_rank_{r}.pt" for r in (0, 3))
        shutil.copy(one, two)
        assert "wrong-rank" in kinds(step)

    def test_a_file_of_another_world(self, step: Path) -> None:
        stale = step / "actor" / "model_world_size_8_rank_7.pt"
        shutil.copy(step / "actor" / "model_world_size_4_rank_0.pt", stale)
        (found,) = opened(step).check()
        assert (found.kind, found.file) == ("world-size", f"actor/{stale.name}")

    def test_a_configuration_that_disagrees(self, step: Path) -> None:
        (step / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
        (found,) = opened(step).check()
        assert (found.kind, found.file) == ("world-size", "actor/fsdp_config.json")

    def test_a_damaged_configuration(self, step: Path) -> None:
        (step / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_si')
        with pytest.raises(CorruptError) as caught:
            opened(step)
        assert caught.value.kind == "bad-index"

    def test_a_missing_rank_leaves_a_hole_and_no_wrong_bytes(self, tmp_path: Path) -> None:
        step = job(tmp_path, "tp_fsdp2")
        (step / "actor" / "model_world_size_4_rank_2.pt").unlink()
        checkpoint = opened(step)
        (found,) = checkpoint.check()
        assert (found.kind, found.rank) == ("missing-rank", 2)
        with pytest.raises(CorruptError) as caught:
            read_tensor(checkpoint, "up.weight")
        assert caught.value.kind == "hole"

    def test_a_missing_replica_is_found_though_every_element_is_there(self, tmp_path: Path) -> None:
        step = job(tmp_path, "hsdp")
        (step / "actor" / "model_world_size_4_rank_3.pt").unlink()
        checkpoint = opened(step)
        assert [f.kind for f in checkpoint.check()] == ["missing-rank"]
        truth = truth_file(DATA / "hsdp" / "truth.safetensors")
        assert read_tensor(checkpoint, "up.weight") == truth["up.weight"].data

    def test_a_world_of_millions_is_told_in_few_findings(self, tmp_path: Path) -> None:
        import torch

        torch.save({}, tmp_path / "model_world_size_9999999_rank_0.pt")
        found = list(opened(tmp_path).check())
        assert len(found) == 65
        assert {f.kind for f in found} == {"missing-rank"}


class TestPlacesOfVerl:
    def test_critic_is_a_component_of_its_own(self, tmp_path: Path) -> None:
        step = job(tmp_path, "fsdp1")
        shutil.copytree(DATA / "hsdp" / "actor", step / "critic")
        checkpoint = opened(step)
        assert list(checkpoint.check()) == []
        ours = truth_file(DATA / "fsdp1" / "truth.safetensors")
        theirs = truth_file(DATA / "hsdp" / "truth.safetensors")
        assert read_tensor(checkpoint, "up.weight") == ours["up.weight"].data
        assert read_tensor(checkpoint, "extra:critic:up.weight") == theirs["up.weight"].data
        key = "extra:critic:exp_avg:up.weight"
        assert read_tensor(checkpoint, key) == theirs["exp_avg:up.weight"].data
        assert "critic.rank_0.lr_scheduler" in checkpoint.objects

    def test_the_dataloader_beside_the_ranks_is_an_object(self, tmp_path: Path) -> None:
        import torch

        step = job(tmp_path, "hsdp")
        torch.save({"_snapshot": {"position": 17}}, step / "data.pt")
        (step / "actor" / "huggingface").mkdir()
        (step / "actor" / "huggingface" / "config.json").write_text("{}")
        checkpoint = opened(step)
        assert checkpoint.load_object("data.pt") == {"_snapshot": {"position": 17}}
        assert set(checkpoint.members()) == set(checkpoint.source.entries)
        items = {i.key: i for i in resume_check(checkpoint)}
        assert items["data"].presence is Presence.PRESENT

    def test_recognition_needs_one_listing_more_at_most(self, tmp_path: Path) -> None:
        step = job(tmp_path, "hsdp")
        found = Ranks().recognise(listing_of_path(step))
        assert found is not None
        assert found.reason == "has actor/model_world_size_4_rank_0.pt"
        assert Ranks().recognise(listing_of_path(tmp_path)) is None
        single = step / "actor" / "model_world_size_4_rank_0.pt"
        assert Ranks().recognise(listing_of_path(single)) is None


def test_an_actor_and_a_critic_keep_their_own_random_states(tmp_path: Path) -> None:
    for who in ("actor", "critic"):
        shutil.copytree(DATA / "hsdp" / "actor", tmp_path / who)
    checkpoint = opened(tmp_path)
    states = [k for k in checkpoint.tensors if k.startswith("extra:rank0:")]
    alone = [k for k in opened(DATA / "hsdp" / "actor").tensors if k.startswith("extra:rank0:")]
    assert alone
    assert len(states) == 2 * len(alone)
    assert sum(k.startswith("extra:rank0:critic.") for k in states) == len(alone)
