"""Loading a DCP checkpoint into a job: ftckpt.torch.Reader against torch's own readers.

    python benchmarks/loading.py [MODE …] [--size 1GB] [--rounds 5] [--json]

`local` is one process: with the check and without, one thread and two, beside FileSystemReader,
which checks nothing. `ranks` is two processes with one thread each, whose tensors are divided in
rows and in columns; each record is cut over both.
`restart` is a job on other ranks: reshard and then dcp.load, beside Reader alone. `s3` reads from a
server on loopback, beside FsspecReader, and counts requests and bytes. `memory` is what a process
takes beside the tensors that it loads into, and how much more with each thread.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import Contestant, Row, compare, remove, warm, workplace

from ftckpt.amounts import size as size_in_bytes

MODES = ("local", "ranks", "restart", "s3", "memory")
_RECORD = 3 << 20  # bytes of one


def main() -> None:
    parser = side_by_side.arguments((__doc__ or "").splitlines()[0], size="1GB")
    words = ", ".join(MODES)
    parser.add_argument("modes", nargs="*", default=["local"], metavar="MODE", help=words)
    parser.add_argument("--rank-of", help="be a rank of the mode `ranks`")
    parser.add_argument("--peak-of", nargs=2, help="be a process of the mode `memory`")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.rank_of:
        of_rank(Path(options.rank_of), options.rounds)
        return
    if options.peak_of:
        print(peak_of(Path(options.peak_of[0]), int(options.peak_of[1])))
        return
    with workplace(options.dir) as place:
        path = place / "step-1"
        save(path, size_in_bytes(options.size))
        warm(path)
        for mode in options.modes:
            modes = {"local": local, "ranks": ranks, "restart": restart, "s3": s3, "memory": memory}
            modes[mode](path, options)


def save(path: Path, nbytes: int) -> None:
    """Let torch save matrices of float32 in two files, a record of 3 MiB each."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    torch.manual_seed(0)
    base = torch.randn(1024, _RECORD // 4096)
    state = {f"layers.{i}.weight": base + i for i in range(max(1, nbytes // _RECORD))}
    writer = FileSystemWriter(path, thread_count=2)
    dcp_save({"model": state}, storage_writer=writer, no_dist=True)


def empty_state(path: Path) -> dict[str, Any]:
    """Return a state to load into."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata: Any = FileSystemReader(path).read_metadata()
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }


def load(state: dict[str, Any], reader: Any) -> int:
    """Load a state; return its bytes."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    dcp_load(state, storage_reader=reader)
    return sum(one.numel() * one.element_size() for one in state.values())


def local(path: Path, options: Any) -> None:
    """Load in one process."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from ftckpt.torch import Reader

    state = empty_state(path)
    rows = compare(
        [
            Contestant("Reader, checked, 1 thread", lambda: load(state, Reader(path, jobs=1)),
                       ours=True),
            Contestant("Reader, checked, 2 threads", lambda: load(state, Reader(path, jobs=2))),
            Contestant("Reader, unchecked, 1 thread",
                       lambda: load(state, Reader(path, jobs=1, level="structure"))),
            Contestant("FileSystemReader", lambda: load(state, FileSystemReader(path))),
        ],
        options.rounds,
    )  # fmt: skip
    side_by_side.show("load a DCP, one process", rows, {}, as_json=options.json)


def ranks(path: Path, options: Any) -> None:
    """Load by two processes."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    job = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", str(path), "--rounds", str(options.rounds)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [one.communicate()[0] for one in job]
    found = json.loads(said[0])
    for way, times in found.items():
        ours = times["Reader, checked"]
        rows = [
            Row(name, seconds, 0, [a / b for a, b in zip(seconds, ours, strict=True)])
            for name, seconds in times.items()
        ]
        side_by_side.show(f"load a DCP, 2 ranks, {way}", rows, {}, as_json=options.json)


def of_rank(path: Path, rounds: int) -> None:
    """Be one of two ranks; the first prints the seconds of each contestant."""
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from ftckpt.torch import Reader

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    readers: dict[str, Any] = {
        "Reader, checked": lambda: Reader(path, jobs=1),
        "Reader, unchecked": lambda: Reader(path, jobs=1, level="structure"),
        "FileSystemReader": lambda: FileSystemReader(path),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for way, axis in (("rows", 0), ("columns", 1)):
        state: dict[str, Any] = {}
        for name, whole in empty_state(path).items():
            shape = list(whole.shape)
            if axis >= len(shape):
                continue
            shape[axis] //= 2
            state[name] = DTensor.from_local(torch.zeros(shape), mesh, [Shard(axis)])
        if not state:
            continue
        times: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(rounds + 1):
            for name, make in readers.items():
                distributed.barrier()
                began = time.perf_counter()
                from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

                dcp_load(state, storage_reader=make())
                distributed.barrier()
                if number:
                    times[name].append(time.perf_counter() - began)
        found[way] = times
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


def memory(path: Path, options: Any) -> None:
    """Print what each reader takes beside the tensors, in MiB."""
    found = {}
    for name, jobs in (("FileSystemReader", 0), ("Reader, 1 thread", 1), ("Reader, 4 threads", 4)):
        done = subprocess.run(
            [sys.executable, __file__, "--peak-of", str(path), str(jobs)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[name] = float(done.stdout.split()[-1])
    side_by_side.show("memory beside the tensors, MiB", [], found, as_json=options.json)


def peak_of(path: Path, jobs: int) -> float:
    """Load once small and once whole; return by how much the peak of memory grew, in MiB."""
    import resource

    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from ftckpt.torch import Reader

    state = empty_state(path)
    for tensor in state.values():
        tensor.fill_(1)  # or its pages are not there yet

    def reader() -> Any:
        return Reader(path, jobs=jobs) if jobs else FileSystemReader(path)

    load(dict(list(state.items())[:1]), reader())  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load(state, reader())
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def restart(path: Path, options: Any) -> None:
    """Restart on other ranks: files for them first, or straight into the job."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    import ftckpt
    from ftckpt.torch import Reader

    state = empty_state(path)
    out = path.parent / "for-3-ranks"

    def resharded() -> int:
        ftckpt.reshard(str(path), str(out), dp=3)
        return load(state, FileSystemReader(out))

    rows = compare(
        [
            Contestant("Reader", lambda: load(state, Reader(path)), ours=True),
            Contestant("reshard, then dcp.load", resharded, prepare=lambda: remove(out, path)),
        ],
        options.rounds,
    )
    side_by_side.show("restart on 3 ranks", rows, {}, as_json=options.json)


def s3(path: Path, options: Any) -> None:
    """Load from an object store."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    from ftckpt.torch import Reader
    from tests.servers.s3 import BUCKET
    from tests.servers.swift import swift_server

    with swift_server() as service:
        os.environ.update(service.environment)
        service.client.create_bucket(Bucket=BUCKET)
        for file in sorted(path.iterdir()):
            service.put(f"run/{file.name}", file.read_bytes())
        url = f"s3://{BUCKET}/run"
        state = empty_state(path)
        used: dict[str, Any] = {}

        def ours() -> int:
            reader = Reader(url, jobs=4)
            nbytes = load(state, reader)
            assert reader._state is not None
            usage = reader._state.content.checkpoint.source.store.usage()
            used.update(requests=usage.requests, bytes_read=usage.bytes_read, bytes=nbytes)
            return nbytes

        options_of = {"endpoint_url": os.environ.get("AWS_ENDPOINT_URL")}
        rows = compare(
            [
                Contestant("Reader, checked, 4 threads", ours, ours=True),
                Contestant("FsspecReader", lambda: load(state, FsspecReader(url, **options_of))),
            ],
            options.rounds,
        )
        side_by_side.show("load a DCP from S3", rows, used, as_json=options.json)


if __name__ == "__main__":
    main()
