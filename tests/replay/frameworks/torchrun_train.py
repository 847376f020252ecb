"""DDP as `torchrun` starts it, with one file a rank by `torch.save`."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.replay.frameworks import loop, parts


def main() -> None:
    given = parts.arguments()
    drop = given.drop
    rank, net = loop.start()
    file = given.dir / f"state-{rank}.pt"
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer, scheduler = loop.tuned(model)
    averaged = AveragedModel(net)
    saved: Any = None
    if file.exists():
        saved = torch.load(file, weights_only=False)
        net.load_state_dict(parts.fresh(saved["model"], drop))
        if drop != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        parts.reset_schedule(saved["scheduler"], drop)
        scheduler.load_state_dict(saved["scheduler"])
        if drop != "ema":
            averaged.load_state_dict(saved["ema"])
    done, position = loop.counters(saved and saved["step"], drop)
    loader = DataLoader(parts.Samples(), parts.BATCH, sampler=parts.Cursor(position, rank))
    batches = iter(loader)  # draws a seed from the global generator
    if saved is not None:
        parts.set_generators(saved["rng"], drop)

    def state(done: int) -> dict[str, Any]:
        return {
            "step": done, "model": net.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "ema": averaged.state_dict(),
            "rng": parts.generators(),
        }  # fmt: skip

    def save(state: dict[str, Any]) -> None:
        given.dir.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)

    loop.train(given, done, batches, (model, optimizer, scheduler),
               lambda: averaged.update_parameters(net), state, save)  # fmt: skip


if __name__ == "__main__":
    main()
    parts.leave()
