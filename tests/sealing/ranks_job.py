"""Save by several ranks through a sealing writer: `ranks_job.py WORLD ROOT HOW...`.

Each HOW saves into a directory of its name below ROOT. It is `save`; `process` or `thread` for an
asynchronous save; `alone` or `alone-thread` for one without collectives; or `die` (rank 1 dies
after its data).
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from ftckpt.own_files import MANIFEST
from ftckpt.torch import SealingWriter, seal_after


class Dying(FileSystemWriter):
    """Dies when its data are written."""

    def write_data(self, *given: Any) -> Any:
        done = super().write_data(*given)
        done.wait()
        os._exit(1)


def main(rank: int, world: int, root: str, ways: list[str], port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(4000, dtype=torch.float32).reshape(40, 100)
    state = {"model": {"weight": distribute_tensor(whole, mesh, [Shard(0)])}, "step": 1}
    for how in ways:
        save_so(state, Path(root, how), how, rank)
    dist.barrier()
    dist.destroy_process_group()


def save_so(state: dict[str, Any], path: Path, how: str, rank: int) -> None:
    kind = Dying if how == "die" and rank == 1 else FileSystemWriter
    writer = SealingWriter(kind(path), strict=True)
    way, _, executor = how.partition("-")
    more: dict[str, Any] = {"use_collectives": False} if way == "alone" else {}
    executor = executor or way
    if executor == "process":
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    if executor in ("process", "thread"):
        done: Any = async_save(state, storage_writer=writer, **more)
        done.result()
    else:
        save(state, storage_writer=writer, **more)
    dist.barrier()
    if way == "alone" and rank == 0:
        assert not (path / MANIFEST).exists()
        report = seal_after(path, strict=True)
        assert report is not None
        assert report.bytes_read == 0  # every rank left what it had hashed
        assert not list(path.glob(".ftckpt/sealing/*"))


if __name__ == "__main__":
    world = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = (world, sys.argv[2], sys.argv[3:], port)
    try:
        # Not "spawn": each rank would import torch anew.
        start_processes(main, given, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessExitedException:
        if "die" not in sys.argv:
            raise
