"""Show tensors with a number added to each element, in float32 and rounded once.

Megatron-core keeps the norm behind linear attention less one, because its other norms are so; in
transformers that norm has the weight itself. Weights and masters are changed; moments are the same
on both sides. An element far from one is rounded to its type, as Megatron-Bridge rounds it.

Source: `RMSNorm2ZeroCenteredRMSNormMapping` of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box, Kind, TensorInfo
from ftckpt.checkpoint.computed import computed
from ftckpt.checkpoint.read_tensor import read_box
from ftckpt.checkpoint.rounding import from_bfloat16, to_bfloat16
from ftckpt.errors import UnsupportedError
from ftckpt.transfer.content import Content, Copy, TargetTensor

from . import TensorViews

if TYPE_CHECKING:
    import numpy as np

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_CHANGED = (Kind.PARAM, Kind.MASTER)


def added(content: Content, wanted: Mapping[str, float]) -> Content:
    """Return the content with numbers added to some of its tensors.

    Args:
        content: what is to be written.
        wanted: by key of a tensor: what is added to each of its elements.

    Raises:
        UnsupportedError: a tensor was changed before, or does not hold floats.
    """
    if not wanted:
        return content
    base = content.checkpoint
    views = TensorViews(base)
    tensors, made = dict(base.tensors), dict(content.tensors)
    numbers: dict[str, tuple[TensorInfo, float]] = {}
    for key, number in wanted.items():
        info = views.source(content.tensors[key])
        if info.dtype.name not in _FLOATS:
            raise UnsupportedError(f"{key} is {info.dtype.name}: it cannot be computed", tensor=key)
        if not info.shape or not prod(info.shape):
            raise UnsupportedError(f"{key} has no rows to compute", tensor=key)
        shown = f"{info.key} {number:+}"
        numbers[shown] = info, number
        tensors[shown] = info._replace(name=shown)
        box = Box.whole(info.shape)
        made[key] = content.tensors[key]._replace(copies=(Copy(box, shown, box),))

    def fill(key: str, offset: int, out: memoryview) -> None:
        info, number = numbers[key]
        row = info.dtype.nbytes(prod(info.shape[1:]))
        first, last = offset // row, -(-(offset + len(out)) // row)
        zeros = (0 for _ in info.shape[1:])
        box = Box((first, *zeros), (last - first, *info.shape[1:]))
        data = _sum(read_box(base, info, box), info.dtype.name, number)
        begin = offset - first * row
        out[:] = data[begin : begin + len(out)]

    made_of: Mapping[str, Sequence[str]] = {key: [info.key] for key, (info, _) in numbers.items()}
    shows = computed(base, tensors, made_of, fill, getattr(base, "replaced", {}))
    shows.step = base.step
    return replace(content, checkpoint=shows, tensors=made)


def is_changed(wanted: TargetTensor) -> bool:
    """Say whether a tensor of a parameter that is stored otherwise is itself stored so."""
    return wanted.kind in _CHANGED


def _sum(values: np.ndarray[Any, Any], dtype: str, number: float) -> bytes:
    import numpy as np

    kept = np.ascontiguousarray(values)
    if dtype == "bfloat16":
        wide = from_bfloat16(kept.view(np.uint16))
        return to_bfloat16(wide + np.float32(number)).tobytes()
    known = kept.view(np.dtype(dtype))
    if dtype == "float64":
        return (known + number).tobytes()
    return (known.astype(np.float32) + np.float32(number)).astype(known.dtype).tobytes()
