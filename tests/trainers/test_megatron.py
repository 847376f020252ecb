"""Seals of what Megatron-Core saves, by its own code: synchronous and asynchronous."""

from __future__ import annotations

import json
import socket
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.own_files import MANIFEST
from ftckpt.torch import seal_after

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.filterwarnings("default"),
]
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's package for checkpoints, without CUDA; its names are put back afterwards."""
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(cuda, "current_device", lambda: "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import torch as strategies

    for place, name in (
        (dist_checkpointing, "save"), (dist_checkpointing.serialization, "save"),
        (strategies, "FileSystemWriterAsync"), (strategies, "get_async_strategy"),
    ):  # fmt: skip
        if hasattr(place, name):
            monkeypatch.setattr(place, name, getattr(place, name))
    return dist_checkpointing


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each seal has read."""
    found: list[int] = []

    def counted(*given: Any, **more: Any) -> Any:
        report = seal_after(*given, **more)
        found.append(report.bytes_read if report else -1)
        return report

    monkeypatch.setattr("ftckpt.torch.writer.seal_after", counted)
    return found


def state(core: Any) -> dict[str, Any]:
    sharded = core.mapping.ShardedTensor.from_rank_offsets
    names = [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(3)]
    return {name: sharded(name, torch.randn(64, 40), replica_id=0) for name in names} | {
        "iteration": 7, "args": None
    }  # fmt: skip


def saved(core: Any, path: Path, **more: Any) -> Any:
    path.mkdir()
    return core.save(state(core), str(path), **more)


def require_covered(path: Path) -> None:
    report = ftckpt.verify(str(path), level="content")
    assert report.code is ExitCode.OK
    listed = [entry["path"] for entry in json.loads((path / MANIFEST).read_text())["files"]]
    assert listed == sorted(f.name for f in path.iterdir() if f.name != MANIFEST)
    assert "metadata.json" in listed


def test_a_save_is_sealed_when_megatron_has_finished(
    core: Any, tmp_path: Path, reads: list[int]
) -> None:
    from ftckpt.trainers.megatron import SealMegatron

    SealMegatron(strict=True)
    SealMegatron(strict=True)  # a second one changes nothing
    assert saved(core, tmp_path / "iter_0000001") is None
    require_covered(tmp_path / "iter_0000001")
    small = sum(f.stat().st_size for f in (tmp_path / "iter_0000001").glob("*.*")
                if f.suffix in (".json", ".pt"))  # fmt: skip
    assert 0 < reads[0] < small  # what no writer of ours wrote: `metadata.json`, `common.pt`


def test_an_asynchronous_save_is_sealed_before_the_tracker_names_it(
    core: Any, tmp_path: Path, reads: list[int]
) -> None:
    from ftckpt.trainers.megatron import SealMegatron

    SealMegatron(strict=True)
    path = tmp_path / "iter_0000002"
    request = saved(core, path, async_sharded_save=True, **asynchronous(core))
    sealed: list[bool] = []

    def track() -> None:  # as Megatron-LM's `save_checkpoint` adds it
        sealed.append((path / MANIFEST).is_file())
        (tmp_path / TRACKER).write_text("2")

    request.add_finalize_fn(track)
    calls = queue_of(request)
    calls.schedule_async_request(request)
    assert not (path / MANIFEST).exists()
    calls.maybe_finalize_async_calls(blocking=True)
    assert sealed == [True]
    require_covered(path)
    assert len(reads) == 1
    found = ftckpt.latest(str(tmp_path), level="content")
    assert found is not None


def test_a_checkpoint_of_bridge_is_sealed_when_bridge_has_finished(
    core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Bridge itself, which needs CUDA's packages: its class `Callback` has no content."""
    callbacks: Any = ModuleType("megatron.bridge.training.callbacks")
    callbacks.Callback = type("Callback", (), {})
    callbacks.VALID_EVENTS = frozenset(("on_checkpoint_save",))  # as Bridge 0.5 has it
    for name in ("megatron.bridge", "megatron.bridge.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, callbacks.__name__, callbacks)
    monkeypatch.delitem(sys.modules, "ftckpt.trainers.bridge", raising=False)
    from ftckpt.trainers.bridge import SealBridge

    callback = SealBridge(strict=True)
    path = tmp_path / "iter_0000003"
    assert saved(core, path) is None
    torch.save({"step": torch.tensor(3)}, path / "train_state.pt")
    (path / "run_config.yaml").write_text("model: {}\n")
    assert not (path / MANIFEST).exists()
    callback.on_checkpoint_save(None)  # type: ignore[arg-type, unused-ignore]
    require_covered(path)


def asynchronous(core: Any) -> dict[str, Any]:
    """Return what chooses Megatron's own writer where there are two."""
    import inspect

    known = inspect.signature(core.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def queue_of(request: Any) -> Any:
    """Return the queue of Megatron's, which forks a process a save."""
    module = sys.modules[type(request).__module__]
    return module.AsyncCallsQueue(persistent=False)
