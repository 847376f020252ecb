"""Give the rows of each head the order that another rotary embedding needs.

A head of width w is rotated in pairs of rows. Meta's code and torchtitan's take neighbours, rows 2i
and 2i+1; that of transformers takes halves, rows i and w/2+i. So row 2i+s of the one is row
s*w/2+i of the other. Rows are moved when they are read, some heads at a time; nothing is computed.

Source: `permute` in convert_llama_weights_to_hf.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, TensorInfo
from ftckpt.checkpoint.computed import computed
from ftckpt.checkpoint.read_tensor import read_box

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_BLOCK = 8 << 20  # bytes that are moved at a time


class Rotated(NamedTuple):
    """A tensor whose rows are in the other order.

    Attributes:
        key: of the tensor as it is.
        width: rows of a head.
        halves: whether the result has halves; else it has neighbours.
    """

    key: str
    width: int
    halves: bool


def rotated(checkpoint: Checkpoint, wanted: Mapping[str, Rotated]) -> Checkpoint:
    """Return a checkpoint that shows tensors in the other order besides its own.

    Args:
        checkpoint: the source.
        wanted: by the key of the result; its rows are whole heads.
    """
    if not wanted:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for key, one in wanted.items():
        tensors[key] = checkpoint.tensors[one.key]._replace(name=key)

    def fill(key: str, offset: int, out: memoryview) -> None:
        one = wanted[key]
        _fill(checkpoint, checkpoint.tensors[one.key], one, offset, out)

    made_of: Mapping[str, Sequence[str]] = {key: [one.key] for key, one in wanted.items()}
    replaced = getattr(checkpoint, "replaced", {})
    return computed(checkpoint, tensors, made_of, fill, replaced)


def _fill(
    checkpoint: Checkpoint, info: TensorInfo, one: Rotated, offset: int, out: memoryview
) -> None:
    """Put the bytes of the result that begin at `offset` into `out`."""
    import numpy as np

    row = info.dtype.nbytes(prod(info.shape[1:]))
    target = np.frombuffer(out, np.uint8)
    end = offset + len(target)
    step = max(_BLOCK // max(row, 1) // one.width, 1) * one.width
    first, last = offset // row, -(-end // row)
    while first < last:
        stop = min((first // step + 1) * step, last)
        data = _rows(checkpoint, info, one, first, stop).reshape(-1).view(np.uint8)
        begin, upto = max(offset, first * row), min(end, stop * row)
        target[begin - offset : upto - offset] = data[begin - first * row : upto - first * row]
        first = stop


def _rows(checkpoint: Checkpoint, info: TensorInfo, one: Rotated, first: int, last: int) -> Array:
    """Return rows of the result."""
    import numpy as np

    def read(begin: int, end: int) -> Array:
        zeros = (0 for _ in info.shape[1:])
        return read_box(checkpoint, info, Box((begin, *zeros), (end - begin, *info.shape[1:])))

    width, half = one.width, one.width // 2
    if first % width == 0 and last % width == 0:
        whole = read(first, last)
        rest = whole.shape[1:]
        shape = (-1, half, 2, *rest) if one.halves else (-1, 2, half, *rest)
        made: Array = np.ascontiguousarray(whole.reshape(shape).swapaxes(1, 2))
        return made.reshape(whole.shape)
    parts = []
    while first < last:  # the rows of a head, or some of them
        begin = first - first % width
        stop = min(begin + width, last)
        wanted = np.arange(first - begin, stop - begin)
        pairs, sides = (wanted % half, wanted // half) if one.halves else divmod(wanted, 2)
        rows = 2 * pairs + sides if one.halves else sides * half + pairs
        lowest, highest = int(rows.min()), int(rows.max()) + 1
        parts.append(read(begin + lowest, begin + highest)[rows - lowest])
        first = stop
    return np.concatenate(parts)
