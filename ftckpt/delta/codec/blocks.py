"""One block of one tensor: encoded against what the reader will have, and decoded again.

A block is a run of at most `BLOCK` elements in the tensor's C order. Blocks of equal number cover
equal elements in every tensor of one shape, so that a prediction needs one block of each.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from . import planes, words
from .changes import pack_changes, unpack_changes
from .entropy import damaged
from .planes import Planes

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
