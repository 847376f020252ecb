"""Run the benchmarks small, all of them, and print one table: `python -m benchmarks`.

    python -m benchmarks [--only NAME …] [--size 64MB] [--rounds 1] [--dir DIR] [--json] [--list]
                         [--zipnn PYTHON] [--s5cmd PATH] [--deepspeed PYTHON]

Each benchmark runs as a process of its own, with little data and one round, so a row says in which
order things come and nothing finer; the full size stands in docs/benchmarks.md. "ours is" says how
many times as fast the first row of its group is. Peers that are not installed are named at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import side_by_side  # noqa: E402

_LIMIT = 600  # seconds for one of them
_FAILED = "failed:"


@dataclass(frozen=True)
class Small:
    """A benchmark as it runs here.

    Attributes:
        words: after the script's name; {size} and {rounds} are filled in.
        pythons: options that a user may give, each passed on; without it a peer is left out.
        beside: what it is compared with, for `--list`.
    """

    words: str
    beside: str
    pythons: tuple[str, ...] = ()


SIZED = "--size {size} --rounds {rounds}"
SMALL: dict[str, Small] = {
    "verify": Small(SIZED, "plain reads, xxhsum"),
    "cold": Small(SIZED, "cat, sha256sum, cp, each from a cold page cache"),
    "crc": Small(SIZED, "zipfile.testzip, dcp.load"),
    "reshard": Small(
        f"dcp-safetensors hf-dcp zero2-universal {SIZED}",
        "cp, dcp_to_torch_save, HuggingFaceStorageReader, ds_to_universal.py",
        ("deepspeed",),
    ),
    "weights": Small(
        f"consolidate {SIZED}", "torch's _consolidate_hf_safetensors with 1 and 2 threads"
    ),
    "replicas": Small(
        f"local s3 {SIZED}", "cp, boto3, rclone copy --checksum, s5cmd cp", ("s5cmd",)
    ),
    "compress": Small(SIZED, "zipnn, zstd", ("zipnn",)),
    "diff": Small(SIZED, "cmp"),
    "sealing": Small(SIZED, "the same save without a seal"),
    "inspect_metadata": Small("--tensors 4000 --rounds {rounds}", "torch's import and unpickling"),
    "retention": Small("--checkpoints 20 --files 200 --rounds {rounds}", "find, du"),
    "loading": Small(f"local restart {SIZED}", "dcp.load with FileSystemReader; reshard first"),
    "s3": Small("--shards 16 --rounds {rounds}", "a request a shard"),
    "plan": Small("--failures 2000 --rounds {rounds}", "a plain Python loop"),
    "startup": Small("--rounds {rounds}", "ftckpt --help"),
}
# What has no small form, and why.
ELSEWHERE: dict[str, str] = {
    "adapters": "needs PEFT for its peer",
    "cluster": "needs distributed, and 700 GB of holes",
    "delta": "trains for 20 minutes first",
    "delta_bound": "prints a bound, no times",
    "delta_jobs": "needs the states of delta",
    "loading_gpu": "needs a GPU",
    "newest": "installs the newest releases from the network",
    "many": "computed, and beside no peer",
    "orbax": "needs a Python with Orbax",
    "parts": "140 GB",
    "passes": "counts bytes, no times",
    "replay": "trains a model for minutes",
    "retention_s3": "a million keys",
    "s3_pieces": "counts requests, each slowed on purpose",
    "s3_reading": "processor time, beside itself and obstore",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=SMALL, metavar="NAME", help="these alone")
    parser.add_argument("--small", action="store_true", help="the default, and all there is")
    parser.add_argument("--size", default="64MB", help="of the data of each")
    parser.add_argument("--rounds", type=int, default=1, help="after one to warm up")
    parser.add_argument("--dir", help="where to make the data; a temporary directory by default")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    peers = sorted({name for one in SMALL.values() for name in one.pythons})
    for name in peers:
        parser.add_argument(f"--{name}", help="passed on: where this peer is")
    options = parser.parse_args()
    if options.list:
        print("\n".join(listed()))
        return
    given = {name: vars(options)[name] for name in peers}
    documents: list[dict[str, Any]] = []
    skipped = [f"{name}: {why}" for name, why in ELSEWHERE.items()]
    for name in options.only or SMALL:
        if not (HERE / f"{name}.py").exists():
            skipped.append(f"{name}: not in this checkout")
            continue
        found, left = run(name, options, given)
        documents += found
        skipped += [f"{name}: {one}" for one in left]
    if options.json:
        print(json.dumps({"machine": side_by_side.machine(), "benchmarks": documents,
                          "skipped": skipped}, indent=1))  # fmt: skip
    else:
        print("\n".join(table(documents)))
        print("\nleft out:\n" + "\n".join(f"  {line}" for line in skipped))
    if any(_FAILED in line for line in skipped):
        raise SystemExit(1)


def run(
    name: str, options: argparse.Namespace, given: Mapping[str, str | None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run one benchmark; return its documents, and what it left out or why it failed."""
    small = SMALL[name]
    words = small.words.format(size=options.size, rounds=options.rounds).split()
    words += [w for one in small.pythons if given[one] for w in (f"--{one}", str(given[one]))]
    words += ["--dir", options.dir] if options.dir else []
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / f"{name}.py"), *words, "--json"], timeout=_LIMIT,
            capture_output=True, text=True, cwd=side_by_side.ROOT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{name}: given up after {_LIMIT} s", file=sys.stderr)
        return [], [f"{_FAILED} {_LIMIT} s are over"]
    documents = list(documents_of(done.stdout))
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    left = [document["left out"] for document in documents if document.get("left out")]
    left += [line for line in done.stdout.splitlines() if ": left out, " in line]
    if done.returncode:
        left.append(f"{_FAILED} code {done.returncode}, {done.stderr.strip()[-300:]}")
    return documents, left


def documents_of(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents among the lines of an output."""
    decoder = json.JSONDecoder()
    place = 0
    while (start := text.find("{\n", place)) >= 0:
        document, place = decoder.raw_decode(text, start)
        yield document


def table(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one table of all documents."""
    yield f"({side_by_side.machine()})"
    yield f"{'':46}{'seconds':>9}{'GB/s':>8}{'ours is':>9}"
    for document in documents:
        yield document["benchmark"]
        rows = document.get("rows", ())
        for row in rows:
            seconds, ratio = figures(row, rows[0])
            rate = f"{row['bytes'] / seconds / 1e9:8.2f}" if row.get("bytes") else f"{'':8}"
            yield f"  {row['name'][:43]:44}{seconds:9.3f}{rate}{ratio:8.2f}x"
        for name, value in document.items():
            if name.endswith("times smaller"):
                yield f"  {name[:43]:44}{value:26.2f}"


def figures(row: dict[str, Any], first: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of a row, and how many times as fast ours is."""
    if "seconds" in row:
        return sorted(row["seconds"])[len(row["seconds"]) // 2], row["ratio"]
    return row["command s"], row["command s"] / first["command s"]  # processor time alone


def listed() -> Iterator[str]:
    """Yield a line for each benchmark."""
    for name, small in SMALL.items():
        there = "" if (HERE / f"{name}.py").exists() else " (not in this checkout)"
        yield f"{name:18} beside {small.beside}{there}"
    for name, why in ELSEWHERE.items():
        yield f"{name:18} not run here: {why}"


if __name__ == "__main__":
    main()
