"""Ship the checkpoints of a root to another tier: those that rules choose, the oldest gap first.

What the tier holds is never believed by its name: the copy must be finished and of the sizes that
its manifest lists, and be of the very bytes of the source. The latter is known from the source's
own manifest, or from the record that was left with the copy: the listing (names, sizes, times,
versions) that it was made of. Where neither says so, the source is read and compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
    worst,
)
from ftckpt.manifest import NAME, Manifest, find, is_own
from ftckpt.opening import open_child
from ftckpt.progress import NULL, Counter
from ftckpt.retention import log, records, rules
from ftckpt.retention.checking import surveyed
from ftckpt.retention.classifying import judged_by
from ftckpt.retention.entries import EntryClass
from ftckpt.retention.found import Found, Reading
from ftckpt.retention.policy import Policy
from ftckpt.retention.reading import read_entries
from ftckpt.roots import Root, join, read_again
from ftckpt.source import Source
from ftckpt.store import EntryKind
from ftckpt.stores import StoreOptions
from ftckpt.stores.atomic import make_directories
from ftckpt.stores.oserror import translate
from ftckpt.transfer.places import staging_name

from .copying import CopyReport, copy
from .options import ReplicationOptions
from .standing import require_same
from .sync_lock import leased, locked

_KIND, _LABEL = "synced", "source"
# One checkpoint fails of these, and the next may be shipped all the same.
_OF_ONE = (
    CorruptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
)


class State(StrEnum):
    """What became of one checkpoint.

    SHIPPED: copied, proven and visible.
    THERE: the same checkpoint stood there before.
    PLANNED: it would be shipped (a dry run).
    DROPPED: the tier's own gc has dropped it since it was saved.
    UNFINISHED: its save is not committed.
    GONE: it was removed from the source meanwhile.
    FAILED: see its code.
    """

    SHIPPED = "shipped"
    THERE = "there"
    PLANNED = "planned"
    DROPPED = "dropped"
    UNFINISHED = "unfinished"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint of the source.

    Attributes:
        name: relative to its root.
        step: by its name or content.
        state: what became of it.
        why: which rule chose it, or what went wrong.
        code: exit code of a failure, else OK.
        nbytes: bytes of its files.
        report: of the copy, where one was made.
    """

    name: str
    step: int | None
    state: State
    why: str = ""
    code: ExitCode = ExitCode.OK
    nbytes: int = 0
    report: CopyReport | None = None


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Attributes:
        source: the root.
        destination: the tier.
        items: what was chosen, and what is not finished, by ascending step.
        seconds: how long it took.
    """

    source: str
    destination: str
    items: tuple[Item, ...]
    seconds: float

    def of(self, *states: State) -> tuple[Item, ...]:
        """Return the items of some states."""
        return tuple(item for item in self.items if item.state in states)

    @property
    def code(self) -> ExitCode:
        """The worst of the failures."""
        return worst(item.code for item in self.items)


@dataclass(frozen=True)
class SyncOptions:
    """How a tier is brought up to date.

    Attributes:
        policy: whose keep rules choose; None for every checkpoint.
        replication: how each copy is made.
        stores: how to reach object stores.
        dry_run: only say what would be done.
        again: ship also what the tier's own gc has dropped.
        actor: who, for the lock.
    """

    policy: Policy | None
    replication: ReplicationOptions
    stores: StoreOptions
    dry_run: bool = False
    again: bool = False
    actor: str = ""


def sync(
    root: Root,
    tier: Root,
    how: Reading,
    options: SyncOptions,
    *,
    told: Callable[[Item], None] = lambda _: None,
    remark: Callable[[str], None] = lambda _: None,
    counter: Counter = NULL,
) -> SyncReport:
    """Ship what the rules choose and the tier lacks; nothing is removed on either side.

    A checkpoint that cannot be shipped is named, and does not hold up the others. Killed at any
    instant, the same call goes on where it was.

    Args:
        root: the source.
        tier: the destination, which may be empty.
        how: formats, and what a checkpoint is a delta upon.
        options: which, and how.
        told: told of each item as it is decided.
        remark: told what else there is to say.
        counter: is told of bytes.

    Raises:
        RefusedError: another sync holds the tier, or has taken it.
        NoResourceError, DeniedError, UnavailableError: a side could not be read or written.
    """
    began = time.monotonic()
    work = _Sync(root, tier, how, options, told, counter)
    if options.dry_run:
        work.run(lambda: None)
    else:
        with locked(tier, options.actor, remark) as check:
            work.run(check)
    order = sorted(work.items.values(), key=lambda i: (-1 if i.step is None else i.step, i.name))
    return SyncReport(root.url, tier.url or tier.store.url, tuple(order), time.monotonic() - began)


class _Sync:
    """One sync at work."""

    def __init__(
        self,
        root: Root,
        tier: Root,
        how: Reading,
        options: SyncOptions,
        told: Callable[[Item], None],
        counter: Counter,
    ) -> None:
        self.root, self.tier, self.options = root, tier, options
        self.told, self.counter = told, counter
        self.items: dict[str, Item] = {}
        self.members: dict[str, Found] = {}
        for found in read_entries(root, how, counter=counter):
            name = self._name(found)
            if found.entry.entry_class is EntryClass.COMMITTED:
                found = judged_by(found, how)
            self.members[name] = found
        self.dropped = {} if options.again else _dropped(tier)

    def run(self, check: Callable[[], None]) -> None:
        for name, found in self.members.items():
            if found.entry.entry_class in (EntryClass.STAGING, EntryClass.ABANDONED):
                self._tell(self._item(name, State.UNFINISHED, found.entry.why))
            elif found.entry.entry_class is EntryClass.CORRUPT and self._in_question(found):
                self._tell(self._item(name, State.FAILED, found.entry.why, ExitCode.CORRUPT))
        # What fails makes room for the next that the rules choose.
        while waiting := [(n, w) for n, w in self._chosen() if n not in self.items]:
            name, why = waiting[0]
            check()
            self._tell(self._ship(name, why))

    def _tell(self, item: Item) -> None:
        self.items[item.name] = item
        self.told(item)

    def _item(self, name: str, state: State, why: str, code: ExitCode = ExitCode.OK) -> Item:
        found = self.members[name].entry
        return Item(name, found.step, state, why, code)

    def _in_question(self, found: Found) -> bool:
        """Say whether a damaged one would be chosen were it whole."""
        return any(found.entry.name == name for name, _ in self._chosen(also=found))

    def _chosen(self, also: Found | None = None) -> list[tuple[str, str]]:
        """Return what the rules choose, with the rule: bases first, the lowest step first."""
        failed = (State.FAILED, State.GONE)
        good = {
            name: found
            for name, found in self.members.items()
            if found is also
            or (
                found.entry.entry_class is EntryClass.COMMITTED
                and (name not in self.items or self.items[name].state not in failed)
            )
        }
        order = sorted(good, key=lambda name: good[name].entry.age_order)
        policy = self.options.policy
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

    def _ship(self, name: str, why: str) -> Item:
        found = surveyed(self.members[name])
        if found is None:
            return self._item(name, State.GONE, "it was removed meanwhile")
        assert found.entry.contents is not None
        self.members[name] = found
        item = replace(self._item(name, State.PLANNED, why), nbytes=found.entry.contents.nbytes)
        dropped = self.dropped.get(name)
        old = found.entry.time is None or dropped is None or found.entry.time < dropped
        if dropped is not None and old and not self._stands(found):
            return replace(item, state=State.DROPPED, why="gc of the tier has dropped it")
        try:
            if not self._left_behind(found) and self._is_there(found):
                return replace(item, state=State.THERE)
            if self.options.dry_run:
                return item
            with leased(self.root, name, self.options.actor):
                report = self._copy(found)
        except _OF_ONE as error:
            if surveyed(found.now(contents=None)) is None:
                return replace(item, state=State.GONE, why="it was removed meanwhile")
            return replace(item, state=State.FAILED, why=error.message, code=error.exit_code)
        self._remember(found, report.url)
        state = State.THERE if report.already_there else State.SHIPPED
        return replace(item, state=state, report=report)

    def _copy(self, found: Found) -> CopyReport:
        checkpoint = self._opened(found)
        target = self._target(found)
        local = self.tier.store.local_path(self._path(found))
        if local is not None:  # a step may hold its one checkpoint in a folder
            try:
                make_directories(os.path.dirname(local))
            except OSError as error:
                raise translate(error, target, "write") from error
        return copy(
            checkpoint,
            target,
            options=self.options.replication,
            stores=self.options.stores,
            counter=self.counter,
        )

    def _opened(self, found: Found) -> Checkpoint:
        assert found.child is not None
        if len(found.child.parts) > 1:
            raise UnsupportedError(
                f"{found.entry.name} holds several checkpoints, which no copy makes visible at once"
            )
        return open_child(self.root, found.child)[0]

    def _name(self, found: Found) -> str:
        return found.place.path[len(self.root.base) + 1 if self.root.base else 0 :]

    def _path(self, found: Found) -> str:
        """Return where a checkpoint goes: the store's path in the tier."""
        assert found.child is not None
        path = found.child.parts[0].entry.path
        return join(self.tier.base, path[len(self.root.base) + 1 if self.root.base else 0 :])

    def _target(self, found: Found) -> str:
        return self.tier.store.describe(self._path(found))

    def _standing(self, found: Found) -> Source:
        """List what stands where a checkpoint goes.

        Raises:
            NotFoundError: nothing does.
        """
        assert found.child is not None
        store, path = self.tier.store, self._path(found)
        if found.child.parts[0].entry.kind is EntryKind.FILE:
            return Source.file(store, store.stat(path))
        return Source.directory(store, path)

    def _stands(self, found: Found) -> bool:
        with suppress(NotFoundError):
            return find(self._standing(found)) is not None
        return False

    def _left_behind(self, found: Found) -> bool:
        """Say whether a copy was killed after its last act; copying again sweeps up after it."""
        folder, name = os.path.split(self.tier.store.local_path(self._path(found)) or "")
        leftover = os.path.join(folder, staging_name(name))
        return bool(name) and os.path.lexists(leftover) and not self.options.dry_run

    def _is_there(self, found: Found) -> bool:
        """Say whether the tier holds this very checkpoint.

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
        checkpoint = self._opened(found)
        own = find(checkpoint.source)
        taken = ExistsError(
            f"{standing.url} holds another checkpoint than {checkpoint.source.url}",
            hint="it was saved again under the same name, or comes from another run: nothing is "
            "overwritten",
        )
        if own is not None and not own.same_content(manifest):
            raise taken
        if own is not None and not _written_since(checkpoint.source):
            return True
        if self._remembered(found, manifest):
            return True
        cheap = replace(self.options.replication, proof=False)
        # Read, whatever a manifest says that is older than the files.
        require_same(
            checkpoint.source, None, standing.url, self.options.stores, cheap, self.counter, taken
        )
        if not self.options.dry_run:
            self._remember(found, standing.url)
        return True

    def _remembered(self, found: Found, manifest: Manifest) -> bool:
        assert found.entry.contents is not None
        for record in records.read(self.tier, _KIND, self._name(found)):
            if (
                record.label == _LABEL
                and record.text("listing", "") == found.entry.contents.fingerprint
                and record.text("manifest", "") == _digest(manifest)
            ):
                return True
        return False

    def _remember(self, found: Found, url: str) -> None:
        """Leave with the copy what it was made of; without it the source is read next time."""
        assert found.entry.contents is not None
        try:
            manifest = find(self._standing(found))
            if manifest is None:
                return
            self.tier = read_again(self.tier)
            fields = {
                "listing": found.entry.contents.fingerprint,
                "manifest": _digest(manifest),
                "source": self.root.url,
            }
            records.write(self.tier, _KIND, self._name(found), _LABEL, fields)
        except FtckptError:
            return


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


def _written_since(source: Source) -> bool:
    """Say whether a file was written after the source was sealed, or nobody can tell."""
    seal = source.entries.get(NAME)
    if seal is None or seal.mtime is None:  # beside a single file; or the store keeps no times
        return True
    times = [e.mtime for name, e in source.entries.items() if not is_own(name)]
    return any(time is None or time > seal.mtime for time in times)


def _digest(manifest: Manifest) -> str:
    """Return the digest in a manifest's last line."""
    return manifest.dump().rsplit(b'"', 2)[-2].decode()


def _dropped(tier: Root) -> Mapping[str, float]:
    """Return when gc of the tier has dropped what, by its name there."""
    found: dict[str, float] = {}
    for event in log.read(tier):
        names, then = event.get("dropped"), event["time"]
        if event.get("event") == log.APPLIED and isinstance(names, list):
            assert isinstance(then, (int, float))
            for name in _texts(names):
                found[name[len(tier.base) + 1 if tier.base else 0 :]] = float(then)
    return found


def _texts(values: Iterable[object]) -> Sequence[str]:
    return [value for value in values if isinstance(value, str)]
