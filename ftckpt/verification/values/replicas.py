"""Compare the copies of a tensor that one checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.read_tensor import read_part, slabs, stream_payload
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, finding, from_error
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

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
