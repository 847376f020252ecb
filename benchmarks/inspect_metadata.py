"""Inspect of DCP metadata with 100,000 tensors in 200,000 pieces against torch's own unpickling.

    python benchmarks/inspect_metadata.py [--tensors 100000] [--rounds 5] [--json]

The metadata is made of torch's own classes and pickled as torch does. The data file is a hole of
the right length: inspect never reads it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import Contestant, compare, ftckpt_command, workplace

MAKE = """
import sys
from pathlib import Path
from inspect_metadata import save_metadata
save_metadata(Path(sys.argv[1]), int(sys.argv[2]))
"""
LOAD = """
import pickle, sys
import torch.distributed.checkpoint
with open(sys.argv[1], "rb") as file:
    metadata = pickle.load(file)
print(len(metadata.state_dict_metadata))
"""


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=100_000, help="with two pieces each")
    options = parser.parse_args()
    with workplace(options.dir) as place:
        path = place / "step-1"
        # In a process of its own: what a process starts inherits its peak memory.
        make = [sys.executable, "-c", MAKE, str(path), str(options.tensors)]
        subprocess.run(make, cwd=Path(__file__).parent, check=True)
        size = (path / ".metadata").stat().st_size
        peaks: dict[str, int] = {}
        commands = {
            "ftckpt inspect": [*ftckpt_command(), "inspect", str(path), "--json"],
            "torch: import and unpickle": [sys.executable, "-c", LOAD, str(path / ".metadata")],
        }
        contestants = [
            Contestant(name, lambda n=name: measured(n, commands[n], peaks), ours="ft" in name)  # type: ignore[misc]
            for name in commands
        ]
        rows = compare(contestants, options.rounds)
        extra: dict[str, object] = {"metadata, bytes": size}
        for name, peak in peaks.items():
            extra[f"peak RSS, {name}"] = f"{peak >> 20} MiB, {peak / size:.1f} x the metadata"
        side_by_side.show(
            f"inspect, {options.tensors} tensors in {2 * options.tensors} pieces",
            rows, extra, as_json=options.json,
        )  # fmt: skip


def measured(name: str, command: list[str], peaks: dict[str, int]) -> int:
    """Run a command; remember the most memory that it held."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, cwd=side_by_side.ROOT, env=side_by_side.environment()
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    peaks[name] = max(peaks.get(name, 0), usage.ru_maxrss * 1024)
    return 0


def save_metadata(path: Path, tensors: int) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    path.mkdir()
    state: dict[str, Any] = {}
    storage, planner = {}, {}
    offset = 0
    length = 4096
    for number in range(tensors):
        name = f"model.layers.{number // 10}.block.{number % 10}.weight"
        chunks = [
            ChunkStorageMetadata(torch.Size([8 * half, 16]), torch.Size([8, 16]))
            for half in range(2)
        ]
        state[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([16, 16]), chunks
        )
        planner[name] = ("model", *name.split(".")[1:])
        for half, chunk in enumerate(chunks):
            index = MetadataIndex(name, chunk.offsets, half)
            storage[index] = _StorageInfo("__0_0.distcp", offset, length)
            offset += length
    metadata = Metadata(state, planner_data=planner, storage_data=storage)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    with (path / "__0_0.distcp").open("wb") as file:
        file.truncate(offset)


if __name__ == "__main__":
    main()
