"""Check the rows of a delta's index: every block of every tensor.

A million at once by numpy, few without it: importing it takes longer than all else that `inspect`
does with a small delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ftckpt.delta.codec.choose_encoding import ALONE, BLOCK, Form, Reference
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import ROW

if TYPE_CHECKING:
    from ftckpt.delta.codec.words import Array
    from ftckpt.delta.index import DataFile, DeltaTensor

# Up to this many rows are checked one by one: as long as numpy takes to be imported.
FEW = 1 << 14
_REFERENCES, _FORMS = max(Reference), max(Form)
_UNKNOWN = "an unknown reference of a block"
_REFERENCE = "a block is stored against what its tensor does not have"
_NO_FILE = "a block lies in no data file"
_OUTSIDE = "a block lies outside its data file"
_LENGTH = "a block has another length than its elements allow"
_FIELDS = [
    ("file", "<u4"),
    ("reference", "u1"),
    ("form", "u1"),
    ("zero", "<u2"),
    ("offset", "<u8"),
    ("length", "<u4"),
    ("stored", "S8"),
    ("digest", "S16"),
]


class Refuses(Protocol):
    """Refuses an index: the parser, as far as rows need it."""

    def bad(self, reason: str, /) -> NoReturn:
        """Raise CorruptError: the index is damaged."""

    def unknown(self, what: str, /) -> NoReturn:
        """Raise UnsupportedError: a later version wrote it."""


def check_rows(
    parser: Refuses, rows: bytes, files: Sequence[DataFile], tensors: Sequence[DeltaTensor]
) -> None:
    """Check that the rows are those of the tensors and lie inside the data files.

    Raises:
        CorruptError: they do not (`bad-delta`).
        UnsupportedError: a reference or a form that is not known.
    """
    held, needed = len(rows) // ROW.size, sum(tensor.blocks for tensor in tensors)
    if needed != held:
        parser.bad(f"it has {held} blocks and its tensors need {needed}")
    if held > FEW:
        _check_many(parser, rows, files, tensors)
    elif held:
        _check_few(parser, rows, files, tensors)


def _check_few(
    parser: Refuses, rows: bytes, files: Sequence[DataFile], tensors: Sequence[DeltaTensor]
) -> None:
    table = list(ROW.iter_unpack(rows))
    if any(zero or reference > _REFERENCES for _, reference, _, zero, *_ in table):
        parser.unknown(_UNKNOWN)
    form = max(row[2] for row in table)
    if form > _FORMS:
        parser.unknown(f"the form {form} of a block")
    sizes = [file.size for file in files]
    exact, plain, alone = int(Form.EXACT), int(Form.PLAIN), {int(form) for form in ALONE}
    for tensor in tensors:
        words = words_of(tensor.dtype)
        whole = BLOCK * words.each * words.size
        left = tensor.nbytes
        known = {int(Reference.NOTHING)}
        known |= {int(Reference.BASE)} if tensor.base is not None else set()
        known |= {int(Reference.PREDICTION)} if tensor.fit is not None else set()
        for row in table[tensor.first : tensor.first + tensor.blocks]:
            file, reference, form, _, offset, length, *_ = row
            if reference not in known or (not reference) != (form in alone):
                parser.bad(_REFERENCE)
            if length and file >= len(sizes):
                parser.bad(_NO_FILE)
            if length and offset + length > sizes[file]:
                parser.bad(_OUTSIDE)
            most = min(left, whole)
            left -= most
            if (
                length > most
                or (form == plain and length != most)
                or (form == exact) != (not length)
            ):
                parser.bad(_LENGTH)


def _check_many(
    parser: Refuses, rows: bytes, files: Sequence[DataFile], tensors: Sequence[DeltaTensor]
) -> None:
    import numpy as np

    table = np.frombuffer(rows, np.dtype(_FIELDS))
    counts = np.array([tensor.blocks for tensor in tensors], dtype=np.int64)
    if table["zero"].any() or table["reference"].max() > _REFERENCES:
        parser.unknown(_UNKNOWN)
    if table["form"].max() > _FORMS:
        parser.unknown(f"the form {table['form'].max()} of a block")
    owner = np.repeat(np.arange(len(tensors)), counts)
    based = np.array([tensor.base is not None for tensor in tensors])
    predicted = np.array([tensor.fit is not None for tensor in tensors])
    against = table["reference"]
    if (
        ((against == Reference.BASE) & ~based[owner]).any()
        or ((against == Reference.PREDICTION) & ~predicted[owner]).any()
        or ((against == Reference.NOTHING) != np.isin(table["form"], list(ALONE))).any()
    ):
        parser.bad(_REFERENCE)
    sizes = np.array([file.size for file in files], dtype=np.uint64)
    held = table["length"] > 0
    if (table["file"][held] >= len(sizes)).any():
        parser.bad(_NO_FILE)
    ends = sizes[table["file"][held]]
    lengths = table["length"][held].astype(np.uint64)
    # The offset is compared with what is left: a sum could pass 2^64.
    if (lengths > ends).any() or (table["offset"][held] > ends - lengths).any():
        parser.bad(_OUTSIDE)
    _check_lengths(parser, table, tensors, owner)


def _check_lengths(
    parser: Refuses, table: Any, tensors: Sequence[DeltaTensor], owner: Array
) -> None:
    """Check that no block is longer than its elements, and that plain ones are as long."""
    import numpy as np

    whole = np.array([BLOCK * words_of(t.dtype).each * words_of(t.dtype).size for t in tensors])
    last = np.array([t.nbytes - (t.blocks - 1) * w for t, w in zip(tensors, whole, strict=True)])
    most = whole[owner]
    ends = np.append(owner[1:] != owner[:-1], True)
    most[ends] = last[owner[ends]]
    form, length = table["form"], table["length"]
    plain, exact = form == Form.PLAIN, form == Form.EXACT
    other = (length > most) | (plain & (length != most)) | (exact != (length == 0))
    if other.any():
        parser.bad(_LENGTH)
