"""Compare the copies of its files that a checkpoint keeps itself.

Every copy may be right in itself and be of another save: CRC-32s do not tell. If a manifest lists
their digests, nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ftckpt.checkpoint import Checkpoint
from ftckpt.findings import finding
from ftckpt.manifest import Manifest
from ftckpt.workers import Work

from .evidence import Emit, Report, Sample
from .replica import compare_or_fail, pairs_of


def check_file_copies(
    checkpoint: Checkpoint,
    *,
    emit: Emit,
    work: Work,
    manifest: Manifest | None,
    sample: float | None = None,
    bad: Collection[str] = (),
) -> tuple[int, bool]:
    """Report the copies of a file that differ (`copies-differ`).

    Args:
        checkpoint: keeps copies of its files.
        emit: takes the findings.
        work: how.
        manifest: has the digests of all files, if the checkpoint is sealed.
        sample: share of the blocks to compare; None for all.
        bad: files with damage that is known already: they differ, and nothing more is learnt.

    Returns:
        The bytes that were read, and whether no copy differs.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    report = Report(source, emit)
    pairs = list(_pairs(checkpoint.file_copies, source.entries, bad))
    if manifest is not None:
        for first, other in pairs:
            ours, theirs = (manifest.by_path.get(name) for name in (first, other))
            if ours is not None and theirs is not None and ours.digest != theirs.digest:
                report.add(finding("copies-differ", _differ(first, other), file=other))
        return 0, report.ok
    chosen = Sample(sample, source.name)
    alike = []
    for first, other in pairs:
        if source.size(first) == source.size(other):
            alike.append((first, other))
        else:
            report.add(finding("copies-differ", _differ(first, other), file=other))
    total = sum(source.size(first) for first, _ in alike)
    work.counter.start("comparing copies", None if sample else total)
    read = 0
    first_of = {other: first for first, other in alike}
    tasks = (
        pair
        for first, other in alike
        for pair in pairs_of(
            ((source.store, source.path(first)), (source.store, source.path(other))),
            other, source.size(first), chosen, report, work.limiter,
        )
    )  # fmt: skip
    for done in work.run(tasks, compare_or_fail):
        work.counter.add(done.length)
        if done.error is not None:
            report.fail(done.file, done.error)
            continue
        read += 2 * done.length
        if done.first is None or done.last is None or report.changed(done.file):
            continue
        what = f"{_differ(first_of[done.file], done.file)} in bytes {done.first} to {done.last}"
        length = done.last + 1 - done.first
        report.add(finding("copies-differ", what, file=done.file, offset=done.first, length=length))
    return read, report.ok


def _differ(first: str, other: str) -> str:
    return f"{first} and {other}, copies of one file, differ"


def _pairs(
    copies: Mapping[str, Iterable[str]], entries: Collection[str], bad: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the first sound copy of each file with each other one, once."""
    seen: set[str] = set()
    for name, others in copies.items():
        if name in seen:
            continue
        group = [n for n in (name, *others) if n in entries and n not in bad]
        seen.update((name, *others))
        for other in group[1:]:
            yield group[0], other
