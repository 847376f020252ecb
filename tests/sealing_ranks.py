"""Save by several ranks through a sealing writer: `sealing_ranks.py WORLD ROOT HOW`.

HOW is `save`, `process` (an asynchronous save by a process), `alone` (without collectives) or `die`
(rank 1 dies after its data).
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ftckpt.torch import SealingWriter


class Dying(FileSystemWriter):
    """Dies when its data are written."""

    def write_data(self, *given: Any) -> Any:
        done = super().write_data(*given)
        done.wait()
        os._exit(1)


def main(rank: int, world: int, root: str, how: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(4000, dtype=torch.float32).reshape(40, 100)
    state = {"model": {"weight": distribute_tensor(whole, mesh, [Shard(0)])}, "step": 1}
    path = Path(root, "step-1")
    kind = Dying if how == "die" and rank == 1 else FileSystemWriter
    writer = SealingWriter(kind(path), strict=how != "alone")
    if how == "process":
        done: Any = async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        done.result()
    elif how == "alone":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save(state, storage_writer=writer, use_collectives=False)
        assert any("is not sealed" in str(one.message) for one in told)
    else:
        save(state, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = (world, sys.argv[2], sys.argv[3], port)
    try:
        spawn(main, given, nprocs=world)  # type: ignore[no-untyped-call]
    except ProcessExitedException:
        if sys.argv[3] != "die":
            raise
