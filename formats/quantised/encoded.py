"""Compute codes and scales of weights, a line of blocks at a time."""

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

from . import encoding
from .encoding import FP8_BLOCK, MX_BLOCK, CodesAndScales

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

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
        most = encoding.MX_MOST if self._mx else encoding.FP8_MOST
        if made.largest > most + _MARGIN:
            raise failed(
                f"{weight.name} deviates by {made.largest} of a block's largest", weight.key
            )
        self._take(made.largest, weight.name)
        return made

    def _line(self, target: EncodedTensor, matrix: int, line: int, measure: bool) -> CodesAndScales:
        made = encoding.fp8_line(self._values(target, matrix, line), measure=measure)
        _require_finite(target, made.scales)
        return made

    def _line_of_scales(self, target: EncodedTensor, matrix: int, line: int) -> Array:
        import numpy as np

        scales, _, _ = encoding.fp8_scales(self._values(target, matrix, line))
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
            made = encoding.mx_group(values, measure=measure)
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
