"""The recipe for accelerate's own save, in a real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.torch import seal_after

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


def test_a_state_is_sealed(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model: Any = torch.nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, 8)).square().mean())
    optimizer.step()
    path = tmp_path / "checkpoint-1"
    accelerator.save_state(str(path))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        report = seal_after(path, strict=True)
        assert report is not None
        listed = {f.path for f in report.manifest.files}
        assert listed >= {"model.safetensors", "optimizer.bin"}
    assert ftckpt.verify(str(path), level="content").code is ExitCode.OK
    accelerator.load_state(str(path))
