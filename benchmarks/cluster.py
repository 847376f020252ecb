"""One line by one Dask worker and by two: how much sooner the answer is there.

    python benchmarks/cluster.py [--size 700GB] [--state 4GB] [--rounds 3] [--dir DIR] [--json]

The scheduler and its workers run before the clock starts, as they do in a cluster; the time is
that of the command, with its start, its plan and the end. A worker has one thread, so one processor
is compared with two; a machine of two has the scheduler and the command on the same two. Beside it
stands what the machine gives at most: one process with `--jobs 1` and with `--jobs 2`.

`verify` reads sealed safetensors whose data are holes (see parts.py), `delta pack` compresses a
state of DCP, proven.
Needs `pip install distributed`.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import side_by_side
import torch
from parts import save_holes, taken
from side_by_side import workplace
from torch.distributed.checkpoint.state_dict_saver import save

from ftckpt.amounts import size as size_in_bytes

_TENSORS = 64


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="700GB", rounds=3)
    parser.add_argument("--state", default="4GB", help="of the state that is converted")
    options = parser.parse_args()
    found: dict[str, object] = {}
    with workplace(options.dir) as place:
        step = save_holes(place / "run" / "step-1", size_in_bytes(options.size))
        state = place / "dcp"
        each = size_in_bytes(options.state) // _TENSORS // 4
        tensors = {f"layer.{n}": torch.randn(each) for n in range(_TENSORS)}
        save(tensors, checkpoint_id=str(state), no_dist=True)
        out = place / "out"
        lines = {
            "verify": ["verify", str(step), "--level", "content"],
            "delta pack": ["delta", "pack", str(state), str(out)],
        }
        for name, words in lines.items():
            ratios: dict[str, list[float]] = {"worker of Dask": [], "thread of one process": []}
            for _ in range(options.rounds):
                by_workers, by_threads = [], []
                for number in (1, 2):
                    shutil.rmtree(out, ignore_errors=True)
                    by_threads.append(taken(*words, "--jobs", str(number))[0])
                    shutil.rmtree(out, ignore_errors=True)
                    at = ["--parts", str(place / "at")] if name == "verify" else []
                    with cluster(number) as address:
                        by_workers.append(taken(*words, *at, "--cluster", address)[0])
                    shutil.rmtree(place / "at", ignore_errors=True)
                for what, seconds in zip(ratios, (by_workers, by_threads), strict=True):
                    ratios[what].append(round(seconds[0] / seconds[1], 2))
                    print(
                        f"{name}: one {what} {seconds[0]:.1f} s, two {seconds[1]:.1f} s",
                        file=sys.stderr,
                    )
            for what, each_round in ratios.items():
                found[f"{name}: one {what} / two, each round"] = each_round
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")


@contextmanager
def cluster(workers: int) -> Iterator[str]:
    """Run a scheduler and its workers; yield the scheduler's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, *words: str) -> None:
        line: Sequence[str] = [sys.executable, "-m", f"distributed.cli.{module}", *words]
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(line, stdout=quiet, stderr=quiet, cwd=side_by_side.ROOT))

    try:
        start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        for _ in range(workers):
            start(
                "dask_worker", address, "--nthreads", "1", "--memory-limit", "0", "--no-dashboard"
            )
        from distributed import Client

        with Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=60)
        time.sleep(2)  # until the workers have imported what they import at their start
        yield address
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
