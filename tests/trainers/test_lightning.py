"""The callback of Lightning's Trainer, in a real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.errors import ExitCode

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("default")


def test_what_is_kept_is_sealed_and_what_is_removed_leaves_nothing(tmp_path: Path) -> None:
    from ftckpt.trainers.lightning import SealLightning

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    saving = lightning.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = lightning.Trainer(
        max_steps=8, callbacks=[saving, SealLightning(strict=True)], logger=False,
        accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    data: Any = torch.utils.data.DataLoader(list(torch.randn(8, 4)), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(Line(), data)
    files = sorted(one.name for one in tmp_path.glob("*.ckpt"))
    assert len(files) == 3
    assert "last.ckpt" in files
    seals = sorted(one.name for one in tmp_path.glob("*.ftckpt.json"))
    assert seals == [f"{name}.ftckpt.json" for name in files]
    for name in files:
        assert ftckpt.verify(str(tmp_path / name), level="content").code is ExitCode.OK
    trainer.fit(Line(), data, ckpt_path=str(tmp_path / "last.ckpt"))
