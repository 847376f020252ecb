"""Legacy Megatron: roots, and checkpoints that Megatron-LM itself wrote."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import ftckpt
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.inspection.resume import Presence, resume_check
from tests.builders.archives import extract
from tests.builders.megatron_files import altered, opened, write
from tests.builders.megatron_model import Job
from tests.conformance.formats import Truth

SHARED = Path(__file__).parents[4] / "shared" / "checkpoints"


class TestRoot:
    def test_the_tracker_points_to_an_iteration(self, tmp_path: Path) -> None:
        for iteration in (100, 300, 200):
            write(tmp_path, Job(iteration=iteration, layers=1))
        found = ftckpt.latest(str(tmp_path))
        assert (found.path, found.step, found.format) == (
            f"{tmp_path}/iter_0000300", 300, "megatron"
        )  # fmt: skip
        (pointer,) = found.pointers
        assert (pointer.name, pointer.agrees) == ("latest_checkpointed_iteration.txt", False)

    def test_the_tracker_points_to_a_release(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(layers=1))
        altered(made, "mp_rank_00", iteration=0)
        made.path.rename(tmp_path / "release")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
        found = ftckpt.latest(str(tmp_path))
        assert (found.code, found.path, found.step) == (ExitCode.OK, f"{tmp_path}/release", 0)
        assert [p.agrees for p in found.pointers] == [True]


REAL = ("mcore_torch_tp2pp2", "mcore_torch_tp2dp2_distopt_bf16")
# Names of Transformer Engine's layers, in which the truth is told, and of the plain ones.
_PLAIN = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    archive = SHARED / f"{request.param}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    extract(archive, tmp_path)
    return tmp_path / str(request.param)


def told(file: Path) -> Iterator[tuple[str, Truth]]:
    """Yield the tensors that the framework gathered from memory, one a layer, by their keys."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    for stored, info in json.loads(raw[8 : 8 + length]).items():
        if stored == "__metadata__":
            continue
        data = raw[8 + length :][slice(*info["data_offsets"])]
        dtype = {"F32": "float32", "BF16": "bfloat16"}[info["dtype"]]
        name, kind = stored, ""
        if stored.startswith("optimizer.state."):
            kind, _, name = stored.removeprefix("optimizer.state.").partition(".")
            kind = {"param": "master"}.get(kind, kind) + ":"
        for theirs, plain in _PLAIN:
            name = name.replace(theirs, plain)
        if ".layers." not in name:
            yield kind + name, Truth(dtype, tuple(info["shape"]), data)
            continue
        layers, *shape = info["shape"]
        size = len(data) // layers
        for layer in range(layers):
            key = kind + name.replace(".layers.", f".layers.{layer}.", 1)
            yield key, Truth(dtype, tuple(shape), data[layer * size : (layer + 1) * size])


class TestReal:
    def test_one_random_stream_a_model_part_is_all_of_them(self, real: Path) -> None:
        items = {item.key: item for item in resume_check(opened(real / "ckpt" / "iter_0000003"))}
        for key in ("rng-python", "rng-torch", "rng-cuda"):
            assert items[key].presence is Presence.PRESENT
            assert "but only" not in items[key].reason

    def test_every_tensor_equals_the_gathered_one(self, real: Path) -> None:
        expected = dict(told(real / "truth" / "state.safetensors"))
        expected |= dict(told(real / "truth" / "optim.safetensors"))
        checkpoint = opened(real / "ckpt" / "iter_0000003")
        held = {
            key
            for key, tensor in checkpoint.tensors.items()
            if not tensor.component.startswith("extra:") and not key.endswith(".step")
        }
        assert held == set(expected)
        for key, (dtype, shape, data) in expected.items():
            tensor = checkpoint.tensors[key]
            assert (tensor.dtype.name, tensor.shape) == (dtype, shape), key
            assert read_tensor(checkpoint, key) == data, key
        assert list(checkpoint.check()) == []
        assert checkpoint.step == 3
        assert checkpoint.topology.world_size == 4

    def test_every_rank_holds_its_shard(self, real: Path) -> None:
        """The pieces of each rank's weights cover as many bytes as that rank held in memory."""
        raw = (real / "truth" / "local_shards.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        checkpoint = opened(real / "ckpt" / "iter_0000003")
        grid = checkpoint.layout.grid
        held: dict[int, int] = dict.fromkeys(range(grid.tp * grid.pp), 0)
        for tensor in checkpoint.tensors.values():
            for piece in tensor.pieces if tensor.component == "model" else ():
                assert piece.rank is not None
                held[piece.rank] += piece.extent.length
        expected = dict.fromkeys(held, 0)
        for name, info in header.items():
            if name != "__metadata__":
                t, p = (int(part[2:]) for part in name.split(".")[:2])
                first, last = info["data_offsets"]
                expected[t * grid.pp + p] += last - first
        assert held == expected

    def test_the_root_and_its_values(self, real: Path) -> None:
        found = ftckpt.latest(str(real / "ckpt"))
        assert (found.code, found.step) == (ExitCode.OK, 3)
        report = ftckpt.verify(str(real / "ckpt" / "iter_0000003"), level="values")
        assert report.code is ExitCode.OK
