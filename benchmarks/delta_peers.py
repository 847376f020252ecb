"""What deltas are compared with: each takes a state and a base, and says what it made of them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Best:
    """Processor time of the pieces of one work, each in the best of its rounds."""

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}

    @contextmanager
    def timed(self, piece: object) -> Iterator[None]:
        begin = time.thread_time()
        yield
        seconds = time.thread_time() - begin
        self._seconds[piece] = min(seconds, self._seconds.get(piece, seconds))

    @property
    def sum(self) -> float:
        return sum(self._seconds.values())


# Of target, base and rounds; None where it does not apply or is not there.
Peer = Callable[[State, "State | None", int], "Result | None"]


def zstd(target: State, base: State | None, rounds: int) -> Result:
    """Run zstd -3 over each tensor's bytes; what torch's ZStandard extension does."""
    del base
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

    def encode(key: str) -> list[bytes]:
        return [compressor.compress(target.data[key])]

    def decode(key: str, parts: list[bytes]) -> bytes:
        return decompressor.decompress(parts[0])

    return _measured(target, encode, decode, rounds)


def xor_planes(target: State, base: State | None, rounds: int) -> Result:
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

    return _measured(target, encode, decode, rounds)


def patch_from(target: State, base: State | None, rounds: int) -> Result | None:
    """Run zstd --patch-from over the two files, whole and once: it takes longest by far."""
    del rounds
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
folder = Path(sys.argv[1])
tensors = json.loads((folder / "tensors.json").read_text())
data = {name: (folder / name).read_bytes() for name, _, _ in tensors}
sizes, times = {}, {}
for number in range(int(sys.argv[2])):
    for name, kind, dtype in tensors:
        coder = ZipNN(bytearray_dtype=dtype, threads=1)
        given = bytearray(data[name])
        begin = time.process_time()
        made = coder.compress(given)
        middle = time.process_time()
        back = coder.decompress(made)
        took = middle - begin, time.process_time() - middle
        times[name] = [min(pair) for pair in zip(took, times.get(name, took))]
        assert bytes(back) == data[name]
        if not number:
            sizes[kind] = sizes.get(kind, 0) + len(made)
print(json.dumps([sizes, *map(sum, zip(*times.values()))]))
"""


def zipnn(python: str) -> Peer:
    """Return ZipNN run by another interpreter: XOR with the base, then its own coding."""
    import json

    def run(target: State, base: State | None, rounds: int) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for number, (key, info) in enumerate(target.infos.items()):
                if not info.nbytes:
                    continue
                Path(folder, str(number)).write_bytes(_apart(target, base, key).tobytes())
                rows.append((str(number), info.kind.value, info.dtype.name))
            Path(folder, "tensors.json").write_text(json.dumps(rows))
            done = subprocess.run(
                [python, "-c", _ZIPNN, folder, str(rounds)],
                capture_output=True,
                text=True,
                check=False,
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
    rounds: int,
) -> Result:
    sizes: dict[str, int] = {}
    encoding, decoding = Best(), Best()
    for number in range(rounds):
        for key, info in target.infos.items():
            with encoding.timed(key):
                parts = encode(key)
            with decoding.timed(key):
                back = decode(key, parts)
            assert back == target.data[key]
            if not number:
                sizes[info.kind.value] = sizes.get(info.kind.value, 0) + sum(map(len, parts))
    return Result(sizes, encoding.sum, decoding.sum)


def _process(*command: str | os.PathLike[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr.decode()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
