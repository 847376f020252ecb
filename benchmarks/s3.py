"""Inspect of a 64-shard safetensors checkpoint on a real S3 server: requests and bytes.

    python benchmarks/s3.py [--shards 64] [--rounds 3] [--json]

The server is OpenStack Swift's s3api, started on loopback by the tests' own code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import side_by_side
from side_by_side import Contestant, compare, workplace

from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], rounds=3)
    parser.add_argument("--shards", type=int, default=64)
    options = parser.parse_args()
    from tests.servers.s3 import BUCKET
    from tests.servers.swift import swift_server

    with workplace(options.dir) as place, swift_server() as service:
        os.environ.update(service.environment)
        service.client.create_bucket(Bucket=BUCKET)
        nbytes = save_shards(place, options.shards)
        for file in sorted(place.iterdir()):
            service.put(f"model/{file.name}", file.read_bytes())
        url = f"s3://{BUCKET}/model"
        used: dict[str, object] = {}

        def inspect() -> int:
            checkpoint = open_target(url, FORMATS, StoreOptions()).open()
            assert len(checkpoint.tensors) == 4 * options.shards
            usage = checkpoint.source.store.usage()
            used["requests"] = usage.requests
            used["requests a shard"] = round(usage.requests / options.shards, 2)
            used["bytes read"] = usage.bytes_read
            return 0

        rows = compare([Contestant("ftckpt inspect", inspect, ours=True)], options.rounds)
        used["bytes of the checkpoint"] = nbytes
        side_by_side.show(
            f"inspect on S3, {options.shards} shards", rows, used, as_json=options.json
        )


def save_shards(path: Path, shards: int) -> int:
    """Save a sharded checkpoint with its index, as Hugging Face lays it out."""
    import torch
    from safetensors.torch import save_file

    names: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        tensors = {f"model.layers.{number}.{i}.weight": torch.zeros(128, 512) for i in range(4)}
        save_file(tensors, path / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    total = 4 * shards * 128 * 512 * 4
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(f.stat().st_size for f in path.iterdir())


if __name__ == "__main__":
    main()
