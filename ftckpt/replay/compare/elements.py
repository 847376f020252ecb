"""Compare tensors that differ, element by element.

A log holds digests, which show that a tensor differs and not where. Once the first differing
tensors are known, both runs are repeated, and each keeps their bytes of that one step beside its
log (`journal.Journal.keep`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.comparison.arithmetic import measure
from ftckpt.comparison.elements import bits_of, has_values, values, wide_type
from ftckpt.replay.record.floats import value_of, written
from ftckpt.replay.settings import values_file


@dataclass(frozen=True, slots=True)
class Closeup:
    """The differing elements of one tensor of two runs.

    Attributes:
        step: of the training.
        rank: whose tensor it is.
        event: key of `events.EVENTS`.
        item: name of the tensor.
        dtype: torch's name of its type.
        shape: of the rank's part.
        index: of the first element that differs.
        reference: that element in the uninterrupted run, as `floats.written` or a number's digits.
        other: the same in the restart.
        ulps: distance of the two in units in the last place; None if not defined.
        changed: number of differing elements.
        compared: number of compared elements: all, or as many as `LIMIT` bytes hold.
        most: the largest such distance of two elements; None as for `ulps`.
    """

    step: int
    rank: int
    event: str
    item: str
    dtype: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    reference: str
    other: str
    ulps: int | None
    changed: int
    compared: int
    most: int | None

    @property
    def words(self) -> str:
        """Return it in words: `0.weight[3, 5] is 0.25 instead of 0.5, 3 ULP; …`."""
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        apart = "" if self.ulps is None else f", {self.ulps:,} ULP"
        far = f", the farthest by {self.most:,} ULP" if self.most and self.changed > 1 else ""
        return (
            f"{self.item}{place} is {_shown(self.other)} instead of {_shown(self.reference)}"
            f"{apart}; {self.changed:,} of {self.compared:,} elements differ{far}"
        )


def _shown(text: str) -> str:
    value = value_of(text) if " " in text else None
    return text if value is None else f"{value:.9g}"


def look(
    reference: Path, other: Path, step: int, rank: int, event: str, items: tuple[str, ...]
) -> tuple[Closeup, ...]:
    """Compare the values that two runs kept of the same tensors.

    Args:
        reference: directory of the uninterrupted run's log.
        other: of the restart's.
        step: at which they were kept.
        rank: whose tensors they are.
        event: that they belong to.
        items: their names, in the order of the request.

    Returns:
        One for each differing tensor that both kept in one type and shape.
    """
    found = []
    for number, item in enumerate(items):
        files = [values_file(log, rank, number) for log in (reference, other)]
        if not all(file.exists() for file in files):
            continue
        (head, ours), (head_too, theirs) = map(_kept, files)
        name, shape = head["dtype"], tuple(head["shape"])
        if head != head_too or not DTYPES[name].itemsize:
            continue
        first = _first_unlike(DTYPES[name], ours, theirs)
        if first is None:
            continue
        count = len(ours) // DTYPES[name].itemsize
        tally = measure((DTYPES[name], ours), (DTYPES[name], theirs), count, None)
        pair = [_element(DTYPES[name], data, first) for data in (ours, theirs)]
        texts = [_text(DTYPES[name], data) for data in pair]
        here = measure((DTYPES[name], pair[0]), (DTYPES[name], pair[1]), 1, None)
        finite = not (here.nan_ours or here.nan_theirs or here.inf_ours or here.inf_theirs)
        found.append(
            Closeup(
                step, rank, event, item, name, shape, _index(first, shape), texts[0], texts[1],
                here.max_ulp if finite else None, tally.changed, count, tally.max_ulp,
            )
        )  # fmt: skip
    return tuple(found)


def _kept(file: Path) -> tuple[dict[str, Any], bytes]:
    head, _, data = file.read_bytes().partition(b"\n")
    return json.loads(head), data


def _first_unlike(dtype: DType, ours: bytes, theirs: bytes) -> int | None:
    """Return the place of the first element whose bits differ."""
    import numpy as np

    other = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
    return int(other.argmax()) // dtype.itemsize if other.any() else None


def _element(dtype: DType, data: bytes, place: int) -> bytes:
    return data[place * dtype.itemsize : (place + 1) * dtype.itemsize]


def _text(dtype: DType, data: bytes) -> str:
    """Return an element as in a record; both parts of a complex number."""
    import numpy as np

    if not has_values(dtype):
        return data.hex()
    bits = bits_of(dtype, data)
    wide = np.empty(bits.size, wide_type(dtype))
    values(dtype, bits, wide)
    if dtype.family == "float":
        return written(float(wide[0]), dtype.name)
    if dtype.family == "complex":
        return repr(complex(*wide))
    return str(int(wide[0]))


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for axis in range(len(shape)):
        here, place = divmod(place, math.prod(shape[axis + 1 :]))
        index.append(here)
    return tuple(index)
