"""Check the rows of a delta's index: every block of every tensor, a million at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .blocks import ALONE, BLOCK, Form, Reference
from .words import words_of

if TYPE_CHECKING:
    from .index import DataFile, DeltaTensor
    from .index_parser import Parser
    from .words import Array

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


def check_rows(
    parser: Parser, rows: bytes, files: Sequence[DataFile], tensors: Sequence[DeltaTensor]
) -> None:
    """Check that the rows are those of the tensors and lie inside the data files.

    Raises:
        CorruptError: they do not (`bad-delta`).
        UnsupportedError: a reference or a form that is not known.
    """
    import numpy as np

    table = np.frombuffer(rows, np.dtype(_FIELDS))
    counts = np.array([tensor.blocks for tensor in tensors], dtype=np.float64)
    if counts.sum() != len(table):  # as floats: what a shape promises may be any number
        parser.bad(f"it has {len(table)} blocks and its tensors need {counts.sum():.0f}")
    if not len(table):
        return
    if table["zero"].any() or table["reference"].max() > max(Reference):
        parser.unknown("an unknown reference of a block")
    if table["form"].max() > max(Form):
        parser.unknown(f"the form {table['form'].max()} of a block")
    owner = np.repeat(np.arange(len(tensors)), counts.astype(np.int64))
    based = np.array([tensor.base is not None for tensor in tensors])
    predicted = np.array([tensor.fit is not None for tensor in tensors])
    against = table["reference"]
    if (
        ((against == Reference.BASE) & ~based[owner]).any()
        or ((against == Reference.PREDICTION) & ~predicted[owner]).any()
        or ((against == Reference.NOTHING) != np.isin(table["form"], list(ALONE))).any()
    ):
        parser.bad("a block is stored against what its tensor does not have")
    sizes = np.array([file.size for file in files], dtype=np.uint64)
    held = table["length"] > 0
    if (table["file"][held] >= len(sizes)).any():
        parser.bad("a block lies in no data file")
    ends = sizes[table["file"][held]]
    lengths = table["length"][held].astype(np.uint64)
    # The offset is compared with what is left: a sum could pass 2^64.
    if (lengths > ends).any() or (table["offset"][held] > ends - lengths).any():
        parser.bad("a block lies outside its data file")
    _check_lengths(parser, table, tensors, owner)


def _check_lengths(
    parser: Parser, table: Any, tensors: Sequence[DeltaTensor], owner: Array
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
    if (length > most).any() or (length[plain] != most[plain]).any() or length[exact].any():
        parser.bad("a block has another length than its elements allow")
    if (length[~exact] == 0).any():
        parser.bad("a block that is not as its reference has no bytes")
