"""The recipe for DeepSpeed's own save, in a real training of one rank."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.torch import barrier, seal_after

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("stage", [1])
def test_a_step_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    import deepspeed

    # It would compile an operation of its own first.
    monkeypatch.setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
    deepspeed.init_distributed("gloo")
    try:
        model = torch.nn.Linear(8, 4)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "zero_optimization": {"stage": stage},
            },
        )
        for _ in range(2):
            loss: Any = engine(torch.randn(1, 8)).square().mean()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(str(tmp_path))
        barrier()
        place = tmp_path / f"global_step{engine.global_steps}"
        report = seal_after(place, strict=True)
        assert report is not None
        assert ftckpt.verify(str(place), level="content").code is ExitCode.OK
        assert {f.path for f in report.manifest.files} == {
            str(f.relative_to(place)) for f in place.glob("*.pt")
        }
        engine.load_checkpoint(str(tmp_path))
    finally:
        torch.distributed.destroy_process_group()
