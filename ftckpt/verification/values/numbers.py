"""Check the numbers of one tensor: NaN, infinity, impossible moments, pages of zeros.

Count NaN, infinities and negative numbers in raw elements.

Elements are handled as unsigned integers, so bfloat16 and float8 need no cast.

Layers whose weights are all zero, beside layers whose weights are not.

No initialisation and no training leaves every matrix of a layer zero: a file that was never
written, a save of weights that lay on another device, or a merge that missed a layer does. One
matrix alone may be zero on purpose (a block that begins as the identity, a zero convolution, the B
of an adapter), and so may vectors.

Pages of zeros inside a tensor that is not zero: what a crash leaves of pages never written.

A run of zeros is suspicious where it begins and ends exactly at pages of the file (or at an end of
the piece), between elements that are not zero, and tensors do not look so by themselves:

- Padded vocabularies, unused embeddings and pruned blocks are whole rows. An end of the piece is
  the end of a row as well, because a flat partition may cut it.
- Causal masks, padded rows and tables of positions are zero from or to the end of a row.
- Blocks of zeros are at the same place in the row before or after.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import KnownState, named_state
from ftckpt.checkpoint.read_tensor import raw_dtype, read_part, slabs, stream_payload
from ftckpt.findings import Finding, counted, finding, listed
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

from .masters import SLAB

# Bits of exponent and mantissa below the sign: an all-ones exponent is infinity (mantissa zero)
# or NaN. float8 of the fn and fnuz families have no infinity; their NaN patterns are listed.
_IEEE = {
    "float64": (0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
    "float32": (0x7F800000, 0x7FFFFFFF),
    "float16": (0x7C00, 0x7FFF),
    "bfloat16": (0x7F80, 0x7FFF),
    "float8_e5m2": (0x7C, 0x7F),
}
_NAN_ONLY = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
# A power of two: it has no sign and no zero.
_UNSIGNED = "float8_e8m0fnu"
_PARTS = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


class Count(NamedTuple):
    """Counts of special values in a block of elements."""

    nan: int
    inf: int
    negative: int
    nonzero: bool
    first: int


def count_values(dtype: DType, data: bytes) -> Count | None:
    """Count NaN, infinities and negative numbers in raw elements; None for types without them.

    Negative zero and NaN are not negative. `first` is the index of the first element that is NaN or
    infinite, or -1. Both parts of a complex number are counted. `data` holds whole elements.
    """
    import numpy as np

    name = _PARTS.get(dtype.name, dtype.name)
    if name in _IEEE:
        exponent, magnitude = _IEEE[name]
        size = {0x7F: 1, 0x7FFF: 2, 0x7FFFFFFF: 4}.get(magnitude, 8)
        bits = np.frombuffer(data, raw_dtype(size))
        plain = bits & bits.dtype.type(magnitude)
        infinite = bits.dtype.type(exponent)
        special = plain >= infinite
        signed = (bits != plain) & (plain != 0)
        if not special.any():
            return Count(0, 0, int(np.count_nonzero(signed)), bool(plain.any()), -1)
        inf = int(np.count_nonzero(plain == infinite))
        nan = int(np.count_nonzero(special)) - inf
        negative = int(np.count_nonzero(signed & (plain <= infinite)))
        parts = dtype.itemsize // size  # two in an element of a complex type
        return Count(nan, inf, negative, True, int(special.argmax()) // parts)
    if name in _NAN_ONLY:
        bits = np.frombuffer(data, np.uint8)
        special = np.isin(bits, np.array(_NAN_ONLY[name], np.uint8))
        nan = int(np.count_nonzero(special))
        first = int(special.argmax()) if nan else -1
        if name == _UNSIGNED:
            return Count(nan, 0, 0, bool(bits.size), first)
        negative = int(np.count_nonzero((bits > 0x80) & ~special))
        return Count(nan, 0, negative, nan > 0 or bool((bits & 0x7F).any()), first)
    return None


_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_DEPTH = 2  # layers, and experts in them
_FEW = 2  # matrices that a layer has at least
_KINDS = (Kind.PARAM, Kind.MASTER)


def check_layers(tensors: Mapping[str, TensorInfo], zeros: Container[str]) -> Iterator[Finding]:
    """Yield layers, and experts, of which every matrix is zero.

    Args:
        tensors: of the checkpoint, by key.
        zeros: keys of those whose numbers are all zero.
    """
    stacks: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(dict)
    for key, info in tensors.items():
        if info.kind not in _KINDS or len(info.shape) < _FEW or not info.numel:
            continue
        if info.dtype.family != "float":
            continue
        for depth, match in enumerate(_NUMBER.finditer(info.name)):
            if depth < _DEPTH:
                stack = info.component, str(info.kind), info.name[: match.start(1)]
                stacks[stack].setdefault(match[1], []).append(key)
    told: set[str] = set()
    for (_, _, before), units in sorted(stacks.items(), key=lambda one: len(one[0][2])):
        empty = {
            number: keys
            for number, keys in units.items()
            if len(keys) >= _FEW and all(key in zeros for key in keys)
        }
        if len(empty) == len(units) and len(units) < _FEW:
            continue
        names = [f"{before}{number}" for number, keys in empty.items() if not told.issuperset(keys)]
        if not names:
            continue
        for keys in empty.values():
            told.update(keys)
        first = next(iter(empty.values()))[0]
        what = "are zero" if len(names) > 1 else "is zero"
        left = len(units) - len(empty)
        others = f" ({counted(left, 'other')} beside it {'is' if left == 1 else 'are'} not)"
        yield finding(
            "zero-layer",
            f"every matrix of {listed(names, 3)} {what}: the values were lost, or never written"
            + (others if left else ""),
            file=tensors[first].pieces[0].extent.file,
            tensor=first,
        )


PAGE = 4096
# Runs of one piece that are remembered.
_MOST = 10_000


class ZeroPages:
    """Looks for pages of zeros in the bytes of one piece, block after block.

    Args:
        piece: whose bytes lie dense in C order.
        dtype: of its elements.
        start: the offset of its first byte in the file.
        length: of the bytes.

    Attributes:
        runs: how many there are, once it has finished.
        first: the bytes of the first of them in the file.
    """

    def __init__(self, piece: Piece, dtype: DType, start: int, length: int) -> None:
        sizes, size = piece.box.sizes, dtype.itemsize
        self._rows = [prod(sizes[axis:]) * size for axis in range(1, len(sizes))]
        self._shift = start - (0 if piece.flat is None else piece.flat[0] * size)
        self._start, self._end, self._size = start, start + length, size
        self._at, self._last, self._begun, self._sharp = start, b"", -1, False
        self._found: list[tuple[int, int]] = []
        self.runs = 0
        self.first = (0, 0)

    def take(self, block: bytes) -> None:
        """Look at the bytes that follow."""
        import numpy as np

        if not self._rows:
            return
        lead = min(-self._at % PAGE, len(block))
        pages = (len(block) - lead) // PAGE
        tail = lead + pages * PAGE
        words = np.frombuffer(block, np.uint64, pages * PAGE // 8, lead).reshape(pages, PAGE // 8)
        full = np.ones(pages, np.bool_)
        doubted = np.flatnonzero((words[:, 0] == 0) & (words[:, -1] == 0))
        full[doubted] = words[doubted].any(axis=1)
        if self._begun < 0 and full.all() and any(block[tail:]) and any(block[:lead]):
            self._at, self._last = self._at + len(block), block[-self._size :]
            return
        changes = np.flatnonzero(full[1:] != full[:-1]) + 1
        bounds = [lead + int(page) * PAGE for page in (*changes, pages)] if pages else []
        cuts = sorted({0, lead, *bounds, len(block)})
        for begin, end in pairwise(cuts):
            inner = lead <= begin < tail
            empty = not (full[(begin - lead) // PAGE] if inner else any(block[begin:end]))
            if empty and self._begun < 0:
                before = (self._last + block[max(0, begin - self._size) : begin])[-self._size :]
                self._begun = self._at + begin
                self._sharp = any(before) or self._begun == self._start
            elif not empty and self._begun >= 0:
                self._run(self._at + begin, after=any(block[begin : begin + self._size]))
        self._at, self._last = self._at + len(block), block[-self._size :]

    def finish(self) -> None:
        """Look at what reaches to the end of the piece, and count."""
        if self._begun > self._start:
            self._run(self._end, after=True)
        found = set(self._found)
        alone = [
            (begin, end)
            for begin, end in self._found
            if not any((begin + by, end + by) in found for row in self._rows for by in (row, -row))
        ]
        self.runs = len(alone)
        self.first = alone[0] if alone else (0, 0)

    def _run(self, end: int, *, after: bool) -> None:
        begin, self._begun = self._begun, -1
        edges = self._start, self._end
        aligned = all(at % PAGE == 0 or at in edges for at in (begin, end))
        if not (aligned and after and self._sharp) or end - begin < PAGE:
            return

        def ends(at: int, row: int) -> bool:
            return at in edges or (at - self._shift) % row == 0

        if any(ends(begin, row) and ends(end, row) for row in self._rows):
            return
        inner = self._rows[-1]
        if end - begin <= inner and (ends(begin, inner) or ends(end, inner)):
            return
        if len(self._found) < _MOST:
            self._found.append((begin, end))


# NaN and infinity in these are damage; in a scale they spoil every weight of its block.
_OF_A_PARAMETER = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


class KnownParameters:
    """Tells parameters from buffers, as far as possible."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        state, weights = set(), set()
        for info in tensors:
            if info.kind in _OF_A_PARAMETER:
                state.add(info.name)
            elif info.component == "optimizer":
                state.add(named_state(info.name).parameter)  # `<parameter>.momentum_buffer`
            elif info.kind is Kind.PARAM:
                weights.add(info.name)
        # State under numbers, or under other names, says nothing about a name.
        self._with_state = state & weights

    def kind(self, info: TensorInfo) -> str | None:
        """Return the kind of finding for non-finite numbers; None if they are damage."""
        if info.kind in _OF_A_PARAMETER or info.kind is Kind.SCALE:
            return None
        if info.component == "optimizer" and _state_of(info) is not None:
            return None
        if info.kind is not Kind.PARAM:
            return "nonfinite-buffer"
        if info.name in self._with_state:
            return None
        named = info.name.rpartition(".")[2] in ("weight", "bias")
        if not self._with_state:
            return None if named else "nonfinite-unknown"
        # Without state among parameters that have it: a buffer, or frozen if the name says so.
        return "nonfinite-unknown" if named else "nonfinite-buffer"


def _state_of(info: TensorInfo) -> KnownState | None:
    """Return what the table says of an optimizer's state that a restart needs; else None."""
    state = named_state(info.name).state if info.kind is Kind.OTHER else None
    return state if state is not None and state.moment else None


def _is_unsigned(info: TensorInfo) -> bool:
    if info.kind is Kind.EXP_AVG_SQ:
        return True
    state = _state_of(info) if info.component == "optimizer" else None
    return state is not None and state.unsigned


def check_numbers(
    checkpoint: Checkpoint,
    key: str,
    info: TensorInfo,
    lesser: str | None,
    work: Work,
    zeros: set[str],
) -> Iterator[Finding]:
    """Yield defects of the numbers of one tensor; add its key to `zeros` if all are zero.

    NaN and infinity are a finding of the kind `lesser`; None: they are damage.
    """
    nonzero = False
    floats = False
    for piece in info.pieces:
        total, offset = Count(0, 0, 0, False, -1), 0
        place = None
        pages = _pages(checkpoint, info, piece)
        for block in _elements(checkpoint, info, piece, work.limiter):
            found = count_values(info.dtype, block)
            work.counter.add(len(block))
            if found is None:
                break
            floats = True
            if pages is not None:
                pages.take(block)
            if found.first >= 0 and place is None:
                place = offset // max(info.dtype.itemsize, 1) + found.first
            total = Count(
                total.nan + found.nan,
                total.inf + found.inf,
                total.negative + found.negative,
                total.nonzero or found.nonzero,
                -1,
            )
            offset += len(block)
        nonzero = nonzero or total.nonzero
        where = {"file": piece.extent.file, "tensor": key, "rank": piece.rank}
        at = "" if place is None else f", the first at element {place} of the piece"
        for kind, count, word in (("nan", total.nan, "NaN"), ("inf", total.inf, "infinite")):
            if count and lesser is None:
                yield finding(kind, f"{key} holds {count} {word} values{at}", **where)  # type: ignore[arg-type]
        if (total.nan or total.inf) and lesser is not None:
            message = f"{key} holds {total.nan + total.inf} values that are not finite{at}"
            yield finding(lesser, message, **where)  # type: ignore[arg-type]
        if total.negative and _is_unsigned(info):
            message = f"{key} holds {total.negative} negative values"
            yield finding("negative-exp-avg-sq", message, **where)  # type: ignore[arg-type]
        if pages is not None and floats:
            yield from _zero_pages(pages, key, where)
    if floats and not nonzero:
        zeros.add(key)
    if floats and not nonzero and info.numel and info.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        yield finding(
            "zero-moment",
            f"{key} is all zero: frozen, an expert never used, or step 0",
            tensor=key,
        )


def _pages(checkpoint: Checkpoint, info: TensorInfo, piece: Piece) -> ZeroPages | None:
    """Return what looks for pages of zeros; None where the file does not hold plain elements."""
    payload = checkpoint.payload(piece)
    if payload.transforms or payload.strides is not None:
        return None
    return ZeroPages(piece, info.dtype, payload.extent.offset, payload.extent.length)


def _zero_pages(pages: ZeroPages, key: str, where: Mapping[str, Any]) -> Iterator[Finding]:
    pages.finish()
    if pages.runs:
        begin, end = pages.first
        more = f", and {counted(pages.runs - 1, 'such run')} more" if pages.runs > 1 else ""
        yield finding(
            "zero-pages",
            f"{key} is zero in bytes {begin} to {end} of {where['file']}, from page to page and not"
            f" at its rows{more}: pages that were never written look so",
            offset=begin, length=end - begin, **where,
        )  # fmt: skip


def _elements(
    checkpoint: Checkpoint, info: TensorInfo, piece: Piece, limiter: RateLimit | None
) -> Iterator[bytes]:
    """Yield the raw elements of a piece without its neighbours'."""
    payload = checkpoint.payload(piece)
    length = payload.inner[1] if payload.inner else payload.extent.length
    elements = piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]
    if payload.strides is None or length == info.dtype.nbytes(elements):
        # Dense in some order of axes: every byte is an element, and the order does not matter.
        yield from _whole(
            stream_payload(checkpoint.source, payload, limiter), max(info.dtype.itemsize, 1)
        )
    elif elements:
        for slab in slabs(piece.box, SLAB, info.dtype.itemsize):
            yield read_part(checkpoint, info, piece, slab, limiter).tobytes()


def _whole(blocks: Iterator[bytes], itemsize: int) -> Iterator[bytes]:
    """Cut a stream at element boundaries: a decompressor ends its blocks anywhere."""
    rest = b""
    for block in blocks:
        data = rest + block if rest else block
        end = len(data) - len(data) % itemsize
        rest = data[end:]
        if end:
            yield data if end == len(data) else data[:end]
    if rest:
        yield rest
