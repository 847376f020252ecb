"""One file a rank: sets written by real jobs of four processes, and by torch in this process."""

from __future__ import annotations

import json
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.assembly import read_tensor
from ftckpt.checkpoint import CommitState, Kind
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    worst,
)
from ftckpt.formats.rank_checkpoint import RanksCheckpoint
from ftckpt.formats.ranks import Ranks
from ftckpt.resume import Presence, resume_check
from ftckpt.source import Source
from ftckpt.stores import open_store
from tests.format_suite import (
    FormatTests,
    Made,
    Truth,
    findings_of,
    listing_of_path,
)

DATA = Path(__file__).parents[1] / "data" / "ranks"
SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
JOBS = ("fsdp1", "tp_fsdp2", "hsdp")


def opened(path: Path) -> RanksCheckpoint:
    return Ranks().open(Source.directory(open_store(str(path))))


def truth_of(value: Any) -> Truth:
    import torch

    data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return Truth(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def key_of(name: str) -> str:
    """Return the key of a tensor as the generators of the truth name it."""
    if not name.startswith("optim:"):
        return name
    parameter, _, leaf = name.removeprefix("optim:").rpartition(".")
    return f"optimizer:{parameter}.step" if leaf == "step" else f"{leaf}:{parameter}"


def truth_file(path: Path, prefix: str = "") -> dict[str, Truth]:
    from safetensors.torch import load_file

    return {key_of(prefix + name): truth_of(v) for name, v in load_file(path).items()}


def rng_truth(folder: Path) -> dict[str, Truth]:
    import torch

    return {
        f"extra:rank{r}:rng.cpu": truth_of(torch.load(file, weights_only=False)["rng"]["cpu"])
        for r in range(4)
        if (file := folder / f"extra_state_world_size_4_rank_{r}.pt")
    }


def job(root: Path, name: str) -> Path:
    """Copy one job's step, without its truth."""
    shutil.copytree(DATA / name / "actor", root / name / "actor")
    return root / name


def write_plain(folder: Path, parts: list[Any], record: Any = None, name: str = "") -> Path:
    """Write `shard_%05d.pt` of each part."""
    import torch

    folder.mkdir(parents=True)
    for rank, part in enumerate(parts):
        torch.save(part, folder / (name or "shard_{:05d}.pt").format(rank, len(parts)))
    if record is not None:
        (folder / "metadata.json").write_text(json.dumps(record))
    return folder


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
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
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
            assert checkpoint.step == 3

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


def kinds(path: Path) -> set[str]:
    return {f.kind for f in findings_of(Ranks(), path) if f.code is not ExitCode.OK}


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


class TestPlain:
    """Plain tensors are merged by a record, never by looking alike."""

    def test_without_a_record_each_rank_keeps_its_own(self, tmp_path: Path) -> None:
        import torch

        parts = [{"w": torch.full((2, 2), float(r))} for r in range(2)]
        checkpoint = opened(write_plain(tmp_path / "p", parts))
        assert set(checkpoint.tensors) == {"extra:rank0:w", "extra:rank1:w"}
        assert read_tensor(checkpoint, "extra:rank1:w") == truth_of(parts[1]["w"]).data
        assert {f.kind for f in checkpoint.notes} == {"note"}
        assert any("nothing records how 1 tensors" in f.message for f in checkpoint.notes)

    def test_equal_values_are_no_proof_of_a_replica(self, tmp_path: Path) -> None:
        import torch

        parts = [{"w": torch.zeros(3)}] * 2
        checkpoint = opened(write_plain(tmp_path / "p", parts, {"world_size": 2}))
        assert set(checkpoint.tensors) == {"extra:rank0:w", "extra:rank1:w"}

    def test_one_rank_is_the_whole(self, tmp_path: Path) -> None:
        import torch

        names = "shard_{:05d}_of_{:05d}.pt"
        checkpoint = opened(write_plain(tmp_path / "p", [{"w": torch.ones(3)}], None, names))
        assert set(checkpoint.tensors) == {"w"}
        assert list(checkpoint.check()) == list(checkpoint.notes) == []

    def test_ranks_after_a_gap_have_no_place(self, tmp_path: Path) -> None:
        import torch

        record = {"world_size": 3, "tensors": {"w": {"shape": [6], "dim": 0}}}
        parts = [{"w": torch.arange(2.0) + 2 * r} for r in range(3)]
        folder = write_plain(tmp_path / "p", parts, record)
        (folder / "shard_00001.pt").unlink()
        checkpoint = opened(folder)
        assert [f.kind for f in checkpoint.check()] == ["missing-rank"]
        assert [p.rank for p in checkpoint.tensors["w"].pieces] == [0]

    def test_shapes_that_the_record_cannot_hold(self, tmp_path: Path) -> None:
        import torch

        record = {"world_size": 2, "tensors": {"w": {"shape": [4, 3], "dim": 0}}}
        parts = [{"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 2)}]
        folder = write_plain(tmp_path / "p", parts, record)
        assert kinds(folder) == {"shape-mismatch", "hole"}

    def test_types_that_disagree(self, tmp_path: Path) -> None:
        import torch

        record = {"tensors": {"w": {"shape": [4], "dim": 0}}}
        parts = [{"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float16)}]
        assert "dtype-mismatch" in kinds(write_plain(tmp_path / "p", parts, record))

    @pytest.mark.parametrize("split", [
        {"shape": [4], "dim": 1}, {"shape": [-1], "dim": 0}, {"shape": "4", "dim": 0},
        {"shape": [4], "dim": True},
    ])  # fmt: skip
    def test_a_record_that_cannot_be(self, tmp_path: Path, split: Any) -> None:
        folder = write_plain(tmp_path / "p", [{}], {"tensors": {"w": split}})
        with pytest.raises(CorruptError) as caught:
            opened(folder)
        assert caught.value.kind == "bad-index"

    def test_tied_weights_are_an_alias(self, tmp_path: Path) -> None:
        import torch

        weight = torch.ones(3)
        folder = write_plain(tmp_path / "p", [{"a": weight, "b": weight}])
        assert opened(folder).aliases == {"b": "a"}

    def test_unproven_ids_keep_their_numbers(self, tmp_path: Path) -> None:
        import torch

        state = {i: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)} for i in range(2)}
        part = {
            "model": {"a": torch.ones(3), "b": torch.ones(3)},
            "optimizer": {"state": state, "param_groups": [{"params": [0]}, {"params": [1]}]},
        }
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert {"exp_avg:0.0", "exp_avg:1.0"} < set(checkpoint.tensors)

    def test_wrappers_are_taken_off_and_remembered(self, tmp_path: Path) -> None:
        import torch

        state = {"module.a": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}}
        part = {
            "model": {"module._orig_mod.a": torch.ones(3), "module.b": torch.ones(2)},
            "optimizer": {
                "state": {"module._orig_mod.a": state["module.a"]},
                "param_groups": [{"params": ["module._orig_mod.a"]}],
            },
        }
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert set(checkpoint.tensors) == {"a", "b", "exp_avg:a", "optimizer:a.step"}
        assert checkpoint.tensors["a"].stored_name == "model.module._orig_mod.a"

    def test_names_that_the_optimizer_was_given(self, tmp_path: Path) -> None:
        import torch

        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(list(layer.named_parameters())[::-1])
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        part = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert checkpoint.tensors["exp_avg:bias"].shape == (2,)
        assert checkpoint.tensors["exp_avg:weight"].shape == (2, 2)


def fake_world(world_size: int, save: Callable[[int], Any]) -> Iterator[Any]:
    """Yield what `save` gives on each rank of a world that torch only believes in."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield save(rank)
        finally:
            dist.destroy_process_group()


def write_dtensors(
    folder: Path, full: Any, mesh_shape: tuple[int, ...], placements: list[Any]
) -> Path:
    """Save the rank files that a job with this mesh would, by torch's own arithmetic."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    folder.mkdir()

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        if any(p.is_partial() for p in placements):
            local = full
        else:
            size, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
            window = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            local = full[window].clone()
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        name = f"model_world_size_{mesh.size()}_rank_{rank}.pt"
        torch.save({"w": tensor}, folder / name)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = 1
        for size in mesh_shape:
            world *= size
        list(fake_world(world, save))
    return folder


class TestPlacements:
    """DTensors that torch pickles in one process, over meshes that no test machine has."""

    def test_every_layout_reads_back(self, tmp_path: Path) -> None:
        import torch
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        full = torch.arange(60.0).reshape(10, 6)
        layouts: list[tuple[tuple[int, ...], list[Any]]] = [
            ((3,), [Shard(0)]),
            ((4,), [Shard(1)]),
            ((2, 3), [Shard(0), Shard(1)]),
            ((2, 2), [Shard(0), Shard(0)]),
            ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
            ((3, 2), [Replicate(), Shard(1)]),
            ((2, 2, 2), [Shard(1), _StridedShard(0, split_factor=2), Shard(0)]),
        ]
        for number, (mesh, placements) in enumerate(layouts):
            folder = write_dtensors(tmp_path / str(number), full, mesh, placements)
            checkpoint = opened(folder)
            assert list(checkpoint.check()) == [], placements
            assert read_tensor(checkpoint, "w") == truth_of(full).data, placements

    def test_partial_sums_are_refused(self, tmp_path: Path) -> None:
        import torch
        from torch.distributed.tensor import Partial

        folder = write_dtensors(tmp_path / "p", torch.ones(4), (2,), [Partial()])
        with pytest.raises(UnsupportedError) as caught:
            opened(folder)
        assert (caught.value.kind, caught.value.tensor) == ("partial-tensor", "w")

    def test_a_local_tensor_of_the_wrong_shape(self, tmp_path: Path) -> None:
        import torch
        from torch.distributed.tensor import Shard

        write_dtensors(tmp_path / "a", torch.ones(8), (2,), [Shard(0)])
        write_dtensors(tmp_path / "b", torch.ones(9), (2,), [Shard(0)])
        name = "model_world_size_2_rank_1.pt"
        shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
        assert kinds(tmp_path / "a") == {"shape-mismatch", "hole"}

    def test_sharded_here_and_whole_there(self, tmp_path: Path) -> None:
        import torch
        from torch.distributed.tensor import Shard

        folder = write_dtensors(tmp_path / "a", torch.ones(8), (2,), [Shard(0)])
        torch.save({"w": torch.ones(8)}, folder / "model_world_size_2_rank_1.pt")
        assert kinds(folder) == {"bad-metadata", "hole"}


class TestBadInput:
    def test_a_hostile_rank_stops_everything(self, tmp_path: Path) -> None:
        import torch

        canary = tmp_path / "canary"

        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (canary,)

        class Worse:
            def __reduce__(self) -> Any:
                import os

                return os.system, (f"touch {canary}",)

        for evil in (Evil(), Worse()):
            folder = write_plain(tmp_path / type(evil).__name__, [{"w": torch.ones(1)}, evil])
            with pytest.raises(UnsafeError):
                opened(folder)
        assert not canary.exists()

    def test_shared_references_do_not_unfold_without_end(self, tmp_path: Path) -> None:
        bomb: list[Any] = [{}]
        for _ in range(40):
            bomb = [bomb, bomb]
        endless: list[Any] = []
        endless.append(endless)
        for number, tree in enumerate((endless, {"model": endless}, bomb)):
            with pytest.raises(UnsafeError) as caught:
                opened(write_plain(tmp_path / str(number), [tree]))
            assert caught.value.kind == "unsafe-pickle"

    def test_sparse_and_quantized_tensors_are_named(self, tmp_path: Path) -> None:
        import torch

        folder = write_plain(tmp_path / "p", [{"w": torch.eye(3).to_sparse()}])
        with pytest.raises(UnsupportedError) as caught:
            opened(folder)
        assert "sparse" in caught.value.message
        assert caught.value.tensor == "w"

    def test_no_rank_file_is_not_found(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("")
        with pytest.raises(NotFoundError):
            opened(tmp_path)

    @pytest.mark.parametrize("job_name", JOBS)
    def test_flipped_pickle_bytes_end_in_a_named_failure_or_not_at_all(
        self, job_name: str, tmp_path: Path
    ) -> None:
        step = job(tmp_path, job_name)
        path = step / "actor" / "model_world_size_4_rank_1.pt"
        good = path.read_bytes()
        for place in range(130, 4000, 97):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :])
            found = findings_of(Ranks(), step)
            assert worst(f.code for f in found) in (ExitCode.OK, ExitCode.CORRUPT, ExitCode.UNSAFE)


def test_strided_shards_do_not_lie_in_the_order_of_ranks() -> None:
    checkpoint = opened(DATA / "tp_fsdp2" / "actor")
    offsets = [p.box.offsets[0] for p in checkpoint.tensors["up.weight"].pieces]
    assert offsets == [0, 6, 3, 9]


def test_a_name_that_stands_twice_in_a_file(tmp_path: Path) -> None:
    import torch

    part = {"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(3)}}
    assert kinds(write_plain(tmp_path / "p", [part])) == {"duplicate-tensor"}
