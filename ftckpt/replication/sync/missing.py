"""Find what a tier lacks: the checkpoints that rules choose and the tier does not hold.

What the tier holds is never believed by its name: the copy must be finished and of the sizes that
its manifest lists, and be of the very bytes of the source. The latter is known from the source's
own manifest, or from the record that was left with the copy: the listing (names, sizes, times,
versions) that it was made of. Where neither says so, the source is read and compared.

Keep a second sync away from a tier.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.roots import Root, read_again
from ftckpt.errors import CorruptError, ExistsError, FtckptError, NotFoundError, UnsupportedError
from ftckpt.manifest import Manifest, ThinnedFrom
from ftckpt.manifest.locate import find, thinned_from
from ftckpt.own_files import weights_of
from ftckpt.replication.existing_destination import require_same, written_since
from ftckpt.replication.options import ReplicationOptions
from ftckpt.retention import records
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.locks.remote import RemoteLock, beating
from ftckpt.retention.policy import Policy, rules
from ftckpt.retention.records import log
from ftckpt.retention.scan.entry import ScannedEntry, fingerprint_of, identity_of, list_entry
from ftckpt.storage import StoreOptions
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind, join, relative
from ftckpt.transfer.places import staging_name

_KIND, _LABEL = "synced", "source"


def chosen(good: Mapping[str, ScannedEntry], policy: Policy | None) -> list[tuple[str, str]]:
    """Return what rules choose, with the rule: bases first, the lowest step first.

    Args:
        good: the checkpoints that can be shipped, by name.
        policy: its keep rules choose; None for every checkpoint.
    """
    order = sorted(good, key=lambda name: good[name].entry.age_order)
    if policy is None:
        why = dict.fromkeys(order, "")
    else:
        entries = [good[name].entry for name in order]
        names = {good[name].entry.name: name for name in order}
        kept = rules.keep(policy, [e for e in entries if e.step is not None])
        why = {names[entry.name]: reason.detail for entry, reason in kept}
        for name in order:
            tags = sorted(set(good[name].entry.tags) & set(policy.keep_tags))
            if tags and name not in why:
                why[name] = f"tagged {tags[0]}"
    places = {good[name].place.path: name for name in order}
    result: dict[str, str] = {}

    def add(name: str, reason: str) -> None:
        if name in result:
            return
        for path in good[name].entry.bases:
            base = places.get(path)
            if base is not None and base != name and base not in why:
                add(base, f"base of {name}")
        result[name] = reason

    for name in (n for n in order if n in why):
        for path in good[name].entry.bases:  # an older one that is chosen by itself comes first
            base = places.get(path)
            if base is not None and base != name and base in why:
                add(base, why[base])
        add(name, why[name])
    return list(result.items())


def name_in(root: Root, found: ScannedEntry) -> str:
    """Return the name of a checkpoint, relative to its root."""
    return relative(root.base, found.place.path)


def opened(root: Root, found: ScannedEntry) -> Checkpoint:
    """Open a checkpoint of a root."""
    assert found.child is not None
    return open_part(root.store, found.child.part)


class DestinationTier:
    """A tier, beside the root that it should hold checkpoints of.

    Args:
        root: the source.
        tier: the destination, which may be empty.
        replication: how both are read where they have to be compared.
        stores: how to reach object stores.
    """

    def __init__(
        self,
        root: Root,
        tier: Root,
        replication: ReplicationOptions,
        stores: StoreOptions,
    ) -> None:
        self.root, self.tier = root, tier
        self._seen: dict[str, str] = {}
        self._replication, self._stores = replication, stores

    def _path(self, found: ScannedEntry) -> str:
        """Return where a checkpoint goes: the store's path in the tier."""
        assert found.child is not None
        path = found.child.part.entry.path
        return join(self.tier.base, relative(self.root.base, path))

    def target(self, found: ScannedEntry) -> str:
        """Return where a checkpoint goes, as a user would type it."""
        return self.tier.store.describe(self._path(found))

    def local_path(self, found: ScannedEntry) -> str | None:
        """Return where a checkpoint goes on this machine, or None where the tier is remote."""
        return self.tier.store.local_path(self._path(found))

    def _standing(self, found: ScannedEntry) -> Source:
        """List what stands where a checkpoint goes.

        Raises:
            NotFoundError: nothing does.
        """
        assert found.child is not None
        store, path = self.tier.store, self._path(found)
        if found.child.part.entry.kind is EntryKind.FILE:
            return Source.file(store, store.stat(path))
        return Source.directory(store, path)

    def stands(self, found: ScannedEntry) -> bool:
        """Say whether a finished copy stands where a checkpoint goes, of it or another."""
        with suppress(NotFoundError):
            return find(self._standing(found)) is not None
        return False

    def left_behind(self, found: ScannedEntry) -> bool:
        """Say whether a copy was killed after its last act; copying again sweeps up after it."""
        folder, name = os.path.split(self.local_path(found) or "")
        leftover = os.path.join(folder, staging_name(name))
        return bool(name) and os.path.lexists(leftover)

    def has_of(self, found: ScannedEntry, *, record: bool) -> str:
        """Say what the tier holds of a checkpoint that was thinned; "" where it needs a copy.

        The whole one was shipped before, or the tier's own gc has thinned it by itself. That a
        checkpoint of its name stands there proves neither.

        Args:
            found: weights of the root.
            record: as in `is_there`.

        Raises:
            CorruptError, ExistsError: as `is_there`.
        """
        ours = thinned_from(Source.directory(self.root.store, found.place.path))
        if ours is None:
            return ""
        own = self._path(found)
        with suppress(NotFoundError):
            if weights_of(own) and self._has_whole(found, ours):
                return "the tier holds it whole"
        with suppress(NotFoundError):
            standing = thinned_from(Source.directory(self.tier.store, own))
            if standing is None or standing == ours:
                return ""
            if _of_one(standing, ours) and self.is_there(found, record=record):
                return "the tier has thinned it itself"
        return ""

    def _has_whole(self, found: ScannedEntry, ours: ThinnedFrom) -> bool:
        """Say whether the tier holds the very checkpoint that was thinned, by what sync recorded.

        Raises:
            CorruptError: files of it are missing or of another size.
            NotFoundError: it holds none.
        """
        standing = Source.directory(self.tier.store, weights_of(self._path(found)))
        manifest = find(standing)
        if manifest is None or manifest.format != ours.format:
            return False
        if manifest.step not in (None, ours.step):  # some formats hold no step
            return False
        name = weights_of(name_in(self.root, found))
        shipped = any(
            record.label == _LABEL
            and record.text("identity", "") == ours.fingerprint
            and record.text("manifest", "") == _digest(manifest)
            for record in records.read(self.tier, _KIND, name)
        )
        if shipped:
            try:
                _require_sizes(standing, manifest)
            except CorruptError as error:
                error.hint = "remove it there, and the next sync ships the weights"
                raise
        return shipped

    def is_there(self, found: ScannedEntry, *, record: bool) -> bool:
        """Say whether the tier holds this very checkpoint.

        Args:
            found: a checkpoint of the root.
            record: whether what had to be read to know it may be recorded in the tier.

        Raises:
            CorruptError: it does, and files of it are missing or of another size.
            ExistsError: it holds another one of this name.
        """
        try:
            standing = self._standing(found)
            manifest = find(standing)
        except NotFoundError:
            return False
        if manifest is None:
            return False  # a copy that is not finished, or somebody else's: copying tells them
        _require_sizes(standing, manifest)
        self._seen[name_in(self.root, found)] = self._listing(found)
        checkpoint = opened(self.root, found)
        own = find(checkpoint.source)
        taken = ExistsError(
            f"{standing.url} holds another checkpoint than {checkpoint.source.url}",
            hint="it was saved again under the same name, or comes from another run: nothing is "
            "overwritten",
        )
        if own is not None and not own.same_content(manifest):
            raise taken
        if own is not None and not written_since(checkpoint.source):
            return True
        if self._remembered(found, manifest):
            return True
        cheap = replace(self._replication, proof=False)
        # Read, whatever a manifest says that is older than the files.
        require_same(checkpoint.source, None, standing.url, self._stores, cheap, taken)
        if record:
            self.remember(found)
        return True

    def _remembered(self, found: ScannedEntry, manifest: Manifest) -> bool:
        listing = self._listing(found)
        for record in records.read(self.tier, _KIND, name_in(self.root, found)):
            if (
                record.label == _LABEL
                and record.text("listing", "") == listing
                and record.text("manifest", "") == _digest(manifest)
            ):
                return True
        return False

    def _listing(self, found: ScannedEntry) -> str:
        """Return a digest of the listing of a checkpoint, and of when its files last changed.

        A file that is written in place, or replaced, may get its old size and time back
        (`rsync --inplace --times`); the time of the inode's last change nobody sets. The number of
        an inode does not tell: a mounted service may number files anew.
        """
        assert found.entry.contents is not None
        listing = found.entry.contents.fingerprint
        if not self.root.store.traits.local:
            return listing
        changed = [
            (file.path, None if file.inode is None else file.inode[1])
            for file in sorted(list_entry(self.root.store, found.place))
        ]
        return f"{listing}+{hashlib.blake2b(repr(changed).encode(), digest_size=16).hexdigest()}"

    def remember(self, found: ScannedEntry) -> None:
        """Leave with the copy what it was made of; without it the source is read next time."""
        assert found.entry.contents is not None
        try:
            manifest = find(self._standing(found))
            if manifest is None:
                return
            self.tier = read_again(self.tier)
            files = list_entry(self.root.store, found.place)
            if fingerprint_of(files) != found.entry.contents.fingerprint:
                return
            listing = self._listing(found)
            if self._seen.get(name_in(self.root, found), listing) != listing:
                return  # written since it was looked at, before it was read
            fields = {
                # Of the data alone: gc keeps it when it thins the checkpoint.
                "identity": identity_of(files, found.place.path),
                "listing": listing,
                "manifest": _digest(manifest),
                "source": self.root.url,
            }
            records.write(self.tier, _KIND, name_in(self.root, found), _LABEL, fields)
        except FtckptError:
            return


def _of_one(a: ThinnedFrom, b: ThinnedFrom) -> bool:
    return (a.name, a.step, a.format) == (b.name, b.step, b.format)


def _require_sizes(standing: Source, manifest: Manifest) -> None:
    for file in manifest.files:
        name = next(iter(standing.entries)) if standing.single else file.path
        entry = standing.entries.get(name)
        if entry is None or entry.size != file.size:
            what = "is missing" if entry is None else f"has {entry.size} bytes, not {file.size}"
            raise CorruptError(
                f"{name} of the copy {standing.url} {what}",
                kind="missing-file" if entry is None else "truncated-file",
                file=name,
                hint="ftckpt repair mends it from the source",
            )


def _digest(manifest: Manifest) -> str:
    """Return the digest in a manifest's last line."""
    return manifest.dump().rsplit(b'"', 2)[-2].decode()


def dropped_from(tier: Root) -> Mapping[str, float]:
    """Return when gc of the tier has dropped what, by its name there."""
    found: dict[str, float] = {}
    for event in log.read(tier):
        names, then = event.get("dropped"), event["time"]
        if event.get("event") == log.APPLIED and isinstance(names, list):
            assert isinstance(then, (int, float))
            for name in _texts(names):
                found[relative(tier.base, name)] = float(then)
    return found


def _texts(values: Iterable[object]) -> Sequence[str]:
    return [value for value in values if isinstance(value, str)]


FOLDER, FILE = "sync-lock", "sync.lock"


@contextmanager
def locked(tier: Root, actor: str, unlocked: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold a tier for one sync, and yield what must be called before each copy.

    A store that cannot keep a second writer away is used without a lock: copies are whole all the
    same, because none overwrites what stands there.

    Args:
        tier: where checkpoints are shipped to.
        actor: who; a second sync is told.
        unlocked: called with the reason when no lock is possible.

    Raises:
        RefusedError: another sync holds it; when the yielded function is called, it was lost.
        UnsafeError: a link stands where the tier's own files belong.
    """
    with ExitStack() as held:
        check = _unchecked
        try:
            check = _lock(tier, actor, held)
        except UnsupportedError as error:
            unlocked(error.message)
        yield check


def _unchecked() -> None:
    """Return: a lock of the system ends with the process, and is never lost before."""


def _lock(tier: Root, actor: str, held: ExitStack) -> Callable[[], None]:
    path = tier.store.local_path(tier.base)
    if path is None:
        lock = RemoteLock(tier, actor, folder=FOLDER, work="sync")
        lock.acquire()
        held.callback(lock.release)
        return held.enter_context(beating(lock.check))
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, folder)
        held.enter_context(lock_beside(folder, tier.url, actor, name=FILE, work="sync"))
    except OSError as error:
        raise translate(error, tier.url, "lock") from error
    return _unchecked
