"""How each method of quantisation names, packs and scales weights.

Sources: transformers' `integrations/finegrained_fp8.py` and `mxfp4.py`, compressed-tensors'
`compressors/`, ModelOpt's `export/quant_utils.py`, bitsandbytes' `functional.QuantState`, GPTQModel
and AutoAWQ (`qlinear`), mlx' `quantize`, all of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint.quantised import ScaleRule

Shape = tuple[int, ...]
_FLOATS = frozenset(("float32", "float16", "bfloat16"))
_CODES8 = frozenset(("float8_e4m3fn",))
_BYTES = frozenset(("uint8",))
_WORDS = frozenset(("int32",))
WORD_BITS = (4, 8, 2, 3)  # of the values that GPTQ puts into words


class Arithmetic(StrEnum):
    """How codes and scales give values; `arithmetic` computes all but the last."""

    GRID = "grid"  # one scale a block of a matrix
    GRID_TRANSPOSED = "grid, transposed"  # packed along the input, kept with it first
    BLOCKS = "blocks"  # one scale a run of elements (bitsandbytes)
    ROWS = "rows"  # one absolute maximum a row of int8 (bitsandbytes)
    WORDS = "words"  # a run of bits in words along the last axis, scale and bias a group (mlx)
    WORDS_INPUT_FIRST = "words, input first"  # zero points and scales a group (GPTQ, AWQ)
    NONE = "none"  # of which only names and shapes are known


class ScalePart(NamedTuple):
    """A tensor beside the codes.

    Attributes:
        role: what it is.
        suffix: its name behind the common stem.
        dtypes: that it may have; empty for any.
        rule: what its values may be.
        required: whether a weight is damaged without it.
    """

    role: str
    suffix: str
    dtypes: frozenset[str]
    rule: ScaleRule
    required: bool = True


class Scheme(NamedTuple):
    """One way to store a weight.

    Attributes:
        name: in words.
        suffix: of the codes' name behind the stem.
        weight: of the weight's name behind the stem.
        dtypes: of the codes.
        parts: the tensors beside the codes.
        arithmetic: how the values are computed.
        packed: values in one element of the codes' last axis.
        grid: rows and columns of a block; 0 for all of an axis; None without a grid.
        bits: of one value, where words hold several (GPTQ, AWQ, mlx).
        inner: whether the product is rounded to the scale's own type first.
        codes: `float` for E4M3 or E2M1, `int` for integers.
        module: the only module that is stored so; "" for any.
        plus_one: whether zero points are stored less one.
    """

    name: str
    suffix: str
    weight: str
    dtypes: frozenset[str]
    parts: tuple[ScalePart, ...]
    arithmetic: Arithmetic = Arithmetic.GRID
    packed: int = 1
    grid: tuple[int, int] | None = None
    bits: int = 0
    inner: bool = False
    codes: str = "float"
    module: str = ""
    plus_one: bool = False

    def weight_shape(self, codes: Shape) -> Shape | None:
        """Return the shape of the weight whose codes have a shape; None where it does not tell."""
        if self.arithmetic is Arithmetic.GRID_TRANSPOSED:
            if len(codes) < 3:
                return None
            *lead, rows, groups, held = codes
            return (*lead, groups * held * self.packed, rows)
        if self.arithmetic is Arithmetic.BLOCKS or not codes:
            return None  # the state beside it tells
        if self.bits and len(codes) < 2:
            return None
        if self.arithmetic is Arithmetic.WORDS_INPUT_FIRST:
            rows, columns = codes[-2:]
            if self.along == 0:
                return (columns, self._values(rows))
            return (self._values(columns), rows)
        if self.bits:
            return (*codes[:-1], self._values(codes[-1]))
        return (*codes[:-1], codes[-1] * self.packed)

    @property
    def along(self) -> int:
        """Which axis of the codes, input first, words pack: GPTQ the input, AWQ the output."""
        return 1 if self.name == "AWQ" else 0

    def _values(self, words: int) -> int:
        """Return how many values are in some words."""
        return words * 32 // self.bits

    def part_shapes(self, codes: Shape, held: Mapping[str, Shape]) -> dict[str, tuple[Shape, ...]]:
        """Return the shapes that the parts of such codes may have, by role; none where any will do.

        Args:
            codes: shape of the codes.
            held: shapes of the parts that are there.
        """
        found = {"scale": self.scale_shapes(codes)}
        if self.arithmetic is Arithmetic.WORDS:
            found["bias"] = found["scale"]
        shape = self.weight_shape(codes)
        if self.arithmetic is Arithmetic.WORDS_INPUT_FIRST and shape is not None:
            rows, columns = shape
            found["order"] = ((columns,),)
            if held.get("scale"):
                found["zeros"] = ((held["scale"][0], rows * self.bits // 32),)
        return found

    def scale_shapes(self, codes: Shape) -> tuple[Shape, ...]:
        """Return the shapes that the scales of such codes may have; none where any will do."""
        if self.arithmetic in (Arithmetic.WORDS, Arithmetic.WORDS_INPUT_FIRST):
            shape = self.weight_shape(codes)
            if shape is None or self.grid is None:
                return ()
            groups = grid_counts(shape, self.grid)[1]
            turned = self.arithmetic is Arithmetic.WORDS_INPUT_FIRST
            return ((groups, shape[0]),) if turned else ((*shape[:-1], groups),)
        if self.arithmetic is Arithmetic.GRID_TRANSPOSED:
            return (codes[:-1],)
        if self.arithmetic is Arithmetic.ROWS:
            return ((codes[0],), (codes[0], 1), (1, codes[0])) if codes else ()
        if self.grid is None or not codes:
            return ()
        shape = (*codes[:-1], codes[-1] * self.packed)
        if self.grid == (0, 0):
            lead = shape[:-2]
            every = ((), (1,), (1, 1)) if prod(lead) == 1 else ()
            return (*every, lead, (*lead, 1, 1), (*lead, 1))
        if len(shape) < 2:
            return ()
        counts = grid_counts(shape, self.grid)
        whole = (*shape[:-2], *counts)
        return (whole, whole[:-1]) if counts[1] == 1 else (whole,)


def grid_counts(shape: Shape, grid: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks a matrix has along its two last axes; the last may be partly used."""
    rows, columns = (
        1 if not block else -(-size // block) for size, block in zip(shape[-2:], grid, strict=True)
    )
    return rows, columns


def _beside(suffix: str) -> ScalePart:
    """Return a part that a weight may have for its activations or caches."""
    return ScalePart(suffix.lstrip("."), suffix, frozenset(), ScaleRule.ANY, required=False)


_INPUTS = tuple(
    _beside(one)
    for one in (".input_scale", ".input_global_scale", ".activation_scale", ".pre_quant_scale")
)


def block_fp8(grid: tuple[int, int], *, exponents: bool) -> tuple[Scheme, ...]:
    """Return transformers' and DeepSeek's: `NAME` with `NAME_scale_inv` beside it.

    Args:
        grid: rows and columns of a block; zeros for one scale a tensor.
        exponents: whether scales in bytes are exponents (`scale_fmt` is `ue8m0`).
    """
    dtypes = _FLOATS | {"float8_e8m0fnu"} | (_BYTES if exponents else frozenset())
    rule = ScaleRule.EXPONENT if exponents else ScaleRule.POSITIVE
    scale = ScalePart("scale", "_scale_inv", dtypes, rule)
    name = "block FP8" if grid != (0, 0) else "FP8"
    of_input = ScalePart("activation_scale", "_activation_scale", frozenset(), ScaleRule.ANY, False)
    return (Scheme(name, "", "", _CODES8, (scale, of_input), grid=grid),)


def scaled(
    name: str, grid: tuple[int, int], *, integers: bool = False, exponents: bool = False
) -> Scheme:
    """Return `STEM.weight` in 8 bits with `STEM.weight_scale` (compressed-tensors, ModelOpt)."""
    scale = ScalePart(
        "scale",
        ".weight_scale",
        _BYTES | {"float8_e8m0fnu"} if exponents else _FLOATS,
        ScaleRule.EXPONENT if exponents else ScaleRule.POSITIVE,
    )
    return Scheme(
        name,
        ".weight",
        ".weight",
        frozenset(("int8",)) if integers else _CODES8,
        (scale, *_INPUTS),
        grid=grid,
        inner=not exponents,
        codes="int" if integers else "float",
    )


def packed_fp4(codes: str, wide: str) -> Scheme:
    """Return NVFP4: two values a byte, a scale of E4M3 for 16, and one for the tensor.

    Args:
        codes: suffix of the codes: `.weight_packed` of compressed-tensors, `.weight` of ModelOpt.
        wide: suffix of the scale of the whole tensor: its values are divided by it where it is
            `.weight_global_scale`, and multiplied where it is `.weight_scale_2`.
    """
    scale = ScalePart("scale", ".weight_scale", _CODES8, ScaleRule.NOT_NEGATIVE)
    of_tensor = ScalePart("global", wide, _FLOATS, ScaleRule.POSITIVE)
    parts = (scale, of_tensor, *_INPUTS)
    return Scheme("NVFP4", codes, ".weight", _BYTES, parts, packed=2, grid=(1, 16))


MXFP4_PACKED = Scheme(
    "MXFP4",
    ".weight_packed",
    ".weight",
    _BYTES,
    (
        ScalePart("scale", ".weight_scale", _BYTES | {"float8_e8m0fnu"}, ScaleRule.EXPONENT),
        *_INPUTS,
    ),
    packed=2,
    grid=(1, 32),
)
MXFP4_BLOCKS = Scheme(
    "MXFP4",
    "_blocks",
    "",
    _BYTES,
    (ScalePart("scale", "_scales", _BYTES, ScaleRule.EXPONENT),),
    Arithmetic.GRID_TRANSPOSED,
    packed=2,
    grid=(1, 32),
)
BNB_INT8 = Scheme(
    "int8 of bitsandbytes",
    ".weight",
    ".weight",
    frozenset(("int8",)),
    (
        ScalePart("scale", ".SCB", frozenset(("float32",)), ScaleRule.NOT_NEGATIVE),
        ScalePart("weight_format", ".weight_format", _BYTES, ScaleRule.ANY, required=False),
    ),
    Arithmetic.ROWS,
    codes="int",
)


def bnb_4bit(kind: str) -> Scheme:
    """Return bitsandbytes' blocks of 4 bits; `kind` is `nf4` or `fp4`."""
    beside = ".weight."
    floats = frozenset(("float32",))
    return Scheme(
        f"{kind.upper()} of bitsandbytes",
        ".weight",
        ".weight",
        _BYTES,
        (
            ScalePart("state", f"{beside}quant_state.bitsandbytes__{kind}", _BYTES, ScaleRule.ANY),
            ScalePart("scale", f"{beside}absmax", floats | _BYTES, ScaleRule.NOT_NEGATIVE),
            ScalePart("map", f"{beside}quant_map", floats, ScaleRule.ANY),
            ScalePart("nested", f"{beside}nested_absmax", floats, ScaleRule.NOT_NEGATIVE, False),
            ScalePart("nested_map", f"{beside}nested_quant_map", floats, ScaleRule.ANY, False),
        ),
        Arithmetic.BLOCKS,
        packed=2,
    )


def gptq_words(bits: int, group: int, *, plus_one: bool) -> Scheme:
    """Return GPTQ's layout: words of values along the input, zero points and scales a group.

    Args:
        bits: of a value.
        group: inputs of a group; 0 for all.
        plus_one: whether zero points are stored less one, as all do but `gptq_v2`.
    """
    parts = (
        ScalePart("scale", ".scales", _FLOATS, ScaleRule.ANY),
        ScalePart("zeros", ".qzeros", _WORDS, ScaleRule.ANY),
        ScalePart("order", ".g_idx", _WORDS, ScaleRule.ANY, required=False),
    )
    return Scheme(
        "GPTQ", ".qweight", ".weight", _WORDS, parts, Arithmetic.WORDS_INPUT_FIRST,
        grid=(1, group), bits=bits, inner=True, codes="int", plus_one=plus_one,
    )  # fmt: skip


def awq_words(group: int) -> Scheme:
    """Return AWQ's layout for `gemm`: words along the output, of eight interleaved values."""
    parts = (
        ScalePart("scale", ".scales", _FLOATS, ScaleRule.ANY),
        ScalePart("zeros", ".qzeros", _WORDS, ScaleRule.ANY),
    )
    return Scheme(
        "AWQ", ".qweight", ".weight", _WORDS, parts, Arithmetic.WORDS_INPUT_FIRST,
        grid=(1, group), bits=4, inner=True, codes="int",
    )  # fmt: skip


def mlx_words(bits: int, group: int, module: str = "") -> Scheme:
    """Return mlx's affine layout: a run of bits in words, and a scale and a bias a group."""
    parts = (
        ScalePart("scale", ".scales", _FLOATS, ScaleRule.ANY),
        ScalePart("bias", ".biases", _FLOATS, ScaleRule.ANY),
    )
    return Scheme(
        "mlx", ".weight", ".weight", frozenset(("uint32",)), parts, Arithmetic.WORDS,
        grid=(1, group), bits=bits, inner=True, codes="int", module=module,
    )  # fmt: skip


def packed_words(bits: int) -> Scheme:
    """Return compressed-tensors' `pack-quantized`: integers of few bits in words."""
    parts = (
        ScalePart("scale", ".weight_scale", _FLOATS, ScaleRule.POSITIVE),
        ScalePart("shape", ".weight_shape", frozenset(), ScaleRule.ANY),
        ScalePart("zeros", ".weight_zero_point", _WORDS, ScaleRule.ANY, required=False),
        ScalePart("order", ".weight_g_idx", frozenset(), ScaleRule.ANY, required=False),
    )
    return Scheme(
        f"int{bits} in words", ".weight_packed", ".weight", _WORDS, parts, Arithmetic.NONE,
        bits=bits, codes="int",
    )  # fmt: skip
