"""Choose, by a sample, how a tensor is stored: against which reference, and in which form.

The size of each way is estimated from the entropy of its bytes over some thousand elements. Nothing
rests on the estimate but size and speed.

One block of one tensor: encoded against what the reader will have, and decoded again.

A block is a run of at most `BLOCK` elements in the tensor's C order. Blocks of equal number cover
equal elements in every tensor of one shape, so that a prediction needs one block of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint.dtypes import DType

from . import planes, words
from .fit_predictor import Fit
from .planes import JOINED, Coder, Planes, compress, damaged, pack_changes, unpack_changes
from .predict import predict
from .words import difference, rotate, words_of

if TYPE_CHECKING:
    from .words import Array


BLOCK = 1 << 20  # elements
_GLANCE = 4096  # words that are compared before all are


class Reference(IntEnum):
    """What a block is stored against; the numbers are the format's."""

    NOTHING = 0
    BASE = 1
    PREDICTION = 2


class Form(IntEnum):
    """How a block is stored; the numbers are the format's."""

    EXACT = 0  # as its reference; no bytes
    PLAIN = 1  # the elements' bytes
    PLANES = 2  # the words, in byte planes
    ROTATED = 3  # the words rotated left by a bit, in byte planes
    DIFFERENCE = 4  # zigzag of the difference to the reference, in byte planes
    XOR = 5  # exclusive or with the reference, in byte planes
    GAPS = 6  # changed words only: gaps between their places, and differences
    MASK = 7  # changed words only: one bit a word, and differences


ALONE = frozenset((Form.PLAIN, Form.PLANES, Form.ROTATED))


class BlockChoice(NamedTuple):
    """How the blocks of one tensor are to be encoded; each may turn out otherwise.

    Attributes:
        form: the form of choice.
        planes: how the planes of that form are stored.
    """

    form: Form
    planes: Planes = Planes()


class Encoded(NamedTuple):
    """One block, encoded.

    Attributes:
        form: what the payload is.
        payload: the bytes to store, in memory of the block's own or that the thread uses again:
            they are to be written before it encodes another. Fresh memory for each took as long as
            a third of the coding.
    """

    form: Form
    payload: bytes | memoryview


def encode_block(values: Array, reference: Array | None, choice: BlockChoice) -> Encoded:
    """Encode the words of one block.

    Args:
        values: the block's words.
        reference: as many, which the reader will have; None for nothing.
        choice: how. Where nothing is saved that way, the block is stored plain.
    """
    if reference is not None and _equal(values, reference):
        return Encoded(Form.EXACT, b"")
    form = choice.form
    if reference is None and form not in ALONE:
        form = Form.PLANES
    payload: bytes | memoryview = b""
    if form in (Form.GAPS, Form.MASK):
        assert reference is not None
        payload = pack_changes(values, reference, gaps=form is Form.GAPS)
    elif form not in (Form.EXACT, Form.PLAIN):
        cutter = _cutter(values, reference, form)
        payload = planes.pack(values.size, values.itemsize, cutter, choice.planes)
    if not payload or len(payload) >= values.nbytes:
        return Encoded(Form.PLAIN, values.view("u1").data)
    return Encoded(form, payload)


def decode_block(form: Form, payload: memoryview, reference: Array | None, out: Array) -> None:
    """Put the words of one block into `out`.

    Args:
        form: as encoded.
        payload: as encoded; anything may stand there.
        reference: as encoded; None for nothing. May be `out` where the block is as its reference.
        out: as many words as the block has.

    Raises:
        CorruptError: the payload is not that of such a block (`bad-delta`).
    """
    if form is Form.PLAIN:
        if len(payload) != out.nbytes:
            raise damaged(f"it has {len(payload)} plain bytes where {out.nbytes} are needed")
        out[...] = words.as_words(payload, out.itemsize)
        return
    if form not in ALONE and reference is None:
        raise damaged("it is stored against nothing")
    if form is Form.EXACT:
        if len(payload):
            raise damaged("it has bytes although it is as its reference")
        if reference is not out:
            out[...] = reference
    elif form in (Form.GAPS, Form.MASK):
        assert reference is not None
        unpack_changes(payload, reference, out, gaps=form is Form.GAPS)
    else:
        _unpack_planes(form, payload, reference, out)


def _cutter(values: Array, reference: Array | None, form: Form) -> planes.Cutter:
    if form is Form.ROTATED:
        return planes.RotatedCutter(values)
    import numpy as np

    def part(start: int, stop: int, out: Array) -> Array:
        given = values[start:stop]
        if form is Form.PLANES:
            return given
        assert reference is not None
        if form is Form.XOR:
            np.bitwise_xor(given, reference[start:stop], out=out)
            return out
        return words.difference(given, reference[start:stop], out)

    return planes.WordCutter(values.itemsize, part)


def _unpack_planes(form: Form, payload: memoryview, reference: Array | None, out: Array) -> None:
    import numpy as np

    def finish(start: int, stop: int) -> None:
        part = out[start:stop]
        if form is Form.ROTATED:
            words.unrotate(part, part)
        elif form is Form.XOR:
            assert reference is not None
            np.bitwise_xor(part, reference[start:stop], out=part)
        elif form is Form.DIFFERENCE:
            assert reference is not None
            words.undo_difference(part, reference[start:stop], part)

    planes.unpack(payload, out.size, out.itemsize, out, finish)


def _equal(values: Array, other: Array) -> bool:
    import numpy as np

    # As bytes, because NumPy would let another thread go first.
    if values[:_GLANCE].tobytes() != other[:_GLANCE].tobytes():
        return False
    if values.size <= _GLANCE:
        return True
    one, two = values.view("u1"), other.view("u1")
    end = one.size - one.size % 8
    differ = words.scratch(end // 8, 1, words.PLANE).view("?")
    np.not_equal(one[:end].view("<u8"), two[:end].view("<u8"), out=differ)
    return not np.logical_or.reduce(differ) and one[end:].tobytes() == two[end:].tobytes()


TINY = 1024  # bytes of a tensor that is not worth a choice
_RUNS, _SHARE, _LEAST, _MOST = 8, 32, 4096, 32768
_GAPS_FROM = 0.8  # share of unchanged words from which gaps beat a mask
_SPARSE_FROM = 0.3


class Effort(NamedTuple):
    """How much is tried: ratio against speed.

    Attributes:
        predictions: whether the optimizer's rule is tried.
        coders: which coders are tried on each plane.
        price: bits of a byte that a plane must save to be coded, which takes several times as long
            as to copy it.
        price_difference: likewise of a plane of differences. More of them save a little, and what
            they depend on must be read and subtracted as well.
    """

    predictions: bool
    coders: tuple[Coder, ...]
    price: float
    price_difference: float


EFFORTS: Mapping[int, Effort] = {
    1: Effort(False, (Coder.HUFFMAN,), 0.25, 1.05),
    2: Effort(True, (Coder.HUFFMAN, Coder.MATCHES), 0.12, 0.12),
    3: Effort(True, (Coder.HUFFMAN, Coder.MATCHES, Coder.THOROUGH), 0.07, 0.07),
}


class EncodingPlan(NamedTuple):
    """How one tensor is stored.

    Attributes:
        reference: against what.
        fit: the rule of a prediction, with its coefficients; else None.
        choice: the form of choice.
        bits: estimated bits of a word, and the price of the work.
    """

    reference: Reference
    fit: Fit | None
    choice: BlockChoice
    bits: float


def sample_ranges(elements: int) -> list[tuple[int, int]]:
    """Return the runs of elements, as half-open ranges, that stand for a tensor."""
    count = min(elements, max(_LEAST, min(_MOST, elements // _SHARE)))
    runs = min(_RUNS, max(1, count // 512))
    length = count // runs
    if not length:
        return []
    starts = [number * (elements - length) // max(1, runs - 1) for number in range(runs)]
    return [(start, start + length) for start in starts] if runs > 1 else [(0, length)]


def untried(dtype: DType, *, with_base: bool) -> EncodingPlan:
    """Return how a tensor of at most `TINY` bytes is stored: as in the base, or else plain.

    Nothing is read for it: a checkpoint may have more small tensors than large blocks.

    Args:
        dtype: of the tensor.
        with_base: whether the base has it.
    """
    reference = Reference.BASE if with_base else Reference.NOTHING
    return EncodingPlan(reference, None, BlockChoice(Form.PLAIN), 8.0 * words_of(dtype).size)


def choose(
    dtype: DType,
    values: Array,
    base: Array | None,
    fits: Sequence[tuple[Fit, Sequence[Array]]],
    effort: Effort,
) -> EncodingPlan:
    """Choose how to store the tensor that a sample stands for.

    Args:
        dtype: of the tensor.
        values: its sampled words.
        base: the base's words at the same places; None without a base.
        fits: rules that may be tried, each with the sampled words of what it needs.
        effort: how much is tried.
    """
    import numpy as np

    references: list[tuple[Reference, Fit | None, Array]] = []
    if base is not None:
        references.append((Reference.BASE, None, base))
    for fit, arrays in fits:
        guess = np.empty_like(values)
        if predict(fit.rule, arrays, fit.coefficients, guess):
            references.append((Reference.PREDICTION, fit, guess))
    if not values.size:
        return EncodingPlan(Reference.NOTHING, None, BlockChoice(Form.PLAIN), 0.0)
    for kind, rule, reference in references:
        if np.array_equal(values, reference):
            return EncodingPlan(kind, rule, BlockChoice(Form.DIFFERENCE), 0.0)
    plans = list(_alone(dtype, values, effort))
    for kind, rule, reference in references:
        plans += _against(dtype, values, reference, kind, rule, effort)
    return min(plans, key=lambda plan: plan.bits)


def _alone(dtype: DType, values: Array, effort: Effort) -> Iterator[EncodingPlan]:
    import numpy as np

    size = values.itemsize
    yield EncodingPlan(Reference.NOTHING, None, BlockChoice(Form.PLAIN), 8.0 * size)
    planes, bits = _planes(values, effort.coders, effort.price)
    yield EncodingPlan(Reference.NOTHING, None, BlockChoice(Form.PLANES, planes), bits)
    if words_of(dtype).rotates:
        rotated = rotate(values, np.empty_like(values))
        planes, bits = _planes(rotated, effort.coders, effort.price)
        yield EncodingPlan(Reference.NOTHING, None, BlockChoice(Form.ROTATED, planes), bits)


def _against(
    dtype: DType,
    values: Array,
    reference: Array,
    kind: Reference,
    rule: Fit | None,
    effort: Effort,
) -> Iterator[EncodingPlan]:
    import numpy as np

    apart = difference(values, reference, np.empty_like(values))
    planes, bits = _planes(apart, effort.coders, effort.price_difference)
    yield EncodingPlan(kind, rule, BlockChoice(Form.DIFFERENCE, planes), bits)
    if dtype.family not in ("float", "complex"):  # flags and packed bits do not carry
        planes, bits = _planes(values ^ reference, effort.coders, effort.price_difference)
        yield EncodingPlan(kind, rule, BlockChoice(Form.XOR, planes), bits)
    changed = apart[apart != 0]
    same = 1 - changed.size / values.size
    if same >= _SPARSE_FROM and changed.size:
        # 1.05: what gaps and masks have been seen to take above the bound.
        places = 1.05 * -(same * log2(same) + (1 - same) * log2(1 - same))
        form = Form.GAPS if same >= _GAPS_FROM else Form.MASK
        _, each = _planes(changed, effort.coders, effort.price_difference)
        yield EncodingPlan(kind, rule, BlockChoice(form), places + (1 - same) * each)


def _planes(words: Array, tried: Sequence[Coder], price: float) -> tuple[Planes, float]:
    """Return how to store the byte planes of sampled words, and the estimated bits of a word."""
    columns = words.view("u1").reshape(-1, words.itemsize)
    entropies = [_entropy(columns[:, plane]) for plane in range(words.itemsize)]
    plain = [plane for plane, bits in enumerate(entropies) if bits > 8 - price]
    noisy = next((p for p in range(words.itemsize) if p not in plain), words.itemsize)
    joined = max(count for count in JOINED if count <= noisy and count < max(words.itemsize, 2))
    bits = [8.0 if plane in plain else entropy for plane, entropy in enumerate(entropies)]
    coders = [Coder.HUFFMAN] * words.itemsize
    if len(tried) > 1:
        for plane in set(range(words.itemsize)) - set(plain):
            dense = columns[:, plane].tobytes()
            sizes = {coder: len(compress(dense, coder)) for coder in tried}
            best = min(tried, key=lambda coder: (sizes[coder], coder))
            if sizes[best] < 0.97 * sizes[Coder.HUFFMAN]:  # the slower must be worth it
                coders[plane] = best
                bits[plane] = min(bits[plane], 8 * sizes[best] / len(dense))
    coded = sum(0 < entropy < 8 for entropy in bits)
    return Planes(joined, frozenset(plain), tuple(coders)), sum(bits) + coded * price


def _entropy(plane: Array) -> float:
    """Return the order-0 entropy of bytes, in bits."""
    import numpy as np

    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / plane.size
    return float(-(shares * np.log2(shares)).sum())
