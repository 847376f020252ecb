"""Make tests/data/run: a root with two small real checkpoints, written by torch's own DCP.

    python tests/data/make_run.py

The committed files are the fixture; run this only to make new ones, and look at the golden files
afterwards: sizes and CRCs are in them.
"""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

HERE = Path(__file__).parent / "run"


def main() -> None:
    warnings.simplefilter("ignore")
    shutil.rmtree(HERE, ignore_errors=True)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.randint(0, 32, (4, 4))).square().mean().backward()
        optimizer.step()
        scheduler.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {
            "model": weights,
            "optimizer": moments,
            "lr_scheduler": scheduler.state_dict(),
            "train_state": {"step": step},
            "rng": {"torch": torch.get_rng_state()[:64].clone()},
        }
        writer = FileSystemWriter(HERE / f"step-{step}", thread_count=2)
        save(state, storage_writer=writer, no_dist=True)
    (HERE / "latest").write_text("step-2")


if __name__ == "__main__":
    main()
