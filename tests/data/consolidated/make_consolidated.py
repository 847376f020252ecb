"""Write the consolidated saves in this directory: torch's Hugging Face writer, on gloo ranks.

Run it from the repository root to write them anew:
`python tests/data/consolidated/make_consolidated.py`. The truth is gathered from live memory before
the save, never read back. torch 2.13 wrote them.

- `three`: FSDP2 over 3 ranks, two files, `enable_consolidation=True`. `temperature` has no axes:
  torch writes zero for it into the consolidated file, and the shards have its value.
- `stale`: the same, and then another step of the same run over 2 ranks into the same folder: rank
  3's shards are of the first save, and torch consolidates all that it finds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.up = nn.Linear(6, 10, dtype=torch.bfloat16)
        self.conv = nn.Parameter(torch.randn(5, 3, 2))
        self.gain = nn.Parameter(torch.randn(2))
        self.register_buffer("temperature", torch.tensor(0.75 + step))


def rank_main(rank: int, world: int, step: int, rendezvous: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(step)
    net = Net(step)
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    state = net.state_dict()
    truth = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
    }
    files = {name: 1 if name.startswith("embed") else 2 for name in state}
    writer = HuggingFaceStorageWriter(out, files, save_distributed=True, enable_consolidation=True)
    save(state, storage_writer=writer)
    if rank == 0:
        save_file(truth, f"{out}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for name, saves in (("three", [(3, 1)]), ("stale", [(3, 1), (2, 2)])):
        shutil.rmtree(HERE / name, ignore_errors=True)
        for world, step in saves:
            with tempfile.TemporaryDirectory() as temporary:
                arguments = (world, step, f"{temporary}/rendezvous", str(HERE / name))
                spawn(rank_main, arguments, nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
