"""Prove a result by tensor digests that are known already, without reading the source again.

Where a source is a delta, its index says what every tensor was when it was packed. A result with
those digests is what was packed, whatever happened on the way; the source would have to be decoded
a second time to compare it. A digest is of a logical tensor, so of its main pieces: replicas are
compared with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.digests.tensors import TensorDigest
from ftckpt.progress import Counter
from ftckpt.transfer.content import Content, Shard
from ftckpt.transfer.forms import (
    ResultTensor,
    compare_forms,
    failed,
    nbytes_in,
    pairs,
    require_all_read,
)
from ftckpt.transfer.read.elements import Gatherer, of_result
from ftckpt.workers import ALONE, Work
from ftckpt.workers.buffers import buffer

from .against_source import Proof, SameObjects, compare_objects, compare_replicas

_TASK = 32 << 20  # bytes digested by one task
_STEP = 1 << 20
_SLOT = 4


class DigestProof:
    """Compares the tensors of a result with digests; a `Prover`.

    Args:
        digests: the tensor digest of each tensor that is to be written, by key.
        replicas: whether replicas must equal the main pieces. Those of a source may have differed,
            and where its own files come back they do again: other evidence must prove them there.
    """

    def __init__(self, digests: Mapping[str, str], *, replicas: bool = True) -> None:
        self._digests = digests
        self._replicas = replicas

    def __call__(
        self,
        content: Content,
        result: Checkpoint,
        same_objects: SameObjects,
        work: Work = ALONE,
    ) -> Proof:
        """Compare a result with what was to be written (see `proof.prove`).

        Raises:
            CorruptError: names, shapes, types, tiling, digests, replicas or objects differ
                (`failed-proof`).
        """
        if self._replicas:
            require_all_read(result)
        compare_forms(content, result)
        held = list(pairs(content, result))
        nbytes = nbytes_in(held) if self._replicas else sum(pair.info.nbytes for pair in held)
        work.counter.start("proving", nbytes)
        gatherer = Gatherer(result, work.limiter)

        def digested(task: DigestedRange, counter: Counter) -> tuple[int, int, int, int]:
            made = _digest(task, gatherer)
            counter.add(task.shard.dtype.nbytes(task.stop - task.start))
            return task.number, made.elements, *made.sums

        found = [TensorDigest(pair.info.dtype, pair.info.shape) for pair in held]
        with reading_ahead(result, of_result(content, result), work.limiter, jobs=work.threads):
            try:
                for number, *sums in work.spread(_ranges(held, result), digested):
                    found[number].add(*sums)
                for pair, digest in zip(held, found, strict=True) if not work.partial else ():
                    self._require(pair, digest)
                if self._replicas:
                    compare_replicas(held, gatherer, work)
            finally:
                gatherer.close()
        objects = 0 if work.partial else compare_objects(content, result, same_objects)
        return Proof(len(content.tensors), nbytes, objects)

    def _require(self, pair: ResultTensor, made: TensorDigest) -> None:
        has, wanted = made.hexdigest(), self._digests[pair.key]
        if has != wanted:
            key = pair.info.key
            raise failed(f"{key} in the result has the digest {has} and not {wanted}", key)


class DigestedRange(NamedTuple):
    """Elements of one tensor of the result.

    Attributes:
        number: its place among the pairs.
        key: the tensor.
        shard: all of it.
        start, stop: which elements.
    """

    number: int
    key: str
    shard: Shard
    start: int
    stop: int


def _ranges(held: Sequence[ResultTensor], result: Checkpoint) -> Iterator[DigestedRange]:
    found = Content.of(result)
    for number, pair in enumerate(held):
        shard = found.whole(pair.info.key)
        step = _TASK // shard.dtype.bits * 8
        for start in range(0, shard.numel, step):
            yield DigestedRange(number, pair.info.key, shard, start, min(start + step, shard.numel))


def _digest(task: DigestedRange, gatherer: Gatherer) -> TensorDigest:
    dtype, shape = task.shard.dtype, task.shard.shape
    made = TensorDigest(dtype, shape)
    step = _STEP // dtype.bits * 8
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        view = buffer(dtype.nbytes(stop - start), _SLOT)
        gatherer.fill(task.shard, start, stop, view)
        made.update(Box.whole(shape), view, start)
    return made
