"""Compute merged weights some rows at a time: float32 throughout, rounded once at the end.

A block of rows is always the same block, whatever bytes are asked for: so a weight that is computed
twice, to be written and to be proven, has the same bits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import isqrt, prod
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.errors import CorruptError
from ftckpt.transfer.casting import cast
from ftckpt.transfer.content import Shard, SourceBox
from ftckpt.transfer.read.elements import Gatherer

from .fit import Added, ChangedTensor, LowRank, Replaced

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_RUN = 1 << 18  # elements of a block: what is between two steps stays in the cache
_STEP = 1 << 15  # elements whose rounding is measured at once
_KEPT = 256 << 20  # bytes of matrices that are kept for the next block
_WHOLES = 2  # tensors of adapters that are kept: A and B of the experts that come next
_BLOCKS = 2  # computed blocks that a thread keeps: a request ends in the middle of one
# Multiplications of one product: OpenBLAS uses one thread up to here.
_ALONE = 1 << 18
_SINGLE = DTYPES["float32"]


class Rounding(NamedTuple):
    """What rounding to the type of the result did.

    Attributes:
        largest: difference to the float32 value, as a part of that value; the largest of all.
        tensor: where it is.
        infinite: values that were finite and are no longer.
    """

    largest: float = 0.0
    tensor: str = ""
    infinite: int = 0


class _Factors(NamedTuple):
    """The two matrices of a change, per expert, so that rows are `left[rows] @ right`."""

    left: Array
    right: Array

    @property
    def nbytes(self) -> int:
        return int(self.left.nbytes + self.right.nbytes)


class MergedWeights:
    """Computes bytes of merged weights; may be used from many threads.

    Args:
        base: the checkpoint that they are merged into.
        targets: what is computed, by key.
        dtypes: the types of the results, by key.
    """

    def __init__(
        self, base: Checkpoint, targets: Mapping[str, ChangedTensor], dtypes: Mapping[str, DType]
    ) -> None:
        self._targets = targets
        self._dtypes = dtypes
        self._base = base
        self._gatherers: dict[int, Gatherer] = {}
        self._lock = threading.Lock()
        self._measuring = threading.Lock()
        self._factors: OrderedDict[tuple[str, int], _Factors] = OrderedDict()
        self._wholes: OrderedDict[tuple[int, str], Array] = OrderedDict()
        self._norms: dict[tuple[str, int], Array] = {}
        self._done: dict[str, set[int]] = {}
        self._thread = threading.local()
        self._infinite: dict[str, int] = {}  # values of a block
        self.rounding = Rounding()

    def told(self) -> list[Any]:
        """Return what rounding did, as plain data."""
        return [self.rounding.largest, self.rounding.tensor, self._infinite]

    def hear(self, said: Any) -> None:
        """Take in what rounding did to values that were computed elsewhere.

        Raises:
            ValueError, TypeError: it is other data.
        """
        largest, tensor, infinite = said
        counts = {str(block): int(count) for block, count in dict(infinite).items()}
        self._take(float(largest), str(tensor), counts)

    def _take(self, largest: float, tensor: str, infinite: Mapping[str, int]) -> None:
        """Count what rounding did; the same block may come twice, from who wrote and who proved."""
        with self._lock:
            so_far = self.rounding
            if largest > so_far.largest:
                so_far = so_far._replace(largest=largest, tensor=tensor)
            self._infinite |= infinite
            self.rounding = so_far._replace(infinite=sum(self._infinite.values()))

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a weight that begin at `offset` of its dense C order into `view`.

        Raises:
            CorruptError: the adapter makes a weight infinite or NaN that the base has not so.
        """
        import numpy as np

        out = np.frombuffer(view, np.uint8)
        size = self._dtypes[key].itemsize
        at, end = offset, offset + len(out)
        for number, first, stop in _blocks(
            self._targets[key].info.shape, at // size, -(-end // size)
        ):
            made = self._block(key, number, first, stop)
            begin = max(at - first * size, 0)
            to = first * size + begin - offset
            count = min(len(made) - begin, len(out) - to)
            out[to : to + count] = made[begin : begin + count]

    def _block(self, key: str, number: int, first: int, stop: int) -> Array:
        kept: OrderedDict[tuple[str, int], Array] | None = getattr(self._thread, "kept", None)
        if kept is None:
            kept = self._thread.kept = OrderedDict()
        made = kept.get((key, number))
        if made is None:
            made = kept[key, number] = self._compute(key, first, stop)
            while len(kept) > _BLOCKS:
                kept.popitem(last=False)
        return made

    def _compute(self, key: str, first: int, stop: int) -> Array:
        """Return the bytes of elements `first` to `stop`, whole rows."""
        import numpy as np

        target, dtype = self._targets[key], self._dtypes[key]
        with np.errstate(all="ignore"):
            values = self._values(key, len(target.changes), first, stop)
            if not np.isfinite(values).all():
                self._blame(target, values, first, stop)
            items = cast(values.view(np.uint32), _SINGLE, dtype)
            if dtype != _SINGLE and self._is_new(key, first):
                self._note(target.name, first, values, items, dtype)
        made: Array = np.ascontiguousarray(items).reshape(-1).view(np.uint8)
        return made

    def _is_new(self, key: str, first: int) -> bool:
        """Return whether a block is computed for the first time: the proof computes it again."""
        with self._lock:
            done = self._done.setdefault(key, set())
            known = first in done
            done.add(first)
            return not known

    def _blame(self, target: ChangedTensor, values: Array, first: int, stop: int) -> None:
        import numpy as np

        before = self._read(self._base, target.info, first, stop).reshape(values.shape)
        if (np.isfinite(before) & ~np.isfinite(values)).any():
            where = target.changes[-1].adapter.source.url
            raise CorruptError(
                f"merging {where} makes values of {target.name} infinite or NaN",
                hint=f"ftckpt verify {quote(where)} --level values names the tensor",
                kind="nan",
                tensor=target.info.key,
            )

    def _note(self, name: str, first: int, values: Array, items: Array, dtype: DType) -> None:
        import numpy as np

        largest, infinite = 0.0, 0
        flat, made = values.reshape(-1), items.reshape(-1)
        for start in range(0, flat.size, _STEP):  # what is between two steps stays in the cache
            was = flat[start : start + _STEP]
            off = cast(made[start : start + _STEP], dtype, _SINGLE).view(np.float32)
            off -= was
            off /= was
            np.abs(off, out=off)
            worst = float(np.fmax.reduce(off))  # of zeros it is NaN, and passed over
            if np.isinf(worst):  # beyond the type
                infinite += int(np.count_nonzero(np.isinf(off)))
                worst = float(off[np.isfinite(off)].max(initial=0.0))
            largest = max(largest, worst)
        if largest > self.rounding.largest or infinite:
            self._take(largest, name, {f"{first} {name}": infinite} if infinite else {})

    def _values(self, key: str, count: int, first: int, stop: int) -> Array:
        """Return whole rows as float32, after the first `count` changes."""
        target = self._targets[key]
        width = _width(target.info.shape)
        values = self._read(self._base, target.info, first, stop).reshape(-1, width)
        for number, change in enumerate(target.changes[:count]):
            if isinstance(change, Replaced):
                values = self._read(change.adapter, change.info, first, stop).reshape(-1, width)
            elif isinstance(change, Added):
                added = self._read(change.adapter, change.info, first, stop)
                values = values + (added * _single(change.scale)).reshape(-1, width)
            else:
                values = self._merged(key, number, change, values, first // width)
        return values

    def _merged(self, key: str, number: int, change: LowRank, values: Array, row: int) -> Array:
        values += self._product(key, number, change, row, len(values))
        if change.magnitude is None:
            return values
        import numpy as np

        magnitude = self._whole(change.adapter, change.magnitude).reshape(-1)
        if change.turned:
            values *= (magnitude / self._norm(key, number))[None, :]
            return values
        norm = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
        part = magnitude[row : row + len(values)] / norm.astype(np.float32)
        values *= part[:, None]
        return values

    def _product(self, key: str, number: int, change: LowRank, row: int, rows: int) -> Array:
        factors = self._factors_of(key, number, change)
        expert, begin = divmod(row, factors.left.shape[1])
        found = _multiplied(factors.left[expert, begin : begin + rows], factors.right[expert])
        found *= _single(change.scale)
        return found

    def _norm(self, key: str, number: int) -> Array:
        """Return the norms of a weight's columns (DoRA, stored input first), by a pass over it."""
        import numpy as np

        with self._measuring:
            known = self._norms.get((key, number))
            if known is not None:
                return known
            target = self._targets[key]
            change = target.changes[number]
            assert isinstance(change, LowRank)
            width = _width(target.info.shape)
            squares = np.zeros(width, np.float64)
            for _, first, stop in _blocks(target.info.shape, 0, target.info.numel):
                values = self._values(key, number, first, stop)
                values += self._product(key, number, change, first // width, len(values))
                squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
            found: Array = np.sqrt(squares).astype(np.float32)
            self._norms[key, number] = found
            return found

    def _factors_of(self, key: str, number: int, change: LowRank) -> _Factors:
        with self._lock:
            known = self._factors.get((key, number))
            if known is not None:
                self._factors.move_to_end((key, number))
                return known
        a = self._whole(change.adapter, change.a)
        b = self._whole(change.adapter, change.b)
        # A holds expert by expert, B the experts of each rank side by side.
        a = a.reshape(change.experts, change.rank, -1)
        b = b.reshape(b.shape[0], change.rank, change.experts).transpose(2, 0, 1)
        import numpy as np

        rows = slice(None)
        if (part := change.part) is not None:
            a, b = a[part.expert : part.expert + 1], b[part.expert : part.expert + 1]
            rows = slice(part.start, part.stop)
        if change.turned:
            made = _Factors(
                np.ascontiguousarray(a.transpose(0, 2, 1)[:, rows]),
                np.ascontiguousarray(b.transpose(0, 2, 1)),
            )
        else:
            made = _Factors(np.ascontiguousarray(b[:, rows]), np.ascontiguousarray(a))
        with self._lock:
            self._factors[key, number] = made
            while len(self._factors) > 1 and sum(f.nbytes for f in self._factors.values()) > _KEPT:
                self._factors.popitem(last=False)
        return made

    def _whole(self, adapter: Checkpoint, info: TensorInfo) -> Array:
        """Return a tensor of an adapter as float32; the experts of one share it."""
        key = (id(adapter), info.key)
        with self._lock:
            known = self._wholes.get(key)
        if known is not None:
            return known
        found: Array = self._read(adapter, info, 0, info.numel).reshape(info.shape)
        with self._lock:
            self._wholes[key] = found
            while len(self._wholes) > _WHOLES:
                self._wholes.popitem(last=False)
        return found

    def _read(self, checkpoint: Checkpoint, info: TensorInfo, first: int, stop: int) -> Array:
        """Return elements of a tensor as float32, in C order."""
        import numpy as np

        with self._lock:
            gatherer = self._gatherers.setdefault(id(checkpoint), Gatherer(checkpoint))
        box = Box.whole(info.shape)
        shard = Shard(info.shape, info.dtype, (SourceBox(box, info.key, box),))
        size = info.dtype.itemsize
        raw = bytearray((stop - first) * size)
        gatherer.fill(shard, first, stop, memoryview(raw))
        items = np.frombuffer(raw, raw_dtype(size))
        return cast(items, info.dtype, _SINGLE).view(np.float32)


def _multiplied(left: Array, right: Array) -> Array:
    """Return a product, made of products that are too small for a library to share out.

    Threads of a library would wait for each other beside ours (ten times the processor time was
    measured), and how many there are would decide how each sum is rounded.
    """
    import numpy as np

    rank, (rows, width) = left.shape[1], (left.shape[0], right.shape[1])
    tall = min(rows, max(16, isqrt(_ALONE // rank)))
    wide = max(16, _ALONE // (rank * tall))
    made = np.empty((rows, width), np.float32)
    for row in range(0, rows, tall):
        for column in range(0, width, wide):
            part = made[row : row + tall, column : column + wide]
            np.matmul(left[row : row + tall], right[:, column : column + wide], out=part)
    return made


def _single(value: float) -> Any:
    import numpy as np

    return np.float32(value)


def _width(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number and elements of the blocks that hold elements `start` to `stop`.

    A block is some rows of one matrix.
    """
    width = max(_width(shape), 1)
    rows = shape[-2] if len(shape) > 1 else 1
    step = max(1, _RUN // width)
    each = -(-rows // step)  # blocks of a matrix
    matrix, inside = divmod(start, rows * width)
    number = matrix * each + inside // (step * width)
    last = prod(shape)
    while True:
        matrix, place = divmod(number, each)
        first = (matrix * rows + place * step) * width
        if first >= min(stop, last):
            return
        yield number, first, (matrix * rows + min((place + 1) * step, rows)) * width
        number += 1
