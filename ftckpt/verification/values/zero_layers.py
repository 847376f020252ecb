"""Layers whose weights are all zero, beside layers whose weights are not.

No initialisation and no training leaves every matrix of a layer zero: a file that was never
written, a save of weights that lay on another device, or a merge that missed a layer does. One
matrix alone may be zero on purpose (a block that begins as the identity, a zero convolution, the B
of an adapter), and so may vectors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.findings import Finding, counted, finding, listed

_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_DEPTH = 2  # layers, and experts in them
_FEW = 2  # matrices that a layer has at least
_KINDS = (Kind.PARAM, Kind.MASTER)


def check_layers(tensors: Mapping[str, TensorInfo], zeros: Container[str]) -> Iterator[Finding]:
    """Yield layers, and experts, of which every matrix is zero.

    Args:
        tensors: of the checkpoint, by key.
        zeros: keys of those whose numbers are all zero.
    """
    stacks: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(dict)
    for key, info in tensors.items():
        if info.kind not in _KINDS or len(info.shape) < _FEW or not info.numel:
            continue
        if info.dtype.family != "float":
            continue
        for depth, match in enumerate(_NUMBER.finditer(info.name)):
            if depth < _DEPTH:
                stack = info.component, str(info.kind), info.name[: match.start(1)]
                stacks[stack].setdefault(match[1], []).append(key)
    told: set[str] = set()
    for (_, _, before), units in sorted(stacks.items(), key=lambda one: len(one[0][2])):
        empty = {
            number: keys
            for number, keys in units.items()
            if len(keys) >= _FEW and all(key in zeros for key in keys)
        }
        if len(empty) == len(units) and len(units) < _FEW:
            continue
        names = [f"{before}{number}" for number, keys in empty.items() if not told.issuperset(keys)]
        if not names:
            continue
        for keys in empty.values():
            told.update(keys)
        first = next(iter(empty.values()))[0]
        what = "are zero" if len(names) > 1 else "is zero"
        left = len(units) - len(empty)
        others = f" ({counted(left, 'other')} beside it {'is' if left == 1 else 'are'} not)"
        yield finding(
            "zero-layer",
            f"every matrix of {listed(names, 3)} {what}: the values were lost, or never written"
            + (others if left else ""),
            file=tensors[first].pieces[0].extent.file,
            tensor=first,
        )
