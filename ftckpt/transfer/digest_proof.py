"""Prove a result by tensor digests that are known already, without reading the source again.

Where a source is a delta, its index says what every tensor was when it was packed. A result with
those digests is what was packed, whatever happened on the way; the source would have to be decoded
a second time to compare it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

from ftckpt.buffers import buffer
from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.engine import run
from ftckpt.limits import RateLimit
from ftckpt.progress import NULL, Counter
from ftckpt.tensor_digest import TensorDigest

from .content import Content, Shard
from .gathering import Gatherer
from .proof import Proof, SameObjects, compare_forms, compare_objects, failed

_TASK = 32 << 20  # bytes digested by one task
_STEP = 1 << 20
_SLOT = 4


class DigestProof:
    """Compares the tensors of a result with digests; a `Prover`.

    Args:
        digests: the tensor digest of each tensor that is to be written, by key.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = digests

    def __call__(
        self,
        content: Content,
        result: Checkpoint,
        same_objects: SameObjects,
        *,
        jobs: int = 1,
        executor: Executor | None = None,
        limiter: RateLimit | None = None,
        counter: Counter = NULL,
    ) -> Proof:
        """Compare a result with what was to be written (see `proof.prove`).

        Raises:
            CorruptError: names, shapes, types, tiling, digests or objects differ (`failed-proof`).
        """
        compare_forms(content, result)
        nbytes = sum(wanted.nbytes for wanted in content.tensors.values())
        counter.start("proving", nbytes)
        gatherer = Gatherer(result, limiter)

        def digest(task: _Range) -> tuple[str, TensorDigest]:
            made = _digest(task, gatherer)
            counter.add(task.shard.dtype.nbytes(task.stop - task.start))
            return task.key, made

        found = {
            key: TensorDigest(wanted.dtype, wanted.shape) for key, wanted in content.tensors.items()
        }
        try:
            for key, part in run(_ranges(content, result), digest, jobs=jobs, executor=executor):
                found[key].merge(part)
        finally:
            gatherer.close()
        for key, made in found.items():
            if made.hexdigest() != self._digests[key]:
                raise failed(
                    f"{key} in the result has the digest {made.hexdigest()} and not "
                    f"{self._digests[key]}",
                    key,
                )
        return Proof(len(found), nbytes, compare_objects(content, result, same_objects))


class _Range(NamedTuple):
    """Elements `start` to `stop` of one tensor of the result."""

    key: str
    shard: Shard
    start: int
    stop: int


def _ranges(content: Content, result: Checkpoint) -> Iterator[_Range]:
    found = Content.of(result)
    for key in content.tensors:
        shard = found.whole(result.aliases.get(key, key))
        step = _TASK // shard.dtype.bits * 8
        for start in range(0, shard.numel, step):
            yield _Range(key, shard, start, min(start + step, shard.numel))


def _digest(task: _Range, gatherer: Gatherer) -> TensorDigest:
    dtype, shape = task.shard.dtype, task.shard.shape
    made = TensorDigest(dtype, shape)
    step = _STEP // dtype.bits * 8
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        view = buffer(dtype.nbytes(stop - start), _SLOT)
        gatherer.fill(task.shard, start, stop, view)
        made.update(Box.whole(shape), view, start)
    return made
