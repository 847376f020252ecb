"""Locate a parameter in the flat buffers of Megatron's distributed optimizer.

Megatron lays the parameters of one model chunk on one tensor-parallel rank into a flat buffer for
each element type, last registered first, cuts the buffer into buckets, and pads each bucket so
that data-parallel ranks own equal parts of it. Checkpoints hold the buffers without the padding at
the ends of buckets and without names, so the layout must be built again:

- each parameter starts at a multiple of 64 elements;
- a bucket closes when it holds `limit` elements or more; an embedding that two pipeline stages
  share has a bucket of its own;
- a closed bucket is padded to a multiple of lcm(dp, 128), so the next one starts aligned.

Parameters of experts have buffers of their own, and an optimizer and a data-parallel group of
their own: build them apart. A checkpoint numbers the buffers of one optimizer model chunk by model
chunk, inside a chunk in the order of `by_dtype`.

Source: `_ParamAndGradBuffer` in megatron/core/distributed/param_and_grad_buffer.py (core 0.16);
`DistributedOptimizer._compute_per_buffer_param_layout` since core 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import lcm, prod
from typing import NamedTuple

from ftckpt.checkpoint.dtypes import DType

ALIGNMENT = 64
_BUCKET_MULTIPLE = 128
# With `--ddp-pad-buckets-for-high-nccl-busbw`.
_WIDE_BUCKET_MULTIPLE = 1 << 16


class Parameter(NamedTuple):
    """One parameter as its tensor-parallel rank holds it."""

    name: str  # any name; it is the key in `Buffer.slots`
    shape: tuple[int, ...]  # on its tensor-parallel rank
    dtype: DType  # of the weight, which decides the buffer
    # whether it is an embedding that the first and the last pipeline stage share, each with a copy
    # (tied embeddings and more than one stage)
    shared: bool = False


class Slot(NamedTuple):
    """The place of one parameter."""

    bucket: int  # number of its bucket in the buffer
    start: int  # its first element, counted from the bucket's first
    length: int  # its elements


class Buffer(NamedTuple):
    """The layout of one buffer."""

    slots: Mapping[str, Slot]  # by parameter name, in the order of the buffer
    buckets: tuple[int, ...]  # elements of each bucket without the padding at its end

    @property
    def unpadded(self) -> int:
        """Elements of all buckets without the padding at their ends (`numel_unpadded`)."""
        return sum(self.buckets)

    def starts(self) -> dict[str, int]:
        """Return each parameter's first element in the unpadded buckets, one after the other.

        This is how `distrib_optim.pt` stores them since buckets are coalesced (2024-02).
        """
        before = (0, *accumulate(self.buckets))
        return {name: before[slot.bucket] + slot.start for name, slot in self.slots.items()}


def default_limit(dp: int) -> int:
    """Return the elements at which a bucket closes where the run set no `--ddp-bucket-size`.

    It holds only with `--overlap-grad-reduce`, on the first pipeline stage and there for the first
    model chunk; anywhere else a buffer is one bucket.

    Args:
        dp: number of data-parallel ranks.
    """
    return max(40_000_000, 1_000_000 * dp)


def padded(numel: int, dp: int, *, wide: bool = False) -> int:
    """Return the elements of a bucket with the padding at its end (`per_bucket_numel`).

    Args:
        numel: without it.
        dp: number of ranks that share the bucket, context-parallel ones included.
        wide: whether the run padded for NCCL's bandwidth.
    """
    multiple = lcm(dp, _WIDE_BUCKET_MULTIPLE if wide else _BUCKET_MULTIPLE)
    return _up(numel, multiple)


def by_dtype(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Split the parameters of a model chunk into those of each of its buffers, in their order."""
    groups: dict[DType, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def lay_out(parameters: Sequence[Parameter], limit: int | Sequence[int] | None = None) -> Buffer:
    """Return the layout of one buffer.

    Args:
        parameters: all of the buffer, in the order of registration.
        limit: elements at which a bucket closes: one number for all buckets; or one a bucket,
            where the checkpoint records their sizes; or None for one bucket. Recorded sizes that
            do not fit show in `Buffer.buckets`, which then differs from them.
    """
    slots: dict[str, Slot] = {}
    buckets: list[int] = []
    end = 0  # of the open bucket, which starts aligned: aligned inside is aligned in the buffer
    empty = True
    for parameter in reversed(parameters):
        start = _up(end, ALIGNMENT)
        if parameter.shared and not empty:
            buckets.append(start)
            start = 0
        length = prod(parameter.shape)
        slots[parameter.name] = Slot(len(buckets), start, length)
        end, empty = start + length, False
        if parameter.shared or end >= _limit(limit, len(buckets), end + 1):
            buckets.append(end)
            end, empty = 0, True
    if not empty:
        buckets.append(end)
    return Buffer(slots, tuple(buckets))


def _limit(limit: int | Sequence[int] | None, bucket: int, beyond: int) -> int:
    """Return the elements at which `bucket` closes; `beyond` where nothing closes it."""
    if limit is None:
        return beyond
    if isinstance(limit, int):
        return limit
    return limit[bucket] if bucket < len(limit) else beyond


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
