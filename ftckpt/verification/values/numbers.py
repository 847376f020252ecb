"""Check the numbers of one tensor: NaN, infinity, impossible moments, pages of zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftckpt.checkpoint import Checkpoint, Kind, Piece, TensorInfo
from ftckpt.checkpoint.optimizer_states import KnownState, named_state
from ftckpt.checkpoint.read_tensor import read_part, slabs, stream_payload
from ftckpt.findings import Finding, counted, finding
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

from .replicas import SLAB
from .special import Count, count_values
from .zero_pages import ZeroPages

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
