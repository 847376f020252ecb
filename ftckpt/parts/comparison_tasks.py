"""Name the tasks of a comparison, and write their results as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ftckpt.comparison.arithmetic import Tally
from ftckpt.comparison.read import ComparedRange, RangeResult
from ftckpt.verification.record_sums import ByteRun

from .finish import dump_error, load_error
from .shares import WHO_MEETS_IT, Shares

Ranges = Sequence[ComparedRange]

_SUMS = ("max_abs", "change", "ours", "theirs", "product")
_COUNTS = ("elements", "changed", "beyond", "max_ulp", "nan_ours", "nan_theirs", "inf_ours",
           "inf_theirs")  # fmt: skip


def key_of_ranges(task: Ranges) -> str:
    """Return what names a task."""
    import xxhash

    places = [(one.pair.name, one.start, one.stop, one.equal) for one in task]
    text = repr(places).encode("utf-8", "surrogateescape")
    return f"differ {xxhash.xxh3_128_hexdigest(text)} {task[0].pair.name}"


def part_of_ranges(task: Ranges, shares: Shares) -> int:
    """Return the part that a task belongs to: by where its elements lie in the tensors."""
    first = task[0]
    if first.equal:
        return WHO_MEETS_IT
    _, shard = first.pair.ours
    key = shard.fills[0].key if shard.fills else first.pair.name
    length = sum(one.nbytes for one in task)
    return shares.of_elements(key, shard.dtype.nbytes(first.start), length)


def dump_ranges(done: Sequence[RangeResult]) -> Any:
    """Return results in JSON's types."""
    return [
        [_dump_tally(one.tally), one.nbytes, [[*place] for place in one.equal],
         dump_error(one.error), [[[*run] for run in runs] for runs in one.runs]]
        for one in done
    ]  # fmt: skip


def load_ranges(task: Ranges, value: Any) -> Sequence[RangeResult]:
    """Return the results of a task from JSON's types."""
    return [
        RangeResult(
            one.pair.name, _load_tally(tally), int(nbytes), [(int(a), int(b)) for a, b in equal],
            load_error(error), [[_run(run) for run in runs] for runs in read],
        )
        for one, (tally, nbytes, equal, error, read) in zip(task, value, strict=True)
    ]  # fmt: skip


def _run(value: Any) -> ByteRun:
    file, offset, length, crc = value
    return ByteRun(str(file), int(offset), int(length), int(crc))


def _dump_tally(tally: Tally) -> Any:
    counts = [getattr(tally, name) for name in _COUNTS]
    return [*counts, *(_number(getattr(tally, name)) for name in _SUMS)]


def _load_tally(value: Any) -> Tally:
    counts, sums = value[: len(_COUNTS)], value[len(_COUNTS) :]
    if not all(type(one) is int or one is None for one in counts):
        raise ValueError("it is not a count")
    return Tally(
        **dict(zip(_COUNTS, counts, strict=True)),
        **{name: _loaded(one) for name, one in zip(_SUMS, sums, strict=True)},
    )


def _number(value: Any) -> Any:
    """Return a number as JSON holds it to the last bit: a long double, and no number, as text."""
    if isinstance(value, int):
        return value
    plain = float(value)
    return plain if plain == value and math.isfinite(plain) else str(value)


def _loaded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    import numpy as np

    return np.longdouble(value)
