"""Mend a checkpoint from the copies of its files that it keeps itself.

Some writers store every data file several times below one metadata. Such a checkpoint is its own
replica: read with each file's name standing for another copy of it. Where several ranks wrote the
same shards, damaged ones are read from the others (see `own_replicas`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.read_tensor import stream_payload
from ftckpt.digests.blocks import hash_files
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    FtckptError,
    UnavailableError,
    UnsafeError,
    UnverifiedError,
    UsageError,
)
from ftckpt.extents import BLOCK, Extent
from ftckpt.findings import Finding, Severity
from ftckpt.manifest.locate import find
from ftckpt.progress import NULL
from ftckpt.storage import StoreOptions
from ftckpt.storage.readonly import StoreView
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.verification.replica import BlockPair, compare_or_fail
from ftckpt.workers import Work

from .options import ReplicationOptions
from .own_replicas import has_replicas, spliced
from .repair import RepairReport, repair
from .trusted_manifest import Open

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.storage.store import Entry, Reader, Store

_CHANGING = frozenset({Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ})
# Bytes of a record of which it is not a chance that two steps have the same.
_ENOUGH = 64
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
    a file is taken whole from a copy of which every record matches its CRC-32, if the damaged file
    shows that both are of one save: it is there, and they differ only in damaged records.
    A damaged shard may be had from a replica whose bytes have its recorded CRC-32.

    Raises:
        UsageError: it keeps no copies, neither of files nor of shards.
        CorruptError: a block is damaged in all of them, or a file that is there once.
        UnverifiedError: nothing is sealed, and nothing says which copy is right.
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
        if has_replicas(checkpoint):
            yield spliced(checkpoint, replace(work, counter=NULL))
            return
        raise UsageError(
            f"{source.url} keeps no copies of its files or shards",
            hint="--from names another copy of it",
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

    That a copy matches its own CRC-32s does not show that it is of this save. The damaged copy
    shows it: see `_require_same_save`.

    Raises:
        UnverifiedError: two of its copies differ, and neither shows damage; or nothing shows that
            the copies are of one save.
    """
    source, quiet = checkpoint.source, replace(work, counter=NULL)
    options = VerifyOptions(level=Level.CONTENT, use_manifest=False)
    report = verify(checkpoint, options, work=quiet)
    # That two copies differ does not say which is damaged.
    errors = (f for f in report.findings if f.severity is Severity.ERROR)
    damage = [f for f in errors if f.kind != "copies-differ"]
    bad = {f.file for f in damage}
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
    taken = {name: place for name, place in found.items() if place != name and name not in digests}
    if taken:
        _require_same_save(checkpoint, taken, damage, quiet)
    return found


def _require_same_save(
    checkpoint: Checkpoint,
    taken: Mapping[str, str],
    damage: Sequence[Finding],
    work: Work,
) -> None:
    """Demand that each damaged file shows that the copy taken for it is of the same save.

    It does where both have the same bytes, but for records that do not match their CRC-32. Then
    both have the same recorded CRC-32 for the damaged record too, and the copy matches it.
    What is left of a short file shows it where it is the beginning of the copy and holds state that
    every step changes. Of a missing one nothing does.

    Args:
        checkpoint: opened.
        taken: copies to take, by the names of the damaged files.
        damage: that was found.
        work: how.

    Raises:
        UnverifiedError: a file is missing, is longer, differs elsewhere, or too little is left.
    """
    source = checkpoint.source
    sizes = {}
    for name, place in taken.items():
        sizes[name] = source.size(name) if name in source.entries else 0
        whole = source.size(place)
        short = sizes[name] < whole
        if sizes[name] > whole or (short and not _shows(checkpoint, place, sizes[name], work)):
            raise _not_of_one_save(name, place)
    failed = {
        Extent(f.file, f.offset, f.length)
        for f in damage
        if f.kind == "bad-crc" and f.file is not None and f.offset is not None and f.length
    }
    extents: dict[str, list[Extent]] = {name: [] for name in taken}
    with suppress(FtckptError):  # what lies behind that damage is compared
        for record in checkpoint.records():
            # The CRC-32s of a transformed stream are in the stream, which is damaged itself.
            one = record.extent
            if one in failed and one.file in taken and not record.transforms:
                extents[one.file].append(one)
    store = source.store
    pairs = (
        BlockPair(
            (store, store), (source.path(name), source.path(place)), name, offset, length,
            work.limiter,
        )
        for name, place in taken.items()
        for offset, length in _between(extents[name], sizes[name])
    )  # fmt: skip
    for done in work.run(pairs, compare_or_fail):
        if isinstance(done.error, (DeniedError, UnavailableError)):
            raise done.error
        if done.error is not None or done.first is not None:
            raise _not_of_one_save(done.file, taken[done.file])


def _shows(checkpoint: Checkpoint, place: str, size: int, work: Work) -> bool:
    """Return whether the first bytes of a file hold state that is another one after each step.

    That is a whole record of a moment or a master. Parameters prove nothing: frozen ones keep their
    values, as those below an adapter do, and so may those of few bits. A record of one value, as
    moments before the first gradient are, is the same in many saves.
    """
    for info in checkpoint.tensors.values():
        if info.kind not in _CHANGING or info.nbytes < _ENOUGH:
            continue
        for piece in info.pieces:
            if piece.extent.file != place or piece.extent.end > size:
                continue
            payload = checkpoint.payload(piece)
            if payload.transforms or payload.extent.length < _ENOUGH:
                continue
            data = next(iter(stream_payload(checkpoint.source, payload, work.limiter)), b"")
            if len(set(data)) > 2 * info.dtype.itemsize:
                return True
    return False


def _between(extents: Sequence[Extent], size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what lies between extents of a file, in blocks."""
    at = 0
    for start, end in (*sorted((e.offset, e.end) for e in extents), (size, size)):
        while at < start:
            length = min(BLOCK, start - at)
            yield at, length
            at += length
        at = max(at, end)


def _not_of_one_save(name: str, place: str) -> UnverifiedError:
    return UnverifiedError(
        f"no evidence says that {place} is of the same save as {name}, which is damaged or missing",
        hint="--from names another copy of the checkpoint",
        file=name,
    )


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


class _OtherNames(StoreView):
    """A store in which some names stand for other files of it."""

    def __init__(self, below: Store, places: Mapping[str, str]) -> None:
        super().__init__(
            below, f"{below.url} is read by the names of other copies, and not written so"
        )
        self._places = places

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
