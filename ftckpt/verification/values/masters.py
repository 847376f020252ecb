"""Compare weights with what their masters cast to.

Compare the copies of a tensor that one checkpoint holds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box, Checkpoint, Kind, Piece, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import read_box, read_part, slabs, stream_payload
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, finding, from_error
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


# Bytes of a tensor that are read at once.
SLAB = 16 << 20


def differing_copies(checkpoint: Checkpoint, keys: Iterable[str], work: Work) -> Iterator[Finding]:
    """Yield, as warnings, tensors that one save wrote twice where the two differ.

    What reads only the first copy goes on with it, and says so; also where the second cannot be
    read. Both are read.
    """

    def compare(key: str) -> list[Finding]:
        info = checkpoint.tensors[key]
        found = []
        try:
            for one in check_replicas(checkpoint, key, info, work.limiter):
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


def check_replicas(
    checkpoint: Checkpoint, key: str, info: TensorInfo, limiter: RateLimit | None
) -> Iterator[Finding]:
    """Yield the pieces of a tensor that differ from another copy of the same elements."""
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
        for slab in slabs(piece.box, SLAB, info.dtype.itemsize):
            digest.update(read_part(checkpoint, info, piece, slab, limiter).tobytes())
    else:
        for block in stream_payload(checkpoint.source, payload, limiter):
            digest.update(block)
    return digest.digest()


# Elements whose squares are summed at once.
_BLOCK = 1 << 18


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


def check_files(checkpoint: Checkpoint, cast: Mapping[str, MasterCast]) -> Iterator[Finding]:
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
    odd -= {scalar.file for scalar in checkpoint.step_scalars}
    for file in sorted(odd - apart):
        what = (
            f"{cast[file].differs} of {cast[file].compared} weights in {file} are not what their"
            " masters cast to, those of the other files are: the file is of another save"
        )
        yield finding("mixed-steps", what, file=file)


def check_master(
    checkpoint: Checkpoint,
    key: str,
    info: TensorInfo,
    files: Mapping[str, MasterCast],
    limiter: RateLimit | None,
) -> Iterator[Finding]:
    """Yield whether a master casts to its weight; count in `files` how they compare."""
    weight = checkpoint.tensors.get(tensor_key("model", Kind.PARAM, info.name))
    if weight is None or weight.shape != info.shape or info.dtype.name != "float32":
        return
    import numpy as np

    differs = 0
    for box, holders in _rows_of_files(weight).items():
        seen = MasterCast(compared=box.volume)
        for slab in slabs(box, SLAB, info.dtype.itemsize):
            master = read_box(checkpoint, info, slab, limiter).view(np.float32)
            cast = cast_master(master, weight.dtype)
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


def cast_master(master: Array, dtype: DType) -> Array | None:
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
