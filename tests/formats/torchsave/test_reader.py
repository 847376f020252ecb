"""torch.save checkpoints: what real trainers save, against the tensors in memory."""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ftckpt.checkpoint import Checkpoint, CommitState, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ftckpt.formats.torchsave import TorchSave
from ftckpt.inspection.resume import resume_check
from tests.builders.archives import extract
from tests.conformance.formats import (
    FormatTests,
    Made,
    Truth,
    findings_of,
    listing_of_path,
    open_path,
)

CHECKPOINTS = Path(__file__).parents[4] / "shared" / "checkpoints"


class Net(torch.nn.Module):
    """Parameters of equal and of different shapes, buffers between them, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.randn(3))
        self.scale = 0.5
        self.register_buffer("freq", torch.arange(5.0))
        self.embed = torch.nn.Embedding(11, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(self.embed(ids)))
        return logits * self.gain.sum() * self.scale


def trained(steps: int = 3) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 11, (8,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def truth_of(tensor: torch.Tensor) -> Truth:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return Truth(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()
    )


def state_truth(
    model: Mapping[str, torch.Tensor], optimizer: Any = None, names: Iterable[str] = ()
) -> dict[str, Truth]:
    found = {name: truth_of(tensor) for name, tensor in model.items()}
    states = optimizer.state_dict()["state"].values() if optimizer else ()
    for name, state in zip(names, states, strict=True):
        found[f"exp_avg:{name}"] = truth_of(state["exp_avg"])
        found[f"exp_avg_sq:{name}"] = truth_of(state["exp_avg_sq"])
        found[f"optimizer:{name}.step"] = truth_of(state["step"])
    return found


def parameter_names(net: torch.nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def save(obj: object, path: Path, *, legacy: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(obj, path, _use_new_zipfile_serialization=not legacy)
    return path


def sharded(state: Mapping[str, torch.Tensor], folder: Path, parts: int = 3) -> Path:
    folder.mkdir(parents=True)
    names = list(state)
    files = [f"pytorch_model-{i + 1:05d}-of-{parts:05d}.bin" for i in range(parts)]
    weight_map = {name: files[i * parts // len(names)] for i, name in enumerate(names)}
    for file in files:
        save({n: state[n].clone() for n in names if weight_map[n] == file}, folder / file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


class TestTorchSave(FormatTests):
    format = TorchSave()
    truncated = frozenset({"bad-zip", "bad-pickle", "truncated-file"})
    empty = frozenset({"bad-zip"})

    def make(self, root: Path) -> list[Made]:
        net, optimizer, scheduler = trained()
        state = net.state_dict()
        names = parameter_names(net)
        views = {"t": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), "b": torch.ones(2, 2)}
        views["row"] = views["b"][1]
        every = {n: torch.arange(96, dtype=torch.uint8).view(getattr(torch, n)).reshape(2, -1)
                 for n, d in DTYPES.items() if d.name == n and d.itemsize and d.safetensors
                 and n not in ("bool", "float4_e2m1") and hasattr(torch, n)}  # fmt: skip
        training = {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": 1,
            "step": 3,
        }
        return [
            Made(save(state, root / "bare.pt"), state_truth(state)),
            Made(save(state, root / "old.bin", legacy=True), state_truth(state)),
            Made(save(views, root / "views.pth"), state_truth(views)),
            Made(save(every, root / "every"), state_truth(every)),
            Made(save(training, root / "run.ckpt"), state_truth(state, optimizer, names)),
            Made(save(torch.eye(3), root / "one.pt"), {"tensor": truth_of(torch.eye(3))}),
            Made(sharded(state, root / "hf"), state_truth(state)),
        ]

    def victims(self, path: Path) -> list[str]:
        if path.is_dir():
            return sorted(p.name for p in path.glob("*.bin"))
        return [path.name]


# --- training states ----------------------------------------------------------------------------


def opened(obj: object, tmp_path: Path, **options: bool) -> Checkpoint:
    return open_path(TorchSave(), save(obj, tmp_path / "x.pt", **options))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_state_is_sorted(tmp_path: Path, legacy: bool) -> None:
    net, optimizer, scheduler = trained()
    rng = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    checkpoint = opened(
        {
            "state_dict": net.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "rng": rng,
            "global_step": 3,
            "args": argparse.Namespace(lr=0.1),
        },
        tmp_path,
        legacy=legacy,
    )
    kinds = {key: t.kind for key, t in checkpoint.tensors.items()}
    assert kinds["gain"] is Kind.PARAM
    assert kinds["norm.running_mean"] is Kind.BUFFER
    assert kinds["norm.num_batches_tracked"] is Kind.BUFFER
    assert kinds["exp_avg:norm.bias"] is Kind.EXP_AVG
    assert checkpoint.tensors["extra:rng:torch"].shape == (5056,)
    assert checkpoint.step == 3
    assert checkpoint.aliases == {"out.weight": "embed.weight"}
    assert checkpoint.load_object("lr_scheduler")["last_epoch"] == 3
    assert checkpoint.load_object("args").get("lr") == 0.1
    assert checkpoint.load_object("optimizer_state_dict.param_groups")[0]["initial_lr"] == 1e-3
    assert {"rng.python", "rng.numpy", "lr_scheduler.last_epoch"} <= set(checkpoint.fields())
    verdicts = {item.key: item.presence for item in resume_check(checkpoint)}
    for key in ("weights", "scheduler", "rng-python", "rng-numpy", "rng-torch", "step"):
        assert verdicts[key] == "present", key
    assert findings_of(TorchSave(), tmp_path / "x.pt") == []


def test_moments_get_names_only_where_one_assignment_fits(tmp_path: Path) -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam([layers[0].weight, layers[2].weight])
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint = opened({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert "exp_avg:0.1" in checkpoint.tensors
    assert "exp_avg:0.weight" not in checkpoint.tensors
    assert "numbers its parameters" in checkpoint.notes[0].message


def test_an_optimizer_alone_is_numbered(tmp_path: Path) -> None:
    _, optimizer, _ = trained()
    checkpoint = opened(optimizer.state_dict(), tmp_path)
    assert {t.component for t in checkpoint.tensors.values()} == {"optimizer"}
    assert "exp_avg:0.0" in checkpoint.tensors
    assert (checkpoint.step, checkpoint.optimizer_count) == (None, 3)


def test_two_optimizers_do_not_meet(tmp_path: Path) -> None:
    one, two = trained(2)[1], trained(3)[1]
    both = {"optimizers": [one.state_dict(), two.state_dict()]}
    checkpoint = opened(both, tmp_path)
    for number, optimizer in enumerate((one, two)):
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        assert read_tensor(checkpoint, f"exp_avg:{number}.0.0") == truth_of(moment).data


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_are_taken_off_and_remembered(tmp_path: Path, prefix: str) -> None:
    net, optimizer, _ = trained()
    model = {prefix + name: tensor for name, tensor in net.state_dict().items()}
    checkpoint = opened({"model": model, "optimizer": optimizer.state_dict()}, tmp_path)
    assert set(checkpoint.tensors) >= {*net.state_dict(), "exp_avg:gain"}
    assert checkpoint.tensors["gain"].stored_name == f"model.{prefix}gain"


def test_an_average_is_a_component(tmp_path: Path) -> None:
    net, _, _ = trained()
    checkpoint = opened({"model": net.state_dict(), "ema": net.state_dict()}, tmp_path)
    assert checkpoint.tensors["ema:gain"].component == "ema"
    assert checkpoint.aliases["ema:gain"] == "gain"


def test_a_pickled_module_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    net, _, _ = trained()
    for obj in (net.norm, {"model": net.norm, "epoch": 3}):
        checkpoint = opened(obj, tmp_path)
        assert set(checkpoint.tensors) == set(net.norm.state_dict())
        for name, tensor in net.norm.state_dict().items():
            assert read_tensor(checkpoint, name) == truth_of(tensor).data


def test_what_is_no_strided_tensor_is_kept_in_parts(tmp_path: Path) -> None:
    complex_ = torch.arange(3.0).to(torch.complex64)
    meta = torch.empty(2, device="meta")
    state = {"s": torch.eye(3).to_sparse(), "c": complex_.conj(), "meta": meta}
    checkpoint = opened(state, tmp_path)
    assert set(checkpoint.tensors) == {"s.indices", "s.values", "c.conj"}
    assert "meta" in checkpoint.objects
    assert read_tensor(checkpoint, "s.values") == truth_of(torch.ones(3)).data


def test_every_record_has_an_owner_and_a_crc(tmp_path: Path) -> None:
    net, _, _ = trained()
    checkpoint = opened(net.state_dict(), tmp_path)
    records = list(checkpoint.records())
    data = (tmp_path / "x.pt").read_bytes()
    import zlib

    for record in records:
        extent = record.extent
        assert zlib.crc32(data[extent.offset : extent.end]) == record.crc32
    owners = {r.owner for r in records}
    assert set(net.state_dict()) - {"out.weight"} <= owners
    assert "x.pt:data.pkl" in owners


def test_a_stored_view_is_counted_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    checkpoint = opened({"a": weight, "b": weight, "row": weight[1], "e": weight[:0]}, tmp_path)
    assert checkpoint.aliases == {"b": "a"}
    assert read_tensor(checkpoint, "row") == truth_of(weight[1]).data


def test_the_optimizers_count_comes_from_its_tensors(tmp_path: Path) -> None:
    net, optimizer, _ = trained(5)
    checkpoint = opened({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert (checkpoint.step, checkpoint.optimizer_count) == (None, 5)
    assert {s.value for s in checkpoint.scalars(3)} == {5.0}
    assert opened(net.state_dict(), tmp_path).optimizer_count is None


def test_opaque_classes_are_a_note(tmp_path: Path) -> None:
    checkpoint = opened({"model": {"w": torch.ones(1)}, "config": Config()}, tmp_path)
    assert [n.kind for n in checkpoint.notes] == ["opaque-object"]
    assert "Config" in checkpoint.notes[0].message
    assert checkpoint.load_object("config").get("depth") == 12


class Config:
    def __init__(self) -> None:
        self.depth = 12


# --- damage and refusals ------------------------------------------------------------------------


def test_a_flipped_bit_of_a_local_header_is_found(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4)}, tmp_path / "x.pt")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"x/data/0", b"x/data/1", 1))
    assert [f.kind for f in findings_of(TorchSave(), path)] == ["unsafe-zip"]


def test_an_edited_crc_is_noted(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4)}, tmp_path / "x.pt")
    checkpoint = open_path(TorchSave(), path)
    crc = next(r.crc32 for r in checkpoint.records() if r.owner == "w")
    assert crc is not None
    old = crc.to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(old, b"\1\2\3\4"))
    found = findings_of(TorchSave(), path)
    assert [f.kind for f in found] == ["note"]
    assert "serialization id" in found[0].message


def test_one_damaged_shard_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = sharded({f"w{i}": torch.full((3,), float(i)) for i in range(6)}, tmp_path / "hf")
    victim = folder / "pytorch_model-00002-of-00003.bin"
    victim.write_bytes(victim.read_bytes()[:-1])
    checkpoint = open_path(TorchSave(), folder)
    assert set(checkpoint.tensors) == {"w0", "w1", "w4", "w5"}
    assert [(f.kind, f.file) for f in checkpoint.check()] == [("bad-zip", victim.name)]


def test_shards_without_their_index_are_incomplete(tmp_path: Path) -> None:
    folder = sharded({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "hf", 2)
    (folder / "pytorch_model.bin.index.json").unlink()
    found = TorchSave().recognise(listing_of_path(folder))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    with pytest.raises(IncompleteError, match="index is written last"):
        open_path(TorchSave(), folder)


def test_a_swapped_shard_is_found(tmp_path: Path) -> None:
    folder = sharded({f"w{i}": torch.ones(1) for i in range(3)}, tmp_path / "hf")
    one, two = (folder / f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    kinds = {f.kind for f in findings_of(TorchSave(), folder)}
    assert kinds == {"wrong-shard"}


def test_a_folder_of_unrelated_files_is_not_one_checkpoint(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "d" / "a.pt")
    save({"b": torch.ones(1)}, tmp_path / "d" / "b.pt")
    assert TorchSave().recognise(listing_of_path(tmp_path / "d")) is None
    with pytest.raises(NotFoundError):
        open_path(TorchSave(), tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "data", "known"),
    [
        ("x.pt", b"", True),
        ("x.ckpt", b"garbage", True),
        ("x.bin", b"garbage", False),
        ("x.txt", b"garbage", False),
        ("x.zip", b"PK\3\4" + bytes(100), False),
        ("x.pt", b"PK\3\4" + bytes(100), True),
    ],
)
def test_what_is_taken_for_a_torch_file(
    tmp_path: Path, name: str, data: bytes, known: bool
) -> None:
    (tmp_path / name).write_bytes(data)
    assert (TorchSave().recognise(listing_of_path(tmp_path / name)) is not None) is known
    if known:
        with pytest.raises(CorruptError):
            open_path(TorchSave(), tmp_path / name)


def test_torchscript_is_left_to_its_own_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match="TorchScript"):
        open_path(TorchSave(), tmp_path / "x.pt")


# --- real files ---------------------------------------------------------------------------------


@pytest.fixture
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    archive = CHECKPOINTS / f"{request.param}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    extract(archive, tmp_path)
    (found,) = tmp_path.rglob("ckpt")
    return found


@pytest.mark.parametrize("unpacked", ["lightning_ddp"], indirect=True)
def test_lightning(unpacked: Path) -> None:
    checkpoint = open_path(TorchSave(), unpacked / "last.ckpt")
    truth = unpacked.parent / "truth"
    assert checkpoint.step == json.loads((truth / "scalars.json").read_text())["global_step"]
    assert "Lightning 2.6" in checkpoint.dialect
    expected = {k: truth_of(t) for k, t in load_file(truth / "state.safetensors").items()}
    for stored, tensor in load_file(truth / "optim.safetensors").items():
        name, _, leaf = stored.rpartition(".")
        key = f"optimizer:{stored}" if leaf == "step" else f"{leaf}:{name}"
        expected[key] = truth_of(tensor)
    assert {k for k in checkpoint.tensors if not k.startswith("extra:")} == set(expected)
    for key, (dtype, shape, data) in expected.items():
        info = checkpoint.tensors[key]
        assert (info.dtype.name, info.shape) == (dtype, shape)
        assert read_tensor(checkpoint, key) == data, key
    assert findings_of(TorchSave(), unpacked / "last.ckpt") == []


@pytest.mark.parametrize("unpacked", ["hf4_llama_bin"], indirect=True)
def test_hugging_face_shards(unpacked: Path) -> None:
    checkpoint = open_path(TorchSave(), unpacked)
    truth = load_file(unpacked.parent / "truth" / "state.safetensors")
    assert set(checkpoint.tensors) == set(truth)
    for key, tensor in truth.items():
        assert read_tensor(checkpoint, key) == truth_of(tensor).data, key
    assert findings_of(TorchSave(), unpacked) == []
    assert checkpoint.commit.state is CommitState.COMMITTED
