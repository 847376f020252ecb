"""A flipped bit outside of elements: verify is never 0 where the framework loads other values.

Every bit of headers, directories, pickles and metadata of a small file of each format is flipped in
turn. What the framework then loads, in a process of its own, is compared with what `verify --level
content` says. The short campaign tries a sample, the full one (`--campaign full`) every bit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ftckpt import open_checkpoint, verify
from ftckpt.errors import ExitCode, FtckptError
from tests import campaign
from tests.formats.dcp.writing import save

SAMPLE = 250


def _state() -> dict[str, object]:
    return {
        "model": {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2).bfloat16()},
        "step": 7,
        "lr": [0.1, {"k": (1, "x")}],
    }


def _zip(folder: Path) -> tuple[str, Path]:
    torch.save(_state(), folder / "a.pt")
    return "torch", folder / "a.pt"


def _legacy(folder: Path) -> tuple[str, Path]:
    torch.save(_state(), folder / "a.pt", _use_new_zipfile_serialization=False)
    return "torch", folder / "a.pt"


def _dcp(folder: Path) -> tuple[str, Path]:
    return "dcp", save({"w": torch.arange(6.0), "step": 7}, folder / "c")


def _safetensors(folder: Path) -> tuple[str, Path]:
    tensors = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2).bfloat16()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return "safetensors", folder / "model.safetensors"


def _index(folder: Path) -> tuple[str, Path]:
    place = folder / "hf"
    place.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    safetensors.torch.save_file({"a": torch.ones(3)}, place / names[0], {"format": "pt"})
    safetensors.torch.save_file({"b": torch.zeros(2)}, place / names[1], {"format": "pt"})
    index = {"metadata": {"total_size": 20}, "weight_map": dict(zip("ab", names, strict=True))}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return "safetensors", place


MAKERS = {
    "zip": _zip, "legacy": _legacy, "dcp": _dcp, "safetensors": _safetensors, "index": _index,
}  # fmt: skip


class Loader:
    """The framework in another process, begun anew when it crashes."""

    def __init__(self, kind: str, path: Path) -> None:
        self._words = [sys.executable, "-m", "tests.verification.flip_loader", kind, str(path)]
        self._process: subprocess.Popen[str] | None = None

    def load(self, file: str, offset: int, bit: int) -> str:
        """Return the digests of what is loaded, or `fail`."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{file} {offset} {bit}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            self.close()
            return "crash"
        return answer

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _bits(path: Path, elements: set[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        name = "." if file == path else file.relative_to(path).as_posix()
        for offset in range(file.stat().st_size):
            if (file.name if name == "." else name, offset) not in elements:
                for bit in range(8):
                    yield name, offset, bit


def _said(path: Path) -> ExitCode:
    try:
        return verify(open_checkpoint(str(path)), level="content").code
    except FtckptError as error:
        return error.exit_code


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", MAKERS)
def test_no_flipped_bit_passes_where_the_framework_loads_something_else(
    name: str, tmp_path: Path
) -> None:
    # Names of one length: DCP's metadata holds the path, and offsets must mean the same in both.
    (tmp_path / "here").mkdir()
    (tmp_path / "copy").mkdir()
    _, path = MAKERS[name](tmp_path / "here")
    kind, copy = MAKERS[name](tmp_path / "copy")
    extents = [p.extent for t in open_checkpoint(str(path)).tensors.values() for p in t.pieces]
    # Elements have a CRC-32 where the format has one, and other tests; here is all the rest.
    every = list(_bits(path, {(e.file, at) for e in extents for at in range(e.offset, e.end)}))
    tried = random.Random(5).sample(every, min(campaign.examples(SAMPLE, len(every)), len(every)))
    loader = Loader(kind, copy)
    truth = loader.load(tried[0][0], 0, -1)
    assert truth not in ("fail", "crash")
    counts: Counter[str] = Counter()
    wrong = []
    try:
        for file, offset, bit in tried:
            target = path if file == "." else path / file
            good = target.read_bytes()
            bad = bytearray(good)
            bad[offset] ^= 1 << bit
            target.write_bytes(bad)
            code = _said(path)
            target.write_bytes(good)
            if code is ExitCode.OK:
                loaded = loader.load(file, offset, bit)
                what = loaded if loaded in ("fail", "crash") else "other values"
                if loaded == truth:
                    what = "loads the same"
                elif loaded.partition(":")[2] == truth.partition(":")[2]:
                    # DCP's metadata says a name once, and no checksum covers it. The loader of a
                    # model looks for its names, and fails.
                    what = "the same values under another name"
                else:
                    wrong.append((file, offset, bit, what))
                counts[f"passes, {what}"] += 1
            else:
                counts[f"found ({int(code)})"] += 1
    finally:
        loader.close()
    print(name, len(tried), dict(counts))
    assert "found (1)" not in counts
    assert not wrong, wrong[:20]
