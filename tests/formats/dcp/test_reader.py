"""torch.distributed.checkpoint: what torch writes reads back bit for bit, whatever the layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard

from ftckpt.checkpoint import CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.reader import DcpCheckpoint, open_dcp
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.archives import extract
from tests.conformance.formats import FormatTests, Made, Truth, open_path
from tests.formats.dcp.writing import DATA, save, truth_of

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip


def weights(rows: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "up.weight": torch.randn(rows, 3, generator=generator),
        "up.bias": torch.randn(rows, generator=generator).to(torch.bfloat16),
        "large": torch.randn(40, 70, generator=generator),
    }


def model_truth(tensors: dict[str, torch.Tensor]) -> dict[str, Truth]:
    return {name: truth_of(tensor) for name, tensor in tensors.items()}


def of_every_dtype(root: Path) -> Made:
    bits = torch.arange(48, dtype=torch.uint8)
    tensors = {
        str(t).removeprefix("torch."): (
            (bits[:6] % 2).to(torch.bool) if t is torch.bool else bits.view(t).clone()
        )
        for t in DTYPES
    }
    return Made(save({"model": tensors}, root / "dtypes"), model_truth(tensors))


def of_odd_views(root: Path) -> Made:
    base = torch.arange(120, dtype=torch.float32).reshape(10, 12)
    tensors = {
        "transposed": base.t(),
        "sliced": base[2:9:3, 1:11:4],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    return Made(save({"model": tensors}, root / "views"), model_truth(tensors))


def nested(root: Path) -> Made:
    w = weights()
    state: dict[str, Any] = {
        "model": w,
        "optimizer": {
            "state": {
                n: {"step": torch.tensor(7.0), "exp_avg": t.float(), "exp_avg_sq": t.float() ** 2}
                for n, t in w.items()
            },
            "param_groups": [{"lr": 0.1, "params": list(w)}],
        },
        "nest": {"a.b": {"c": torch.ones(2)}, 3: [torch.zeros(1), {"d": torch.ones(1, 1)}]},
        "train_state": {"step": 7, "losses": (1.0, 2.0)},
        "blob": b"bytes",
    }
    truth = model_truth(w)
    for name, tensor in w.items():
        truth[f"exp_avg:{name}"] = truth_of(tensor.float())
        truth[f"exp_avg_sq:{name}"] = truth_of(tensor.float() ** 2)
        truth[f"optimizer:{name}.step"] = truth_of(torch.tensor(7.0))
    truth["extra:nest:a.b.c"] = truth_of(torch.ones(2))
    truth["extra:nest:3.0"] = truth_of(torch.zeros(1))
    truth["extra:nest:3.1.d"] = truth_of(torch.ones(1, 1))
    return Made(save(state, root / "nested"), truth)


def fixture(root: Path, kind: str, step: str = "step-3") -> Made:
    path = root / f"{kind}-{step}"
    shutil.copytree(DATA / kind / step, path)
    truth = {}
    for name, tensor in load_file(DATA / kind / f"{step}.safetensors").items():
        truth[key_of(name)] = truth_of(tensor)
    return Made(path, truth)


def key_of(stored: str) -> str:
    """Return the key of a name in the generator's truth: `model.x`, `optimizer.state.x.leaf`."""
    head, _, rest = stored.partition(".")
    label = ""
    if head == "trainer":  # one of several models below a wrapper
        whose, head, rest = rest.split(".", 2)
        label = f"{whose}."
    if head == "model":
        return label + rest
    assert head in ("optimizer", "optim"), stored
    name, _, leaf = rest.removeprefix("state.").rpartition(".")
    name = label + name
    return f"{leaf}:{name}" if leaf.startswith("exp_avg") else f"optimizer:{name}.{leaf}"


class TestDcp(FormatTests):
    format = Dcp()
    truncated = frozenset({"truncated-file"})
    empty = frozenset({"truncated-file"})

    def make(self, root: Path) -> list[Made]:
        w = weights()
        truth = model_truth(w)
        one = {"w": torch.randn(3)}
        return [
            nested(root),
            of_every_dtype(root),
            of_odd_views(root),
            Made(save({"model": w}, root / "per-item", single_file_per_rank=False), truth),
            # More threads than items: the others leave files of 0 bytes.
            Made(save({"model": one}, root / "threads", thread_count=4), model_truth(one)),
            Made(save({"model": w, "n": 1}, root / "zstd", _extensions=[ZStandard()]), truth),
            Made(save({"model": w}, root / "local", collectives=False), truth),
            fixture(root, "fsdp2"),
            fixture(root, "hsdp"),
            fixture(root, "tp"),
            fixture(root, "ranklocal"),
            fixture(root, "actors"),
        ]


def test_every_object_reads_back(tmp_path: Path) -> None:
    checkpoint = open_path(Dcp(), nested(tmp_path).path)
    held = {name: checkpoint.load_object(name) for name in checkpoint.objects}
    assert held["optimizer.param_groups.0.lr"] == 0.1
    assert held["optimizer.param_groups.0.params"] == ["up.weight", "up.bias", "large"]
    assert held["train_state.losses"] == (1.0, 2.0)
    assert held["blob"] == b"bytes"
    assert checkpoint.step == 7


def test_wrappers_are_taken_off_the_names(tmp_path: Path) -> None:
    names = ["module._orig_mod.a.weight", "module._orig_mod.b._checkpoint_wrapped_module.bias"]
    state: dict[str, Any] = {
        "model": {n: torch.ones(2) for n in names},
        "optimizer": {"state": {n: {"exp_avg": torch.ones(2)} for n in names}},
    }
    checkpoint = open_path(Dcp(), save(state, tmp_path / "c"))
    assert set(checkpoint.tensors) == {"a.weight", "b.bias", "exp_avg:a.weight", "exp_avg:b.bias"}
    assert checkpoint.tensors["a.weight"].stored_name == f"model.{names[0]}"


def test_a_name_that_only_some_tensors_begin_with_stays(tmp_path: Path) -> None:
    state = {"model": {"module.a": torch.ones(1), "head": torch.ones(1)}}
    checkpoint = open_path(Dcp(), save(state, tmp_path / "c"))
    assert set(checkpoint.tensors) == {"module.a", "head"}


def test_two_stored_names_of_one_meaning_are_both_kept(tmp_path: Path) -> None:
    state = {"model": {"x": torch.ones(1)}, "net": {"x": torch.zeros(1)}}
    checkpoint = open_path(Dcp(), save(state, tmp_path / "c"))
    assert {read_tensor(checkpoint, key) for key in checkpoint.tensors} == {
        truth_of(torch.ones(1)).data,
        truth_of(torch.zeros(1)).data,
    }


def test_copies_of_a_save_without_collectives_are_replicas() -> None:
    checkpoint = open_path(Dcp(), DATA / "ranklocal" / "step-3")
    seen = checkpoint.tensors["seen"]
    assert [(p.replica, p.rank) for p in seen.pieces] == [(0, 0), (1, 1)]
    assert seen.pieces[-1] == seen.pieces[1]
    assert {r.extent.file for r in checkpoint.records() if r.owner == "train_state.step"} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }


def test_data_may_lie_in_directories_below(tmp_path: Path) -> None:
    import pickle

    path = save({"model": weights()}, tmp_path / "c")
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for stored in metadata.storage_data.values():
        stored.relative_path = f"shards/a/{stored.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "shards" / "a").mkdir(parents=True)
    (path / "__0_0.distcp").rename(path / "shards" / "a" / "__0_0.distcp")
    checkpoint = open_path(Dcp(), path)
    assert set(checkpoint.members()) == {".metadata", "shards/a/__0_0.distcp"}
    for name, tensor in weights().items():
        assert read_tensor(checkpoint, name) == truth_of(tensor).data
    assert [f for f in checkpoint.check() if f.code is not ExitCode.OK] == []
    assert checkpoint.topology.world_size == 1


def test_what_the_commit_marker_shows(tmp_path: Path) -> None:
    checkpoint = open_path(Dcp(), save({"n": 1}, tmp_path / "c"))
    assert (checkpoint.commit.state, checkpoint.commit.marker) == (
        CommitState.COMMITTED,
        ".metadata",
    )


# --- checkpoints of the frameworks ---------------------------------------------------------------

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
ACCELERATE = (
    ("checkpoint_3/pytorch_model_fsdp_0", "state"),
    ("checkpoint_3/optimizer_0", "optim"),
)
MEGATRON = (("iter_0000003", "state"), ("iter_0000003", "optim"))
FRAMEWORKS = {
    "accelerate_fsdp1": ACCELERATE,
    "accelerate_fsdp2": ACCELERATE,
    "dcp_2d_tpfsdp": (("step-3", "state"),),
    "dcp_fsdp2_nested": (("step-3", "state"), ("step-4", "state_next")),
    "dcp_fsdp2_titan": (("step-3", "state"),),
    "dcp_torch26_fsdp2_async": (("step-3", "state"),),
    "mcore_torchdist_tp2pp2": MEGATRON,
    "mcore_torchdist_tp2dp2_fullyreshard_bf16": MEGATRON,
    "mcore0161_tp2dp2_dpreshard": (("iter_0000003", "state"),),
}  # fmt: skip


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("frameworks")}


def framework(name: str, unpacked: dict[str, Path]) -> Path:
    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    if name not in unpacked:
        extract(archive, unpacked[""])
        unpacked[name] = unpacked[""] / name
    return unpacked[name]


def stored(path: Path) -> DcpCheckpoint:
    """Open a store as it lies there, also one of Megatron, which the format itself refuses."""
    return open_dcp(Source.directory(open_store(str(path))), DcpCheckpoint)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_checkpoints_of_frameworks_equal_live_memory(name: str, unpacked: dict[str, Path]) -> None:
    root = framework(name, unpacked)
    for place, truth in FRAMEWORKS[name]:
        checkpoint = stored(root / "ckpt" / place)
        keys = {t.stored_name: key for key, t in checkpoint.tensors.items()}
        found = 0
        for said, tensor in load_file(root / "truth" / f"{truth}.safetensors").items():
            key = next(
                (keys[n] for n in (said, f"model.{said}", f"optimizer.state.{said}") if n in keys),
                None,
            )
            assert key is not None, (place, said)
            info = checkpoint.tensors[key]
            want = truth_of(tensor)
            assert (info.dtype.name, info.shape) == (want.dtype, want.shape), said
            assert read_tensor(checkpoint, key) == want.data, said
            found += 1
        assert found
        assert [f for f in checkpoint.check() if f.code is not ExitCode.OK] == []


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("mcore_torchdist_tp2pp2", (4, 2, 2, 1)),
        ("mcore_torchdist_tp2dp2_fullyreshard_bf16", (4, 2, 1, 2)),
    ],
)
def test_megatron_arguments_give_the_topology(
    name: str, topology: tuple[int, ...], unpacked: dict[str, Path]
) -> None:
    checkpoint = stored(framework(name, unpacked) / "ckpt" / "iter_0000003")
    known = checkpoint.topology
    assert (known.world_size, known.tp, known.pp, known.dp) == topology
    assert checkpoint.step == 3
    names = set(checkpoint.fields())
    assert "common_state/shard_0_1.0.opt_param_scheduler.num_steps" in names
    assert "common_state/shard_0_1.0.iteration" in names


def test_common_state_in_a_file_of_its_own_is_an_object(unpacked: dict[str, Path]) -> None:
    name = "mcore0161_tp2dp2_dpreshard"
    checkpoint = stored(framework(name, unpacked) / "ckpt" / "iter_0000003")
    assert checkpoint.step == 3
    assert checkpoint.load_object("common.pt")["iteration"] == 3
    assert "common.pt.opt_param_scheduler.max_lr" in set(checkpoint.fields())
    assert any(r.extent.file == "common.pt" and r.crc32 for r in checkpoint.records())
