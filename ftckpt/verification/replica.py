"""Compare a checkpoint with another copy of itself, byte by byte or tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import block_count, block_length
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import FtckptError
from ftckpt.extents import BLOCK
from ftckpt.findings import finding
from ftckpt.own_files import is_own
from ftckpt.storage.ranges import size_for
from ftckpt.storage.source import Source
from ftckpt.storage.store import Reader, Store
from ftckpt.workers import ALONE, Work
from ftckpt.workers.buffers import buffer, same
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Owners, Report, Sample, damaged


class BlockPair(NamedTuple):
    """The same block of two files: a task of the engine.

    Attributes:
        stores: ours and the replica's.
        paths: keys in them.
        file: the name in the checkpoint.
        offset: first byte.
        length: number of bytes.
        limiter: bounds the rate of reading, of both together.
    """

    stores: tuple[Store, Store]
    paths: tuple[str, str]
    file: str
    offset: int
    length: int
    limiter: RateLimit | None = None


class ReplicaDifference(NamedTuple):
    """A difference between the two.

    Attributes:
        file: the name in the checkpoint.
        length: compared bytes.
        first: offset of the first differing byte; None if equal.
        last: offset of the last one.
        error: why they could not be compared.
    """

    file: str
    length: int
    first: int | None = None
    last: int | None = None
    error: FtckptError | None = None


def check_against(
    checkpoint: Checkpoint,
    replica: Source,
    *,
    emit: Emit,
    work: Work = ALONE,
    sample: float | None = None,
    owners: Owners | None = None,
) -> ContentResult:
    """Compare the files of `checkpoint` with those of the same relative names in `replica`.

    It cannot tell which side is right. A difference is reported per 64 MiB block
    (`differs-from-replica`), narrowed to its first and last differing byte. `replica` is listed;
    the other arguments are as in `blocks.check_manifest`.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    report = Report(source, emit)
    chosen = Sample(sample, source.name)
    names = sorted(set(checkpoint.members()))
    wanted = [n for n in names if not is_own(n) and _both(source, replica, n, report)]
    total = sum(source.size(name) for name in wanted)
    work.counter.start("comparing", None if sample else total)
    read = 0
    tasks = _pairs(source, replica, wanted, chosen, report, work.limiter)
    for done in work.run(tasks, compare_or_fail):
        work.counter.add(done.length)
        if done.error is not None:
            report.fail(done.file, done.error)
            continue
        read += done.length
        if done.first is None or done.last is None or report.changed(done.file):
            continue
        length = done.last + 1 - done.first
        message = f"{done.file} differs from {replica.url} in bytes {done.first} to {done.last}"
        report.add(damaged("differs-from-replica", message, done.file, done.first, length, owners))
    uncovered = sum(source.size(n) for n in source.entries if not is_own(n) and n not in wanted)
    return ContentResult("replica", read, total, uncovered, sample, report.ok)


def _both(source: Source, replica: Source, name: str, report: Report) -> bool:
    """Report a file that one side lacks or has in another size; return whether both can be read."""
    try:
        ours = source.size(name)
    except FtckptError as error:
        report.fail(name, error)
        return False
    theirs = replica.entries.get(name)
    if theirs is None:
        message = f"{name} is not in {replica.url}"
        report.add(finding("differs-from-replica", message, file=name))
        return False
    if theirs.size != ours:
        low, high = sorted((ours, theirs.size))
        report.add(
            finding(
                "differs-from-replica",
                f"{name} has {ours} bytes here and {theirs.size} in {replica.url}",
                file=name,
                offset=low,
                length=high - low,
            )
        )
    return True


def _pairs(
    source: Source,
    replica: Source,
    names: Iterable[str],
    chosen: Sample,
    report: Report,
    limiter: RateLimit | None,
) -> Iterator[BlockPair]:
    for name in names:
        size = min(source.size(name), replica.size(name))
        places = (source.store, source.path(name)), (replica.store, replica.path(name))
        yield from pairs_of(places, name, size, chosen, report, limiter)


def pairs_of(
    places: tuple[tuple[Store, str], tuple[Store, str]],
    name: str,
    size: int,
    chosen: Sample,
    report: Report,
    limiter: RateLimit | None,
) -> Iterator[BlockPair]:
    """Yield the blocks of two files that are to be compared.

    Args:
        places: the store and the key of both.
        name: what the findings call the file.
        size: bytes to compare.
        chosen: which blocks.
        report: knows whether to go on.
        limiter: bounds the rate.
    """
    (ours, theirs) = places
    for number in range(block_count(size)):
        if report.failed(name):
            break
        if chosen.takes(name, number, first=number == 0):
            stores, paths = (ours[0], theirs[0]), (ours[1], theirs[1])
            length = block_length(size, number)
            yield BlockPair(stores, paths, name, number * BLOCK, length, limiter)


def compare_or_fail(pair: BlockPair) -> ReplicaDifference:
    """Compare one block of two files; a failure is a result too."""
    try:
        with (
            pair.stores[0].open(pair.paths[0]) as ours,
            pair.stores[1].open(pair.paths[1]) as theirs,
        ):
            first, last = _compare(pair, ours, theirs)
        return ReplicaDifference(pair.file, pair.length, first, last)
    except FtckptError as error:
        return ReplicaDifference(pair.file, pair.length, error=error)


def _compare(pair: BlockPair, ours: Reader, theirs: Reader) -> tuple[int | None, int | None]:
    first: int | None = None
    last: int | None = None
    size = max(map(size_for, pair.stores))
    end = pair.offset + pair.length
    for offset in range(pair.offset, end, size):
        length = min(size, end - offset)
        a, b = buffer(length, 0), buffer(length, 1)
        if pair.limiter is not None:
            pair.limiter.take(2 * length)
        ours.readinto(offset, a)
        theirs.readinto(offset, b)
        if same(a, b):
            continue
        low, high = _narrow(bytes(a), bytes(b))
        first = offset + low if first is None else first
        last = offset + high
    return first, last


def _narrow(a: bytes, b: bytes) -> tuple[int, int]:
    """Return the first and last differing index of two byte strings of equal length."""
    low, high = 0, len(a)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if a[low:middle] != b[low:middle] else (middle, high)
    first = low
    low, high = 0, len(a)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[middle:high] != b[middle:high] else (low, middle)
    return first, low


class TensorPair(NamedTuple):
    """One logical tensor of two checkpoints: a task of the engine."""

    ours: Checkpoint
    theirs: Checkpoint
    key: str
    limiter: RateLimit | None = None


def check_tensors_against(
    checkpoint: Checkpoint,
    replica: Checkpoint,
    *,
    emit: Emit,
    work: Work = ALONE,
    sample: float | None = None,
) -> ContentResult:
    """Compare the logical tensors of two checkpoints of any format and topology.

    A tensor of another key, shape, type or content is reported as `differs-from-replica`. Objects
    are not compared, because formats spell them differently. `sample` is a share of the tensors;
    the other arguments are as in `blocks.check_manifest`.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    report = Report(checkpoint.source, emit)
    chosen = Sample(sample, checkpoint.source.name)
    ours, theirs = checkpoint.tensors, replica.tensors
    for keys, where in (
        (sorted(ours.keys() - theirs.keys()), replica.source.url),
        (sorted(theirs.keys() - ours.keys()), checkpoint.source.url),
    ):
        for key in keys:
            message = f"{key} is not in {where}"
            report.add(finding("differs-from-replica", message, tensor=key))
    common = [
        key
        for number, key in enumerate(sorted(ours.keys() & theirs.keys()))
        if chosen.takes("", number, first=number == 0)
    ]
    work.counter.start("comparing tensors", sum(ours[key].nbytes for key in common))
    read = 0
    tasks = (TensorPair(checkpoint, replica, key, work.limiter) for key in common)
    for key, difference, error in work.run(tasks, compare_tensors):
        work.counter.add(ours[key].nbytes)
        if error is not None:
            report.fail(error.file or key, error, (key, None))
            continue
        read += ours[key].nbytes
        if difference:
            message = f"{key} differs from {replica.source.url}: {difference}"
            report.add(finding("differs-from-replica", message, tensor=key))
    covered = sum(ours[key].nbytes for key in ours.keys() & theirs.keys())
    uncovered = max(0, checkpoint.source.nbytes - covered)
    return ContentResult("replica", read, covered, uncovered, sample, report.ok)


def compare_tensors(pair: TensorPair) -> tuple[str, str, FtckptError | None]:
    """Return the key, how its tensors differ ("" if equal), and an error."""
    ours, theirs = pair.ours.tensors[pair.key], pair.theirs.tensors[pair.key]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        one, other = (f"{t.dtype.name}{list(t.shape)}" for t in (ours, theirs))
        return pair.key, f"{one} against {other}", None
    try:
        if digest_tensor(pair.ours, ours, pair.limiter) == digest_tensor(
            pair.theirs, theirs, pair.limiter
        ):
            return pair.key, "", None
    except FtckptError as error:
        return pair.key, "", error
    return pair.key, "other elements", None
