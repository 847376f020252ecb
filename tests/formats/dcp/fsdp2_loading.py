"""One rank of a job that loads a distributed checkpoint into an FSDP2 model and its optimizer.

`torchrun` would start it; the tests start it with the same environment. Every rank compares what
was loaded with the state that one process had, and ends with 1 where a bit differs.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(torch.nn.Module):
    """Rows that no world divides evenly, a tensor of fewer rows than ranks, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.gain = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens) * self.gain.sum()
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def trained() -> tuple[Model, torch.optim.AdamW]:
    """Return a model and its optimizer after three steps, the same in every process."""
    torch.manual_seed(11)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.arange(13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fully_sharded(world: int) -> tuple[Model, torch.optim.AdamW]:
    """Return an untrained model over all ranks, and an optimizer that has state."""
    torch.manual_seed(12)
    model = Model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    return model, optimizer


def main(checkpoint: str) -> None:
    """Load, and compare with what one process had."""
    dist.init_process_group("gloo")
    model, optimizer = fully_sharded(dist.get_world_size())
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    load(loaded, checkpoint_id=checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    got = get_state_dict(model, optimizer, options=whole)
    want = get_state_dict(*trained())
    if dist.get_rank() == 0:
        require_equal(got[0], want[0])
        require_equal(got[1]["state"], want[1]["state"])
        require_equal(got[1]["param_groups"], want[1]["param_groups"])
        print("equal", len(want[0]))
    dist.barrier()
    dist.destroy_process_group()


def require_equal(got: Any, want: Any) -> None:
    """Compare two trees bit for bit."""
    if isinstance(want, torch.Tensor):
        assert got.dtype is want.dtype
        assert torch.equal(got, want), (got, want)
    elif isinstance(want, dict):
        assert set(got) == set(want)
        for key, value in want.items():
            require_equal(got[key], value)
    elif isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            require_equal(a, b)
    else:
        assert got == want


if __name__ == "__main__":
    main(sys.argv[1])
