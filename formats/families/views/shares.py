"""Tensors of other model code that are parts of one of Hugging Face's, as views.

    share = "columns 1/2"     # gate of `gate_up_proj`, [experts, in, 2 out], whose other half is up
    share = "rows 3/3"        # values of a tower's `wqkv`

Rows of a head may be in another order there (`rotary`), or the last two axes the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.transfer.content import Copy, TargetTensor

from . import TensorViews

_SAID = re.compile(r"(rows|columns) ([1-9])/([2-9])")


class Share(NamedTuple):
    """Which part of a tensor of Hugging Face's another tensor is.

    Attributes:
        rows: whether the first axis is cut; else the last.
        number: of the part, from 0.
        parts: how many there are, of one size.
    """

    rows: bool
    number: int
    parts: int

    @classmethod
    def of(cls, text: str, table: str) -> Share:
        """Return the share that a row of a table says.

        Raises:
            UsageError: it says none.
        """
        match = _SAID.fullmatch(text) if isinstance(text, str) else None
        if match is None or int(match[2]) > int(match[3]):
            raise UsageError(
                f"the table of {table} says share = {text!r}", hint='like "columns 1/2", "rows 2/3"'
            )
        return cls(match[1] == "rows", int(match[2]) - 1, int(match[3]))


class Order(NamedTuple):
    """How elements lie in other model code.

    Attributes:
        transposed: whether the last two axes are the other way round.
        width: rows of a head, where they lie in halves and Hugging Face's are neighbours; else 0.
    """

    transposed: bool
    width: int


def cut_share(
    views: TensorViews, whole: TargetTensor, name: str, share: Share, order: Order
) -> TargetTensor:
    """Return one part of a tensor of Hugging Face's.

    Raises:
        UsageError: it has no such parts.
        UnsupportedError: it was changed before.
    """
    if is_scalar(whole):
        return whole._replace(name=name)
    info = views.source(whole)
    axis = 0 if share.rows else len(info.shape) - 1
    size = info.shape[axis] if info.shape else 0
    if not size or size % share.parts or (not share.rows and axis == 0):
        raise UsageError(
            f"{whole.key} of {list(info.shape)} does not hold {share.parts} tensors side by side",
            tensor=whole.key,
        )
    key = _shown(views, whole, order, halves=True)
    shape = list(_exchanged(info.shape) if order.transposed else info.shape)
    axis -= order.transposed and not share.rows
    shape[axis] //= share.parts
    offsets = [0] * len(shape)
    offsets[axis] = share.number * shape[axis]
    box, source = Box.whole(tuple(shape)), Box(tuple(offsets), tuple(shape))
    return whole._replace(name=name, shape=tuple(shape), copies=(Copy(box, key, source),))


def joined_shares(
    views: TensorViews,
    parts: Mapping[Share, TargetTensor],
    name: str,
    orders: Mapping[Share, Order],
) -> TargetTensor:
    """Return the tensor of Hugging Face's that all parts make.

    Args:
        views: what is shown.
        parts: all that are there.
        name: of the whole.
        orders: how the elements of each part lie.

    Raises:
        UnsupportedError: one is missing or was changed before, or they differ in type or shape.
    """
    first = next(iter(parts))
    some = parts[first]
    absent = sorted(set(range(first.parts)) - {share.number for share in parts})
    if absent:
        raise UnsupportedError(
            f"{some.key} is one of {first.parts} parts of {name}, whose part {absent[0] + 1} is not"
            " there",
            tensor=some.key,
        )
    ordered = sorted(parts.items(), key=lambda one: one[0].number)
    if len({(one.dtype, one.shape) for _, one in ordered}) > 1:
        raise UnsupportedError(
            f"the parts of {name} differ in type or shape, so that they make no one tensor",
            tensor=some.key,
        )
    if is_scalar(some):
        return ordered[0][1]._replace(name=name)
    if len(some.shape) < (1 if first.rows else 2):
        raise UnsupportedError(f"{some.key} of {list(some.shape)} has no columns", tensor=some.key)
    each = _exchanged(some.shape) if orders[first].transposed else some.shape
    axis = 0 if first.rows else len(each) - 1
    copies = []
    for share, part in ordered:
        key = _shown(views, part, orders[share], halves=False)
        offsets = [0] * len(each)
        offsets[axis] = share.number * each[axis]
        copies.append(Copy(Box(tuple(offsets), each), key, Box.whole(each)))
    shape = list(each)
    shape[axis] *= first.parts
    return some._replace(name=name, shape=tuple(shape), copies=tuple(copies))


def is_scalar(wanted: TargetTensor) -> bool:
    """Say whether a tensor counts something of its parameter and is not shaped like it."""
    return wanted.shape in ((), (1,)) and wanted.kind == "other"


def _shown(views: TensorViews, wanted: TargetTensor, order: Order, *, halves: bool) -> str:
    info = views.source(wanted)
    if order.width:
        rows = info.shape[0] if info.shape else 0
        if order.width % 2 or rows % order.width:
            raise UsageError(
                f"{wanted.key} of {list(info.shape)} holds no heads of width {order.width}",
                tensor=wanted.key,
            )
        return views.rotate(wanted, order.width, halves=halves).copies[0].key
    if not order.transposed:
        return info.key
    return views.show(info, {}, [[axis] for axis in _exchanged(tuple(range(len(info.shape))))])


def _exchanged(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2])
