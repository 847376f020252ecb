"""Save with torch's DCP, with and without a seal while saving.

    python benchmarks/sealing.py [--size 2GB] [--rounds 5] [--threads 1] [--dir DIR] [--json]

Both write the same bytes with the same writer and flush them to the disk. "then ftckpt seal" saves
and then reads everything once more. "processor s" is what all threads of one save took. One save
flushes the other's writes too, so each is written anew after a `sync`.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import side_by_side
import torch
from side_by_side import Contestant, compare, show, workplace
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter

from ftckpt.amounts import size as size_in_bytes
from ftckpt.torch import SealingWriter, seal_after

_TENSORS = 32


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="2GB", rounds=5)
    parser.add_argument("--threads", type=int, default=1, help="the writer's thread_count")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    each = size_in_bytes(options.size) // _TENSORS // 4
    state = {"model": {f"layer.{n}": torch.randn(each) for n in range(_TENSORS)}}
    spent: dict[str, list[float]] = {}
    with workplace(options.dir) as place:

        def contestant(
            name: str, writer: Callable[[Path], StorageWriter], *, ours: bool = False
        ) -> Contestant:
            path = place / "step-1"

            def clear() -> None:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()

            def run() -> int:
                before = resource.getrusage(resource.RUSAGE_SELF)
                save(state, storage_writer=writer(path))
                if name.startswith("then"):
                    seal_after(path, strict=True)
                after = resource.getrusage(resource.RUSAGE_SELF)
                took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                spent.setdefault(name, []).append(took)
                return sum(one.stat().st_size for one in path.iterdir())

            return Contestant(name, run, ours=ours, prepare=clear)

        def plain(path: Path) -> FileSystemWriter:
            return FileSystemWriter(path, thread_count=options.threads)

        rows = compare(
            [
                contestant("dcp.save", plain),
                contestant(
                    "dcp.save, SealingWriter", lambda p: SealingWriter(plain(p), strict=True),
                    ours=True,
                ),
                contestant("then ftckpt seal", plain),
            ],
            options.rounds,
        )  # fmt: skip
    processor = {
        f"processor s, {name}": round(statistics.median(each[1:]), 3)
        for name, each in spent.items()
    }
    show("sealing", rows, dict(processor), as_json=options.json)


if __name__ == "__main__":
    main()
