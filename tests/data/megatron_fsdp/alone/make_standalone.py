"""Make `standalone.tar.xz` beside this file, on a GPU: `python make_standalone.py`.

Needs megatron-fsdp (made with 0.6.1 and torch 2.11, on an H200). A model of two blocks is trained
for two steps by `fully_shard_model` and `fully_shard_optimizer`, and saved by
`torch.distributed.checkpoint.save`, as the package's README shows it. Its optimizer numbers its
states, and has counted one step more than the training: `fully_shard_optimizer` takes a step with
gradients of zero to make the states.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + changed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def main() -> None:
    import torch.distributed as dist
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.checkpoint.state_dict_saver import save

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(where, LOCAL_RANK="0")
    dist.init_process_group("nccl")
    torch.manual_seed(3)
    model: Any = fully_shard_model(module=Net().cuda(), fsdp_unit_modules=[Block])
    optimizer: Any = fully_shard_optimizer(optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in (1, 2):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 16, (4, 6), generator=drawn).cuda()
        found = model(tokens).flatten(0, 1)
        loss: Any = nn.functional.cross_entropy(found, tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as work:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, checkpoint_id=f"{work}/standalone/step-2")
        subprocess.run(
            ["tar", "-cJf", HERE / "standalone.tar.xz", "-C", work, "standalone"], check=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
