"""How each method of quantisation names, packs and scales weights.

Sources: transformers' `integrations/finegrained_fp8.py` and `mxfp4.py`, compressed-tensors'
`compressors/`, ModelOpt's `export/quant_utils.py`, bitsandbytes' `functional.QuantState`, GPTQModel
and AutoAWQ (`qlinear`), mlx' `quantize`, all of 2026.

Numbers beside scales are codes, whatever stored them: their values are not the numbers.

Every library has names of its own for the tensors beside the codes of a weight, and new ones appear
each month. So what shows codes is the pair: a tensor of integers, or of 8-bit floats, and in the
same module one that is called scales, zero points, or a table. A cast would leave the codes as they
are and round the scales, and nothing would say that the model is another one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.quantised import CODED, ScaleRule
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding, listed

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


# Scales of activations and caches: of no weight's values.
OTHER_SCALES = (
    ".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".prob_output_scale", ".activation_scale", ".input_zero_point", ".pre_quant_scale",
)  # fmt: skip
KEPT = "without --dtype every byte is kept as it is"
# What is called so stands beside codes: a word of the last part of a name.
_BESIDE = re.compile(
    r"(?:^|[._])(?:[a-z]*scales?|[a-z]*scale_inv|scb|q?zeros?|zero_?points?|absmax|codebooks?|luts?"
    r"|quant_map|centroids|biases)(?:$|[._\d])",
    re.IGNORECASE,
)
_AFFINE = "biases"  # beside scales alone: a module may call its own so
# Integers that are no codes, wherever they lie.
_APART = re.compile(
    r"(?:^|[._])(?:masks?|ids|idx|index|indexes|num|count|counter|shape|perm|order|steps?|size|seed"
    r"|state|bias|version|quant_state\S*|weight_format)(?:$|[._\d])",
    re.IGNORECASE,
)
_OFTEN = 3  # times as many siblings must have what one lacks


class UnknownCodes(NamedTuple):
    """Codes of a scheme that is not known.

    Attributes:
        codes: the tensor.
        beside: names of what shows it, without the module's.
    """

    codes: TensorInfo
    beside: frozenset[str]


def unknown_codes(tensors: Iterable[TensorInfo], known: Collection[str] = ()) -> list[UnknownCodes]:
    """Return the tensors of a model that hold codes of a scheme that is not known.

    What alone among its like has nothing beside it is among them: it lost its scales.

    Args:
        tensors: of the model.
        known: keys of codes, and of what belongs to them, that a scheme explains.
    """
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for info in tensors:
        if info.component == "model":
            module, _, leaf = info.name.rpartition(".")
            modules[module][leaf] = info
    found: list[UnknownCodes] = []
    bare: list[tuple[str, UnknownCodes]] = []
    for module, held in modules.items():
        beside = frozenset(leaf for leaf in held if _is_beside(leaf, held))
        for leaf, info in held.items():
            if info.key in known or leaf in beside or not _may_be_codes(leaf, info):
                continue
            # bitsandbytes and others put their parts below the name of the weight.
            below = modules.get(f"{module}.{leaf}" if module else leaf, {})
            parts = beside | {f"{leaf}.{n}" for n in below if _is_beside(n, below)}
            one = UnknownCodes(info, parts)
            if parts:
                found.append(one)
            else:
                bare.append((leaf, one))
    sorts = {(one.codes.name.rpartition(".")[2], one.codes.dtype.name) for one in found}
    found += [one for leaf, one in bare if (leaf, one.codes.dtype.name) in sorts]
    return found


def _may_be_codes(leaf: str, info: TensorInfo) -> bool:
    return info.dtype.name in CODED and info.numel > 1 and not _APART.search(leaf)


def _is_beside(leaf: str, held: Collection[str]) -> bool:
    if not _BESIDE.search(leaf) or f".{leaf}".endswith((*OTHER_SCALES, ".logit_scale")):
        return False
    return _AFFINE not in leaf or any("scale" in other for other in held)


def check_siblings(found: Iterable[UnknownCodes]) -> Iterator[Finding]:
    """Yield codes that lack what nearly all others of their name and type have."""
    sorts: dict[tuple[str, str], list[UnknownCodes]] = defaultdict(list)
    for one in found:
        sorts[one.codes.name.rpartition(".")[2], one.codes.dtype.name].append(one)
    for alike in sorts.values():
        having = Counter(leaf for one in alike for leaf in one.beside)
        for leaf, many in having.items():
            lacking = [one for one in alike if leaf not in one.beside]
            if not lacking or many < _OFTEN * len(lacking):
                continue
            for one in lacking:
                yield finding(
                    "missing-scale",
                    f"{one.codes.name} holds codes and lacks the {leaf} that {many} others have:"
                    " its values are lost",
                    file=one.codes.pieces[0].extent.file,
                    tensor=one.codes.key,
                )


def require_known(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with codes of a scheme that is not known: a cast would spoil it.

    Raises:
        UnsupportedError: with the name of a tensor, and of what stands beside it.
    """
    found = unknown_codes(checkpoint.tensors.values())
    if not found:
        return
    first = max(found, key=lambda one: len(one.beside))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise UnsupportedError(
        f"{first.codes.name}{more} holds codes of {first.codes.dtype.name}, with"
        f" {listed(sorted(first.beside), 3)} beside it: how its values are computed is not known",
        hint=KEPT,
        tensor=first.codes.key,
    )
