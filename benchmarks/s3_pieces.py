"""Verbs on a checkpoint of many small pieces on S3, where every request waits: GETs and seconds.

    python benchmarks/s3_pieces.py [--tensors 160] [--ranks 4] [--delay 50] [--verb NAME]

The server is OpenStack Swift's s3api on loopback, behind the tests' own proxy, which lets every
request wait `--delay` milliseconds before it is passed on. Results go to local files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import side_by_side
from side_by_side import workplace

from ftckpt import convert, diff, open_checkpoint, verify
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from ftckpt.transfer.layout import LayoutRequest


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=160, help="of one step")
    parser.add_argument("--rows", type=int, default=24, help="of each tensor, of 1 KiB")
    parser.add_argument("--ranks", type=int, default=4, help="files, over which each is cut")
    parser.add_argument("--delay", type=float, default=50, help="of each request, in ms")
    parser.add_argument("--verb", default="", help="this one alone")
    options = parser.parse_args()
    from tests.servers.faults import Fault, fault_proxy
    from tests.servers.s3 import BUCKET, upload_tree
    from tests.servers.swift import swift_server

    with (
        workplace(options.dir) as place,
        swift_server() as service,
        fault_proxy(service.endpoint) as proxy,
    ):
        os.environ.update(service.environment)
        service.client.create_bucket(Bucket=BUCKET)
        for step in (1, 2):
            save(place / f"step-{step}", options.tensors, options.rows, options.ranks, step)
            upload_tree(place / f"step-{step}", f"s3://{BUCKET}/run/step-{step}")
        size = sum(f.stat().st_size for f in (place / "step-1").iterdir())
        print(
            f"{options.tensors * options.ranks} pieces in {options.ranks} files of "
            f"{size / 1e6:.1f} MB in all, {options.delay:g} ms a request "
            f"({side_by_side.machine()})"
        )
        stores = StoreOptions(endpoint=proxy.endpoint)
        for name, act in verbs(f"s3://{BUCKET}/run", place / "out", stores).items():
            if options.verb not in name:
                continue
            shutil.rmtree(place / "out", ignore_errors=True)
            proxy.log.clear()
            proxy.faults = [Fault("", times=1 << 60, then=lambda: time.sleep(options.delay / 1e3))]
            began = time.perf_counter()
            act()
            seconds = time.perf_counter() - began
            print(f"{name:24}{proxy.seen('^GET .*distcp'):6} GETs{seconds:8.1f} s")


def verbs(root: str, out: Path, stores: StoreOptions) -> dict[str, Callable[[], object]]:
    """Return what is measured."""
    one, two, made = f"{root}/step-1", f"{root}/step-2", str(out)

    def pack() -> None:
        target, base = open_checkpoint(two, stores), open_checkpoint(one, stores)
        pack_checkpoint(target, base, made, options=PackOptions(), store_options=stores)

    return {
        "reshard --dp 2": lambda: convert(one, made, request=LayoutRequest(dp=2), stores=stores),
        "convert to safetensors": lambda: convert(one, made, to="safetensors", stores=stores),
        "diff": lambda: diff(one, two, stores=stores),
        "verify --level values": lambda: verify(one, level="values", stores=stores),
        "delta pack": pack,
    }


def save(path: Path, tensors: int, rows: int, ranks: int, step: int) -> None:
    """Save tensors as PyTorch's distributed checkpoint does, each cut over all ranks."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(step)
    state = {f"layers.{n}.weight": torch.randn(rows, 256) for n in range(tensors)}
    whole = path.with_suffix(".safetensors")
    save_file(state, whole)
    convert(str(whole), str(path), to="dcp", request=LayoutRequest(dp=ranks))
    whole.unlink()


if __name__ == "__main__":
    main()
