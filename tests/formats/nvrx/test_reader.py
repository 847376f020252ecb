"""Local checkpoints that NVIDIA's manager wrote for a job of Megatron-Core (tests/data/nvrx)."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ftckpt
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.errors import ExitCode, FtckptError, UsageError
from ftckpt.formats.nvrx import NvrxLocal
from tests.builders.archives import extract
from tests.conformance.formats import FormatTests, Made, Truth
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "nvrx"
# Megatron stores the norms under the names of Transformer Engine's fused modules.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def _unpacked(name: str, path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Return the sessions on two nodes, and the weights and moments of iteration 20."""
    extract(DATA / f"{name}.tar.xz", path)
    truth = {}
    for key, value in load_file(path / "truth.safetensors").items():
        for ours, theirs in _NORMS.items():
            key = key.replace(ours, theirs)
        truth[key] = value
    return path / "node0" / "run7", path / "node1" / "run7", truth


def _joined(path: Path, iteration: int | None = None) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return one folder with all ranks, as a shared filesystem has them."""
    ours, theirs, truth = _unpacked("one", path)
    shutil.copytree(theirs, ours, dirs_exist_ok=True)
    if iteration is not None:
        for file in ours.rglob("*.pt"):
            if f"iter_{iteration:07d}_" not in file.name:
                file.unlink()
    return ours, truth


class TestNvrx(FormatTests):
    format = NvrxLocal()
    construct = "from ftckpt.formats.nvrx import NvrxLocal; form = NvrxLocal()"
    truncated = frozenset({"truncated-file", "bad-zip"})
    empty = frozenset({"truncated-file", "bad-zip", "bad-pickle"})
    missing = frozenset({"missing-rank"})

    def make(self, root: Path) -> list[Made]:
        path, weights = _joined(root, 20)
        truth = {
            key: Truth("float32", tuple(value.shape), value.numpy().tobytes())
            for key, value in weights.items()
        }
        step = torch.tensor(2.0)
        for rank in range(4):
            key = f"extra:rank{rank}:common.optimizer.state.common_step"
            truth[key] = Truth("float32", (), step.numpy().tobytes())
        return [Made(path, truth)]


@pytest.mark.parametrize("name", ["one", "two"])
def test_two_nodes(name: str, tmp_path: Path) -> None:
    ours, theirs, weights = _unpacked(name, tmp_path)
    first, second = str(ours), str(theirs)
    replicated = name == "two"
    also = ("--also", second)
    assert ftckpt_json("latest", first)["result"]["code"] == (0 if replicated else 5)
    found = ftckpt_json("latest", first, *also, "--level", "values")
    assert (found["path"], found["step"]) == (f"{first}@20", 20)
    for step in (10, 20):
        answer = ftckpt_json("verify", f"{first}@{step}", *also, "--level", "values")
        assert (answer["result"]["code"], answer["step"]) == (0, step)
    assert len(ftckpt_json("verify", first, "--all", *also)["checkpoints"]) == 2
    shown = ftckpt_json("inspect", first, *also)
    assert shown["topology"]["world_size"] == 4
    checkpoint = ftckpt.open_checkpoint(f"{first}@20", also=[second])
    own = {k for k in checkpoint if not k.startswith("extra:rank")}
    assert own == weights.keys()
    for key in own:
        assert torch.equal(checkpoint[key].torch(), weights[key])
    copies = copies_of(checkpoint.tensors["output_layer.weight"])
    assert any(one.replicas for one in copies) == replicated
    for form in ("safetensors", "dcp"):
        out = str(tmp_path / form)
        command = ("convert", f"{first}@20", out, "--to", form, *also)
        assert ftckpt_json(*command)["result"]["code"] == 0
        made = ftckpt.open_checkpoint(out)
        assert made.keys() == checkpoint.keys()
        assert all(torch.equal(made[key].torch(), weights[key]) for key in own)


def test_a_copy_is_a_session(tmp_path: Path) -> None:
    ours, theirs, _ = _unpacked("one", tmp_path)
    out = str(tmp_path / "copy")
    ftckpt.copy(f"{ours}@20", out, also=[str(theirs)])
    assert ftckpt.verify(out, level="content").code == 0
    assert sorted(p.name for p in Path(out).iterdir() if p.is_dir() and p.name.isdecimal()) == list(
        "0123"
    )
    assert ftckpt.latest(out).path == f"{out}@20"


def test_a_missing_rank(tmp_path: Path) -> None:
    path, _ = _joined(tmp_path)
    (path / "3" / "iter_0000020_3_local.pt").unlink()
    answer = ftckpt_json("verify", f"{path}@20")
    assert answer["result"]["code"] == 5
    assert "rank 3" in answer["findings"][0]["message"]
    assert ftckpt.latest(str(path)).path == f"{path}@10"
    with pytest.raises(FtckptError, match="rank 3"):
        ftckpt.convert(f"{path}@20", str(tmp_path / "out"), "safetensors")
    assert ftckpt_json("verify", str(path / "0"))["result"]["code"] == 5  # one rank's folder


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    path, _ = _joined(tmp_path)
    file = path / "1" / "iter_0000020_1_local.pt"
    file.rename(file.with_name("iter_0000020_1_local.dirty.pt"))
    answer = ftckpt_json("verify", f"{path}@20")
    assert answer["result"]["code"] == 5
    assert any("still being written" in f["message"] for f in answer["findings"])
    assert ftckpt.latest(str(path)).path == f"{path}@10"
    for file in path.rglob("iter_0000020_?_local.pt"):
        file.rename(file.with_name(file.name.replace(".pt", ".dirty.pt")))
    assert ftckpt_json("verify", f"{path}@20")["result"]["code"] == 5


def test_a_flipped_bit(tmp_path: Path) -> None:
    path, _ = _joined(tmp_path)
    piece = ftckpt.open_checkpoint(f"{path}@20").tensors["output_layer.weight"].pieces[0]
    file = path / piece.extent.file
    data = bytearray(file.read_bytes())
    data[piece.extent.offset + 5] ^= 4
    file.write_bytes(data)
    answer = ftckpt_json("verify", f"{path}@20")
    assert answer["result"]["code"] == 4
    assert {f["kind"] for f in answer["findings"] if f["severity"] == "error"} == {"bad-crc"}
    assert answer["findings"][0]["tensor"] == "output_layer.weight"


def test_a_file_of_another_iteration(tmp_path: Path) -> None:
    path, _ = _joined(tmp_path)
    shutil.copy(path / "2/iter_0000010_2_local.pt", path / "2/iter_0000020_2_local.pt")
    answer = ftckpt_json("verify", f"{path}@20")
    assert answer["result"]["code"] == 4
    assert "mixed-steps" in {f["kind"] for f in answer["findings"]}


def test_a_replica_that_differs(tmp_path: Path) -> None:
    ours, theirs, _ = _unpacked("two", tmp_path)
    also = [str(theirs)]
    checkpoint = ftckpt.open_checkpoint(f"{ours}@20", also=also)
    replica = checkpoint.tensors["output_layer.weight"].pieces[1]
    file = ours / replica.extent.file
    data = bytearray(file.read_bytes())
    data[replica.extent.offset] ^= 1
    file.write_bytes(data)
    assert ftckpt.verify(f"{ours}@20", also=also).code == 4
    other = theirs / checkpoint.tensors["output_layer.weight"].pieces[0].extent.file
    other.unlink()  # then the damaged replica is all there is
    assert ftckpt.verify(f"{ours}@20", also=also).code == 4
    file.unlink()
    assert ftckpt.verify(f"{ours}@20", also=also).code == 5


def test_nothing_is_written_into_a_session(tmp_path: Path) -> None:
    path, _ = _joined(tmp_path)
    before = sorted(p.name for p in path.rglob("*"))
    for command in (("seal", f"{path}@20"), ("gc", str(path), "--keep-last", "1", "--apply")):
        assert ftckpt_json(*command)["result"]["code"] in (2, 8, 13)
    assert sorted(p.name for p in path.rglob("*")) == before
    with pytest.raises(UsageError):
        ftckpt.latest([str(path), str(tmp_path)], also=[str(tmp_path)])


def _file(tree: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(tree), buffer)
    return buffer.getvalue()


_numbers = itertools.count()


def _hostile(tmp_path: Path, tree: Mapping[str, Any]) -> ExitCode:
    path = tmp_path / f"session{next(_numbers)}" / "0"
    path.mkdir(parents=True)
    (path / "iter_0000005_0_local.pt").write_bytes(_file(tree))
    return ftckpt.verify(str(path.parent)).code


def _mapping(**changed: Any) -> Any:
    """Return a ShardedTensor as megatron-core pickles one, with some fields changed."""
    mapping = ModuleType("megatron.core.dist_checkpointing.mapping")
    kind = type("ShardedTensor", (), {"__module__": mapping.__name__})
    mapping.__dict__["ShardedTensor"] = kind
    one = kind()
    one.__dict__ |= {
        "key": "w", "data": torch.ones(2, 3), "dtype": torch.float32, "local_shape": (2, 3),
        "global_shape": (2, 3), "global_offset": (0, 0), "axis_fragmentations": (1, 1),
        "replica_id": 0, "prepend_axis_num": 0, "allow_shape_mismatch": False,
        "flattened_range": None,
    } | changed  # fmt: skip
    return one, mapping


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, ExitCode.OK),
        ({"key": 7}, ExitCode.UNSUPPORTED),
        ({"key": "x" * 5000}, ExitCode.CORRUPT),
        ({"local_shape": (3, 2)}, ExitCode.CORRUPT),
        ({"global_shape": (2, 3, 4)}, ExitCode.CORRUPT),
        ({"global_shape": (1 << 80, 3)}, ExitCode.CORRUPT),
        ({"global_shape": (1 << 50, 3)}, ExitCode.CORRUPT),  # a hole
        ({"global_shape": (True, 3)}, ExitCode.UNSUPPORTED),
        ({"global_offset": (-1, 0)}, ExitCode.CORRUPT),
        ({"global_offset": (1, 0)}, ExitCode.CORRUPT),
        ({"global_offset": None}, ExitCode.UNSUPPORTED),
        ({"prepend_axis_num": 1}, ExitCode.CORRUPT),
        ({"prepend_axis_num": -1}, ExitCode.CORRUPT),
        ({"dtype": torch.int64}, ExitCode.CORRUPT),
        ({"data": None}, ExitCode.CORRUPT),
        ({"data": "text"}, ExitCode.UNSUPPORTED),
        ({"flattened_range": slice(0, 6)}, ExitCode.UNSUPPORTED),
    ],
)
def test_what_a_sharded_tensor_must_say(
    changed: dict[str, Any], code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, mapping = _mapping(**changed)
    for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, name, mapping)
    monkeypatch.setitem(sys.modules, mapping.__name__, mapping)
    tree = {"common": {"iteration": 5, "args": {"world_size": 1}}, "sharded_state_dict": {"w": one}}
    assert _hostile(tmp_path, tree) is code


@pytest.mark.parametrize(
    ("tree", "code"),
    [
        ({"state_dict": {"w": torch.ones(2)}}, ExitCode.OK),  # how many ranks is unknown: a warning
        ({"state_dict": {"w": torch.ones(2)}, "_is_hollow": True}, ExitCode.CORRUPT),
        ({"something": 1}, ExitCode.UNSUPPORTED),
        ({"common": {"args": {"world_size": 2}}, "sharded_state_dict": {}}, ExitCode.INCOMPLETE),
        # No world of this size is waited for; a store without a tensor proves nothing.
        ({"common": {"args": {"world_size": 1 << 70}}, "sharded_state_dict": {}},
         ExitCode.UNVERIFIED),
        ({"common": {"args": {"rank": 3, "world_size": 1}}, "sharded_state_dict": {}},
         ExitCode.CORRUPT),
        ({"common": 3, "sharded_state_dict": {}}, ExitCode.UNVERIFIED),
    ],
)  # fmt: skip
def test_odd_files(tree: dict[str, Any], code: ExitCode, tmp_path: Path) -> None:
    assert _hostile(tmp_path, tree) is code


def test_the_world_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "session" / "0"
    path.mkdir(parents=True)
    (path / "iter_0000005_0_local.pt").write_bytes(_file({"state_dict": {"w": torch.ones(2)}}))
    report = ftckpt.verify(str(path.parent))
    assert "count-unknown" in {one.kind for one in report.findings}
    assert ftckpt.verify(str(path.parent), strict=["counts"]).code == 6
