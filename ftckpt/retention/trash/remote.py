"""The trash of a root in an object store, which has no rename.

    .ftckpt/trash/20261121T031500.123456Z~step-100      its tombstone: every key, and what it held
    .ftckpt/trash/20261121T031500.123456Z!step-100      the same, while it is being freed

One put of its tombstone drops an entry: from then on ftckpt treats it as trash. Then its commit
marker is removed, so that nobody else treats it as a checkpoint; the tombstone keeps the marker's
bytes. The data stay under their keys until they are freed: only those keys, each only while it
holds the listed object, and the answer for each is checked.

A tombstone is valid while nothing of the entry is younger. If a trainer has saved there again, the
entry is not trash any more and is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from shlex import quote

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.dropped import TRASH, Tomb, finished_since, is_record
from ftckpt.discovery.recognise import UnopenedPart
from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    FtckptError,
    NewerWriterError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsafeError,
)
from ftckpt.own_files import MANIFEST, TRANSFER
from ftckpt.retention.locks.remote import RemoteLock
from ftckpt.retention.policy.plan import Decision
from ftckpt.retention.scan.classify import marker_of
from ftckpt.retention.scan.entry import ScannedEntry, fingerprint_of, list_entry
from ftckpt.retention.trash import Erased, Trashed, parse_trash_name, trash_name
from ftckpt.storage.store import Entry, EntryKind, join, relative

from .tombstone import MAX_BYTES, Tombstone

# Keys per delete request, and between two checks of the lock.
_BATCH = 1000


class RemoteTrash:
    """The trash of one root in an object store (see `trash.Trash`)."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._store = root.store
        self._folder = join(root.base, TRASH)
        self._lock: RemoteLock | None = None

    @contextmanager
    def lock(self, actor: str, now: float) -> Iterator[None]:
        """Take the lease of the root, and give it back."""
        lock = RemoteLock(self._root, actor)
        lock.acquire()
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            with suppress(FtckptError):  # it expires by itself
                lock.release()

    def discard(
        self,
        found: ScannedEntry,
        decision: Decision,
        *,
        actor: str,
        now: float,
        final: bool = False,
    ) -> Trashed:
        """Put the tombstone of an entry, then remove its commit marker."""
        files = list_entry(self._store, found.place)
        self._require_as_seen(found, files)
        child = found.child
        marker = None if child is None else marker_of(self._store, child.part, files)
        markers = [] if marker is None else [marker]
        tombstone = Tombstone(
            name=relative(self._root.base, found.place.path),
            directory=found.place.kind is EntryKind.DIRECTORY,
            time=now,
            actor=actor,
            reasons=tuple(str(reason) for reason in decision.reasons),
            files=tuple(files),
            versions=tuple(self._store.history(files)),
            markers={m.path: self._store.read(m.path, 0, m.size) for m in markers},
        )
        self._check()
        trashed = self._put(tombstone)
        try:
            self._remove(markers)
        except FtckptError:
            with suppress(FtckptError):
                self.restore(trashed)  # so it still stands
            raise
        return trashed

    def listed(self) -> list[Trashed]:
        """Return everything with a tombstone, the earliest first."""
        try:
            entries = self._store.children(self._folder)
        except NotFoundError:
            return []
        found: dict[str, Trashed] = {}
        for entry in entries:
            trashed = self._parsed(entry)
            # Of two tombstones that a killed run left, prefer the one that is being freed.
            if trashed is not None and (trashed.id not in found or trashed.erasing):
                found[trashed.id] = trashed
        return sorted(found.values(), key=lambda t: (t.time, t.name))

    def restore(self, trashed: Trashed) -> None:
        """Restore the commit marker of an entry whose other keys are all still there."""
        if trashed.erasing:
            raise RefusedError(f"{trashed.name} is being reclaimed: it is not whole any more")
        tombstone = self._read(trashed)
        standing = {file.path: file for file in self._standing(tombstone)}
        own = self._ended_transfers(tombstone, standing)
        for file in tombstone.files:
            there = standing.get(file.path)
            if file.path.startswith(own):
                continue  # a transfer's own records, which went when it ended
            if there is None and file.path not in tombstone.markers:
                raise RefusedError(f"{trashed.name} is not whole any more: {file.path} is gone")
            if there is not None and not self._is_same(there, file, tombstone):
                raise ExistsError(
                    f"{self._store.describe(file.path)} holds something else by now: "
                    f"{trashed.name} was saved again",
                    file=file.path,
                )
        for path, data in tombstone.markers.items():
            if path not in standing:
                self._check()
                self._store.create(path, data)
        self._check()
        self._delete(trashed.path)

    def is_whole(self, trashed: Trashed) -> bool:
        """Whether all keys of an entry stand but the marker that its drop took away."""
        known = self._known(trashed)
        if known is None:
            return False
        tombstone, standing = known
        gone = {file.path for file in tombstone.files} - {file.path for file in standing}
        if gone - tombstone.markers.keys():
            return False
        if tombstone.markers:
            return not trashed.erasing
        part = self._recognised(tombstone, standing)
        return part is not None and part.recognition.commit is not CommitState.UNCOMMITTED

    def recall(self, trashed: Trashed) -> bool:
        """Delete the tombstone of an entry whose commit marker stands as it did.

        A drop takes the marker away. This one was killed, or somebody who could not do that has
        written its tombstone.
        """
        known = self._known(trashed)
        if known is None:
            return False
        tombstone, standing = known
        listed = {file.path: file for file in tombstone.files}
        there = [f for f in standing if f.path in listed and f.same_object(listed[f.path])]
        if tombstone.markers:
            committed = tombstone.markers.keys() <= {file.path for file in there}
        else:
            part = self._recognised(tombstone, there)
            committed = part is not None and marker_of(self._store, part, there) is not None
        if committed:
            self._check()
            self._delete(trashed.path)
        return committed

    def _known(self, trashed: Trashed) -> tuple[Tombstone, list[Entry]] | None:
        """Return a tombstone, and what stands of its entry; None if nothing is done by it.

        A transfer to the entry says better what is the matter with it.
        """
        try:
            tombstone = self._read(trashed)
        except (CorruptError, UnsafeError, NewerWriterError, NotFoundError):
            return None
        standing = self._standing(tombstone)
        written = self._store.stat(trashed.path).mtime
        held = written is not None and Tomb(self._store, trashed.path, written).holds(standing)
        return None if any(_is_transfer(f) for f in standing) or not held else (tombstone, standing)

    def is_ours(self, trashed: Trashed) -> bool:
        """No store says who wrote a tombstone: `recall` looks whether its drop was carried out."""
        return True

    def erase(self, trashed: Trashed) -> Erased:
        """Mark an entry as being freed, then delete all its keys."""
        tombstone = self._read(trashed)
        standing = self._standing(tombstone)
        self._require_trash(trashed, tombstone, standing)
        self._check()
        trashed = self._marked(trashed, tombstone)
        transfers = [f for f in standing if _is_transfer(f)]
        if transfers:  # one that still runs is refused from here on, or has ended before
            self._remove(transfers)
            self._require_trash(trashed, tombstone, self._standing(tombstone))
        errors: dict[str, FtckptError] = {}
        freed = 0
        there = {file.path for file in standing}
        late = self._late_records(tombstone, standing)
        doomed = (*(tombstone.versions or tombstone.files), *(self._store.history(late) or late))
        for first in range(0, len(doomed), _BATCH):
            self._check()
            batch = doomed[first : first + _BATCH]
            for entry, error in zip(batch, self._store.erase(batch), strict=True):
                if error is not None:
                    errors[entry.path] = error
                else:
                    freed += entry.size if entry.path in there else 0
        for file in self._standing(tombstone):
            if file.path in there and file.path not in errors:
                errors[file.path] = UnavailableError(
                    f"{self._store.describe(file.path)} is said to be gone and is still listed"
                )
        if not errors:
            self._check()
            self._delete(trashed.path)
            freed += sum(len(d) for path, d in tombstone.markers.items() if path not in there)
        return Erased(freed, errors)

    def _check(self) -> None:
        assert self._lock is not None, "what changes anything is called within the lock"
        self._lock.check()

    def _require_as_seen(self, found: ScannedEntry, files: Sequence[Entry]) -> None:
        seen = found.entry.contents
        if seen is not None and fingerprint_of(files) != seen.fingerprint:
            raise RefusedError(f"{found.entry.name} stays: it has changed since it was listed")
        for file in files:
            if file.kind is not EntryKind.FILE:
                raise UnsafeError(
                    f"{self._store.describe(file.path)} is not a plain key: nothing is dropped",
                    kind="unsafe-path",
                    file=file.path,
                )

    def _delete(self, path: str) -> None:
        error = self._store.delete([path])[path]
        if error is not None:
            raise error

    def _put(self, tombstone: Tombstone) -> Trashed:
        time = tombstone.time
        while True:
            path = f"{self._folder}/{trash_name(tombstone.name, time)}"
            try:
                self._store.create(path, tombstone.dump())
            except ExistsError:
                time += 1e-6
            else:
                return Trashed(tombstone.name, time, self._root.base, path)

    def _marked(self, trashed: Trashed, tombstone: Tombstone) -> Trashed:
        name = trash_name(trashed.name, trashed.time, erasing=True)
        marked = Trashed(
            trashed.name, trashed.time, trashed.group, f"{self._folder}/{name}", erasing=True
        )
        if not trashed.erasing:
            with suppress(ExistsError):  # by a run that was killed here
                self._store.create(marked.path, tombstone.dump())
        self._delete(f"{self._folder}/{trashed.id}")
        return marked

    def _remove(self, markers: Sequence[Entry]) -> None:
        """Remove commit markers, and check that they are gone.

        Raises:
            FtckptError: one is not gone.
        """
        if not markers:
            return
        self._check()
        for marker, error in zip(markers, self._store.erase(markers), strict=True):
            if error is not None:
                raise error
            with suppress(NotFoundError):
                self._store.stat(marker.path)
                raise UnavailableError(
                    f"{self._store.describe(marker.path)} is said to be gone and is still there",
                    file=marker.path,
                )

    def _require_trash(
        self, trashed: Trashed, tombstone: Tombstone, standing: Sequence[Entry]
    ) -> None:
        """Refuse to free an entry that is not, key by key, what was dropped.

        If it is whole, somebody has saved there again: its tombstone goes, and it stays. If its
        commit marker is missing, only the tombstone has that.
        """
        written = self._store.stat(trashed.path).mtime
        other = finished_since((f.path for f in tombstone.files), (f.path for f in standing))
        other += [f.path for f in _unknown(tombstone, standing) if not is_record(f.path)]
        tomb = None if written is None else Tomb(self._store, trashed.path, written)
        if not other and tomb is not None and tomb.holds(standing):
            return
        what = other[0] if other else trashed.name
        message = f"{trashed.name} is not reclaimed: {what} was written after it was dropped"
        if tombstone.markers.keys() <= {file.path for file in standing}:
            self._check()
            self._delete(trashed.path)
            raise RefusedError(message, hint="it is not trash any more")
        raise RefusedError(message, hint=f"gc undelete ROOT {quote(trashed.id)} has it back")

    def _recognised(self, tombstone: Tombstone, standing: Sequence[Entry]) -> UnopenedPart | None:
        """Return what stands of an entry as its format knows it."""
        path = join(self._root.base, tombstone.name)
        if tombstone.directory:
            return self._root.ask(Entry(path, 0, kind=EntryKind.DIRECTORY))
        return next((self._root.ask(file) for file in standing if file.path == path), None)

    def _ended_transfers(
        self, tombstone: Tombstone, standing: Mapping[str, Entry]
    ) -> tuple[str, ...]:
        """Return where the records lay of transfers that have ended since the entry was dropped."""
        ended = finished_since((file.path for file in tombstone.files), standing)
        places = [path.removesuffix(MANIFEST) for path in ended]
        return tuple(
            f"{place}{TRANSFER.removesuffix('.json')}{end}"
            for place in places
            for end in ("/", ".json")
        )

    def _late_records(self, tombstone: Tombstone, standing: Sequence[Entry]) -> list[Entry]:
        """Return the manifests that were written while an entry was dropped."""
        return [file for file in _unknown(tombstone, standing) if is_record(file.path)]

    def _is_same(self, there: Entry, file: Entry, tombstone: Tombstone) -> bool:
        """Whether a key holds the recorded object; a restored marker may have another ETag."""
        marker = tombstone.markers.get(file.path)
        if there.same_object(file) or marker is None or there.size != len(marker):
            return there.same_object(file)
        return self._store.read(file.path, 0, there.size) == marker

    def _standing(self, tombstone: Tombstone) -> list[Entry]:
        path = join(self._root.base, tombstone.name)
        kind = EntryKind.DIRECTORY if tombstone.directory else EntryKind.FILE
        try:
            return list_entry(self._store, Entry(path, 0, kind=kind))
        except NotFoundError:
            return []

    def _read(self, trashed: Trashed) -> Tombstone:
        entry = self._store.stat(trashed.path)
        if entry.kind is not EntryKind.FILE or entry.size > MAX_BYTES:
            raise CorruptError(f"{self._store.describe(trashed.path)} is not a tombstone")
        tombstone = Tombstone.parse(
            self._store.read(trashed.path, 0, entry.size),
            self._store.describe(trashed.path),
            join(self._root.base, trashed.name),
        )
        if tombstone.name != trashed.name:
            raise CorruptError(
                f"{self._store.describe(trashed.path)} is of {tombstone.name}: nothing is touched"
            )
        return tombstone

    def _parsed(self, entry: Entry) -> Trashed | None:
        parsed = parse_trash_name(entry.path[len(self._folder) + 1 :])
        return parsed and Trashed(
            parsed[0], parsed[1], self._root.base, entry.path, parsed[2], entry.mtime
        )


def _unknown(tombstone: Tombstone, standing: Sequence[Entry]) -> list[Entry]:
    known = {file.path: file for file in tombstone.files}
    return [f for f in standing if f.path not in known or not f.same_object(known[f.path])]


def _is_transfer(file: Entry) -> bool:
    """Whether a key says that a transfer of ours to its place is not finished."""
    return file.path.endswith(f"/{TRANSFER}")
