"""The inputs that a sweep can run over: `gpus=1k..128k`, `save=1s..10m`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ftckpt.amounts import brief_duration, decimal_bytes, human_count
from ftckpt.errors import UsageError
from ftckpt.planning import quantities

from .failures import CostOptions, FailureOptions

# More points than anybody reads or draws.
_MOST = 10_000
_USUAL = 13


class _Kind(NamedTuple):
    """What an input is measured in.

    Attributes:
        parse: text and flag to a number.
        write: a number to the text that an option takes.
        show: a number to what people read.
        unit: for JSON.
    """

    parse: Callable[[str, str], float]
    write: Callable[[float], str]
    show: Callable[[float], str]
    unit: str


_GPUS = _Kind(partial(quantities.count, kilo=1024), lambda v: str(int(v)), "{:,.0f}".format, "")
_COUNT = _Kind(quantities.count, lambda v: str(int(v)), lambda v: human_count(int(v)), "")
_TIME = _Kind(quantities.duration, "{!r}s".format, brief_duration, "s")
_SIZE = _Kind(quantities.size, lambda v: f"{v:.0f}B", decimal_bytes, "B")
_BANDWIDTH = _Kind(
    quantities.bandwidth, lambda v: f"{v:.0f}B/s", lambda v: decimal_bytes(v) + "/s", "B/s"
)

# Name of the axis -> its options, the field of them, its kind, and what people call it.
AXES: dict[str, tuple[type[Any], str, _Kind, str]] = {
    "gpus": (FailureOptions, "gpus", _GPUS, "GPUs"),
    "mtbf": (FailureOptions, "mtbf", _TIME, "time between failures of the job"),
    "gpu-mtbf": (FailureOptions, "gpu_mtbf", _TIME, "time between failures of one GPU"),
    "save": (CostOptions, "save", _TIME, "time that a save stops training"),
    "snapshot": (CostOptions, "snapshot", _TIME, "time that a snapshot stops training"),
    "flush": (CostOptions, "flush", _TIME, "time to write in the background"),
    "detect": (CostOptions, "detect", _TIME, "time to notice and replace"),
    "restart": (CostOptions, "restart", _TIME, "time to restart"),
    "bytes": (CostOptions, "nbytes", _SIZE, "size of a checkpoint"),
    "params": (CostOptions, "params", _COUNT, "parameters"),
    "write-bw": (CostOptions, "write_bw", _BANDWIDTH, "bandwidth of one rank"),
    "storage-bw": (CostOptions, "storage_bw", _BANDWIDTH, "bandwidth of the storage"),
}


@dataclass(frozen=True)
class Axis:
    """A range of one input.

    Attributes:
        name: as in `AXES`.
        values: ascending, in the base unit.
        group: the options that hold the input.
        field: its field there.
        texts: the values as the option takes them.
        names: the values as people read them.
        unit: of the values.
        label: what people call the input.
    """

    name: str
    values: tuple[float, ...]
    group: type[Any]
    field: str
    texts: tuple[str, ...]
    names: tuple[str, ...]
    unit: str
    label: str

    @property
    def marks(self) -> tuple[str, ...] | None:
        """Names for the axis of a picture; None for durations, which have round ones."""
        return None if self.unit == "s" else self.names

    @property
    def key(self) -> str:
        """The heading of its column in a table of numbers: `save_s`."""
        unit = {"": "", "s": "_s", "B": "_bytes", "B/s": "_bytes_per_s"}[self.unit]
        return self.name.replace("-", "_") + unit


def read_axis(text: str, points: int) -> Axis:
    """Return the values of `NAME=LOW..HIGH`, evenly spaced on a logarithmic scale.

    Args:
        text: as typed.
        points: how many; 0 means doublings where high / low is a power of two, else 13.

    Raises:
        UsageError: it is not a range of a known input.
    """
    name, _, rest = text.partition("=")
    low_text, dots, high_text = rest.partition("..")
    if name not in AXES:
        raise UsageError(f"--over {text}: unknown input", hint=f"one of {', '.join(AXES)}")
    if not dots:
        raise UsageError(f"--over {text}: this is not a range", hint="write gpus=1k..128k")
    group, field, kind, label = AXES[name]
    flag = f"--over {name}:"
    low, high = kind.parse(low_text, flag), kind.parse(high_text, flag)
    if not 0 < low < high:
        raise UsageError(f"--over {text}: the range must rise, and begin above zero")
    if points == 1 or points > _MOST:
        raise UsageError(f"--points {points}: a range has 2 to {_MOST:,} points")
    doublings = math.log2(high / low)
    number = points or (round(doublings) + 1 if doublings == round(doublings) <= 40 else _USUAL)
    spaced = [low * (high / low) ** (k / (number - 1)) for k in range(number)]
    if kind.unit == "":
        spaced = sorted({float(round(value)) for value in spaced})
    return Axis(
        name,
        tuple(spaced),
        group,
        field,
        tuple(map(kind.write, spaced)),
        tuple(map(kind.show, spaced)),
        kind.unit,
        label,
    )
