"""Weights to ship: DCP's Hugging Face shards to whole files, and the model out of a training state.

`consolidate` is against torch's `consolidate_safetensors_files`, with 1 and 2 threads: shards of
four ranks in bfloat16. `model` is against `dcp_to_torch_save`, on a state of 14 bytes a parameter,
and shows the bytes that were read. Processor time is compared, as a whole command and without
imports, because machines are shared. `quantise` has no peer: it shows what one core does.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import side_by_side
from side_by_side import ROOT, arguments, environment, run_ftckpt, used_by, warm, workplace

from ftckpt.amounts import size as size_in_bytes

RANKS, ROWS, COLUMNS = 4, 4096, 2048
# Each prints, as its last line, the processor time of its work and the bytes that it has read.
END = """
work = time.process_time() - began
read = {k: int(v) for k, v in (l.split(": ") for l in open("/proc/self/io"))}["rchar"]
print(json.dumps({"work": work, "read": read - before}))
"""
BEGIN = """
before = {k: int(v) for k, v in (l.split(": ") for l in open("/proc/self/io"))}["rchar"]
began = time.process_time()
"""
OURS = """
import json, sys, time
import ftckpt
source, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ftckpt.convert(source, out, "safetensors", dry_run=True, **options)  # imports what it needs
"""
CONSOLIDATE = """
import json, sys, time
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
"""
DCP_TO_TORCH = """
import json, sys, time
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
source, out = sys.argv[1:3]
"""
CONVERT = 'ftckpt.convert(source, out, "safetensors", **options)'


class Way(NamedTuple):
    """One way to do it.

    Attributes:
        name: of its row.
        imports: code that is not the work.
        work: code that is.
        options: its third argument.
        command: what a user types, where that is not the code.
    """

    name: str
    imports: str
    work: str
    options: Mapping[str, Any] = MappingProxyType({})
    command: Sequence[str] = ()


def elsewhere(make: Callable[[Path, int], None], path: Path, nbytes: int) -> None:
    """Write data in another process: what this one has held counts as held by those it starts."""
    process = multiprocessing.get_context("spawn").Process(target=make, args=(path, nbytes))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def count_of(nbytes: int) -> int:
    """Return how many matrices of bfloat16 have so many bytes."""
    return max(1, nbytes // (2 * ROWS * COLUMNS))


def mapping_of(nbytes: int) -> dict[str, int]:
    """Return for each tensor the number of the file that it should go to, of about 500 MB."""
    each = count_of(500_000_000)
    return {f"model.layers.{n}.weight": n // each + 1 for n in range(count_of(nbytes))}


def save_shards(path: Path, nbytes: int) -> None:
    """Write shards as `HuggingFaceStorageWriter(save_distributed=True)` does."""
    import numpy as np

    path.mkdir()
    count = count_of(nbytes)
    rows = ROWS // RANKS
    random = np.random.default_rng(1)
    for rank in range(RANKS):
        names = [f"model.layers.{n}.weight" for n in range(count)]
        size = 2 * rows * COLUMNS
        header: dict[str, Any] = {
            name: {"dtype": "BF16", "shape": [rows, COLUMNS],
                   "data_offsets": [n * size, (n + 1) * size]}
            for n, name in enumerate(names)
        }  # fmt: skip
        places = {name: {"saved_offsets": [rank * rows, 0]} for name in names}
        header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in names:
                file.write(random.integers(0, 1 << 16, rows * COLUMNS, np.uint16).tobytes())


def save_state(path: Path, nbytes: int) -> None:
    """Let torch save a state of 14 bytes a parameter: bf16 weights, masters and two moments."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    base = torch.randn(ROWS, COLUMNS)
    names = [f"layers.{n}.weight" for n in range(max(1, nbytes // (14 * base.numel())))]
    state = {
        name: {"master_param": base + n, "exp_avg": base * n, "exp_avg_sq": base.square()}
        for n, name in enumerate(names)
    }
    model = {name: state[name]["master_param"].bfloat16() for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
        save({"model": model, "optimizer": {"state": state}}, storage_writer=writer, no_dist=True)


def measured(way: Way, source: Path, out: Path, rounds: int) -> dict[str, Any]:
    """Run one way as a command and as work alone; return medians."""
    words = (str(source), str(out), json.dumps(dict(way.options)))
    alone = (sys.executable, "-c", way.imports + BEGIN + way.work + END, *words)
    whole = tuple(way.command) or (sys.executable, "-c", way.imports + way.work, *words)
    cpu, memory, work, read = [], [], [], 0
    for _ in range(rounds):
        used = used_by(*whole)
        cpu.append(used.ru_utime + used.ru_stime)
        memory.append(used.ru_maxrss / 1024)
        _forget(out)
        done = subprocess.run(
            alone, check=True, capture_output=True, text=True, cwd=ROOT, env=environment()
        )
        said = json.loads(done.stdout.splitlines()[-1])
        work.append(said["work"])
        read = said["read"]
        _forget(out)
    return {
        "name": way.name, "command s": statistics.median(cpu), "work s": statistics.median(work),
        "peak MiB": statistics.median(memory), "read MB": read / 1e6,
    }  # fmt: skip


def _forget(out: Path) -> None:
    """Remove what was made: of processor time no memory need be made ready (see `remove`)."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)


def show(title: str, ways: Sequence[Way], source: Path, asked: Any, **more: Any) -> None:
    """Measure all ways in turn, and print them with ratios to the first."""
    found = [measured(way, source, source.parent / "out", asked.rounds) for way in ways]
    if asked.json:
        print(json.dumps({"benchmark": title, "rows": found, **more}, indent=1))
        return
    print(f"{title}  ({side_by_side.machine()}; processor time)")
    print(f"{'':38}{'command s':>10}{'work s':>9}{'peak MiB':>10}{'read MB':>9}{'ours is':>17}")
    for row in found:
        ratios = [row[key] / found[0][key] for key in ("command s", "work s")]
        print(
            f"{row['name']:38}{row['command s']:10.2f}{row['work s']:9.2f}{row['peak MiB']:10.0f}"
            f"{row['read MB']:9.0f}{ratios[0]:8.2f}x{ratios[1]:7.2f}x"
        )
    for key, value in more.items():
        print(f"{key}: {value}")


def consolidate(place: Path, asked: Any) -> None:
    """Shards of ranks to whole files."""
    source = place / "shards"
    nbytes = int(size_in_bytes(asked.size))
    elsewhere(save_shards, source, nbytes)
    mapping = mapping_of(nbytes)
    warm(source)
    words = (*side_by_side.ftckpt_command(), "convert", str(source), str(place / "out"))
    words += ("--to", "safetensors", "--max-shard-size", "500MB")
    options = {"max_shard_size": "500MB"}
    quick = {**options, "no_proof": True}
    work = "import os; os.mkdir(out)\nconsolidate_safetensors_files(source, out, **options)"
    show(
        f"consolidate {asked.size} of {RANKS} ranks' shards",
        [
            Way("ftckpt convert", OURS, CONVERT, options, words),
            Way("ftckpt convert --no-proof", OURS, CONVERT, quick, (*words, "--no-proof")),
            *(
                Way(f"torch consolidate, {n} threads", CONSOLIDATE, work,
                    {"fqn_to_index_mapping": mapping, "num_threads": n})
                for n in (1, 2)
            ),
        ],
        source, asked,
    )  # fmt: skip


def model(place: Path, asked: Any) -> None:
    """The weights out of a training state."""
    source = place / "step-1"
    elsewhere(save_state, source, int(size_in_bytes(asked.size)))
    warm(source)
    nbytes = sum(file.stat().st_size for file in source.iterdir())
    words = (*side_by_side.ftckpt_command(), "convert", str(source), str(place / "out"))
    words += ("--to", "safetensors", "--only", "model", "--dtype", "bf16")
    options = {"only": "model", "dtype": "bf16"}
    quick, masters = {**options, "no_proof": True}, {**options, "from_master": True}
    show(
        f"the model out of {asked.size} of DCP, 14 bytes a parameter",
        [
            Way("ftckpt convert --only model", OURS, CONVERT, options, words),
            Way("the same, --no-proof", OURS, CONVERT, quick, (*words, "--no-proof")),
            Way("the same, --from-master", OURS, CONVERT, masters, (*words, "--from-master")),
            Way("dcp_to_torch_save", DCP_TO_TORCH, "dcp_to_torch_save(source, out)"),
        ],
        source, asked, **{"weights MB": nbytes / 7e6},
    )  # fmt: skip


def save_folder(path: Path, nbytes: int) -> None:
    """Write a Hugging Face folder of bfloat16 weights of linear layers."""
    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir()
    random = np.random.default_rng(1)
    held = {
        f"model.layers.{n}.mlp.up_proj.weight": random.standard_normal((ROWS, COLUMNS), np.float32)
        for n in range(count_of(nbytes))
    }
    save_file(held, path / "float32.safetensors")
    (path / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')


def quantise(place: Path, asked: Any) -> None:
    """bfloat16 to FP8 in blocks, and back: what one core does."""
    made, source, codes = place / "made", place / "bf16", place / "fp8"
    elsewhere(save_folder, made, int(size_in_bytes(asked.size)))
    words = ("--to", "safetensors", "--no-proof", "--dtype")
    run_ftckpt("convert", str(made), str(source), *words, "bf16")
    run_ftckpt("convert", str(source), str(codes), *words, "fp8-block")
    nbytes = sum(file.stat().st_size for file in source.iterdir()) / 1e9
    for start, dtype in ((source, "fp8-block"), (codes, "bf16")):
        warm(start)
        options = {"dtype": dtype, "jobs": 1}
        quick = {**options, "no_proof": True}
        show(
            f"{asked.size} of {start.name} to {dtype}",
            [Way("ftckpt convert --no-proof", OURS, CONVERT, quick),
             Way("ftckpt convert", OURS, CONVERT, options)],
            start, asked, **{"GB of bfloat16": nbytes},
        )  # fmt: skip


CASES = {"consolidate": consolidate, "model": model, "quantise": quantise}


def main() -> None:
    parser = arguments(__doc__ or "", size="1GB", rounds=3)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    asked = parser.parse_args()
    for name in asked.cases:
        with workplace(asked.dir) as place:
            CASES[name](place, asked)


if __name__ == "__main__":
    main()
