"""Of a training state of 14 bytes a parameter, the model alone costs the bytes of its weights."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest

import ftckpt
from ftckpt.storage import StoreOptions, open_store

torch = pytest.importorskip("torch")
COUNT = 4  # matrices of 1 Mi elements
_numbers = itertools.count()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    path = tmp_path_factory.mktemp("state") / "step-1"
    values = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    names = [f"layers.{n}.weight" for n in range(COUNT)]
    optimizer = {
        name: {"master_param": values + n, "exp_avg": values, "exp_avg_sq": values}
        for n, name in enumerate(names)
    }
    model = {name: optimizer[name]["master_param"].bfloat16() for name in names}
    with warnings.catch_warnings(action="ignore"):
        save({"model": model, "optimizer": {"state": optimizer}}, checkpoint_id=path, no_dist=True)
    return path


WEIGHTS = COUNT << 21  # bytes in bfloat16


def cost(source: str, out: Path, *, from_master: bool = False) -> float:
    """Return the bytes that a conversion read of its source, as a part of those of the weights."""
    opened = ftckpt.open_checkpoint(source)
    before = opened.source.store.usage().bytes_read
    ftckpt.convert(
        opened, str(out), "safetensors", only="model", dtype="bf16", no_proof=True, jobs=1,
        from_master=from_master,
    )  # fmt: skip
    assert out.exists()
    return (opened.source.store.usage().bytes_read - before) / WEIGHTS


@pytest.mark.parametrize("to", ["dcp", "ranks", "torchsave", "deepspeed-universal"])
def test_nothing_else_is_read(state: Path, tmp_path: Path, to: str) -> None:
    source = state
    if to != "dcp":
        source = tmp_path / ("one.pt" if to == "torchsave" else "state")
        ftckpt.convert(str(state), str(source), to, no_proof=True, jobs=1)
    assert 1 <= cost(str(source), tmp_path / "out") < 1.05


def test_nothing_else_is_fetched(state: Path, tmp_path: Path) -> None:
    url = f"memory://model-alone-{next(_numbers)}/step-1"
    store = open_store(url, StoreOptions())
    for file in state.iterdir():
        store.put(file.name, file.read_bytes())
    assert 1 <= cost(url, tmp_path / "out") < 1.05


def test_masters_cost_their_bytes(state: Path, tmp_path: Path) -> None:
    assert 2 <= cost(str(state), tmp_path / "out", from_master=True) < 2.1
