"""Prove the files that come back from a delta, every byte of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta.original_files import OriginalFile, OriginalRuns
from ftckpt.extents import Extent
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.forms import failed
from ftckpt.transfer.layout import Literal, Stored
from ftckpt.transfer.prove.against_digests import DigestProof
from ftckpt.transfer.prove.against_source import Proof, SameObjects
from ftckpt.workers import ALONE, Work

from .original import OriginalWriter

_TASK = 4 << 20  # bytes compared by one task
_MOST = 1024  # runs of them


class OriginalProof:
    """Compares original files with what was packed; a `Prover`.

    Tensors by their digests, every byte beside their main pieces with what the delta keeps of it.
    That is where replicas are: those of the source may have differed, and come back as they were.

    Args:
        writer: what laid the files out.
    """

    def __init__(self, writer: OriginalWriter) -> None:
        self._writer = writer
        self._tensors = DigestProof(writer.delta.decoding.digests(), replicas=False)

    def __call__(
        self,
        content: Content,
        result: Checkpoint,
        same_objects: SameObjects,
        work: Work = ALONE,
    ) -> Proof:
        """Compare a result with what was packed (see `ftckpt.transfer.prove.against_source.prove`).

        Raises:
            CorruptError: names, shapes, types, tiling, digests, objects or bytes differ
                (`failed-proof`).
        """
        proof = self._tensors(content, result, same_objects, work)
        original, rest = self._writer.original, self._writer.rest()
        delta = self._writer.delta.source
        work.counter.start("proving what is not a tensor", original.rest_bytes)

        def compare(task: OriginalRuns) -> None:
            if work.limiter is not None:
                work.limiter.take(task.nbytes)
            _compare(task, result.source, _bytes_of(rest(task.start, task.nbytes), delta))
            work.counter.add(task.nbytes)

        name = next(iter(result.source.entries)) if original.single else None
        for _ in work.run(_runs(original.files, name), compare):
            pass
        return proof


def _runs(files: Iterable[OriginalFile], name: str | None) -> Iterator[OriginalRuns]:
    """Yield what lies beside tensors; where there is one file, it has a name of the user's."""
    start = at = 0
    held: list[Extent] = []
    for file in files:
        for offset, length in file.rest:
            for begin in range(offset, offset + length, _TASK):
                size = min(_TASK, offset + length - begin)
                if held and (at - start + size > _TASK or len(held) == _MOST):
                    yield OriginalRuns(start, at - start, held)
                    start, held = at, []
                held.append(Extent(name or file.path, begin, size))
                at += size
    if held:
        yield OriginalRuns(start, at - start, held)


def _compare(task: OriginalRuns, result: Source, wanted: bytes) -> None:
    at = 0
    for extent, data in zip(task.extents, result.read_many(task.extents), strict=True):
        if data != wanted[at : at + extent.length]:
            file, begin, length = extent
            what = f"bytes [{begin}, {begin + length}) of {file} are not what was packed"
            raise failed(what, None, file)
        at += extent.length


def _bytes_of(segment: Literal | Stored, delta: Source) -> bytes:
    return segment.data if isinstance(segment, Literal) else delta.read(*segment.extent)
