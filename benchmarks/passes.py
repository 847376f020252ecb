"""How many times an operation reads its source and its result: bytes, not seconds.

    python benchmarks/passes.py [CASE …] [--size 256MB] [--json] [--dir DIR]

Every case makes its own data and runs one command. Each read of a file is counted in the process
that makes it, forked copies included, by where the file lies: `source` and `result` are shares of
what lies there in the end. `rchar` is what the first process has read by the system's own counter
(/proc/self/io), with its modules. Peak memory is that of its largest process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import runpy
import shutil
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import side_by_side
from reshard_cases import CASES as RESHARDED
from side_by_side import run_ftckpt, used_by, workplace

from ftckpt.amounts import size as size_in_bytes

_SIDES = ("source", "result", "elsewhere")
_ENDS = "BENCHMARK_PASSES"  # where a counted run says what it has read


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        title: of the row.
        make: puts what it needs into a directory of about that size; returns the source.
        words: of the command line, with {source}, {out} and {place}.
        source: files that are read, with {source} and {place}.
        result: files that are written; "" where they lie among those of the source.
    """

    title: str
    make: Callable[[Path, int], Path]
    words: Sequence[str]
    source: str = "{source}"
    result: str = "{out}"


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="256MB", rounds=1)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--counted", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        _run_counted(options.counted)
        return
    documents = []
    for name in options.cases or CASES:
        with workplace(options.dir) as place:
            documents.append(_measured(name, place, size_in_bytes(options.size)))
            if not options.json:
                _print(documents[-1])
    if options.json:
        for document in documents:
            print(json.dumps(document))


def _print(row: Mapping[str, object]) -> None:
    print(
        f"{row['benchmark']!s:46} source {row['source']:5.2f}  result {row['result']:5.2f}  "
        f"rchar {row['rchar']:6} MB  peak {row['peak MiB']:6} MiB"
    )


def _measured(name: str, place: Path, nbytes: int) -> dict[str, object]:
    case, source = CASES[name], _made(name, place, nbytes)
    names = {"source": str(source), "out": str(place / "out"), "place": str(place)}
    told = place / "told.json"
    places = {side: getattr(case, side).format(**names) for side in ("source", "result")}
    before = {side: _bytes_below(Path(where)) for side, where in places.items() if where}
    os.environ[_ENDS] = json.dumps({"told": str(told), **places})
    words = [word.format(**names) for word in case.words]
    used = used_by(sys.executable, str(Path(__file__).resolve()), "--counted", *words)
    read = json.loads(told.read_text())
    sizes = {
        "source": before["source"],
        "result": _bytes_below(Path(places["result"])) if places["result"] else 0,
    }
    return {
        "benchmark": case.title,
        **{side: read[side] / size if size else 0.0 for side, size in sizes.items()},
        "bytes": sizes,
        "read": {side: read[side] for side in _SIDES},
        "rchar": round(read["rchar"] / 1e6),
        "peak MiB": round(used.ru_maxrss / 1024, 1),
    }


def _made(name: str, place: Path, nbytes: int) -> Path:
    # By a process of its own: what it held would count as the memory of those that follow.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as maker:
        return maker.submit(_make, name, place, nbytes).result()


def _make(name: str, place: Path, nbytes: int) -> Path:
    return CASES[name].make(place, nbytes)


def _bytes_below(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _run_counted(words: Sequence[str]) -> None:
    """Run a command line in this process, and say what it and its copies have read."""
    from ftckpt.storage.local.pagecache import PoliteFile

    asked = json.loads(os.environ.pop(_ENDS))
    prefixes = {side: asked[side] for side in ("source", "result")}
    shared = mmap.mmap(-1, mmap.PAGESIZE * (1 << 10))  # one cell a process and side, forked with it
    plain = PoliteFile.preadv
    first = os.getpid()

    def preadv(file: PoliteFile, view: memoryview, offset: int) -> int:
        got = plain(file, view, offset)
        path = os.readlink(f"/proc/self/fd/{file.fd}")
        at = 24 * (0 if os.getpid() == first else 1 + os.getpid() % 10_000)
        at += 8 * _side_of(path, prefixes)
        struct.pack_into("q", shared, at, struct.unpack_from("q", shared, at)[0] + got)
        return got

    PoliteFile.preadv = preadv  # type: ignore[assignment,method-assign]
    leave = os._exit

    def told(code: int) -> NoReturn:
        if os.getpid() == first:
            cells = struct.unpack(f"{len(shared) // 8}q", shared)
            read = {side: sum(cells[number::3]) for number, side in enumerate(_SIDES)}
            own = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            Path(asked["told"]).write_text(json.dumps({**read, "rchar": int(own["rchar"])}))
        leave(code)

    os._exit = told  # type: ignore[assignment]
    sys.argv = ["ftckpt", *words]
    try:
        runpy.run_module("ftckpt", run_name="__main__", alter_sys=False)
    except SystemExit as ended:
        told(ended.code if isinstance(ended.code, int) else 1)
    told(0)


def _side_of(path: str, prefixes: Mapping[str, str]) -> int:
    """Return which side a file is of; a staging place is named after its destination."""
    for number, side in enumerate(("source", "result")):
        prefix = prefixes[side]
        if prefix and (path == prefix or path.startswith(prefix + "/")):
            return number
    folder, _, name = prefixes["result"].rpartition("/")
    if folder and path.startswith(folder + "/.") and name in path:
        return 1
    return 2


def _resharded(name: str, place: Path, nbytes: int) -> Path:
    return RESHARDED[name].make(place, nbytes, "")


def _dcp(place: Path, nbytes: int) -> Path:
    from dcp_data import save_dcp

    save_dcp(place / "step-1", nbytes, tensor=8 << 20)
    return place / "step-1"


def _sealed(place: Path, nbytes: int) -> Path:
    source = _dcp(place, nbytes)
    run_ftckpt("seal", str(source))
    return source


def _root(place: Path, nbytes: int) -> Path:
    from reshard_data import save_megatron

    return save_megatron(place / "root", nbytes, tp=2).parent


def _damaged(place: Path, nbytes: int) -> Path:
    source = _sealed(place, nbytes)
    shutil.copytree(source, place / "bad")
    (file,) = list((place / "bad").glob("*_0.distcp"))[:1] or sorted((place / "bad").glob("*"))[:1]
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    return source


def _two(place: Path, nbytes: int) -> Path:
    """Make two steps of one run, of which the second differs a little."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    rows = 1024
    count = max(1, nbytes // (rows * 1024 * 4))
    base = {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(count)}
    for step in (1, 2):
        state = {key: t + (step - 1) * 1e-4 * torch.randn_like(t) for key, t in base.items()}
        writer = FileSystemWriter(place / "root" / f"step-{step}")
        save({"model": state}, storage_writer=writer, no_dist=True)
    return place / "root"


def _packed(place: Path, nbytes: int) -> Path:
    root = _two(place, nbytes)
    run_ftckpt("delta", "pack", f"{root}/step-1", f"{root}/step-2", f"{root}/delta-2")
    shutil.rmtree(root / "step-2")
    return root


TO = ("convert", "{source}", "{out}", "--to")
CASES = {
    **{
        name: Case(one.title, partial(_resharded, name), one.words)
        for name, one in RESHARDED.items()
        if not one.maker and not name.endswith("-7b")
    },
    "dcp-sealed": Case("a sealed DCP to safetensors", _sealed, (*TO, "safetensors")),
    "dcp-torchsave": Case("DCP to torch.save", _dcp, (*TO, "torchsave")),
    "dcp-bf16": Case("DCP to safetensors in bf16", _dcp, (*TO, "safetensors", "--dtype", "bf16")),
    "no-proof": Case("DCP to safetensors, --no-proof", _dcp, (*TO, "safetensors", "--no-proof")),
    "copy": Case("copy of DCP", _dcp, ("copy", "{source}", "{out}")),
    "copy-sealed": Case("copy of a sealed DCP", _sealed, ("copy", "{source}", "{out}")),
    "seal": Case("seal of DCP", _dcp, ("seal", "{source}"), result=""),
    "verify": Case(
        "verify of a sealed DCP", _sealed, ("verify", "{source}", "--level", "content"), result=""
    ),
    "restart": Case(
        "restart of Megatron, TP 2 to 4", _root,
        ("restart", "{source}", "--world", "4", "--tp", "4", "--scratch", "{out}"),
    ),
    "pack": Case(
        "delta pack", _two, ("delta", "pack", "{source}/step-1", "{source}/step-2", "{out}")
    ),
    "unpack": Case(
        "delta unpack, base and delta", _packed, ("delta", "unpack", "{source}/delta-2", "{out}"),
    ),
    "repair": Case(
        "repair of one block, from a replica", _damaged,
        ("repair", "{place}/bad", "--from", "{source}"), result="{place}/bad",
    ),
}  # fmt: skip


if __name__ == "__main__":
    main()
