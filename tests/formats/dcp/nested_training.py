"""One rank of a job that saves its state below a wrapper, or resumes from it, and trains on.

The state is what torch's own tutorial saves: `{"app": AppState(model, optimizer)}`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from tests.formats.dcp.fsdp2_loading import fully_sharded


class AppState(Stateful):
    """Model and optimizer as one entry of the saved state; see torch's DCP tutorial."""

    def __init__(self, world: int, flat: bool) -> None:
        self.model, self.optimizer = fully_sharded(world)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"weights_of_mine": model, "adam": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["weights_of_mine"],
            optim_state_dict=state_dict["adam"],
            options=self.options,
        )

    def losses(self, steps: int) -> list[float]:
        """Train on the same tokens in every rank, and return the losses."""
        out = []
        for _ in range(steps):
            loss = self.model(torch.arange(13)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            out.append(loss.item())
        return out


def main(what: str, checkpoint: str, form: str) -> None:
    """Save after three steps, or load; then train two steps on and print their losses."""
    dist.init_process_group("gloo")
    app = AppState(dist.get_world_size(), form == "flat")
    if what == "save":
        app.losses(3)
        save({"app": app}, checkpoint_id=checkpoint)
    else:
        load({"app": app}, checkpoint_id=checkpoint)
    losses = [loss.hex() for loss in app.losses(2)]
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
