"""Sum bytes by component and by prefixes of names; reads headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import TensorInfo

_NUMBER = re.compile(r"(\d+)")


class PrefixSum(NamedTuple):
    """What lies below one prefix of names.

    Attributes:
        component: `model`, `optimizer`, `ema`, `extra:<n>`.
        prefix: the first parts of the names, joined by dots; "" for the whole component.
        depth: number of these parts.
        tensors: number of them.
        elements: number of them.
        bytes: of the logical tensors: each element once, without replicas and aliases.
    """

    component: str
    prefix: str
    depth: int
    tensors: int
    elements: int
    bytes: int


def prefix_sums(infos: Iterable[TensorInfo], depth: int) -> list[PrefixSum]:
    """Return the sums by component, the largest first, and by prefix, in the order of layers."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for info in infos:
        parts = tuple(info.name.split("."))
        for end in range(min(depth, len(parts)) + 1):
            sums = found.setdefault((info.component, parts[:end]), [0, 0, 0])
            sums[0] += 1
            sums[1] += prod(info.shape)
            sums[2] += info.nbytes

    def place(key: tuple[str, tuple[str, ...]]) -> tuple[object, ...]:
        component, parts = key
        return -found[component, ()][2], component, [natural(part) for part in parts]

    return [
        PrefixSum(component, ".".join(parts), len(parts), *found[component, parts])
        for component, parts in sorted(found, key=place)
    ]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `layers.9` before `layers.10`."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in _NUMBER.split(name) if p]
