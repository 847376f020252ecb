"""Two tensors of other model code that lie side by side in one of Hugging Face's, as views.

`gate_up_proj` of Llama 4 is [experts, in, 2 out]: the columns of gate, then those of up. torchtitan
has two tensors of it, whose last two axes are the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.transfer.content import Copy, TargetTensor

from . import TensorViews

ORDER = ("first", "second")


def cut_half(
    views: TensorViews, whole: TargetTensor, name: str, half: str, *, transposed: bool
) -> TargetTensor:
    """Return one half of a tensor of Hugging Face's.

    Raises:
        UsageError: it has no two halves.
        UnsupportedError: it was changed before.
    """
    if is_scalar(whole):
        return whole._replace(name=name)
    info = views.source(whole)
    if len(info.shape) < 2 or info.shape[-1] % 2 or not info.shape[-1]:
        raise UsageError(
            f"{whole.key} of {list(info.shape)} does not hold two tensors side by side",
            tensor=whole.key,
        )
    key = _shown(views, whole, turned=transposed)
    axis = len(info.shape) - (2 if transposed else 1)
    shape = list(_exchanged(info.shape) if transposed else info.shape)
    shape[axis] //= 2
    offsets = [0] * len(shape)
    offsets[axis] = ORDER.index(half) * shape[axis]
    box, source = Box.whole(tuple(shape)), Box(tuple(offsets), tuple(shape))
    return whole._replace(name=name, shape=tuple(shape), copies=(Copy(box, key, source),))


def joined_halves(
    views: TensorViews, parts: Mapping[str, TargetTensor], name: str, *, transposed: bool
) -> TargetTensor:
    """Return the tensor of Hugging Face's that both halves make.

    Raises:
        UnsupportedError: one is missing or was changed before, or they differ in type or shape.
    """
    some = next(iter(parts.values()))
    if len(parts) < len(ORDER):
        absent = next(half for half in ORDER if half not in parts)
        raise UnsupportedError(
            f"{some.key} is one half of {name}, whose {absent} half is not there", tensor=some.key
        )
    ordered = [parts[half] for half in ORDER]
    if len({(one.dtype, one.shape) for one in ordered}) > 1:
        raise UnsupportedError(
            f"the halves of {name} differ in type or shape, so that they make no one tensor",
            tensor=some.key,
        )
    if is_scalar(some):
        return ordered[0]._replace(name=name)
    if len(some.shape) < 2:
        raise UnsupportedError(f"{some.key} of {list(some.shape)} has no columns", tensor=some.key)
    each = _exchanged(some.shape) if transposed else some.shape
    copies = []
    for number, part in enumerate(ordered):
        key = _shown(views, part, turned=transposed)
        box = Box((*(0 for _ in each[1:]), number * each[-1]), each)
        copies.append(Copy(box, key, Box.whole(each)))
    return some._replace(name=name, shape=(*each[:-1], 2 * each[-1]), copies=tuple(copies))


def is_scalar(wanted: TargetTensor) -> bool:
    """Say whether a tensor counts something of its parameter and is not shaped like it."""
    return wanted.shape in ((), (1,)) and wanted.kind == "other"


def _shown(views: TensorViews, wanted: TargetTensor, *, turned: bool) -> str:
    info = views.source(wanted)
    if not turned:
        return info.key
    return views.show(info, {}, [[axis] for axis in _exchanged(tuple(range(len(info.shape))))])


def _exchanged(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2])
