"""What dividing costs: N parts one after the other against one process, plans, and finishing.

    python benchmarks/parts.py [--size 140GB] [--parts 8] [--pieces 1000000] [--records 4000]

The checkpoint has the shape of a 70B model in bfloat16: sealed safetensors of 5 GB, whose data are
holes, so that it takes no disk and is read at the speed of memory. That flatters nobody: the faster
the reading, the more the planning of every part weighs. The work is what all processes took of the
processors and of the clock, start and finishing included.

The plan is of a DCP checkpoint of a million pieces (holes too); the records are of 10 TB, sealed.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import side_by_side
from inspect_metadata import MAKE
from side_by_side import ftckpt_command, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.checkpoint import Topology
from ftckpt.digests.blocks import block_count, block_length, blocks_of_bytes
from ftckpt.discovery.resolve import open_target
from ftckpt.extents import BLOCK
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.own_files import MANIFEST
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords
from ftckpt.parts.finish import gather
from ftckpt.parts.plan import ShareRecord, names_of, plan_of
from ftckpt.parts.shared_folder import PARTS, PartsPlace
from ftckpt.parts.shares import Shares
from ftckpt.storage import StoreOptions, open_store
from ftckpt.verification.blocks import check_manifest
from ftckpt.workers import Work, budget
from ftckpt.workers.memory import no_gc

_SHARD = 5_000_000_000
_TB = 10**12


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="140GB", rounds=3)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--pieces", type=int, default=1_000_000)
    parser.add_argument("--records", type=int, default=4_000)
    options = parser.parse_args()
    found: dict[str, object] = {}
    with workplace(options.dir) as place:
        step = save_holes(place / "run" / "step-1", size_in_bytes(options.size))
        found |= against_one(step, place, options.parts, options.rounds)
        found |= plan_many(place, options.pieces)
        found |= finish_many(place, options.records)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")


def save_holes(path: Path, nbytes: int) -> Path:
    """Make sealed safetensors of bfloat16 zeros that take no disk."""
    path.mkdir(parents=True)
    count = max(1, round(nbytes / _SHARD))
    index: dict[str, str] = {}
    files = []
    zeros = bytes(BLOCK)
    known: dict[int, bytes] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        rows = nbytes // count // (2 * 8192) // 12
        header: dict[str, object] = {}
        at = 0
        for tensor in range(12):
            key = f"model.layers.{number}.block.{tensor}.weight"
            end = at + rows * 8192 * 2
            header[key] = {"dtype": "BF16", "shape": [rows, 8192], "data_offsets": [at, end]}
            index[key], at = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        size = len(head) + at
        with (path / name).open("wb") as file:
            file.write(head)
            file.truncate(size)
        digests = [blocks_of_bytes(head + zeros[: block_length(size, 0) - len(head)])]
        for block in range(1, block_count(size)):
            length = block_length(size, block)
            if length not in known:
                known[length] = blocks_of_bytes(zeros[:length])
            digests.append(known[length])
        files.append(FileDigest(name, size, b"".join(digests)))
    table = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": index}).encode()
    (path / "model.safetensors.index.json").write_bytes(table)
    files.append(FileDigest("model.safetensors.index.json", len(table), blocks_of_bytes(table)))
    files.sort(key=lambda file: file.path)
    (path / MANIFEST).write_bytes(Manifest("safetensors", None, Topology(), files).dump())
    return path


def taken(*words: str, code: int = 0) -> tuple[float, float]:
    """Run the command line; return what it took of the clock and of the processors."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*ftckpt_command(), *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        cwd=side_by_side.ROOT, env=side_by_side.environment(),
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise SystemExit(f"{words} ended with {process.returncode}: {said.decode()}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime


def against_one(step: Path, place: Path, parts: int, rounds: int) -> dict[str, object]:
    """Compare one process with N parts and the end, in turns."""
    words = ["verify", str(step), "--level", "content"]
    at = ["--parts", str(place / "at")]
    clocks, processors = [], []
    for _ in range(rounds):
        alone = taken(*words)
        each = [taken(*words, *at, "--part", f"{n}/{parts}") for n in range(parts)]
        each.append(taken(*words, *at, "--finish"))
        clocks.append(sum(one[0] for one in each) / alone[0])
        processors.append(sum(one[1] for one in each) / alone[1])
        print(
            f"one: {alone[0]:.1f} s, processors {alone[1]:.1f} s; {parts} parts and the end:"
            f" {sum(e[0] for e in each):.1f} s, processors {sum(e[1] for e in each):.1f} s;"
            f" the end alone: {each[-1][0]:.2f} s",
            file=sys.stderr,
        )
    return {
        f"work of {parts} parts and the end / one process, by the clock, best": min(clocks),
        f"work of {parts} parts and the end / one process, by the processors, best": min(
            processors
        ),
    }


def plan_many(place: Path, pieces: int) -> dict[str, object]:
    """Time a part that plans and reads nothing: opening, plan, shares, and every task."""
    path = place / "pieces"
    make = [sys.executable, "-c", MAKE, str(path), str(pieces // 2)]
    subprocess.run(make, cwd=Path(__file__).parent, check=True)
    script = [sys.executable, __file__, "--plan", str(path)]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True,
                               env=side_by_side.environment())  # fmt: skip
    assert process.stdout is not None
    seconds = float(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        f"plan of {pieces} pieces, seconds": seconds,
        f"plan of {pieces} pieces, seconds of a processor": usage.ru_utime + usage.ru_stime,
        f"plan of {pieces} pieces, peak MiB": usage.ru_maxrss >> 10,
    }


def plan_one(path: str) -> None:
    """Plan in this process, and print the seconds."""
    budget.set_budget(2 << 30)
    began = time.monotonic()
    with no_gc():  # as the command line does
        checkpoint = open_target(path, FORMATS, StoreOptions()).open()
    plan_of(checkpoint, "verify", {"level": "content"})
    names = names_of(checkpoint)
    shares = Shares(checkpoint, names, 400)
    mine = sum(
        shares.of_bytes(record.extent.file, record.extent.offset, record.extent.length) == 200
        for info in checkpoint.tensors.values()
        for record in info.pieces
    )
    assert mine
    print(time.monotonic() - began)


def finish_many(place: Path, records: int) -> dict[str, object]:
    """Time the end of a check of 10 TB: gathering all records, and the answer from them."""
    path = place / "terabytes" / "step-1"
    path.mkdir(parents=True)
    size = 2 * _TB // 100
    digest = blocks_of_bytes(bytes(16))
    names = [f"model-{n:05}-of-00500.safetensors" for n in range(500)]
    files = [FileDigest(n, size, digest * block_count(size)) for n in names]
    for name in names:
        with (path / name).open("wb") as file:
            file.truncate(size)
    manifest = Manifest("safetensors", None, Topology(), files)
    from ftckpt.storage.source import Source

    source = Source.directory(open_store(str(path)), "")
    tasks = [(name, n) for name in names for n in range(block_count(size))]
    from ftckpt.parts.plan import WorkPlan

    at = PartsPlace(open_store(str(place / "many")), PARTS, WorkPlan("verify", "/x", "0", "1"))
    each = -(-len(tasks) // records)
    folder = Path(at.store.local_path(at.path(WorkPart(0, records)))).parent  # type: ignore[arg-type]
    folder.mkdir(parents=True)
    for number in range(records):
        units = {f"hash {n} {f}": digest.hex() for f, n in tasks[number * each :][:each]}
        record = ShareRecord(at.plan, WorkPart(number, records), units, host=f"n{number}")
        (folder / f"{number}-{records}.json").write_bytes(record.dump())
    began = time.monotonic()
    gathered = gather(at, records)
    division = FromRecords(gathered.results)
    found = check_manifest(
        source, manifest, emit=lambda one: None, work=Work(threads=2, division=division)
    )
    seconds = time.monotonic() - began
    assert found.ok
    assert not division.done_here
    return {f"finishing of {records} records of {len(tasks)} tasks, seconds": seconds}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plan"]:
        plan_one(sys.argv[2])
    else:
        main()
