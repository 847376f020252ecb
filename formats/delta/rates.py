"""Measure how fast this machine encodes and decodes a delta's blocks and reads its storage.

Measured on a sample of the delta itself: rates differ with the content and with the chain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ftckpt.checkpoint import SelfCheck
from ftckpt.checkpoint.read_ahead import for_reading
from ftckpt.delta import DeltaEncoder, Fill, pair
from ftckpt.delta.pack.tensor_bytes import TensorBytes, own_tensors
from ftckpt.progress import Counter
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.workers.processes import run_in_processes
from ftckpt.workers.threads import run

from .chain import chain
from .checkpoint import DeltaCheckpoint

_SAMPLE = 128 << 20  # bytes of elements
_FEW = 4  # the largest block of a sample is at most this many times the smallest
_READ = 256 << 20  # bytes of files


class DecodeRates(NamedTuple):
    """Bytes a second.

    Attributes:
        encode: of elements, all workers together; what they read is not counted.
        decode: of elements, all workers together, by each delta of the chain.
        read: of the delta's files; what was read a short while ago may come from memory.
    """

    encode: float
    decode: float
    read: float


def measure(delta: DeltaCheckpoint, jobs: int) -> DecodeRates:
    """Read, decode and encode a sample of a delta.

    Args:
        delta: with at least one tensor that has elements.
        jobs: number of workers: processes where there can be any, as packing and unpacking have.

    Raises:
        FtckptError: what reading or decoding raises.
    """
    checks = [c for c in delta.decoder.checks() if c.owner in delta.tensors and c.nbytes]
    largest = max(check.nbytes for check in checks)
    # In their order, in which one serves to decode the next; small ones are mostly overhead.
    sample = list(_within((c for c in checks if _FEW * c.nbytes >= largest), _SAMPLE))
    read, encode = _read_rate(delta), _encode_rate(delta, jobs)
    began = time.perf_counter()
    for _ in run_in_processes(sample, _carried_out, jobs=jobs, processes=for_reading(delta, jobs)):
        pass
    seconds = time.perf_counter() - began
    links = sum(isinstance(link, DeltaCheckpoint) for link in chain(delta))
    return DecodeRates(encode, links * sum(c.nbytes for c in sample) / seconds, read)


def _within(checks: Iterable[SelfCheck], nbytes: int) -> Iterator[SelfCheck]:
    for check in checks:
        yield check
        nbytes -= check.nbytes
        if nbytes <= 0:
            return


def _carried_out(checks: Iterator[SelfCheck], counter: Counter, jobs: int) -> Iterator[None]:
    def carry_out(check: SelfCheck) -> None:
        check.read()

    return run(checks, carry_out, jobs=jobs)


def _read_rate(delta: DeltaCheckpoint) -> float:
    left = _READ
    began = time.perf_counter()
    size = size_for(delta.source.store)
    for name in delta.members():
        length = min(delta.source.size(name), left)
        with delta.source.open(name) as reader:
            for part in chunks(reader, 0, length, size=size):
                left -= len(part)
    return (_READ - left) / max(time.perf_counter() - began, 1e-9)


class _Timed:
    """A fill that says how long each thread spent in it."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._thread = threading.local()

    def __call__(self, key: str, offset: int, view: memoryview) -> None:
        began = time.thread_time()
        self._fill(key, offset, view)
        self._thread.spent = self.spent + time.thread_time() - began

    @property
    def spent(self) -> float:
        """Seconds of this thread."""
        found: float = getattr(self._thread, "spent", 0.0)
        return found


def _encode_rate(delta: DeltaCheckpoint, jobs: int) -> float:
    """Encode a sample anew, with the same base; its reading is taken off."""
    base = delta.base
    base_tensors = {} if base is None else own_tensors(base)
    target = _Timed(delta.decoder.fill)
    below = None if base is None else _Timed(TensorBytes(base).fill)
    pairs = pair(own_tensors(delta).values(), base_tensors)
    encoder = DeltaEncoder(pairs, target, below)
    largest = sorted(range(len(pairs)), key=lambda n: -pairs[n].info.nbytes)
    plans = {number: encoder.plan(number) for number in islice(largest, 8)}
    tasks = [(n, block) for n in plans for block in range(encoder.blocks(n))]

    def encode(task: tuple[int, int]) -> tuple[int, float]:
        number, block = task
        began = time.thread_time()
        reading = target.spent + (0.0 if below is None else below.spent)
        made = encoder.encode(number, block, plans[number])
        reading = target.spent + (0.0 if below is None else below.spent) - reading
        return made.nbytes, time.thread_time() - began - reading

    nbytes = 0
    seconds = 0.0
    for done, took in run(tasks[: _SAMPLE >> 21], encode, jobs=jobs):
        nbytes += done
        seconds += took
    return jobs * nbytes / max(seconds, 1e-9)
