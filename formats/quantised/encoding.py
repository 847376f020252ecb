"""Round weights to codes and scales, as the reference of each method does, bit for bit.

FP8 in blocks is transformers' `Fp8Quantize` (`integrations/finegrained_fp8.py`): a float32 scale a
block, so that the largest value becomes 448; each value is multiplied, clamped and rounded to
nearest even. transformers leaves a weight alone that blocks do not divide; here the last blocks may
be partly used, as in DeepSeek's own files. MXFP4 is Triton's `downcast_to_mxfp_torch` in its
default mode, which transformers calls: the scale is the power of two at or above a sixth of the
largest value, and values are rounded to nearest even.

An FP8 block whose values are all smaller than `_LEAST` would have a subnormal scale and an infinite
factor: its codes are zero.

Compute codes and scales of weights, a line of blocks at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.rounding import from_bfloat16
from ftckpt.errors import CorruptError
from ftckpt.transfer.content import Content, Shard, SourceBox, TargetTensor
from ftckpt.transfer.forms import failed
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.workers.budget import budget, demand

from .arithmetic import e2m1, e4m3, e8m0

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


FP8_BLOCK = 128  # rows and columns that share a scale
MX_BLOCK = 32  # values that do
# The largest difference that rounding makes, as a part of the largest value of a block: half a step
# of E4M3 below 448, and of E2M1 at 5 where 5 is the largest.
FP8_MOST, MX_MOST = 16 / 448, 1 / 5
_E4M3_MAX = 448.0
_LEAST = 2.0**-117
_TOGETHER = 256  # columns that are rounded together, so that they stay in the cache
_SIGN, _SIZE = 0x80000000, 0x7FFFFFFF


class CodesAndScales(NamedTuple):
    """Codes and scales, and how far what they stand for is from the values.

    Attributes:
        codes: bytes.
        scales: float32 of FP8, bytes of MXFP4; NaN or 255 where a value is not finite.
        largest: difference, as a part of the largest value of its block, of all blocks that have a
            value of `_LEAST` or more; 0 where it was not asked for.
    """

    codes: Array
    scales: Array
    largest: float


def fp8_scales(values: Array) -> tuple[Array, Array, Array]:
    """Return the scale of each block of a line of blocks, its factor, and its largest size.

    Args:
        values: float32[rows, columns], at most `FP8_BLOCK` rows.
    """
    import numpy as np

    columns = np.maximum(values.max(axis=0), -values.min(axis=0))
    largest = np.maximum.reduceat(columns, np.arange(0, values.shape[1], FP8_BLOCK))
    good = ~(largest < np.float32(_LEAST))  # of what is not finite too
    # torch divides a number by a tensor so: by its reciprocal, which rounds twice.
    factors = np.float32(1) / np.where(good, largest, np.float32(1)) * np.float32(_E4M3_MAX)
    factors = np.where(good, factors, np.float32(1))
    return np.float32(1) / factors, factors, largest


def fp8_line(values: Array, *, measure: bool = True) -> CodesAndScales:
    """Return a line of blocks as FP8.

    Args:
        values: as in `fp8_scales`.
        measure: whether the difference is asked for.
    """
    import numpy as np

    scales, factors, largest = fp8_scales(values)
    codes = np.empty(values.shape, np.uint8)
    worst = 0.0
    for first in range(0, values.shape[1], _TOGETHER):
        part = values[:, first : first + _TOGETHER]
        blocks = slice(first // FP8_BLOCK, (first + _TOGETHER) // FP8_BLOCK)
        wide = np.repeat(factors[blocks], FP8_BLOCK)[: part.shape[1]]
        made = codes[:, first : first + _TOGETHER] = e4m3_codes(part * wide)
        if not measure:
            continue
        off = e4m3()[made]
        off *= np.repeat(scales[blocks], FP8_BLOCK)[: part.shape[1]]
        off -= part
        columns = np.maximum(off.max(axis=0), -off.min(axis=0))
        most = np.maximum.reduceat(columns, np.arange(0, part.shape[1], FP8_BLOCK))
        worst = max(worst, _worst(most, largest[blocks]))
    return CodesAndScales(codes, scales, worst)


def mx_group(values: Array, *, measure: bool = True) -> CodesAndScales:
    """Return a group of rows as MXFP4, a scale a column, two codes a byte, the first the low half.

    Args:
        values: float32[`MX_BLOCK`, columns].
        measure: whether the difference is asked for.
    """
    import numpy as np

    largest = np.maximum(values.max(axis=0), -values.min(axis=0))
    bits = (largest / np.float32(6)).view(np.uint32)
    bits = (bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
    scales = (bits >> 23).astype(np.uint8)
    scales[~np.isfinite(largest)] = 255
    factors = np.where(bits == 0, np.float32(0), np.float32(1) / bits.view(np.float32))
    codes = e2m1_codes(values * factors)
    packed = codes[0::2] | (codes[1::2] << 4)
    if not measure:
        return CodesAndScales(packed, scales, 0.0)
    off = e2m1()[codes]
    off *= e8m0()[scales]
    off -= values
    return CodesAndScales(
        packed, scales, _worst(np.maximum(off.max(axis=0), -off.min(axis=0)), largest)
    )


def _worst(most: Array, largest: Array) -> float:
    """Return the largest difference of blocks, as a part of the largest value of each."""
    counted = largest >= _LEAST
    return float((most[counted] / largest[counted]).max(initial=0.0))


def e4m3_codes(values: Array) -> Array:
    """Return float32 values as bytes of float8_e4m3fn: clamped, rounded to nearest even."""
    # Below the smallest normal number steps are 2^-9, those of float32 at 2^14.
    return _codes(values, _E4M3_MAX, 20, 120 << 3, 2.0**-6, 2.0**14)


def e2m1_codes(values: Array) -> Array:
    """Return float32 values as numbers below 16 of E2M1: clamped, rounded to nearest even."""
    return _codes(values, 6.0, 22, 126 << 1, 1.0, 2.0**22)


def _codes(
    values: Array, most: float, dropped: int, bias: int, normal: float, magic: float
) -> Array:
    """Return values as codes of a float of few bits; of NaN, any.

    Args:
        values: float32.
        most: the largest value of that type.
        dropped: bits of the mantissa that it has not.
        bias: the difference of both biases, in its bits.
        normal: its smallest normal number.
        magic: a number at which float32 has the steps that it has below `normal`.
    """
    import numpy as np

    def bits_of(number: float) -> Any:
        return np.float32(number).view(np.uint32)

    bits = values.view(np.uint32)
    size = bits & np.uint32(_SIZE)
    np.minimum(size, bits_of(most), out=size)
    small = (size.view(np.float32) + np.float32(magic)).view(np.uint32)
    small -= bits_of(magic)
    codes = size >> dropped
    codes &= 1
    codes += size
    codes += np.uint32((1 << (dropped - 1)) - 1)
    codes >>= dropped
    codes -= np.uint32(bias)
    np.copyto(codes, small, where=size < bits_of(normal))
    codes |= (bits & np.uint32(_SIGN)) >> (28 if dropped == 22 else 24)
    found: Array = codes.astype(np.uint8)
    return found


_BASE = 192 << 20  # bytes: the interpreter, numpy, and blocks of every thread
_KEPT = 32 << 20  # bytes of scales that are kept from their codes until they are asked for
_MARGIN = 1e-6


class Deviation(NamedTuple):
    """How far codes and scales are from the weights.

    Attributes:
        largest: difference, as a part of the largest value of its block; the largest of all.
        tensor: where it is.
    """

    largest: float = 0.0
    tensor: str = ""


class EncodedTensor(NamedTuple):
    """A tensor that is computed.

    Attributes:
        weight: of which.
        role: `codes` or `scales`.
        mark: tells weights apart.
        fills: where the weight's elements are.
    """

    weight: TargetTensor
    role: str
    mark: str
    fills: tuple[SourceBox, ...]


class EncodedWeights:
    """Computes codes and scales; may be used from many threads.

    What is computed at once, and always in the same way, is a line of blocks of FP8, and one
    expert of MXFP4.

    Args:
        content: the weights.
        targets: what is computed, by key.
        packed: whether they are MXFP4, else FP8 in blocks.

    Attributes:
        deviation: of what was computed so far.
    """

    def __init__(
        self, content: Content, targets: Mapping[str, EncodedTensor], *, packed: bool
    ) -> None:
        self._mx = packed
        self._targets = targets
        self._gatherer = Gatherer(content.checkpoint)
        self._lock = threading.Lock()
        self._scales: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._size = 0
        self._done: dict[str, bytearray] = {}
        self._thread = threading.local()
        largest = max(self._need(one.weight) for one in targets.values())
        demand(_BASE + largest, "quantising a weight of this shape")
        # A thread keeps the codes of its last unit.
        self._turns = threading.Semaphore(max(1, (budget() - _BASE) // max(2 * largest, 1)))
        self.deviation = Deviation()

    def _need(self, weight: TargetTensor) -> int:
        """Return the bytes that are held to compute a unit: values of float32, codes, scales."""
        *_, rows, columns = weight.shape
        if self._mx:
            return rows * columns * 2 // 3 + 8 * MX_BLOCK * columns
        return 6 * min(rows, FP8_BLOCK) * columns

    def told(self) -> list[Any]:
        """Return how far the weights are from what they were, as plain data."""
        return list(self.deviation)

    def hear(self, said: Any) -> None:
        """Take in how far those are that were computed elsewhere.

        Raises:
            ValueError, TypeError: it is other data.
        """
        largest, tensor = said
        self._take(float(largest), str(tensor))

    def _take(self, largest: float, tensor: str) -> None:
        with self._lock:
            if largest > self.deviation.largest:
                self.deviation = Deviation(largest, tensor)

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a tensor that begin at `offset` of its dense C order into `view`.

        Raises:
            CorruptError: a weight is NaN or infinite, which has no code.
        """
        import numpy as np

        target = self._targets[key]
        out = np.frombuffer(view, np.uint8)
        sizes = self._sizes(target)
        at, end = offset, offset + len(out)
        # All units of a matrix have one size but its last one.
        rows = target.weight.shape[-2]
        each = 1 if self._mx else -(-rows // FP8_BLOCK)
        whole = (each - 1) * sizes[0] + sizes[1]
        while at < end:
            matrix, inside = divmod(at, whole)
            line = min(inside // sizes[0], each - 1)
            begin = inside - line * sizes[0]
            made = self._unit(target, matrix * each + line, matrix, line)
            count = min(len(made) - begin, end - at)
            out[at - offset : at - offset + count] = made[begin : begin + count]
            at += count

    def _units(self, weight: TargetTensor) -> int:
        """Return the number of units of a weight."""
        *lead, rows, _ = weight.shape
        return prod(lead) * (1 if self._mx else -(-rows // FP8_BLOCK))

    def _sizes(self, target: EncodedTensor) -> tuple[int, int]:
        """Return the bytes of a unit of a tensor, and of the last one of a matrix."""
        *_, rows, columns = target.weight.shape
        if self._mx:
            groups = rows // MX_BLOCK * columns
            size = groups if target.role == "scales" else groups * MX_BLOCK // 2
            return size, size
        if target.role == "scales":
            size = 4 * -(-columns // FP8_BLOCK)
            return size, size
        return FP8_BLOCK * columns, ((rows - 1) % FP8_BLOCK + 1) * columns

    def _unit(self, target: EncodedTensor, number: int, matrix: int, line: int) -> Array:
        """Return the bytes of a unit; codes stay with the thread, which asks for them in pieces."""
        import numpy as np

        place = target.mark, number
        if target.role == "scales":
            if not self._mx:  # safetensors puts all of them before the codes: nothing is kept
                with self._turns, np.errstate(all="ignore"):
                    return self._line_of_scales(target, matrix, line)
            with self._lock:
                known = self._scales.pop(place, None)
                if known is not None:
                    self._size -= known.nbytes
                    return known
        kept: tuple[tuple[str, int], CodesAndScales] | None = getattr(self._thread, "kept", None)
        if kept is None or kept[0] != place:
            self._thread.kept = None
            with self._turns, np.errstate(all="ignore"):
                kept = place, self._compute(target, place, matrix, line)
            self._thread.kept = kept
            if self._mx and target.role == "codes":
                self._keep_scales(place, kept[1].scales.reshape(-1))
        codes, scales = kept[1][:2]
        made: Array = (codes if target.role == "codes" else scales).reshape(-1).view(np.uint8)
        return made

    def _keep_scales(self, place: tuple[str, int], scales: Array) -> None:
        """Keep scales for their tensor, which comes after the codes."""
        with self._lock:
            before = self._scales.pop(place, None)
            self._size += scales.nbytes - (0 if before is None else before.nbytes)
            self._scales[place] = scales
            while self._size > _KEPT:
                self._size -= self._scales.popitem(last=False)[1].nbytes

    def _compute(
        self, target: EncodedTensor, place: tuple[str, int], matrix: int, line: int
    ) -> CodesAndScales:
        weight, number = target.weight, place[1]
        with self._lock:
            done = self._done.setdefault(target.mark, bytearray(self._units(weight)))
            measure = not done[number]  # the proof computes it again
            done[number] = 1
        made = (self._expert if self._mx else self._line)(target, matrix, line, measure)
        most = MX_MOST if self._mx else FP8_MOST
        if made.largest > most + _MARGIN:
            raise failed(
                f"{weight.name} deviates by {made.largest} of a block's largest", weight.key
            )
        self._take(made.largest, weight.name)
        return made

    def _line(self, target: EncodedTensor, matrix: int, line: int, measure: bool) -> CodesAndScales:
        made = fp8_line(self._values(target, matrix, line), measure=measure)
        _require_finite(target, made.scales)
        return made

    def _line_of_scales(self, target: EncodedTensor, matrix: int, line: int) -> Array:
        import numpy as np

        scales, _, _ = fp8_scales(self._values(target, matrix, line))
        _require_finite(target, scales)
        return scales.view(np.uint8)

    def _values(self, target: EncodedTensor, matrix: int, line: int) -> Array:
        """Return a line of blocks."""
        import numpy as np

        *_, rows, columns = target.weight.shape
        first, last = line * FP8_BLOCK, min((line + 1) * FP8_BLOCK, rows)
        raw = self._read(target, "float32", matrix * rows + first, matrix * rows + last)
        return np.frombuffer(raw, np.float32).reshape(-1, columns)

    def _expert(self, target: EncodedTensor, matrix: int, _: int, measure: bool) -> CodesAndScales:
        """Return an expert; transformers rounds it to bfloat16 first."""
        import numpy as np

        _, rows, columns = target.weight.shape
        groups = rows // MX_BLOCK
        codes = np.empty((columns, groups, MX_BLOCK // 2), np.uint8)
        scales = np.empty((columns, groups), np.uint8)
        worst = 0.0
        for group in range(groups):
            first = matrix * rows + group * MX_BLOCK
            raw = self._read(target, "bfloat16", first, first + MX_BLOCK)
            values = from_bfloat16(np.frombuffer(raw, np.uint16)).reshape(MX_BLOCK, columns)
            made = mx_group(values, measure=measure)
            if (made.scales == 0xFF).any():
                raise _not_finite(target.weight)
            codes[:, group], scales[:, group] = made.codes.T, made.scales
            worst = max(worst, made.largest)
        return CodesAndScales(codes, scales, worst)

    def _read(self, target: EncodedTensor, dtype: str, first: int, last: int) -> bytearray:
        """Return rows of a weight in another type."""
        shape, kind = target.weight.shape, DTYPES[dtype]
        raw = bytearray((last - first) * shape[-1] * kind.itemsize)
        shard = Shard(shape, kind, target.fills)
        self._gatherer.fill(shard, first * shape[-1], last * shape[-1], memoryview(raw))
        return raw


def _require_finite(target: EncodedTensor, scales: Array) -> None:
    import numpy as np

    if not np.isfinite(scales).all():
        raise _not_finite(target.weight)


def _not_finite(weight: TargetTensor) -> CorruptError:
    return CorruptError(
        f"{weight.name} has values that are NaN or infinite: they have no code",
        kind="nan",
        hint="ftckpt verify --level values names them; --unquantised keeps the tensor as it is",
        tensor=weight.key,
    )
