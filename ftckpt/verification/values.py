"""Check the numbers: NaN, infinity, impossible moments, replicas that differ.

NaN or infinity is damage in a parameter, a master or a moment, and a note in a buffer, which is
often a mask. Files rarely say which tensor of a model is a buffer: the optimizer's state and the
name do, and if neither does it is a warning.

Everything is read once more, in blocks; replicas and masters are compared in slabs of both.
Elements are handled as unsigned integers, so bfloat16 and float8 need no cast.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import KnownState, named_state
from ftckpt.checkpoint.quantised import QuantisedTensor, ScaleRule
from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.checkpoint.read_tensor import raw_dtype, read_box, read_part, slabs, stream_payload
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.checkpoint.steps import SCALARS_A_FILE
from ftckpt.errors import CorruptError, ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, counted, finding, from_error
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

from .scales import check_scale
from .zero_pages import ZeroPages

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_SLAB = 16 << 20
# Elements whose squares are summed at once.
_BLOCK = 1 << 18
_RNG = re.compile(r"rng|random", re.IGNORECASE)
_RANK = re.compile(r"(?:rank[_.]?|shard_|\[)?(\d+)$")

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


class NumbersOf(NamedTuple):
    """One tensor whose numbers are checked: a task of the engine."""

    tensor: str


@dataclass
class MasterCast:
    """How the weights of a file compare with what their masters cast to.

    Attributes:
        compared: how many there are.
        differs: how many differ.
        far: how many are not one of the two numbers between which their master lies.
        apart: the sum of the squares of the differences, where both numbers are finite.
        masters: of the masters, as they are cast.
        held: of the weights.
    """

    compared: int = 0
    differs: int = 0
    far: int = 0
    apart: float = 0.0
    masters: float = 0.0
    held: float = 0.0

    def add(self, other: MasterCast) -> None:
        """Count what another one has counted."""
        self.compared += other.compared
        self.differs += other.differs
        self.far += other.far
        self.apart += other.apart
        self.masters += other.masters
        self.held += other.held

    @property
    def unlike(self) -> bool:
        """Whether weights and masters have little in common: those of other tensors, permuted.

        The cosine between them is below a half, and a quarter are further apart than rounding.
        Weights that were kept in FP8, an average of the weights, and a save that is some steps
        older all point where the masters point. What is all zero points nowhere, and is not unlike.
        """
        ends = self.masters + self.held - math.sqrt(self.masters * self.held)
        return 4 * self.far > self.compared and self.apart > ends


class Numbers(NamedTuple):
    """What the numbers of one tensor showed.

    Attributes:
        tensor: its key.
        findings: its defects.
        cast: for each file that holds its weight, how it compares with its master.
        zero: whether every element is zero.
    """

    tensor: str
    findings: tuple[Finding, ...]
    cast: Mapping[str, MasterCast]
    zero: bool


def check_values(checkpoint: Checkpoint, work: Work) -> Iterator[Finding]:
    """Yield defects of the numbers; see the module's docstring.

    Raises:
        UnavailableError: the storage does not answer.
    """
    keys = [key for key in checkpoint.tensors if key not in checkpoint.aliases]
    division = work.division
    if division is not None:
        mine = {key for key in keys if division.takes(NumbersOf(key))}
        work.counter.start("values", sum(checkpoint.tensors[key].nbytes for key in mine))
        ahead = extents_of(checkpoint, mine)
    else:
        work.counter.start("values", sum(checkpoint.tensors[key].nbytes for key in keys))
        ahead = None
    trained = _Trained(checkpoint.tensors.values())
    quantised: Mapping[str, QuantisedTensor] = {}
    with suppress(CorruptError):  # it is a finding of the structure
        quantised = checkpoint.quantised
    rules = {key: rule for one in quantised.values() for key, rule in one.rules.items()}
    cast: dict[str, MasterCast] = defaultdict(MasterCast)

    def check(one: NumbersOf) -> Numbers:
        key = one.tensor
        seen: dict[str, MasterCast] = defaultdict(MasterCast)
        zero: set[str] = set()
        found = list(_check_tensor(checkpoint, key, trained, rules.get(key), seen, zero, work))
        return Numbers(key, tuple(found), dict(seen), bool(zero))

    zeros: set[str] = set()

    with reading_ahead(checkpoint, ahead, limiter=work.limiter):
        for done in work.each(map(NumbersOf, keys), check):
            yield from done.findings
            if done.zero:
                zeros.add(done.tensor)
            for file, one in done.cast.items():
                cast[file].add(one)
        if work.partial:
            return  # what follows needs the whole
        yield from _check_files(checkpoint, cast)
        begun = checkpoint.zero_at_first
        if begun and zeros.issuperset(begun):
            first = next(iter(begun))
            what = f"{first} and the {len(begun) - 1} others that begin as zeros are zero still"
            yield finding("untrained", f"{what}: the adapter changes nothing", tensor=first)
        yield from check_rng(checkpoint)


def _check_tensor(
    checkpoint: Checkpoint,
    key: str,
    trained: _Trained,
    rule: ScaleRule | None,
    cast: Mapping[str, MasterCast],
    zeros: set[str],
    work: Work,
) -> Iterator[Finding]:
    info = checkpoint.tensors[key]
    try:
        yield from _check_numbers(checkpoint, key, info, trained.kind(info), work, zeros)
        if rule is not None:
            yield from check_scale(checkpoint, info, rule, work.limiter)
        yield from _check_replicas(checkpoint, key, info, work.limiter)
        if info.kind is Kind.MASTER:
            yield from _check_master(checkpoint, key, info, cast, work.limiter)
    except FtckptError as error:
        yield from_error(error, tensor=key)


class _Trained:
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


# NaN and infinity in these are damage; in a scale they spoil every weight of its block.
_OF_A_PARAMETER = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def _state_of(info: TensorInfo) -> KnownState | None:
    """Return what the table says of an optimizer's state that a restart needs; else None."""
    state = named_state(info.name).state if info.kind is Kind.OTHER else None
    return state if state is not None and state.moment else None


def _is_unsigned(info: TensorInfo) -> bool:
    if info.kind is Kind.EXP_AVG_SQ:
        return True
    state = _state_of(info) if info.component == "optimizer" else None
    return state is not None and state.unsigned


def _check_numbers(
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
        for slab in slabs(piece.box, _SLAB, info.dtype.itemsize):
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


def differing_copies(checkpoint: Checkpoint, keys: Iterable[str], work: Work) -> Iterator[Finding]:
    """Yield, as warnings, tensors that one save wrote twice where the two differ.

    What reads only the first copy goes on with it, and says so; also where the second cannot be
    read. Both are read.
    """

    def compare(key: str) -> list[Finding]:
        info = checkpoint.tensors[key]
        found = []
        try:
            for one in _check_replicas(checkpoint, key, info, work.limiter):
                if one.kind == "copy-differs":
                    found.append(one)
        except FtckptError as error:
            one = from_error(error, tensor=key)
            found.append(replace(one, message=f"{key} is not compared: {one.message}"))
        return [replace(one, severity=Severity.WARNING, code=ExitCode.OK) for one in found]

    twice = [
        key
        for key in keys
        if (info := checkpoint.tensors.get(key)) is not None
        and not checkpoint.second_copies.isdisjoint(p.extent.file for p in info.pieces)
    ]
    for found in work.run(twice, compare):
        yield from found


def _check_replicas(
    checkpoint: Checkpoint, key: str, info: TensorInfo, limiter: RateLimit | None
) -> Iterator[Finding]:
    for held in copies_of(info):
        first, *others = held.pieces
        if not others:
            continue
        wanted = _digest(checkpoint, info, first, limiter)
        for piece in others:
            if _digest(checkpoint, info, piece, limiter) != wanted:
                files = {first.extent.file, piece.extent.file}
                yield finding(
                    "copy-differs" if files & checkpoint.second_copies else "replica-differs",
                    f"{key} differs between {first.extent.file} and {piece.extent.file}",
                    file=piece.extent.file,
                    tensor=key,
                    rank=piece.rank,
                    offset=piece.extent.offset,
                    length=piece.extent.length,
                )


def _digest(
    checkpoint: Checkpoint, info: TensorInfo, piece: Piece, limiter: RateLimit | None
) -> bytes:
    """Return a digest of a piece's elements in the C order of its box."""
    import xxhash

    digest = xxhash.xxh3_128()
    payload = checkpoint.payload(piece)
    if piece.flat is None and payload.strides is not None:
        for slab in slabs(piece.box, _SLAB, info.dtype.itemsize):
            digest.update(read_part(checkpoint, info, piece, slab, limiter).tobytes())
    else:
        for block in stream_payload(checkpoint.source, payload, limiter):
            digest.update(block)
    return digest.digest()


def _check_files(checkpoint: Checkpoint, cast: Mapping[str, MasterCast]) -> Iterator[Finding]:
    """Yield files whose weights are not their masters'.

    Those without a step, where all others' are: stochastic rounding would show in every file, so
    most weights must be exact. And those that are unlike their masters: a file of another rank.
    """
    apart = {file for file, one in cast.items() if one.unlike}
    for file in sorted(apart):
        what = (
            f"{cast[file].far} of {cast[file].compared} weights in {file} are further from their"
            " masters than rounding takes them, and point elsewhere: they and their masters are of"
            " two runs or ranks"
        )
        yield finding("mixed-steps", what, file=file)
    odd = {file for file, one in cast.items() if one.differs}
    exact = sum(one.compared for file, one in cast.items() if file not in odd)
    if not odd or exact <= sum(cast[file].compared for file in odd):
        return
    odd -= {scalar.file for scalar in checkpoint.scalars(SCALARS_A_FILE)}
    for file in sorted(odd - apart):
        what = (
            f"{cast[file].differs} of {cast[file].compared} weights in {file} are not what their"
            " masters cast to, those of the other files are: the file is of another save"
        )
        yield finding("mixed-steps", what, file=file)


def _check_master(
    checkpoint: Checkpoint,
    key: str,
    info: TensorInfo,
    files: Mapping[str, MasterCast],
    limiter: RateLimit | None,
) -> Iterator[Finding]:
    weight = checkpoint.tensors.get(tensor_key("model", Kind.PARAM, info.name))
    if weight is None or weight.shape != info.shape or info.dtype.name != "float32":
        return
    import numpy as np

    differs = 0
    for box, holders in _rows_of_files(weight).items():
        seen = MasterCast(compared=box.volume)
        for slab in slabs(box, _SLAB, info.dtype.itemsize):
            master = read_box(checkpoint, info, slab, limiter).view(np.float32)
            cast = _cast(master, weight.dtype)
            if cast is None:
                return
            held = read_box(checkpoint, weight, slab, limiter)
            _compare(cast, held, weight.dtype, seen)
        for file in holders:
            files[file].add(seen)
        differs += seen.differs
    if differs:
        yield finding(
            "master-differs",
            f"{differs} of {info.numel} elements of {key} do not cast to their weight "
            "(stochastic rounding does this, weights kept in FP8, an average, and a torn save)",
            tensor=key,
        )


def _rows_of_files(info: TensorInfo) -> dict[Box, set[str]]:
    """Return the parts of a tensor that are compared on their own, and the files that hold each.

    Rows that lie in a file each (one expert's of a stack) say which file is odd. Other cuts are
    compared as a whole: to read a column of each file would read every file for each of them.
    """
    found: dict[Box, set[str]] = defaultdict(set)
    for piece in info.pieces:
        found[piece.box].add(piece.extent.file)
    rows = all(box.sizes[1:] == info.shape[1:] for box in found) and bool(info.shape)
    if rows and sum(box.volume for box in found) == info.numel:
        return found
    return {Box.whole(info.shape): {piece.extent.file for piece in info.pieces}}


def _compare(cast: Array, held: Array, dtype: DType, seen: MasterCast) -> None:
    """Count how weights compare with their masters, both as bits of one floating type."""
    import numpy as np

    cast, held = cast.reshape(-1), np.ascontiguousarray(held).reshape(-1)
    for start in range(0, cast.size, _BLOCK):
        one, other = cast[start : start + _BLOCK], held[start : start + _BLOCK]
        unequal = one != other
        differs = int(np.count_nonzero(unequal))
        numbers = _finite(one, dtype)
        squares = float(np.dot(numbers, numbers))
        seen.masters += squares
        if not differs:
            seen.held += squares
            continue
        seen.differs += differs
        seen.far += _far(one[unequal], other[unequal])
        held_numbers = _finite(other, dtype)
        seen.held += float(np.dot(held_numbers, held_numbers))
        numbers -= held_numbers
        seen.apart += float(np.dot(numbers, numbers))


def _finite(bits: Array, dtype: DType) -> Array:
    """Return numbers as float64; 0 for those that are not finite."""
    import numpy as np

    from ftckpt.checkpoint.rounding import from_bfloat16

    with np.errstate(invalid="ignore"):  # a signalling NaN
        floats = from_bfloat16(bits) if dtype.name == "bfloat16" else bits.view(dtype.name)
        numbers = floats.astype(np.float64)
    return np.where(np.isfinite(numbers), numbers, 0.0)


def _far(cast: Array, held: Array) -> int:
    """Count the numbers that are not next to each other, by the bits of one floating type."""
    import numpy as np

    def ordered(bits: Array) -> Array:
        """Return integers in the order of the numbers; both zeros are 0."""
        sign = 1 << (8 * bits.dtype.itemsize - 1)
        plain = (bits & (sign - 1)).astype(np.int64)
        return np.asarray(np.where(bits & sign, -plain, plain))

    return int(np.count_nonzero(np.abs(ordered(cast) - ordered(held)) > 1))


def _cast(master: Array, dtype: DType) -> Array | None:
    """Cast float32 to the bits of a 16- or 32-bit type, rounding to nearest even."""
    import numpy as np

    if dtype.name == "float32":
        return master.view(np.uint32)
    from ftckpt.checkpoint.rounding import to_bfloat16, to_float16

    if dtype.name == "float16":
        return to_float16(master)
    if dtype.name == "bfloat16":
        return to_bfloat16(master)
    return None


def check_rng(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare the RNG states of different ranks, if they are tensors: none may be equal."""
    states: dict[str, dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, info in checkpoint.tensors.items():
        match = _RANK.search(info.name)
        if not match or not _RNG.search(key) or info.nbytes > 1 << 16 or len(info.pieces) != 1:
            continue
        try:
            data = b"".join(stream_payload(checkpoint.source, checkpoint.payload(info.pieces[0])))
        except FtckptError:
            continue  # the checks before this one report it
        states[key[: len(key) - len(match[0])]][data].append(key)
    for family in states.values():
        for keys in family.values():
            if len(keys) > 1:
                yield finding(
                    "equal-rng",
                    f"{len(keys)} ranks share one RNG state ({', '.join(keys[:3])}): they draw "
                    "the same numbers",
                    tensor=keys[0],
                )
