"""Shared parts of content checks: the result, the reports, the sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError, NotFoundError, TruncatedError, UnavailableError
from ftckpt.findings import Finding, Severity, finding, from_error
from ftckpt.storage.source import Source

Owner = tuple[str, int | None]
Owners = Callable[[str, int, int], Sequence[Owner]]
"""(file, offset, length) -> key and rank of every tensor and object with bytes in that range."""

# This many unreadable files mean that the storage is gone, not the files.
_GIVE_UP = 8

# Up to this many files missing from a listing are looked up by name; that reveals a stale one.
ASKED_FOR = 16


class StopChecking(Exception):
    """Raised by `emit` to end a check early (`--fail-fast`); the check does not catch it."""


Emit = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class ContentResult:
    """The result of a content check.

    Attributes:
        evidence: `manifest`, `digests` (of the format's own), `sha256` or `md5` (of whole files),
            `crc32`, `replica`, `signature` or `none`.
        bytes_read: bytes of the checkpoint that were read.
        bytes_covered: bytes that evidence covers, sampled or not.
        bytes_uncovered: bytes of its files without evidence.
        sampled: the requested share, None for all.
        ok: whether no error was found.
        bare: files of the checkpoint without any evidence.
        decoded: whether tensors were decoded too, by the format's own digests.
        records: whether CRC-32s of records cover files that the digests of files leave out.
        signer: whose signature it was held to.
    """

    evidence: str
    bytes_read: int
    bytes_covered: int
    bytes_uncovered: int
    sampled: float | None
    ok: bool
    bare: tuple[str, ...] = ()
    decoded: bool = False
    records: bool = False
    signer: str = ""


class Sample(NamedTuple):
    """Selects the same share of blocks or records in every run.

    Attributes:
        share: in (0, 1]; None selects everything.
        name: of the checkpoint, so that different checkpoints are sampled differently.
    """

    share: float | None = None
    name: str = ""

    def takes(self, file: str, place: int, *, first: bool) -> bool:
        """Whether the block or record at `place` of `file` is in; a file's first always is."""
        if self.share is None or first:
            return True
        import xxhash

        text = f"0\0{self.name}\0{file}\0{place}"
        drawn: int = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
        return drawn < self.share * (1 << 64)


class Report:
    """Passes findings on and tracks their effect on the rest of the check.

    `emit` receives the findings in the thread of the check.
    """

    def __init__(self, source: Source, emit: Emit) -> None:
        self.ok = True
        self._source = source
        self._emit = emit
        self._failed: set[str] = set()
        self._unreadable = 0

    def add(self, found: Finding) -> None:
        """Pass on one finding."""
        self.ok = self.ok and found.severity is not Severity.ERROR
        self._emit(found)

    def failed(self, file: str) -> bool:
        """Whether reading `file` is pointless by now."""
        return file in self._failed

    def fail(self, file: str, error: FtckptError, owner: Owner | None = None) -> None:
        """Report that `file` cannot be read further; once per file.

        Raises:
            UnavailableError: too many files are unreadable: the storage must be gone.
        """
        if file in self._failed:
            return
        # A listed file that is gone or short was not damaged: somebody is writing.
        passed = isinstance(error, (NotFoundError, TruncatedError))
        if passed and file in self._source.entries and self.changed(file):
            return
        self._failed.add(file)
        if isinstance(error, UnavailableError):
            self._unreadable += 1
            if self._unreadable >= _GIVE_UP:
                raise error
        if not error.file:
            error.file = file
        key, rank = owner or (None, None)
        self.add(from_error(error, tensor=key, rank=rank))

    def changed(self, file: str) -> bool:
        """Report `file` if it differs from its listing; return whether it does."""
        if file in self._failed:
            return True
        stored = self._source.stored(file)
        entry = self._source.entry(stored)
        did = "changed"
        try:
            if entry.same_version(self._source.store.stat(self._source.path(stored))):
                return False
        except NotFoundError:
            did = "went away"
        self._failed.add(file)
        self.add(finding("changed-file", f"{file} {did} while it was being read", file=file))
        return True


def damaged(
    kind: str, message: str, file: str, offset: int, length: int, owners: Owners | None
) -> Finding:
    """Return the finding for a range of a file, with the owners of its bytes.

    `owners` finds them (None: unknown); the message gets their names.
    """
    inside = list(owners(file, offset, length)) if owners is not None else []
    key, rank = inside[0] if inside else (None, None)
    return finding(
        kind,
        f"{message}, which hold {named(inside)}" if inside else message,
        file=file,
        tensor=key,
        rank=rank,
        offset=offset,
        length=length,
    )


def named(owners: Sequence[Owner]) -> str:
    """Return owners in words: up to three, and the number of others."""
    words = [key if rank is None else f"{key} (rank {rank})" for key, rank in owners[:3]]
    if len(owners) > 3:
        words.append(f"{len(owners) - 3} more")
    return ", ".join(words)


class OwnerIndex:
    """Finds owners of byte ranges; the index is built when the first damage is found."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, list[tuple[int, int, Owner]]] | None = None

    def __call__(self, file: str, offset: int, length: int) -> Sequence[Owner]:
        """Return key and rank of everything with bytes in the range, in the order of its bytes."""
        if self._files is None:
            self._files = self._build()
        end = offset + length
        found: dict[Owner, None] = {}
        for start, stop, owner in self._files.get(file, ()):
            if start < end and stop > offset:
                found[owner] = None
        return list(found)

    def _build(self) -> dict[str, list[tuple[int, int, Owner]]]:
        files: dict[str, list[tuple[int, int, Owner]]] = defaultdict(list)
        for extent, name, rank in self._checkpoint.extents_by_owner():
            files[extent.file].append((extent.offset, extent.end, (name, rank)))
        for owners in files.values():
            owners.sort(key=lambda item: item[:2])
        return files
