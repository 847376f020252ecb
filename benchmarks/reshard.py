"""Reshard and convert against `cp -r` of the same bytes and against the frameworks' own tools.

    python benchmarks/reshard.py [CASE …] [--size 2GB] [--rounds 3] [--json]
                                 [--deepspeed PYTHON] [--transformers PYTHON]
                                 [--device cuda] [--memory 1GB,2GB,4GB]

Every case makes its own data and runs its contestants in turn, the page cache warm. Ours ends with
the result flushed to the disk, `cp` does not, so `cp -r` and then `sync` is shown beside it.
Memory is the peak of one run of the whole command, of its largest process if there are several;
`--memory` prints that of our commands alone, at each of these sizes.

Frameworks' tools that this interpreter lacks run under another that has them:

- `--deepspeed`: as tests/peers/deepspeed.sh makes it, and `pip install huggingface_hub` for
  zero_to_fp32.py. It also makes the ZeRO files: without it those cases are left out.
- `--transformers`: `pip install torch transformers`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import side_by_side
from reshard_cases import CASES, Case
from reshard_peers import Waiting
from side_by_side import Contestant, compare, ftckpt_command, peak_memory, warm, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import WRITERS
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.run import TransferOptions, transfer
from ftckpt.workers import Work
from ftckpt.workers.limits import jobs

_COMMAND = "ftckpt, the command"
_PEAK = "peak memory, MiB"


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="2GB", rounds=3)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--deepspeed", help="a Python interpreter that has DeepSpeed")
    parser.add_argument("--transformers", help="a Python interpreter that has transformers")
    parser.add_argument("--device", default="cpu", help="also run ours with --device DEVICE")
    parser.add_argument("--memory", help="sizes of data, as 1GB,2GB: show our peak memory alone")
    options = parser.parse_args()
    given = {name: vars(options)[name] for name in ("deepspeed", "transformers")}
    pythons = {name: python for name, python in given.items() if python}
    for name in options.cases or CASES:
        case = CASES[name]
        if case.maker and case.maker not in pythons:
            print(f"{case.title}: left out, its files are made by --{case.maker} PYTHON")
        elif options.memory:
            _show_memory(name, options, pythons)
        else:
            with workplace(options.dir) as place:
                _run(name, _made(name, place, options.size, pythons), options, pythons)


def _made(name: str, place: Path, size: str, pythons: Mapping[str, str]) -> Path:
    # Made by a process of its own: what it held would count as the memory of those that follow.
    python = pythons.get(CASES[name].maker, "")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as maker:
        return maker.submit(_make, name, place, size_in_bytes(size), python).result()


def _make(name: str, place: Path, nbytes: int, python: str) -> Path:
    return CASES[name].make(place, nbytes, python)


def _bytes_below(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _show_memory(name: str, options: argparse.Namespace, pythons: Mapping[str, str]) -> None:
    case = CASES[name]
    peaks = []
    for size in options.memory.split(","):
        with workplace(options.dir) as place:
            source = _made(name, place, size, pythons)
            peak = peak_memory(*_command(case, source, place / "out"))
            peaks.append({"bytes": _bytes_below(source), "peak MiB": peak})
    if options.json:
        print(json.dumps({"benchmark": case.title, "memory": peaks}))
        return
    for row in peaks:
        print(f"{case.title}: {row['peak MiB']:.1f} MiB at {row['bytes'] / 1e9:.2f} GB")


def _command(case: Case, source: Path, out: Path) -> list[str]:
    return [*ftckpt_command(), *(word.format(source=source, out=out) for word in case.words)]


def _run(name: str, source: Path, options: argparse.Namespace, pythons: Mapping[str, str]) -> None:
    case, out, size = CASES[name], source.parent / "out", _bytes_below(source)
    command = _command(case, source, out)

    def run(*words: str) -> int:
        subprocess.run(words, check=True, capture_output=True, env=side_by_side.environment())
        return size

    def ours(*, proof: bool = True, device: str = "cpu") -> int:
        _transfer(case, source, out, TransferOptions(Work(threads=jobs()), proof, device))
        return size

    def waited(peer: Waiting) -> int:
        peer.work()
        return size

    warm(source)
    clean = partial(side_by_side.remove, out, source)
    contestants = [
        Contestant("ftckpt, in a process", ours, ours=True),
        Contestant("ftckpt, without the proof", partial(ours, proof=False)),
        Contestant(_COMMAND, partial(run, *command)),
        Contestant("cp -r", partial(run, "cp", "-r", str(source), str(out))),
        Contestant("cp -r, then sync", partial(run, "sh", "-c", f"cp -r {source} {out}; sync")),
    ]
    if options.device != "cpu":
        contestants.append(
            Contestant(f"ftckpt, {options.device}", partial(ours, device=options.device))
        )
    extra: dict[str, object] = {"bytes": size}
    extra[f"{_COMMAND}, {_PEAK}"] = peak_memory(*command)
    peers = [p for p in case.peers if not p.framework or p.framework in pythons]
    for peer in peers:
        clean()
        whole = peer.command(pythons, str(source), str(out))
        extra[f"{peer.name}, {_PEAK}"] = peak_memory(*whole)
        contestants.append(Contestant(peer.name, partial(run, *whole)))
        waiting = peer.waiting(pythons, str(source), str(out))
        contestants.append(
            Contestant(f"{peer.name}, imported", partial(waited, waiting), prepare=waiting.start)
        )
    cleaned = [replace(c, prepare=partial(_in_turn, clean, c.prepare)) for c in contestants]
    rows = compare(cleaned, options.rounds)
    seconds = {row.name: row.seconds for row in rows}
    for peer in peers:
        pairs = zip(seconds[peer.name], seconds[_COMMAND], strict=True)
        extra[f"{peer.name}, times our command"] = round(median(t / o for t, o in pairs), 2)
    side_by_side.show(case.title, rows, extra, as_json=options.json)


def _in_turn(*steps: Callable[[], None]) -> None:
    for step in steps:
        step()


def _transfer(case: Case, source: Path, out: Path, options: TransferOptions) -> None:
    checkpoint = open_target(str(source), FORMATS, StoreOptions()).open()
    content = Content.of(checkpoint)
    writer = WRITERS[case.to]()
    transfer(
        content,
        writer.layout(content, case.request),
        str(out),
        next(f for f in FORMATS if f.name == case.to),
        single=writer.single,
        same_objects=SameObject,
        options=options,
        store_options=StoreOptions(),
    )


if __name__ == "__main__":
    main()
