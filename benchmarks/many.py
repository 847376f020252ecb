"""What the division of work does on 1 to 1,000 machines: simulated, without reading any data.

    python benchmarks/many.py [--parts 1,10,100,1000] [--rate 1.5] [--storage 100] [--requests]

The division is the real one (`ftckpt.parts.shares`, the cutting of files for a bucket, the reading
of records); only the bytes are not there. The plan and the end are timed in this run, on one
machine. What machines do with their shares is computed: R bytes a second on each, S for all.

- `largest`: the largest share as a multiple of the mean. `blocks`: of 64 MiB, as verify and copies
  on a filesystem divide; `bucket`: as a copy to an object store does, whole files and blocks of
  those that are much of a share; `files`: whole files of a result, as convert and reshard do.
- `opened`: most files that one part reads.
- `lost`: of 100 machines some die, each at a random moment; what is done again, and how much later
  the end is, with one share and with four for each machine.
- `--requests`: what one part asks of a bucket before it reads, by moto.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parts as parts_benchmark
import side_by_side
from side_by_side import workplace

from ftckpt.digests.blocks import block_count, block_length
from ftckpt.extents import BLOCK
from ftckpt.parts.shares import ByteRow, Shares
from ftckpt.transfer.staging.remote import RemoteStaging

_TB, _GB = 10**12, 10**9
_MACHINES = 100


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    parser.add_argument("--parts", default="1,10,100,1000")
    parser.add_argument("--rate", type=float, default=1.5, help="GB/s of one machine")
    parser.add_argument("--storage", type=float, default=100, help="GB/s of all")
    parser.add_argument("--requests", action="store_true", help="ask a bucket of moto")
    options = parser.parse_args()
    numbers = [int(word) for word in options.parts.split(",")]
    found: dict[str, Any] = {"balance": [], "lost": []}
    for name, sizes in states().items():
        for number in numbers:
            if number > 1:
                found["balance"].append({"state": name, "parts": number} | balance(sizes, number))
                print(found["balance"][-1], file=sys.stderr, flush=True)
    sizes = states()["10 TB, 2,000 files of 5 GB"]
    for each in (1, 4):
        for dead in (0, 1, 10):
            found["lost"].append(after_deaths(sizes, each, dead, options.rate * _GB))
            print(found["lost"][-1], file=sys.stderr, flush=True)
    with workplace(options.dir) as place:
        ends = {}
        for number in numbers:
            one = parts_benchmark.finish_many(place / str(number), number)
            ends[number] = float(str(next(iter(one.values()))))
        plan = timed_plan(place)
        found["creates a second, one writer, local"] = round(creates(place))
    found["plan of 10 TB in 2,000 files, seconds"] = round(plan, 2)
    found["end, seconds"] = {number: round(seconds, 2) for number, seconds in ends.items()}
    found["time by the model, seconds"] = {
        number: round(model(sizes, number, plan, ends[number], options), 1) for number in numbers
    }
    if options.requests:
        found["requests of one part before it reads"] = requests_of_a_part()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            print(f"{name}: {row}")


def states() -> dict[str, dict[str, int]]:
    """Return the sizes of the files of several checkpoints."""
    chosen = random.Random(24)

    def equal(total: int, count: int) -> list[int]:
        return [total // count] * count

    def drawn(total: int, count: int, spread: float) -> list[int]:
        weights = [chosen.lognormvariate(0, spread) for _ in range(count)]
        scale = total / sum(weights)
        return [round(scale * one) for one in weights]

    made = {
        "980 GB, 196 files of 5 GB": equal(980 * _GB, 196),
        "980 GB, 64 ranks": equal(980 * _GB, 64),
        "10 TB, 2,000 files of 5 GB": equal(10 * _TB, 2000),
        "10 TB, 1,024 ranks": equal(10 * _TB, 1024),
        "10 TB, a million files, lognormal (1)": drawn(10 * _TB, 1_000_000, 1.0),
        "10 TB, 3,000 files, lognormal (1.5)": drawn(10 * _TB, 3000, 1.5),
        "10 TB, half of it one file": [5 * _TB, *equal(5 * _TB, 999)],
    }
    return {
        name: {f"{number:07}.bin": size for number, size in enumerate(sizes)}
        for name, sizes in made.items()
    }


def balance(sizes: Mapping[str, int], number: int) -> dict[str, object]:
    """Divide a checkpoint in each way."""
    entries = {name: SimpleNamespace(size=size) for name, size in sizes.items()}
    checkpoint: Any = SimpleNamespace(source=SimpleNamespace(entries=entries), tensors={})
    shares = Shares(checkpoint, sizes, number)
    mean = sum(sizes.values()) / number
    ways: dict[str, Callable[[str, int], Iterator[tuple[int, int]]]] = {}

    def blocks(name: str, size: int) -> Iterator[tuple[int, int]]:
        for block in range(block_count(size)):
            length = block_length(size, block)
            yield shares.of_bytes(name, block * BLOCK, length), length

    row = ByteRow.of(sizes.items())
    cuts = RemoteStaging(SimpleNamespace(traits=SimpleNamespace(joint_uploads=True))).cuts  # type: ignore[arg-type]
    share = -(-sum(sizes.values()) // number)

    def whole(name: str, size: int) -> Iterator[tuple[int, int]]:
        yield row.part(name, 0, size, number), size

    def bucket(name: str, size: int) -> Iterator[tuple[int, int]]:
        yield from (blocks if cuts(size, share) else whole)(name, size)

    ways = {"blocks": blocks, "bucket": bucket, "files": whole}
    result: dict[str, object] = {}
    for way, divide in ways.items():
        held: list[int] = [0] * number
        opened: Counter[int] = Counter()
        for name, size in sizes.items():
            seen = set()
            for part, length in divide(name, size):
                held[part] += length
                seen.add(part)
            opened.update(seen)
        result[f"largest, {way}"] = round(max(held) / mean, 2)
        if way == "blocks":
            result["opened"] = max(opened.values())
    return result


def shares_of(sizes: Mapping[str, int], number: int) -> list[int]:
    """Return the bytes of each part, by blocks."""
    row = ByteRow.of(sizes.items())
    held = [0] * number
    for name, size in sizes.items():
        for block in range(block_count(size)):
            length = block_length(size, block)
            held[row.part(name, block * BLOCK, length, number)] += length
    return held


def after_deaths(
    sizes: Mapping[str, int], each: int, dead: int, rate: float, rounds: int = 50
) -> dict[str, object]:
    """Let machines take shares as they get free, and some of them die."""
    held = shares_of(sizes, each * _MACHINES)
    alone = sum(held) / _MACHINES / rate
    chosen = random.Random(24)
    ends, again = [], []
    for _ in range(rounds):
        dies = {m: chosen.uniform(0, alone) for m in chosen.sample(range(_MACHINES), dead)}
        end, lost = _played(held, rate, dies)
        ends.append(end)
        again.append(lost)
    return {
        "machines": _MACHINES, "shares": len(held), "die": dead,
        "done again, share of all bytes": round(statistics.fmean(again) / sum(held), 4),
        "end / without a death": round(statistics.fmean(ends) / alone, 2),
    }  # fmt: skip


def _played(held: Sequence[int], rate: float, dies: Mapping[int, float]) -> tuple[float, float]:
    """Return when all is done, and the bytes that were read in vain."""
    waiting = list(held)
    free = [(0.0, machine) for machine in range(_MACHINES)]
    heapq.heapify(free)
    end = lost = 0.0
    late: list[tuple[float, int]] = []  # shares of the dead, from when they can be taken
    while waiting or late:
        if not waiting:
            late.sort()
        at, machine = heapq.heappop(free)
        death = dies.get(machine, float("inf"))
        if at >= death:
            continue
        if waiting:
            share = waiting.pop()
        else:
            since, share = late.pop(0)
            at = max(at, since)
        done = at + share / rate
        if death < done:
            lost += max(0.0, death - at) * rate
            late.append((max(at, death), share))
            continue
        end = max(end, done)
        heapq.heappush(free, (done, machine))
    return end, lost


def timed_plan(place: Path) -> float:
    """Return the seconds of opening and planning 10 TB of sealed safetensors in 2,000 files.

    A tenth of them is planned, ten times: what a plan takes grows with the files.
    """
    from ftckpt.discovery.resolve import open_target
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.manifest.locate import read
    from ftckpt.own_files import MANIFEST
    from ftckpt.parts.plan import names_of, plan_of
    from ftckpt.storage import StoreOptions

    step = parts_benchmark.save_holes(place / "plan" / "step-1", _TB)
    began = time.monotonic()
    for _ in range(10):
        checkpoint = open_target(str(step), FORMATS, StoreOptions()).open()
        sealed = read(checkpoint.source.store, checkpoint.source.path(MANIFEST))
        plan_of(checkpoint, "verify", {"level": "content"}, sealed=sealed)
        Shares(checkpoint, names_of(checkpoint, sealed), 1000).of_bytes("x", 0, 1)
    return time.monotonic() - began


def creates(place: Path, number: int = 50) -> float:
    """Return how many records one writer leaves in a second on this disk, each flushed."""
    from ftckpt.storage import open_store

    store = open_store(str(place / "creates"))
    began = time.monotonic()
    for one in range(number):
        store.create(f"parts/{one}-{number}.json", bytes(1000))
    return number / (time.monotonic() - began)


def model(sizes: Mapping[str, int], number: int, plan: float, end: float, options: Any) -> float:
    """Return the seconds of a check, its largest share and the storage in its way."""
    held = shares_of(sizes, number)
    slowest = max(max(held) / options.rate, sum(held) / options.storage) / _GB
    return float(plan + slowest + end)


def requests_of_a_part() -> dict[str, dict[str, int]]:
    """Count what a part asks a bucket for where nothing of its share is to be read."""
    from ftckpt.storage.s3.client import S3Client
    from tests.parts.answers import answer
    from tests.servers.moto import moto_server
    from tests.servers.s3 import BUCKET, upload_tree

    clients: list[S3Client] = []
    begin = S3Client.__init__

    def noted(self: S3Client, *words: Any, **more: Any) -> None:
        clients.append(self)
        begin(self, *words, **more)

    S3Client.__init__ = noted  # type: ignore[method-assign]
    found: dict[str, dict[str, int]] = defaultdict(dict)
    parts_benchmark._SHARD = 20_000
    with moto_server() as service, workplace(None) as place:
        os.environ.update(service.environment)
        service.client.create_bucket(Bucket=BUCKET)
        for files in (100, 300):
            step = parts_benchmark.save_holes(place / str(files) / "step-1", 20_000 * files)
            url = f"s3://{BUCKET}/{files}/step-1"
            upload_tree(step, url)
            target = f"s3://{BUCKET}/made-{files}/step-1"
            lines = {
                "verify": ["verify", url, "--level", "content"],
                "copy, the first part": ["copy", url, target],
                "copy": ["copy", url, target],
            }
            for name, line in lines.items():
                number = 500 if "first" in name else 499  # neither has a file of its own
                before = sum(one.requests for one in clients)
                answer(*line, "--part", f"{number}/1000")
                asked = sum(one.requests for one in clients) - before
                found[name][f"{files} files"] = asked
    S3Client.__init__ = begin  # type: ignore[method-assign]
    return dict(found)


if __name__ == "__main__":
    main()
