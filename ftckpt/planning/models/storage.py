"""Compute what is written and kept, how fast, and its cost. Prices are inputs."""

from __future__ import annotations

import math

from ftckpt.errors import UsageError

from .arithmetic import Real, require, smaller

TERABYTE = 1e12
MONTH = 365 * 86400 / 12  # seconds, as storage is billed on average


def state_bytes(params: Real, bytes_per_param: Real) -> Real:
    """Return the bytes of a training state: parameters times bytes for each.

    14 bytes for 16-bit weights with 32-bit master weights and two 32-bit moments.

    Args:
        params: >= 0.
        bytes_per_param: >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the number of parameters", params, at_least=0, unit="")
    require("the bytes per parameter", bytes_per_param, at_least=0, unit="")
    return params * bytes_per_param


def bandwidth(writers: Real, each: Real, ceiling: Real = math.inf) -> Real:
    """Return bytes per second that writers reach together: their sum, but not above the ceiling.

    Args:
        writers: >= 0.
        each: bytes per second of one, >= 0.
        ceiling: of what they write to, bytes per second, > 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the number of writers", writers, at_least=0, unit="")
    require("the bandwidth of a writer", each, at_least=0, unit="B/s")
    require("the bandwidth of the storage", ceiling, above=0, finite=False, unit="B/s")
    return smaller(writers * each, ceiling)


def transfer_seconds(nbytes: Real, bytes_per_second: Real) -> Real:
    """Return the seconds to move bytes.

    Args:
        nbytes: >= 0.
        bytes_per_second: > 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the size", nbytes, at_least=0, unit="B")
    require("the bandwidth", bytes_per_second, above=0, finite=False, unit="B/s")
    return nbytes / bytes_per_second


def kept(saves: int, keep_last: int, every: int = 0, milestones: int = 0) -> int:
    """Return how many checkpoints a retention policy keeps at most.

    keep_last + ceil(saves / every) + milestones, and never more than there were: rules that name
    the same checkpoint are counted twice, so that it is an upper bound.

    Args:
        saves: made so far, >= 0.
        keep_last: newest ones kept, >= 0.
        every: every how manieth is kept for good; 0 for none.
        milestones: others that are kept, >= 0.

    Raises:
        UsageError: a number is negative.
    """
    if min(saves, keep_last, every, milestones) < 0:
        raise UsageError("numbers of checkpoints cannot be negative")
    regular = -(-saves // every) if every else 0
    return min(saves, keep_last + regular + milestones)


def storage_cost(nbytes: Real, price: Real, seconds: Real) -> Real:
    """Return what it costs to keep bytes for a time.

    Args:
        nbytes: >= 0.
        price: for 10^12 bytes and a month of 365/12 days, >= 0.
        seconds: >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the size", nbytes, at_least=0, unit="B")
    require("the price per TB and month", price, at_least=0, unit="")
    require("the time", seconds, at_least=0)
    return nbytes / TERABYTE * price * seconds / MONTH


def gpu_hours(gpus: Real, seconds: Real) -> Real:
    """Return GPU-hours.

    Args:
        gpus: >= 0.
        seconds: >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the number of GPUs", gpus, at_least=0, unit="")
    require("the time", seconds, at_least=0)
    return gpus * seconds / 3600


def written(nbytes: Real, period: Real, seconds: Real) -> Real:
    """Return the bytes written in a time by a checkpoint every `period` seconds of wall time.

    Args:
        nbytes: of one checkpoint, >= 0.
        period: seconds from save to save, > 0.
        seconds: >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the size", nbytes, at_least=0, unit="B")
    require("the period", period, above=0)
    require("the time", seconds, at_least=0)
    return nbytes * (seconds / period)


def staging_bytes(nbytes: Real, writers: Real, buffers: Real = 1) -> Real:
    """Return the host memory that each writer needs to hold its share until it is flushed.

    Args:
        nbytes: of the whole checkpoint, >= 0.
        writers: among whom it is divided evenly, > 0.
        buffers: copies that may be held at once: 2 where a snapshot need not wait for a flush.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the size", nbytes, at_least=0, unit="B")
    require("the number of writers", writers, above=0, unit="")
    require("the number of buffers", buffers, at_least=0, unit="")
    return nbytes / writers * buffers
