"""Processor time and speed of reading one object of S3 by ranges of 8 MiB, in one process.

    python benchmarks/s3_reading.py [--size 1GB] [--jobs 1,4,16] [--rounds 3] [--json]

A server of this file, a process of its own on loopback, sends ranges of a file by sendfile, so that
the client is what is measured. Beside the way that ftckpt reads stand the event loop alone (as it
read before, and still does where the plain way fails) and, where it is installed, obstore. Every
byte is hashed. Processor time is that of the client, user and system.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import side_by_side
from side_by_side import workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.storage import StoreOptions, open_store

_PART, _TASK = 8 << 20, 64 << 20
_HEAD = b'ETag: "abc"\r\nLast-Modified: Tue, 21 Oct 2025 07:28:00 GMT\r\n\r\n'

Read = Callable[[int, memoryview], None]


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="1GB", rounds=3)
    parser.add_argument("--jobs", default="1,4,16", help="threads, several in turn")
    options = parser.parse_args()
    nbytes = size_in_bytes(options.size) // _TASK * _TASK or _TASK
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with workplace(options.dir) as place:
        file = place / "data.bin"
        file.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
        ready = multiprocessing.Pipe()
        server = multiprocessing.Process(target=_serve, args=(file, ready[1]), daemon=True)
        server.start()
        endpoint = f"http://127.0.0.1:{ready[0].recv()}"
        try:
            rows = _measured(endpoint, nbytes, options)
        finally:
            server.terminate()
    if options.json:
        print(json.dumps({"benchmark": "reading S3", "bytes": nbytes, "rows": rows}))
        return
    for row in rows:
        print(f"{row['name']:28} {row['cpu s a GB']:6.2f} s cpu a GB  {row['GB/s']:5.2f} GB/s")


def _measured(endpoint: str, nbytes: int, options: Any) -> list[dict[str, Any]]:
    ways = {"ftckpt": _ours, "ftckpt, the event loop alone": _by_event_loop}
    if find_spec("obstore") is not None:
        ways["obstore"] = _by_obstore
    rows = []
    for jobs in map(int, options.jobs.split(",")):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                found[name].append(_once(way(endpoint), nbytes, jobs))
        for name, runs in found.items():
            cpu, seconds = (median(one) for one in zip(*runs, strict=True))
            rows.append(
                {"name": f"{name}, {jobs} jobs", "cpu s a GB": cpu * 1e9 / nbytes,
                 "GB/s": nbytes / seconds / 1e9, "seconds": [s for _, s in runs]}
            )  # fmt: skip
    return rows


def _once(read: Read, nbytes: int, jobs: int) -> tuple[float, float]:
    """Return the processor time and the time that reading all takes."""
    import xxhash

    own = threading.local()

    def task(start: int) -> None:
        view = getattr(own, "view", None)
        if view is None:
            view = own.view = memoryview(bytearray(_PART))
        state = xxhash.xxh3_128()
        for at in range(start, start + _TASK, _PART):
            read(at, view)
            state.update(view)

    task(0)
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(task, range(0, nbytes, _TASK)))
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return cpu, time.perf_counter() - began


def _ours(endpoint: str) -> Read:
    return open_store("s3://bucket", StoreOptions(endpoint=endpoint)).open("data.bin").readinto


def _by_event_loop(endpoint: str) -> Read:
    store = open_store("s3://bucket", StoreOptions(endpoint=endpoint))
    store.client.fast.takes = lambda length: False  # type: ignore[attr-defined]
    return store.open("data.bin").readinto


def _by_obstore(endpoint: str) -> Read:
    import obstore  # type: ignore[import-not-found]
    from obstore.store import S3Store  # type: ignore[import-not-found]

    store = S3Store(
        "bucket", endpoint=endpoint, region="us-east-1", access_key_id="key",
        secret_access_key="secret", client_options={"allow_http": True},
    )  # fmt: skip

    def read(offset: int, view: memoryview) -> None:
        view[:] = memoryview(obstore.get_range(store, "data.bin", start=offset, length=len(view)))

    return read


def _serve(file: Path, ready: Any) -> None:
    """Answer ranges of one file for ever."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    ready.send(listening.getsockname()[1])
    fd, size = os.open(file, os.O_RDONLY), file.stat().st_size
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_answer, args=(client, fd, size), daemon=True).start()


def _answer(client: socket.socket, fd: int, size: int) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held = b""
    while True:
        while b"\r\n\r\n" not in held:
            more = client.recv(1 << 16)
            if not more:
                return
            held += more
        head, held = held.split(b"\r\n\r\n", 1)
        if head.startswith(b"HEAD"):
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b" % (size, _HEAD))
            continue
        match = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", head)
        start, last = (int(match[1]), int(match[2])) if match else (0, size - 1)
        client.sendall(
            b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d"
            b"\r\n%b" % (last - start + 1, start, last, size, _HEAD)
        )
        while start <= last:
            start += os.sendfile(client.fileno(), fd, start, last + 1 - start)


if __name__ == "__main__":
    main()
