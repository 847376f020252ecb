"""Compute the bytes written and kept, their rates and cost. Prices are inputs.

When compressing a checkpoint makes saving it faster.

Compressing first and writing then wins only if storage is slower than Bc (1 - 1/r); if both
overlap, only if it is slower than the codec itself, Bc. (At Bc / r codec and storage are equally
busy, which is not the break-even.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftckpt.errors import UsageError

from .arithmetic import Real, choose, larger, require, smaller

TERABYTE = 1e12
MONTH = 365 * 86400 / 12  # seconds, as storage is billed on average


def state_bytes(params: Real, bytes_per_param: Real) -> Real:
    """Return the bytes of a training state: parameters times bytes for each.

    14 bytes for 16-bit weights with 32-bit master weights and two 32-bit moments.
    """
    require("the number of parameters", params, at_least=0, unit="")
    require("the bytes per parameter", bytes_per_param, at_least=0, unit="")
    return params * bytes_per_param


def bandwidth(writers: Real, each: Real, ceiling: Real = math.inf) -> Real:
    """Return bytes per second of all writers: their sum, but not above the ceiling.

    `each` is one writer's bytes per second; `ceiling` (> 0) the storage's.
    """
    require("the number of writers", writers, at_least=0, unit="")
    require("the bandwidth of a writer", each, at_least=0, unit="B/s")
    require("the bandwidth of the storage", ceiling, above=0, finite=False, unit="B/s")
    return smaller(writers * each, ceiling)


def transfer_seconds(nbytes: Real, bytes_per_second: Real) -> Real:
    """Return the seconds to move bytes."""
    require("the size", nbytes, at_least=0, unit="B")
    require("the bandwidth", bytes_per_second, above=0, finite=False, unit="B/s")
    return nbytes / bytes_per_second


def kept(saves: int, keep_last: int, every: int = 0, milestones: int = 0) -> int:
    """Return the number of checkpoints that a retention policy keeps at most.

    keep_last + ceil(saves / every) + milestones, and never more than `saves`. It is an upper bound:
    a checkpoint that two rules keep counts twice. `every`: every such save is kept for good; 0 for
    none.
    """
    if min(saves, keep_last, every, milestones) < 0:
        raise UsageError("numbers of checkpoints cannot be negative")
    regular = -(-saves // every) if every else 0
    return min(saves, keep_last + regular + milestones)


def storage_cost(nbytes: Real, price: Real, seconds: Real) -> Real:
    """Return the cost of keeping bytes; `price` is for 10^12 bytes and a month of 365/12 days."""
    require("the size", nbytes, at_least=0, unit="B")
    require("the price per TB and month", price, at_least=0, unit="")
    require("the time", seconds, at_least=0)
    return nbytes / TERABYTE * price * seconds / MONTH


def gpu_hours(gpus: Real, seconds: Real) -> Real:
    """Return GPU-hours."""
    require("the number of GPUs", gpus, at_least=0, unit="")
    require("the time", seconds, at_least=0)
    return gpus * seconds / 3600


def written(nbytes: Real, period: Real, seconds: Real) -> Real:
    """Return the bytes written in `seconds` by a checkpoint every `period` seconds of wall time."""
    require("the size", nbytes, at_least=0, unit="B")
    require("the period", period, above=0)
    require("the time", seconds, at_least=0)
    return nbytes * (seconds / period)


def staging_bytes(nbytes: Real, writers: Real, buffers: Real = 1) -> Real:
    """Return the host memory that each writer needs to hold its share until it is flushed.

    `writers` (> 0) share the checkpoint evenly; `buffers` copies may be held at once: 2 if a
    snapshot need not wait for a flush.
    """
    require("the size", nbytes, at_least=0, unit="B")
    require("the number of writers", writers, above=0, unit="")
    require("the number of buffers", buffers, at_least=0, unit="")
    return nbytes / writers * buffers


@dataclass(frozen=True, slots=True)
class Compression:
    """Save times in seconds, and the decisive storage bandwidths in bytes per second.

    Attributes:
        plain: S/B, without compression.
        sequential: S/Bc + S/(r B): compressed first, then written.
        pipelined: max(S/Bc, S/(r B)): both at once.
        sequential_below: compressing first wins if storage is slower than Bc (1 - 1/r).
        pipelined_below: overlapping wins if storage is slower than Bc; 0 if r <= 1.
        balance: Bc/r, where codec and storage are equally busy.
    """

    plain: Real
    sequential: Real
    pipelined: Real
    sequential_below: Real
    pipelined_below: Real
    balance: Real


def compare(nbytes: Real, ratio: Real, codec: Real, storage: Real) -> Compression:
    """Return the save times with and without compression, and the break-even bandwidths.

    Args:
        nbytes: S, uncompressed bytes, > 0.
        ratio: r, uncompressed over compressed size, > 0.
        codec: Bc, uncompressed bytes per second of the codec, > 0.
        storage: B, bytes per second of the storage, > 0.
    """
    require("the size", nbytes, above=0, unit="B")
    require("the compression ratio", ratio, above=0, unit="")
    require("the bandwidth of the codec", codec, above=0, unit="B/s")
    require("the bandwidth of the storage", storage, above=0, unit="B/s")
    coding, writing = nbytes / codec, nbytes / (ratio * storage)
    gain = larger(0.0, 1 - 1 / ratio)
    return Compression(
        plain=nbytes / storage,
        sequential=coding + writing,
        pipelined=larger(coding, writing),
        sequential_below=codec * gain,
        pipelined_below=choose(gain > 0, codec, 0.0),
        balance=codec / ratio,
    )
