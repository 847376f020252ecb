"""Check files against the manifest of a sealed checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ftckpt.digests.blocks import (
    Block,
    BlockDigest,
    BlockFailure,
    block_count,
    block_length,
    hash_or_fail,
)
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.extents import BLOCK
from ftckpt.findings import finding, listed
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.own_files import VOUCHERS, is_own
from ftckpt.progress import count_file, expect_files
from ftckpt.storage.source import Source
from ftckpt.workers import ALONE, Work
from ftckpt.workers.limits import RateLimit

from .evidence import ASKED_FOR, ContentResult, Emit, Owners, Report, Sample, damaged

if TYPE_CHECKING:
    from .seen import SeenBytes
    from .used_bytes import UsedBytes


def check_manifest(
    source: Source,
    manifest: Manifest,
    *,
    emit: Emit,
    members: Iterable[str] | None = None,
    work: Work = ALONE,
    sample: float | None = None,
    owners: Owners | None = None,
    used: UsedBytes | None = None,
    seen: SeenBytes | None = None,
) -> ContentResult:
    """Compare every file of `source` with `manifest`, block by block.

    Reports missing and added files, files of another size, and blocks of other content
    (`bad-digest`, with the tensors and ranks that have bytes in them).

    Args:
        source: the files, listed.
        manifest: of the sealed files.
        emit: receives the findings when they are found.
        members: names that belong to the checkpoint by its own index, if it can be opened.
        work: threads, rate limit and counter of bytes.
        sample: share of the blocks to read; None for all. A file's first block is always read.
        owners: finds the owners of a range of a file.
        used: only blocks with these bytes are read; None for all.
        seen: what was read and hashed before, which is not read again.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    report = Report(source, emit)
    chosen = Sample(sample, source.name)
    wanted, uncovered = compare_listing(source, manifest, members or (), report)
    work.counter.start("checking digests", None if sample else sum(f.size for f in wanted))
    left = {file.path: block_count(file.size) for file in wanted if file.size}
    if not sample:
        expect_files(work.counter, len(left))
    read = 0
    tasks = _blocks(source, wanted, chosen, report, work.limiter)
    if used is not None:
        tasks = (
            one
            for one in tasks
            if used.takes(one.file, one.number * BLOCK, one.number * BLOCK + one.length)
        )
    before: list[int] = []
    if seen is not None:
        tasks = _unseen(tasks, seen, manifest, before)
    for done in work.run(tasks, hash_or_fail):
        work.counter.add(done.length)
        left[done.file] -= 1
        if not left[done.file]:
            count_file(work.counter)
        read += _compare_block(source, manifest, done, report, owners)
    if seen is not None:
        seen.taken += sum(before)
    work.counter.add(sum(before))
    read += sum(before)
    unread = 0 if used is None else manifest.nbytes - read
    return ContentResult(
        "manifest", read, manifest.nbytes - unread, uncovered + unread, sample, report.ok
    )


def _unseen(
    tasks: Iterable[Block], seen: SeenBytes, manifest: Manifest, before: list[int]
) -> Iterator[Block]:
    """Yield the blocks that are still to be read; note the bytes of the others in `before`."""
    for one in tasks:
        if seen.hashed(one.file, one.number) == manifest.by_path[one.file].block(one.number):
            before.append(one.length)
        else:
            yield one


def check_blocks(
    source: Source,
    manifest: Manifest,
    blocks: Mapping[str, Collection[int]],
    *,
    emit: Emit,
    work: Work = ALONE,
    owners: Owners | None = None,
) -> int:
    """Compare some blocks of some files with `manifest`; return the bytes read.

    `blocks` are block numbers by file; these files have the sealed size. The other arguments are as
    in `check_manifest`.

    Raises:
        UnavailableError: the storage does not answer.
    """
    report = Report(source, emit)
    tasks = [
        Block(source.store, source.path(file), file, number,
              block_length(manifest.by_path[file].size, number), work.limiter)
        for file, numbers in blocks.items() for number in sorted(numbers)
    ]  # fmt: skip
    return sum(
        _compare_block(source, manifest, done, report, owners)
        for done in work.run(tasks, hash_or_fail)
    )


def _compare_block(
    source: Source, manifest: Manifest, done: BlockDigest | BlockFailure, report: Report,
    owners: Owners | None,
) -> int:  # fmt: skip
    """Report a block of other content, or an unreadable one; return the bytes read."""
    if isinstance(done, BlockFailure):
        report.fail(done.file, done.error)
        return 0
    expected = manifest.by_path[done.file].block(done.number)
    if done.digest != expected and not report.changed(done.file):
        _report_block(source, done, expected, report, owners)
    return done.length


def compare_listing(
    source: Source, manifest: Manifest, members: Iterable[str], report: Report
) -> tuple[list[FileDigest], int]:
    """Compare names and sizes with `manifest`, as `check_manifest` does; reads no file.

    Returns:
        The files of `manifest` with bytes to check, and the bytes of the files outside it.

    Raises:
        StopChecking: from `emit` of the report.
        UnavailableError: the storage does not answer.
    """
    uncovered = _report_others(source, manifest, set(members), report)
    absent = [f.path for f in manifest.files if f.path not in source.entries]
    unasked = frozenset(absent[ASKED_FOR:])
    wanted = []
    for file in manifest.files:
        if file.path in unasked:
            message = f"{file.path} is missing"
            report.fail(file.path, CorruptError(message, kind="missing-file", file=file.path))
        elif _compare_size(source, file, report):
            wanted.append(file)
    return wanted, uncovered


def _report_others(source: Source, manifest: Manifest, members: set[str], report: Report) -> int:
    """Report files that the manifest does not list; return their bytes."""
    bytes_outside = 0
    known: list[str] = []
    for name, entry in source.entries.items():
        if name in manifest.by_path or name in VOUCHERS or is_own(name):
            continue
        bytes_outside += entry.size
        if name in members:
            report.add(
                finding(
                    "added-file",
                    f"{name} belongs to the checkpoint and is not in the manifest",
                    file=name,
                )
            )
        elif name in manifest.unmanaged:
            known.append(name)
        else:
            report.add(finding("unmanaged-file", f"{name} came beside the sealed files", file=name))
    if known:
        message = f"{len(known)} files were left out at sealing: {listed(known)}"
        report.add(finding("not-covered", message))
    return bytes_outside


def _compare_size(source: Source, file: FileDigest, report: Report) -> bool:
    """Report a file that is gone or of another size; return whether it has bytes to check."""
    try:
        size = source.size(file.path)
    except FtckptError as error:
        report.fail(file.path, error)
        return False
    if size < file.size:
        report.add(
            finding(
                "truncated-file",
                f"{file.path} has {size} bytes and had {file.size} when it was sealed",
                file=file.path,
                offset=size,
                length=file.size - size,
            )
        )
    elif size > file.size:
        report.add(
            finding(
                "trailing-bytes",
                f"{file.path} has {size} bytes and had {file.size} when it was sealed",
                file=file.path,
                offset=file.size,
                length=size - file.size,
            )
        )
    return True


def _blocks(
    source: Source,
    files: Iterable[FileDigest],
    chosen: Sample,
    report: Report,
    limiter: RateLimit | None,
) -> Iterator[Block]:
    """Yield the blocks to read; of a short file only whole ones."""
    for file in files:
        path = source.path(file.path)
        size = source.size(file.path)
        for number in range(block_count(file.size)):
            length = block_length(file.size, number)
            if report.failed(file.path) or number * BLOCK + length > size:
                break
            if chosen.takes(file.path, number, first=number == 0):
                yield Block(source.store, path, file.path, number, length, limiter)


def _report_block(
    source: Source, done: BlockDigest, expected: bytes, report: Report, owners: Owners | None
) -> None:
    """Report a block of other content, unless only the transfer damaged it."""
    offset = done.number * BLOCK
    # A bit can flip on the wire or in memory; damage at rest is read the same twice.
    again = hash_or_fail(
        Block(source.store, source.path(done.file), done.file, done.number, done.length)
    )
    if isinstance(again, BlockDigest) and again.digest == expected:
        message = f"{done.file} was read wrongly once at {offset} and rightly then"
        report.add(finding("note", message, file=done.file, offset=offset, length=done.length))
        return
    message = f"{done.file} differs from the manifest in bytes {offset} to {offset + done.length}"
    report.add(damaged("bad-digest", message, done.file, offset, done.length, owners))
