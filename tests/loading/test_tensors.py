"""Loading into tensors of torch: through buffers as on a GPU, and on one where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

import ftckpt
from ftckpt.errors import NoResourceError, UnsupportedError
from ftckpt.loading.tensors import STAGE, StagingBuffers, TensorTarget
from ftckpt.torch import Reader

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
         torch.bool, torch.float8_e4m3fn, torch.complex64)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a DCP with a tensor of each type, one transposed, an empty one, a scalar."""
    torch.manual_seed(5)
    tensors = {str(kind)[6:]: torch.randn(37, 53).mul(9).to(kind) for kind in KINDS}
    tensors |= {
        "turned": torch.randn(53, 37).t(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(STAGE // 4 // 500 + 7, 500),
    }
    path = tmp_path_factory.mktemp("tensors") / "step-1"
    dcp.save({"model": tensors}, checkpoint_id=str(path))
    return path, tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def loaded(path: Path, state: dict[str, Any], **flags: Any) -> dict[str, Any]:
    reader = Reader(path, **flags)
    dcp.load({"model": state}, storage_reader=reader)
    assert reader.report.evidence.none == 0
    return state


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("staged", [False, True])
def test_every_type_is_loaded(saved: Any, staged: bool, jobs: int) -> None:
    path, tensors = saved
    state = {name: torch.empty_like(one).fill_(1) for name, one in tensors.items()}
    loaded(path, state, _staged=staged, jobs=jobs)
    for name, one in tensors.items():
        assert torch.equal(bits(state[name]), bits(one)), name


@pytest.mark.parametrize("staged", [False, True])
def test_casts_are_those_of_torch(saved: Any, staged: bool) -> None:
    path, tensors = saved
    pairs = [("float32", torch.bfloat16), ("bfloat16", torch.float32), ("float64", torch.float16),
             ("float8_e4m3fn", torch.float32), ("int64", torch.float32)]  # fmt: skip
    state = {name: torch.zeros(37, 53, dtype=kind) for name, kind in pairs}
    loaded(path, state, _staged=staged)
    for name, kind in pairs:
        assert torch.equal(bits(state[name]), bits(tensors[name].to(kind))), name


def test_a_subclass_is_refused_by_name() -> None:
    class Coded(torch.Tensor):
        pass

    made = torch.zeros(2).as_subclass(Coded)
    with pytest.raises(UnsupportedError, match="w is a Coded"):
        TensorTarget(made, StagingBuffers(torch.device("cpu")), "w")


def test_without_a_gpu_it_is_said(saved: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NoResourceError):
        ftckpt.load(saved[0], device="cuda")


@pytest.mark.gpu
def test_a_gpu_has_the_same_bits(saved: Any, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path, tensors = saved
    state = {name: torch.empty_like(one, device="cuda").fill_(1) for name, one in tensors.items()}
    state["float32"] = torch.zeros(37, 53, dtype=torch.bfloat16, device="cuda")
    state["int64"] = torch.zeros(37, 106, dtype=torch.int64, device="cuda")[:, ::2]
    loaded(path, state, jobs=3)
    for name, one in tensors.items():
        want = one.bfloat16() if name == "float32" else one
        assert torch.equal(bits(state[name]), bits(want)), name
    save_file({"w": tensors["large"]}, tmp_path / "model.safetensors")
    found = ftckpt.load(tmp_path / "model.safetensors", device="cuda")["w"]
    assert found.device.type == "cuda"
    assert torch.equal(bits(found), bits(tensors["large"]))
