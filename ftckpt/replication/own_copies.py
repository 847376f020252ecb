"""Mend a checkpoint from the copies of its files that it keeps itself.

Some writers store every data file several times below one metadata. Such a checkpoint is its own
replica: read with each file's name standing for another copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.digests.files import hash_files
from ftckpt.errors import CorruptError, UnsafeError, UnverifiedError, UsageError
from ftckpt.extents import Extent
from ftckpt.findings import Severity
from ftckpt.manifest.locate import find
from ftckpt.progress import NULL
from ftckpt.storage import StoreOptions
from ftckpt.storage.readonly import ReadOnlyStore
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.workers import Work

from .options import ReplicationOptions
from .repair import RepairReport, repair
from .trusted_manifest import Open

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.storage.store import Entry, Reader, Store, Usage

_OPTIONS = ReplicationOptions()
_STORES = StoreOptions()


def repair_from_own_copies(
    source: Source,
    *,
    opened: Open,
    to: str = "",
    dry_run: bool = False,
    options: ReplicationOptions = _OPTIONS,
    stores: StoreOptions = _STORES,
) -> RepairReport:
    """Mend a checkpoint from the copies that it keeps itself; the arguments are those of `repair`.

    A block may be had from any of the copies that has it as it was sealed. If nothing is sealed,
    a file is taken whole from a copy of which every record matches its CRC-32.

    Raises:
        UsageError: it keeps no copies.
        CorruptError: a block is damaged in all of them, or a file that is there once.
        FtckptError: as `repair`, and as opening raises it.
    """
    last: CorruptError | None = None
    for replica in _replicas(source, opened, options.work):
        try:
            return repair(
                source, replica, opened=opened, to=to, dry_run=dry_run, options=options,
                stores=stores,
            )  # fmt: skip
        except CorruptError as error:  # what was mended stays for the next copy
            last = error
    assert last is not None
    raise last


def _replicas(source: Source, opened: Open, work: Work) -> Iterator[Source]:
    checkpoint = opened(source)
    copies = checkpoint.file_copies
    if not copies:
        raise UsageError(
            f"{source.url} keeps no copies of its files", hint="--from names another copy of it"
        )
    try:
        sealed = find(source) is not None
    except (CorruptError, UnsafeError):  # `repair` makes it anew
        sealed = False
    if not sealed:
        yield _read_as(source, _sound(checkpoint, work))
        return
    for turn in range(max(map(len, copies.values()))):
        yield _read_as(source, {name: all_[turn % len(all_)] for name, all_ in copies.items()})


def _sound(checkpoint: Checkpoint, work: Work) -> dict[str, str]:
    """Return for each file a copy in which no damage was found.

    Raises:
        UnverifiedError: two of its copies differ, and neither shows damage.
    """
    source, quiet = checkpoint.source, replace(work, counter=NULL)
    options = VerifyOptions(level=Level.CONTENT, use_manifest=False)
    report = verify(checkpoint, options, work=quiet)
    bad = {f.file for f in report.findings if f.severity is Severity.ERROR}
    sound = [n for n in checkpoint.file_copies if n in source.entries and n not in bad]
    digests = hash_files(source, {name: source.size(name) for name in sound}, work=quiet)
    found = {}
    for name, others in checkpoint.file_copies.items():
        whole = [one for one in (name, *others) if one in digests]
        differing = next((one for one in whole if digests[one] != digests[whole[0]]), "")
        if differing:
            raise UnverifiedError(
                f"{whole[0]} and {differing} differ, and no evidence says which of them is right",
                hint="--from names another copy of the checkpoint",
                file=differing,
            )
        found[name] = whole[0] if whole else name
    return found


def _read_as(source: Source, places: Mapping[str, str]) -> Source:
    """Return the source with other files' bytes under the names of `places`."""
    entries: dict[str, Entry] = {}
    below: dict[str, str] = {}
    for name in (*source.entries, *(n for n in places if n not in source.entries)):
        entry = source.entries.get(places.get(name, name))
        if entry is not None:
            below[source.path(name)] = entry.path
            entries[name] = entry._replace(path=source.path(name))
    return Source(_OtherNames(source.store, below), source.base, entries, named=source.named)


class _OtherNames(ReadOnlyStore):
    """A store in which some names stand for other files of it."""

    def __init__(self, below: Store, places: Mapping[str, str]) -> None:
        self.url = below.url
        self.traits = below.traits
        self.options = below.options
        self.refusal = f"{self.url} is read by the names of other copies, and not written so"
        self._below = below
        self._places = places

    def usage(self) -> Usage:
        """Return the usage of the store below."""
        return self._below.usage()

    def stat(self, path: str) -> Entry:
        """Return the entry of one key."""
        return self._below.stat(self._places.get(path, path))._replace(path=path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        found = {entry.path: entry for entry in self._below.walk(path)}
        for name in self._places:
            if not path or name.startswith(path + "/"):
                found[name] = self.stat(name)
        return sorted(found.values())

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""
        return self._below.open(self._places.get(path, path))

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        return self._below.read_many(
            [extent._replace(file=self._places.get(extent.file, extent.file)) for extent in extents]
        )
