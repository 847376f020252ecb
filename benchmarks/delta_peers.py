"""What deltas are compared with: each takes a state and a base, and says what it made of them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from delta_states import State


class Result(NamedTuple):
    """What one contestant did with one pair of states.

    Attributes:
        sizes: bytes stored, by class of tensor; "" where only the whole is known.
        encode, decode: seconds of processor time; nan where not measured.
    """

    sizes: dict[str, int]
    encode: float
    decode: float


Peer = Callable[[State, "State | None"], Result]


def zstd(target: State, base: State | None) -> Result:
    """Run zstd -3 over each tensor's bytes; what torch's ZStandard extension does."""
    del base
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

    def encode(key: str) -> list[bytes]:
        return [compressor.compress(target.data[key])]

    def decode(key: str, parts: list[bytes]) -> bytes:
        return decompressor.decompress(parts[0])

    return _measured(target, encode, decode)


def xor_planes(target: State, base: State | None) -> Result:
    """XOR with the base, cut into byte planes, zstd -1 over each."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(key: str) -> list[bytes]:
        size = target.infos[key].dtype.itemsize
        apart = _apart(target, base, key).reshape(-1, size)
        return [compressor.compress(apart[:, k].tobytes()) for k in range(size)]

    def decode(key: str, parts: list[bytes]) -> bytes:
        planes = [np.frombuffer(decompressor.decompress(part), np.uint8) for part in parts]
        apart = np.stack(planes, axis=1).reshape(-1)
        if base is not None:
            apart ^= np.frombuffer(base.data[key], np.uint8)
        return apart.tobytes()

    return _measured(target, encode, decode)


def patch_from(target: State, base: State | None) -> Result | None:
    """Run zstd --patch-from over the two files, whole; None where it is not there or not asked."""
    if base is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        old, new, patch = (Path(folder) / name for name in ("old", "new", "patch"))
        for path, state in ((old, base), (new, target)):
            path.write_bytes(b"".join(state.data.values()))
        try:
            encode = _process(
                "zstd", "-3", "--long=28", "-f", f"--patch-from={old}", new, "-o", patch
            )
        except FileNotFoundError:
            return None
        size = patch.stat().st_size
        decode = _process("zstd", "-d", "--long=28", "-f", f"--patch-from={old}", patch, "-o", new)
        return Result({"": size}, encode, decode)


_ZIPNN = """
import json, sys, time
from pathlib import Path
from zipnn import ZipNN
folder, sizes, times = Path(sys.argv[1]), {}, [0.0, 0.0]
for line in json.loads((folder / "tensors.json").read_text()):
    name, kind, dtype = line
    data = (folder / name).read_bytes()
    coder = ZipNN(bytearray_dtype=dtype, threads=1)
    given = bytearray(data)
    begin = time.process_time()
    made = coder.compress(given)
    middle = time.process_time()
    back = coder.decompress(made)
    times[0] += middle - begin
    times[1] += time.process_time() - middle
    assert bytes(back) == data
    sizes[kind] = sizes.get(kind, 0) + len(made)
print(json.dumps([sizes, *times]))
"""


def zipnn(python: str) -> Peer:
    """Return ZipNN run by another interpreter: XOR with the base, then its own coding."""
    import json

    def run(target: State, base: State | None) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for number, (key, info) in enumerate(target.infos.items()):
                if not info.nbytes:
                    continue
                Path(folder, str(number)).write_bytes(_apart(target, base, key).tobytes())
                rows.append((str(number), info.kind.value, info.dtype.name))
            Path(folder, "tensors.json").write_text(json.dumps(rows))
            done = subprocess.run(
                [python, "-c", _ZIPNN, folder], capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise SystemExit(f"zipnn failed: {done.stderr[-500:]}")
        return Result(*json.loads(done.stdout.splitlines()[-1]))

    return run


def _apart(target: State, base: State | None, key: str) -> Any:
    values = np.frombuffer(target.data[key], np.uint8)
    return values if base is None else values ^ np.frombuffer(base.data[key], np.uint8)


def _measured(
    target: State,
    encode: Callable[[str], list[bytes]],
    decode: Callable[[str, list[bytes]], bytes],
) -> Result:
    sizes: dict[str, int] = {}
    encoding = decoding = 0.0
    for key, info in target.infos.items():
        begin = time.thread_time()
        parts = encode(key)
        middle = time.thread_time()
        back = decode(key, parts)
        encoding += middle - begin
        decoding += time.thread_time() - middle
        assert back == target.data[key]
        sizes[info.kind.value] = sizes.get(info.kind.value, 0) + sum(map(len, parts))
    return Result(sizes, encoding, decoding)


def _process(*command: str | os.PathLike[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr.decode()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
