"""The callback of Hugging Face's Trainer, in a real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.own_files import MANIFEST

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


class Line(torch.nn.Module):
    """The smallest model that a Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(made, labels), "logits": made}


def test_each_checkpoint_is_sealed(tmp_path: Path) -> None:
    from ftckpt.trainers.transformers import SealTransformers

    data: list[dict[str, Any]] = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, save_steps=2, save_total_limit=2, report_to=[],
        per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Line(), args=arguments, train_dataset=data, callbacks=[SealTransformers(strict=True)]
    )
    trainer.train()
    steps = sorted(tmp_path.glob("checkpoint-*"))
    assert [one.name for one in steps] == ["checkpoint-4", "checkpoint-6"]
    for one in steps:
        assert (one / MANIFEST).is_file()
        assert ftckpt.verify(str(one), level="content").code is ExitCode.OK
    found = ftckpt.latest(str(tmp_path), level="content")
    assert found is not None
    trainer.train(resume_from_checkpoint=str(steps[-1]))
