"""CRC check of an unsealed DCP checkpoint against zipfile.testzip and dcp.load.

    python benchmarks/crc.py [--size 4GB] [--rounds 5] [--json]

testzip is Python's own check of the same CRC-32s; dcp.load reads the same data and checks nothing.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import side_by_side
from dcp_data import save_dcp
from side_by_side import Contestant, compare, run_ftckpt, warm, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.checkpoint import Extent
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import StoreOptions
from ftckpt.verification.records import check_records
from ftckpt.workers import Work
from ftckpt.workers.limits import jobs


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    threads = jobs()
    with workplace(options.dir) as place:
        path = place / "step-1"
        save_dcp(path, size_in_bytes(options.size))
        nbytes = sum(f.stat().st_size for f in path.glob("*.distcp"))
        extents = items(path)
        state = empty_state(path)
        warm(path)
        contestants = [
            Contestant("ftckpt, the check in a process", lambda: verify(path, threads), ours=True),
            Contestant("ftckpt verify, the command", lambda: command(path, threads, nbytes)),
            Contestant("zipfile.testzip of every item", lambda: testzip(path, extents)),
            Contestant("dcp.load", lambda: load(path, state)),
        ]
        rows = compare(contestants, options.rounds)
        side_by_side.show("CRC check, unsealed DCP, warm", rows, {}, as_json=options.json)


def verify(path: Path, threads: int) -> int:
    checkpoint = open_target(str(path), FORMATS, StoreOptions()).open()
    result = check_records(checkpoint, emit=lambda found: None, work=Work(threads=threads))
    assert result.ok
    assert result.evidence == "crc32"
    return result.bytes_read


def command(path: Path, threads: int, nbytes: int) -> int:
    run_ftckpt("verify", str(path), "--level", "content", "--jobs", str(threads))
    return nbytes


def items(path: Path) -> list[Extent]:
    checkpoint = open_target(str(path), FORMATS, StoreOptions()).open()
    return [p.extent for t in checkpoint.tensors.values() for p in t.pieces]


class Window(io.RawIOBase):
    """One item of a file as a file of its own."""

    def __init__(self, path: Path, extent: Extent) -> None:
        self._file = (path / extent.file).open("rb", buffering=0)
        self._start, self._size, self._at = extent.offset, extent.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view) or 0
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


def testzip(path: Path, extents: list[Extent]) -> int:
    for extent in extents:
        with io.BufferedReader(Window(path, extent), 1 << 20) as stream:
            assert zipfile.ZipFile(stream).testzip() is None
    return sum(e.length for e in extents)


def empty_state(path: Path) -> dict[str, Any]:
    import torch

    checkpoint = open_target(str(path), FORMATS, StoreOptions()).open()
    return {"model": {t.name: torch.empty(t.shape) for t in checkpoint.tensors.values()}}


def load(path: Path, state: dict[str, Any]) -> int:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads is what is meant
        dcp_load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return sum(t.nbytes for t in state["model"].values())


if __name__ == "__main__":
    main()
