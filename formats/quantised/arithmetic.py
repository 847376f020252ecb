"""Compute weights from codes and scales, some rows at a time, as the reference of each method does.

A product of code and scale is made in float32 and rounded once to the type that is asked for (for
compressed-tensors, GPTQ, AWQ and mlx first to the type of the scale, in which they multiply). A
block of 8-bit codes has one scale, so 256 products serve all its elements: they are computed,
rounded and looked up. Of 4-bit codes with 8-bit scales the same table serves every block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.quantised import QuantisedTensor, ScaleRule
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.checkpoint.rounding import from_bfloat16, to_bfloat16, to_float16
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.storage.source import Source

from .method import QuantMethod
from .pairing import BlockState, Pair
from .schemes import KEPT, Arithmetic, grid_counts

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_RUN = 1 << 20  # elements at once
_TILE = 256  # rows and columns that are turned at once
_STRIPE = 32 << 20  # bytes of codes of some columns that are kept
# The value that stands in each place of a word of AWQ's (`AWQ_REVERSE_ORDER`).
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_HALF_OF_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes multiplies by it
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def require_decodable(method: QuantMethod, pairs: Sequence[Pair]) -> None:
    """Refuse weights of which only names and shapes are known.

    Raises:
        UnsupportedError: with the name of the method, and of a weight.
    """
    for one in pairs:
        grouped = one.scheme.grid is not None or one.scheme.arithmetic is not Arithmetic.GRID
        if one.scheme.arithmetic is Arithmetic.NONE or not grouped or not method.symmetric:
            raise UnsupportedError(
                f"{one.codes.name} is stored as {one.scheme.name} by {method.name}: its values are"
                " not computed by this version",
                hint=KEPT,
                tensor=one.codes.key,
            )


@cache
def e4m3() -> Array:
    """Return the 256 values of float8_e4m3fn, float32."""
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.copysign(size, np.where(codes < 128, 1.0, -1.0)).astype(np.float32)


@cache
def e8m0() -> Array:
    """Return the 256 values of float8_e8m0fnu, float32; 255 is infinite, as the references do."""
    import numpy as np

    with np.errstate(over="ignore"):
        return np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)


@cache
def e2m1() -> Array:
    """Return the 16 values of E2M1, float32."""
    import numpy as np

    return np.array([*_E2M1, *(-one for one in _E2M1)], np.float32)


@cache
def pairs_of_e2m1() -> Array:
    """Return the two values of each byte of E2M1, the low half first, float32[256, 2]."""
    import numpy as np

    codes = np.arange(256)
    return np.stack([e2m1()[codes & 15], e2m1()[codes >> 4]], axis=1)


def look_up(table: Array, codes: Array) -> Array:
    """Return the row of a table for each code: of 256 rows for bytes, of 65,536 for words.

    No code lies outside, so that the bounds are not checked: half the time of `table[codes]`.
    """
    return table.take(codes, axis=0, mode="clip")


def rounded(values: Array, dtype: DType) -> Array:
    """Return float32 values as raw items of a floating type, rounded to nearest even."""
    import numpy as np

    if dtype.name == "bfloat16":
        return to_bfloat16(values)
    if dtype.name == "float16":
        return to_float16(values)
    if dtype.name != "float32":
        raise UnsupportedError(f"quantised weights cannot become {dtype.name}")
    return values.view(np.uint32)


def as_stored(values: Array, dtype: str) -> Array:
    """Return float32 values as they are after a step in a type; themselves for any but a half."""
    import numpy as np

    if dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(values))
    if dtype == "float16":
        return to_float16(values).view(np.float16).astype(np.float32)
    return values


def unpacked(words: Array, bits: int) -> Array:
    """Return the values in words along the last axis, a run of bits from the lowest of the first.

    Args:
        words: uint32[..., n].
        bits: of a value.

    Returns:
        uint8[..., n * 32 // bits].
    """
    import numpy as np

    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        values = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        return values.astype(np.uint8).reshape(*words.shape[:-1], -1)
    held = np.ascontiguousarray(words).view(np.uint8)
    run = np.unpackbits(held, axis=-1, bitorder="little")
    run = run.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(run, axis=-1, bitorder="little")[..., 0]


class WeightComputer:
    """Computes bytes of weights; may be used from many threads.

    Args:
        source: the files.
        pairs: the weights by their keys.
        states: of bitsandbytes, by the key of the codes.
        dtype: of what is computed: float32, float16 or bfloat16.
    """

    def __init__(
        self,
        source: Source,
        pairs: Mapping[str, tuple[QuantisedTensor, Pair]],
        states: Mapping[str, BlockState],
        dtype: DType,
    ) -> None:
        self._source = source
        self._pairs = pairs
        self._states = states
        self._dtype = dtype
        self._lock = threading.Lock()
        self._weight: dict[str, _Weight] = {}

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a weight that begin at `offset` of its dense C order into `view`."""
        with self._lock:
            weight = self._weight.pop(key, None)
            if weight is None:
                weight = self._open(key)
            self._weight[key] = weight
            while len(self._weight) > 8:
                self._weight.pop(next(iter(self._weight)))
        weight.fill(offset, view)

    def _open(self, key: str) -> _Weight:
        weight, one = self._pairs[key]
        kinds: dict[Arithmetic, Callable[..., _Weight]] = {
            Arithmetic.GRID: _Grid,
            Arithmetic.GRID_TRANSPOSED: _Transposed,
            Arithmetic.BLOCKS: _Blocks,
            Arithmetic.ROWS: _Rows,
            Arithmetic.WORDS: _Words,
            Arithmetic.WORDS_INPUT_FIRST: _WordsInputFirst,
        }
        state = self._states.get(one.codes.key)
        import numpy as np

        with np.errstate(all="ignore"):
            made = kinds[one.scheme.arithmetic]
            return made(self._source, weight, one, self._dtype, state)


class _Weight:
    """One weight, as rows of `width` elements.

    Attributes:
        rows: of all its elements in C order, the last perhaps not full.
        width: elements of a row.
    """

    rows: int
    width: int

    def __init__(
        self,
        source: Source,
        weight: QuantisedTensor,
        one: Pair,
        dtype: DType,
        state: BlockState | None,
    ) -> None:
        self.source, self.weight, self.pair, self.dtype, self.state = (
            source,
            weight,
            one,
            dtype,
            state,
        )
        self.width = weight.shape[-1] if weight.shape else 1
        self.rows = prod(weight.shape[:-1])

    def fill(self, offset: int, view: memoryview) -> None:
        """See `WeightComputer.fill`."""
        import numpy as np

        out = np.frombuffer(view, np.uint8)
        size, step = self.width * self.dtype.itemsize, max(1, _RUN // max(self.width, 1))
        at, end = offset, offset + len(out)
        with np.errstate(all="ignore"):
            while at < end:
                first = at // size
                stop = min(first + step, -(-end // size))
                made = np.ascontiguousarray(self.compute(first, stop)).reshape(-1).view(np.uint8)
                begin = at - first * size
                count = min(len(made) - begin, end - at)
                out[at - offset : at - offset + count] = made[begin : begin + count]
                at += count

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of rows `first` to `stop`."""
        raise NotImplementedError

    def read(self, info: TensorInfo, start: int, count: int) -> Array:
        """Return `count` raw items of a stored tensor, from its element `start` on."""
        import numpy as np

        (piece,) = info.pieces
        file, offset, _ = piece.extent
        size = info.dtype.itemsize
        with self.source.open(file) as reader:
            data = reader.read(offset + start * size, count * size)
        return np.frombuffer(data, raw_dtype(size))

    def part(self, role: str) -> TensorInfo:
        """Return a tensor beside the codes."""
        return self.pair.parts[role]

    def numbers(self, role: str, start: int = 0, count: int | None = None) -> Array:
        """Return values of a tensor beside the codes as float32."""
        import numpy as np

        info = self.part(role)
        items = self.read(info, start, info.numel if count is None else count)
        name = info.dtype.name
        if name == "bfloat16":
            return from_bfloat16(items)
        if name == "float8_e4m3fn":
            return look_up(e4m3(), items)
        exponents = self.weight.rules.get(info.key) is ScaleRule.EXPONENT
        if name == "float8_e8m0fnu" or (name == "uint8" and exponents):
            return look_up(e8m0(), items)
        return items.view(info.dtype.numpy).astype(np.float32)


class _Grid(_Weight):
    """A scale for each block of a matrix, or of each of several matrices."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        scheme, shape = self.pair.scheme, self.weight.shape
        assert scheme.grid is not None
        # One scale of a tensor without two axes is one of a matrix of one row.
        self.matrix = shape[-2] if len(shape) > 1 else 1
        whole = (self.matrix, self.width)
        self.block = tuple(b or max(n, 1) for b, n in zip(scheme.grid, whole, strict=True))
        self.counts = grid_counts(whole, scheme.grid)
        self.global_scale = self._global()
        scale = self.part("scale")
        self.inner = scale.dtype.name if scheme.inner else ""
        self.single = scale.numel == 1
        short = scale.dtype.itemsize == 1
        self.by_code = self._products(scale) if short and self.block[0] == 1 else None

    def _global(self) -> Array | None:
        import numpy as np

        if "global" not in self.pair.parts:
            return None
        found = self.numbers("global").reshape(-1)[:1]
        divides = self.part("global").name.endswith("_global_scale")
        scales = e4m3() / found if divides else e4m3() * found
        return scales.astype(np.float32)

    def values(self) -> Array:
        """Return what each code stands for: float32[256, values of one code]."""
        import numpy as np

        if self.pair.scheme.packed == 2:
            return pairs_of_e2m1()
        if self.pair.scheme.codes == "int":
            return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32)[:, None]
        return e4m3()[:, None]

    def products(self, scales: Array) -> Array:
        """Return raw items [scales, codes, values of one code] of every product."""
        import numpy as np

        found = self.values() * scales.reshape(-1, 1, 1).astype(np.float32)
        return rounded(as_stored(found, self.inner), self.dtype)

    def _products(self, scale: TensorInfo) -> Array:
        """Return the products of every code of 8 bits with every scale of 8 bits, as one table."""
        import numpy as np

        if self.global_scale is not None:
            scales = self.global_scale
        else:
            scales = e4m3() if scale.dtype.name == "float8_e4m3fn" else e8m0()
        found = self.products(scales)
        kind = np.dtype(f"<u{self.dtype.itemsize * found.shape[2]}")
        table: Array = np.ascontiguousarray(found).view(kind).reshape(-1)
        return table

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of rows, matrix by matrix."""
        import numpy as np

        packed = self.pair.scheme.packed
        held = self.width // packed
        codes = self.read(self.pair.codes, first * held, (stop - first) * held)
        codes = codes.view(np.uint8).reshape(stop - first, held)
        if self.by_code is not None:
            return self._by_code(codes, first, stop)
        out = np.empty((stop - first, self.width), raw_dtype(self.dtype.itemsize))
        if self.block[0] == 1 and not self.single:
            lines = self.counts[1]
            scales = self.numbers("scale", first * lines, (stop - first) * lines)
            self._scale(codes, scales.reshape(stop - first, lines), out)
            return out
        row = first
        while row < stop:
            matrix, inside = divmod(row, self.matrix)
            line = inside // self.block[0]
            end = min(stop, matrix * self.matrix + min((line + 1) * self.block[0], self.matrix))
            scales = self._line(matrix * self.counts[0] + line)
            here = slice(row - first, end - first)
            self._place(codes[here], scales, out[here])
            row = end
        return out

    def _line(self, number: int) -> Array:
        """Return the scales of a line of blocks."""
        if self.single:
            return self.numbers("scale")
        return self.numbers("scale", number * self.counts[1], self.counts[1])

    def _place(self, codes: Array, scales: Array, out: Array) -> None:
        """Scale a line of blocks: by tables where a block is larger than a table."""
        width = self.block[1]
        if codes.shape[0] * width >= 512:
            for number, table in enumerate(self.products(scales)[:, :, 0]):
                columns = slice(number * width, (number + 1) * width)
                out[:, columns] = look_up(table, codes[:, columns])
            return
        self._scale(codes, scales[None], out)

    def _scale(self, codes: Array, scales: Array, out: Array) -> None:
        """Multiply each code by the scale of its block; `scales` has a row for each or for all."""
        import numpy as np

        wide = scales if scales.shape[1] == 1 else np.repeat(scales, self.block[1], axis=1)
        found = look_up(self.values()[:, 0], codes)
        found *= wide[:, : codes.shape[1]]
        out[:] = rounded(as_stored(found, self.inner), self.dtype)

    def _by_code(self, codes: Array, first: int, stop: int) -> Array:
        """Look the products of codes and scales of 8 bits up, both together as one number."""
        import numpy as np

        assert self.by_code is not None
        lines = self.counts[1]
        scales = self.read(self.part("scale"), first * lines, (stop - first) * lines)
        held = self.block[1] // self.pair.scheme.packed
        places = np.repeat(scales.reshape(stop - first, lines).astype(np.uint16) << 8, held, axis=1)
        places = places[:, : codes.shape[1]] | codes
        found = look_up(self.by_code, places)
        return found.view(raw_dtype(self.dtype.itemsize))


class _Transposed(_Grid):
    """Matrices that are stored with their columns packed as rows: each is computed and turned."""

    def __init__(
        self,
        source: Source,
        weight: QuantisedTensor,
        one: Pair,
        dtype: DType,
        state: BlockState | None,
    ) -> None:
        *lead, rows, columns = weight.shape
        super().__init__(source, weight._replace(shape=(*lead, columns, rows)), one, dtype, state)
        self.turned_rows, self.turned_width = rows, columns
        self._turning = threading.Lock()
        self._kept: tuple[int, Array] | None = None

    def fill(self, offset: int, view: memoryview) -> None:
        """See `WeightComputer.fill`; a matrix is kept while it is asked for."""
        import numpy as np

        out = np.frombuffer(view, np.uint8)
        size = self.turned_rows * self.turned_width * self.dtype.itemsize
        at, end = offset, offset + len(out)
        while at < end:
            number = at // size
            made = self._matrix(number)
            begin = at - number * size
            count = min(size - begin, end - at)
            out[at - offset : at - offset + count] = made[begin : begin + count]
            at += count

    def _matrix(self, number: int) -> Array:
        """Return the bytes of one matrix; one is computed at a time, which bounds the memory."""
        import numpy as np

        with self._turning:
            if self._kept is None or self._kept[0] != number:
                self._kept = None  # two are never held
                turned = np.empty(
                    (self.turned_rows, self.turned_width), raw_dtype(self.dtype.itemsize)
                )
                for row in range(0, self.matrix, _TILE):
                    stop = min(row + _TILE, self.matrix)
                    begin = number * self.matrix
                    found = self.compute(begin + row, begin + stop)
                    for column in range(0, self.width, _TILE):
                        part = found[:, column : column + _TILE]
                        turned[column : column + _TILE, row:stop] = part.T
                self._kept = number, turned.reshape(-1).view(np.uint8)
            return self._kept[1]


class _Blocks(_Weight):
    """bitsandbytes' 4 bits: a table of 16 values, and an absolute maximum a run of elements."""

    def __init__(self, *args: Any) -> None:
        import numpy as np

        super().__init__(*args)
        assert self.state is not None
        self.count = prod(self.weight.shape)
        self.width = self.state.block
        self.rows = -(-self.count // self.width)
        half = self.numbers("map").copy()
        if self.pair.scheme.name.startswith("FP4"):
            half[8] = np.copysign(half[8], -1)  # the kernels give a zero its sign
        codes = np.arange(256)
        self.table = np.stack([half[codes >> 4], half[codes & 15]], axis=1)  # the high half first
        self.outer: Array | None = None
        if "nested" in self.pair.parts:
            self.outer = self.numbers("nested")
            self.map = self.numbers("nested_map")

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of runs."""
        import numpy as np

        held = self.width // 2
        count = min(stop * held, -(-self.count // 2)) - first * held
        codes = self._bytes(first * held, count)
        found: Array = look_up(self.table, codes).reshape(-1)
        full = (stop - first) * self.width
        if found.size < full:
            found = np.concatenate([found, np.zeros(full - found.size, np.float32)])
        found = found.reshape(stop - first, self.width)
        found *= self._maxima(first, stop)[:, None]
        made = rounded(found, self.dtype).reshape(-1)
        return made[: self.count - first * self.width]

    def _bytes(self, start: int, count: int) -> Array:
        """Return bytes of the codes, which may be stored as wider words."""
        import numpy as np

        (piece,) = self.pair.codes.pieces
        with self.source.open(piece.extent.file) as reader:
            return np.frombuffer(reader.read(piece.extent.offset + start, count), np.uint8)

    def _maxima(self, first: int, stop: int) -> Array:
        """Return the absolute maxima of runs, which may be quantised themselves."""
        import numpy as np

        if self.outer is None:
            return self.numbers("scale", first, stop - first)
        assert self.state is not None
        codes = self.read(self.part("scale"), first, stop - first)
        own = self.outer[np.arange(first, stop) // self.state.nested_block]
        found: Array = look_up(self.map, codes) * own + np.float32(self.state.nested_offset)
        return found


class _Rows(_Weight):
    """bitsandbytes' int8: an absolute maximum a row."""

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of rows."""
        import numpy as np

        codes = self.read(self.pair.codes, first * self.width, (stop - first) * self.width)
        found = codes.view(np.int8).reshape(stop - first, self.width).astype(np.float32)
        found *= self.numbers("scale", first, stop - first)[:, None]
        found *= np.float32(_HALF_OF_INT8)
        return rounded(found, self.dtype)


class _Words(_Weight):
    """mlx: a run of bits in words, a scale and a bias for each group of the last axis.

    Source: `affine_dequantize` in mlx 0.32, which multiplies and adds in the type of the scales.
    """

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of rows."""
        import numpy as np

        scheme, scale = self.pair.scheme, self.part("scale")
        held, groups = self.width * scheme.bits // 32, scale.shape[-1]
        words = self.read(self.pair.codes, first * held, (stop - first) * held)
        found = unpacked(words.reshape(stop - first, held), scheme.bits).astype(np.float32)
        found = found.reshape(stop - first, groups, -1)
        for role, step in (("scale", np.multiply), ("bias", np.add)):
            beside = self.numbers(role, first * groups, (stop - first) * groups)
            step(found, beside.reshape(stop - first, groups, 1), out=found)
            found = as_stored(found, scale.dtype.name)
        return rounded(found.reshape(stop - first, -1), self.dtype)


class _WordsInputFirst(_Weight):
    """GPTQ and AWQ: `(code - zero) * scale`, in codes that are kept input first.

    Sources: `QuantLinear.forward` in AutoGPTQ's `qlinear_cuda_old.py`, `dequantize_gemm` in
    AutoAWQ's `utils/packing_utils.py`.
    """

    def __init__(self, *args: Any) -> None:
        import numpy as np

        super().__init__(*args)
        scheme = self.pair.scheme
        inputs = self.weight.shape[1]
        scale = self.part("scale")
        self.scales = self.numbers("scale").reshape(scale.shape)
        zeros = self.part("zeros")
        points = self._values(self.read(zeros, 0, zeros.numel).reshape(zeros.shape))
        if scheme.plus_one:
            points = (points + np.uint8(1)) & np.uint8((1 << scheme.bits) - 1)
        self.zeros = points.astype(np.float32)
        self.groups = self._groups(inputs, scale.shape[0])
        self._each = 1 if scheme.along == 0 else 32 // scheme.bits  # outputs of a column of words
        self._lines = self.pair.codes.shape[0]
        columns = max(1, _STRIPE // (4 * max(self._lines, 1)))
        self._columns = min(columns, self.pair.codes.shape[1])
        self._lock = threading.Lock()
        self._kept: tuple[int, Array] | None = None

    def _groups(self, inputs: int, count: int) -> Array:
        """Return the group of each input.

        Raises:
            CorruptError: one is of a group that has no scale.
        """
        import numpy as np

        order = self.pair.parts.get("order")
        if order is None:
            size = (self.pair.scheme.grid or (1, 0))[1] or max(inputs, 1)
            return np.arange(inputs) // size
        found = self.read(order, 0, order.numel).view(np.int32)
        if len(found) and (found.min() < 0 or found.max() >= count):
            raise CorruptError(
                f"{order.name} names groups from {found.min()} to {found.max()}, and"
                f" {self.part('scale').name} has {count}",
                kind="scale-shape",
                file=order.pieces[0].extent.file,
                tensor=order.key,
            )
        return found

    def _values(self, words: Array) -> Array:
        """Return the values of words whose last axis is the output's: zero points, AWQ's codes."""
        import numpy as np

        found = unpacked(words, self.pair.scheme.bits)
        if self.pair.scheme.along == 0:
            return found
        shape = found.shape
        return np.ascontiguousarray(found.reshape(-1, 8)[:, _AWQ_ORDER]).reshape(shape)

    def compute(self, first: int, stop: int) -> Array:
        """Return raw items of rows: each is a column of the codes."""
        import numpy as np

        out = np.empty((stop - first, self.width), raw_dtype(self.dtype.itemsize))
        row, many = first, self._columns * self._each
        while row < stop:
            number = row // many
            end = min(stop, (number + 1) * many)
            words, begin = self._stripe(number), row - number * many
            if self._each == 1:
                held = np.ascontiguousarray(words[:, begin : begin + end - row].T)
                codes = unpacked(held, self.pair.scheme.bits)
            else:
                columns = slice(begin // self._each, -(-(begin + end - row) // self._each))
                inside = begin % self._each
                codes = self._values(words[:, columns])[:, inside : inside + end - row].T
            found = codes.astype(np.float32)
            found -= self.zeros[:, row:end].T[:, self.groups]
            found *= self.scales[:, row:end].T[:, self.groups]
            inner = self.part("scale").dtype.name
            out[row - first : end - first] = rounded(as_stored(found, inner), self.dtype)
            row = end
        return out

    def _stripe(self, number: int) -> Array:
        """Return some columns of the codes; those that are asked for in turn are kept."""
        import numpy as np

        with self._lock:
            if self._kept is None or self._kept[0] != number:
                self._kept = None  # two are never held
                begin, every = number * self._columns, self.pair.codes.shape[1]
                width = min(self._columns, every - begin)
                made = np.empty((self._lines, width), np.uint32)
                lines = max(1, _STRIPE // (4 * max(every, 1)))
                for line in range(0, self._lines, lines):
                    end = min(line + lines, self._lines)
                    read = self.read(self.pair.codes, line * every, (end - line) * every)
                    made[line:end] = read.reshape(end - line, every)[:, begin : begin + width]
                self._kept = number, made
            return self._kept[1]
