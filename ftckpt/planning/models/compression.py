"""When compressing a checkpoint makes saving it faster.

Compressing first and writing then wins only if storage is slower than Bc (1 - 1/r); if both
overlap, only if it is slower than the codec itself, Bc. (At Bc / r codec and storage are equally
busy, which is not the break-even.)
"""

from __future__ import annotations

from dataclasses import dataclass

from .arithmetic import Real, choose, larger, require


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
