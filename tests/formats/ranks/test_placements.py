"""DTensors in rank files as torch pickles them, and files that lie or attack."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, NotFoundError, UnsafeError, UnsupportedError, worst
from ftckpt.formats.ranks import Ranks
from tests.conformance.formats import findings_of
from tests.formats.ranks.jobs import DATA, JOBS, job, kinds, opened, truth_of, write_plain


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
