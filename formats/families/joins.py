"""Map rows of a joined tensor to rows of its parts: geometry without names.

    whole     one part, as it is
    stacked   equal parts, one after the other (gate, up)
    grouped   for each KV group the rows of its queries, its key, its value
    packed    one part that holds all queries, then all keys, then all values, joined as `grouped`

Source: `merge_qkv_weights` of Megatron-Bridge; `set_attn_state` in Megatron-LM's
tools/checkpoint/loader_mixtral_hf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Join(StrEnum):
    """How the parts make the whole."""

    WHOLE = "whole"
    STACKED = "stacked"
    GROUPED = "grouped"
    PACKED = "packed"


class Heads(NamedTuple):
    """The shape of attention.

    Attributes:
        queries: number of query heads.
        groups: number of key and value heads.
        width: rows of one head.
    """

    queries: int
    groups: int
    width: int

    @property
    def rows(self) -> int:
        """Rows of queries, keys and values together."""
        return (self.queries + 2 * self.groups) * self.width


class RowRun(NamedTuple):
    """Rows that lie together on both sides.

    Attributes:
        part: which part.
        inside: first row in the part.
        joined: first row in the whole.
        rows: how many.
    """

    part: int
    inside: int
    joined: int
    rows: int


def part_rows(join: Join, parts: int, rows: int, heads: Heads) -> list[int] | None:
    """Return the rows of each part of a whole of `rows`; None where it cannot be such a whole."""
    if join is Join.WHOLE:
        return [rows]
    if join is Join.STACKED:
        return None if rows % parts else [rows // parts] * parts
    if rows != heads.rows:
        return None
    keys = heads.groups * heads.width
    return [heads.queries * heads.width, keys, keys] if join is Join.GROUPED else [rows]


def runs(join: Join, parts: int, rows: int, heads: Heads) -> Iterator[RowRun]:
    """Yield the runs of a whole of `rows` that `part_rows` can cut; they tile it."""
    if join in (Join.WHOLE, Join.STACKED):
        for part in range(parts):
            yield RowRun(part, 0, part * rows // parts, rows // parts)
        return
    width, each = heads.width, heads.queries // heads.groups
    starts = (0, heads.queries * width, (heads.queries + heads.groups) * width)
    at = 0
    for group in range(heads.groups):
        for part, size in enumerate((each * width, width, width)):
            if join is Join.GROUPED:
                yield RowRun(part, group * size, at, size)
            else:
                yield RowRun(0, starts[part] + group * size, at, size)
            at += size
