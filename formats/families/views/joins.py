"""Map rows of a joined tensor to rows of its parts: geometry without names.

    whole     one part, as it is
    stacked   equal parts, one after the other (gate, up)
    grouped   for each KV group the rows of its queries, its key, its value
    packed    one part that holds all queries, then all keys, then all values, joined as `grouped`
    gated     as `grouped`, and each query head of the first part has its gate below it; in the
              whole the gates of a group stand between its queries and its key
    delta     linear attention of two parts: for each key head q, k, v, z, and for each key head
              b, a; in the whole all q, all k, all v, all z, all b, all a. Or of four parts that lie
              as in the whole: q, k and v, then z, b, a
    alternate one part whose rows come from two in turn: those of the first, then of the second

Source: `merge_qkv_weights`, `merge_gdn_linear_weights` and `GPTOSSMLPGateUpProjMapping` of
Megatron-Bridge; `set_attn_state` in Megatron-LM's tools/checkpoint/loader_mixtral_hf.py.
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
    GATED = "gated"
    DELTA = "delta"
    ALTERNATE = "alternate"


class LinearHeads(NamedTuple):
    """The shape of linear attention (Gated DeltaNet).

    Attributes:
        keys: number of query and key heads.
        values: number of value heads, a multiple of `keys`.
        key_width, value_width: rows of one head.
    """

    keys: int
    values: int
    key_width: int
    value_width: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Rows that one key head has of q, k, v, z, b and a."""
        each = self.values // self.keys
        wide = each * self.value_width
        return (self.key_width, self.key_width, wide, wide, each, each)


class Heads(NamedTuple):
    """The shape of attention.

    Attributes:
        queries: number of query heads.
        groups: number of key and value heads.
        width: rows of one head.
        linear: that of linear attention, where some layers have it.
    """

    queries: int
    groups: int
    width: int
    linear: LinearHeads | None = None

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
    if join is Join.ALTERNATE:
        return None if rows % 2 else [rows]
    if join is Join.DELTA:
        if heads.linear is None or rows != heads.linear.keys * sum(heads.linear.blocks):
            return None
        sizes = [heads.linear.keys * block for block in heads.linear.blocks]
        if parts == 4:
            return [sum(sizes[:3]), *sizes[3:]]
        return [sum(sizes[:4]), sum(sizes[4:])]
    gates = heads.queries * heads.width if join is Join.GATED else 0
    if rows != heads.rows + gates:
        return None
    keys = heads.groups * heads.width
    queries = heads.queries * heads.width + gates
    return [rows] if join is Join.PACKED else [queries, keys, keys]


def runs(join: Join, parts: int, rows: int, heads: Heads) -> Iterator[RowRun]:
    """Yield the runs of a whole of `rows` that `part_rows` can cut; they tile it."""
    if join in (Join.WHOLE, Join.STACKED):
        for part in range(parts):
            yield RowRun(part, 0, part * rows // parts, rows // parts)
    elif join is Join.ALTERNATE:
        for row in range(rows):
            yield RowRun(0, row, row // 2 + row % 2 * (rows // 2), 1)
    elif join is Join.DELTA and parts == 4:  # as they lie in the whole
        at = 0
        for part, size in enumerate(part_rows(join, parts, rows, heads) or ()):
            yield RowRun(part, 0, at, size)
            at += size
    elif join is Join.DELTA:
        yield from _delta_runs(heads)
    elif join is Join.GATED:
        yield from _gated_runs(heads)
    else:
        yield from _attention_runs(join, heads)


def _attention_runs(join: Join, heads: Heads) -> Iterator[RowRun]:
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


def _gated_runs(heads: Heads) -> Iterator[RowRun]:
    width, each = heads.width, heads.queries // heads.groups
    at = 0
    for group in range(heads.groups):
        for gate in (0, 1):
            for head in range(group * each, (group + 1) * each):
                yield RowRun(0, (2 * head + gate) * width, at, width)
                at += width
        for part in (1, 2):
            yield RowRun(part, group * width, at, width)
            at += width


def _delta_runs(heads: Heads) -> Iterator[RowRun]:
    assert heads.linear is not None  # part_rows has asked
    blocks, keys = heads.linear.blocks, heads.linear.keys
    at = 0
    for block, size in enumerate(blocks):
        part, first = (0, 0) if block < 4 else (1, 4)
        stride = sum(blocks[:4]) if block < 4 else sum(blocks[4:])
        for head in range(keys):
            yield RowRun(part, head * stride + sum(blocks[first:block]), at, size)
            at += size
