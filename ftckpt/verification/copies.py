"""Compare the copies of files that lie in several of the places of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import CorruptError
from ftckpt.findings import Finding, from_error
from ftckpt.own_files import is_own
from ftckpt.storage.chunks import chunks, size_for
from ftckpt.workers import Work


class CopiesOf(NamedTuple):
    """The copies of one file to compare: a task of the engine."""

    file: str


def check_copies(checkpoint: Checkpoint, work: Work) -> Iterator[Finding]:
    """Read every file that lies in several places, and yield those whose copies differ.

    The store compares the copies while one is read (`ftckpt.storage.several_places`). Copies of
    another size are the structure's finding.

    Raises:
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    names = [n for n in sorted(set(checkpoint.members())) if not is_own(n) and n in source.entries]
    shared = [n for n in names if source.entries[n].copies and not source.entries[n].differs]
    work.counter.start("comparing copies", sum(source.size(name) for name in shared))

    def compare(one: CopiesOf) -> CorruptError | None:
        try:
            _read(checkpoint, one.file, work)
        except CorruptError as error:
            return error
        return None

    for error in work.each(map(CopiesOf, shared), compare):
        if error is not None:
            yield from_error(error)


def _read(checkpoint: Checkpoint, name: str, work: Work) -> None:
    source = checkpoint.source
    size = size_for(source.store)
    with source.open(name) as reader:
        for part in chunks(reader, 0, source.size(name), size=size, limiter=work.limiter):
            work.counter.add(len(part))
