"""An entry together with its place, and the options of a scan.

The files of an entry: listed, summed up, and identified by one digest.

Find what an entry needs of others: what its links lead into, and what an adapter is of.

`RootEntry.needs` is what is found here, of every entry that stays: for a plan, while it is carried
out, and before the trash is emptied.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.roots import Child, Root
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.own_files import SUFFIX, is_own
from ftckpt.retention.policy import Metric
from ftckpt.storage.store import Entry, EntryKind, Store, join
from ftckpt.strict_json import JsonError, decode

from .entries import EntryClass, EntryContents, RootEntry, SharedFile

Bases = Callable[[Root, Child], Sequence[str]]


@runtime_checkable
class HasBases(Protocol):
    """A format whose checkpoints can need others to be read (`ftckpt.formats.delta`)."""

    def bases_of_child(self, root: Root, child: Child) -> Sequence[str]:
        """Return the places of a checkpoint's bases (see `ScanOptions.bases`)."""


def recorded_bases(root: Root, child: Child) -> Sequence[str]:
    """Return the places of a checkpoint's bases, as its format records them.

    Raises:
        CorruptError: the record is damaged.
        UnsupportedError: it is of another version: the bases cannot be known.
        UnavailableError, DeniedError: it could not be read.
    """
    by = child.part.format
    return by.bases_of_child(root, child) if isinstance(by, HasBases) else ()


def no_bases(root: Root, child: Child) -> Sequence[str]:
    """Treat every checkpoint as complete by itself: bases of kept deltas may be dropped then."""
    return ()


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """An entry, and where it was found.

    Attributes:
        root: of its run.
        place: its directory or file.
        child: as the formats recognise it; None if none does.
        sealed: whether it has a manifest.
        names: number of files seen in its directory; there may be more, there or deeper.
        left: those of the seen files that a killed write of ftckpt left.
    """

    entry: RootEntry
    root: Root
    place: Entry
    child: Child | None = None
    sealed: bool = False
    names: int = 0
    left: tuple[str, ...] = ()

    def now(self, **known: object) -> ScannedEntry:
        """Return a copy with updated fields of the entry."""
        return replace(self, entry=replace(self.entry, **known))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Run:
    """One scanned run: its root and everything in it."""

    root: Root
    members: Sequence[ScannedEntry]


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """How to read a root.

    Attributes:
        formats: in the order in which they are tried.
        now: seconds since the epoch.
        metric: to look up; None for none.
        bases: returns the places of a checkpoint's bases: paths in the store, or full paths
            elsewhere; one for each delta.
        needs: whether to list local checkpoints, too, for what they need (`RootEntry.needs`).
    """

    formats: Sequence[Format]
    now: float
    metric: Metric | None = None
    bases: Bases = recorded_bases
    needs: bool = False


def list_entry(store: Store, entry: Entry) -> list[Entry]:
    """Return every file of a directory at any depth, or a file and the manifest beside it.

    Links are returned as links, never followed.

    Raises:
        NotFoundError: it is gone.
    """
    if entry.kind is EntryKind.DIRECTORY and entry.link is None:
        return store.walk(entry.path)
    found = [store.stat(entry.path)]
    with suppress(NotFoundError):
        found.append(store.stat(entry.path + SUFFIX))
    return found


def count_names(store: Store, entry: Entry) -> int:
    """Return how many names lie directly in a directory; 1 for a file, 0 if it is gone."""
    if entry.kind is not EntryKind.DIRECTORY or entry.link is not None:
        return 1
    try:
        return len(store.names(entry.path))
    except NotFoundError:
        return 0


def sum_up(files: Sequence[Entry]) -> EntryContents:
    """Sum up files; a file with several names counts once, a link not at all."""
    here: Counter[str] = Counter()
    held: dict[str, tuple[int, int]] = {}
    unshared = 0
    for file in files:
        if file.link is not None:
            continue
        if file.shared is None:
            unshared += file.size
        else:
            inode, links = file.shared
            here[inode] += 1
            held[inode] = file.size, links
    shared = tuple(SharedFile(inode, *held[inode], here[inode]) for inode in sorted(held))
    return EntryContents(
        files=len(files),
        nbytes=unshared + sum(file.size for file in shared),
        unshared=unshared,
        shared=shared,
        linked=sum(f.size for f in files if f.link is not None),
        newest=max((t for f in files if (t := f.touched) is not None), default=None),
        fingerprint=fingerprint_of(files),
    )


def fingerprint_of(files: Sequence[Entry]) -> str:
    """Return the digest of a listing: BLAKE2b-128 over one line per file, sorted by path.

    A line is the representation of path, kind, size, modification time, version and link target.
    Before a plan is carried out, a new listing must have the same digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        identity = (file.path, str(file.kind), file.size, file.mtime, file.etag, file.link)
        digest.update(repr(identity).encode() + b"\n")
    return digest.hexdigest()


def fingerprint_but_targets(files: Sequence[Entry]) -> str:
    """Return `fingerprint_of` a listing without what is known of the targets of its links."""
    return fingerprint_of(
        [Entry(f.path, 0, link=f.link) if f.link is not None else f for f in files]
    )


def identity_of(files: Sequence[Entry], base: str) -> str:
    """Return a digest of the data files of `base`, which a seal does not change.

    Where a store marks content, undelete does not change it either.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        path = file.path[len(base) + 1 :]
        if not is_own(path) and not file.path.endswith(SUFFIX):
            digest.update(repr((path, file.size, file.etag or file.mtime)).encode() + b"\n")
    return digest.hexdigest()


_ADAPTER, _MAX_BYTES, _ADAPTERS = "adapter_config.json", 1 << 20, 16
# Names that are looked at in a directory other than a checkpoint: it may be a data set.
_MOST = 100_000


def with_needs(
    found: ScannedEntry, files: Sequence[Entry] | None, *, whole: bool = False
) -> ScannedEntry:
    """Return an entry with what it needs of others.

    Args:
        found: the entry.
        files: of it; None where they were not listed.
        whole: whether to list those of a finished checkpoint then. A plan does so later, and only
            for what it keeps.

    Raises:
        NotFoundError: it is gone.
        UnavailableError, DeniedError: it could not be listed, or an adapter's configuration read.
    """
    if found.entry.entry_class is EntryClass.TRASH:
        return found
    if files is None and found.entry.entry_class is not EntryClass.COMMITTED:
        files = _links_of(found.root.store, found.place)
    elif files is None:
        if not whole:
            return found
        files = list_entry(found.root.store, found.place)
    own = found.place.path
    needs = dict.fromkeys((*_led_to(found.root.store, files), *_trained_on(found.root, files)))
    others = tuple(path for path in needs if path != own and not path.startswith(own + "/"))
    return found.now(needs=others)


def _links_of(store: Store, place: Entry) -> list[Entry]:
    """Return the links and the adapters' configurations in anything but a checkpoint.

    The nearest come first. No other filesystem is entered, and what may not be read is left out.
    """
    top = store.local_path(place.path)
    if top is None:
        return []
    found: list[Entry] = []
    seen = 0
    with suppress(OSError):
        if os.path.islink(top):
            return [Entry(place.path, 0, link=os.readlink(top))]
        device = os.stat(top).st_dev
        waiting = deque([(top, place.path)])
        while waiting and seen < _MOST:
            folder, path = waiting.popleft()
            with suppress(OSError), os.scandir(folder) as names:
                for each in names:
                    seen += 1
                    inside = f"{path}/{each.name}"
                    if each.is_symlink():
                        found.append(Entry(inside, 0, link=os.readlink(each.path)))
                    elif each.is_dir(follow_symlinks=False):
                        if each.stat(follow_symlinks=False).st_dev == device:
                            waiting.append((each.path, inside))
                    elif each.name == _ADAPTER and os.access(each.path, os.R_OK):
                        found.append(Entry(inside, each.stat(follow_symlinks=False).st_size))
    return found


def _trained_on(root: Root, files: Iterable[Entry]) -> Iterator[str]:
    """Yield where the checkpoint that a LoRA adapter of PEFT was trained on may lie in the store.

    It is told by the names of its run and its step: the path that was recorded is of the machine
    that trained.
    """
    configs = (
        file for file in files
        if file.path.rpartition("/")[2] == _ADAPTER and file.kind is EntryKind.FILE
        and file.size <= _MAX_BYTES
    )  # fmt: skip
    for config in islice(configs, _ADAPTERS):
        base: object = None
        with suppress(NotFoundError, CorruptError, UnsafeError, JsonError, LookupError, TypeError):
            said = root.store.read(config.path, 0, config.size)
            base = decode(said)["base_model_name_or_path"]
        if isinstance(base, str) and "\0" not in base:
            yield from _by_place(root, base)
            yield from _by_names(root, base)


def _by_place(root: Root, said: str) -> Iterator[str]:
    """Yield a recorded path where it leads on this machine: from the run, or from beside it."""
    here, top = root.store.local_path(root.base), root.store.local_path("")
    if here is None or top is None or "://" in said:
        return
    here, top = os.path.realpath(here), os.path.realpath(top)
    for folder in (here, os.path.dirname(here)):
        yield from _inside(top, os.path.realpath(os.path.join(folder, said)))


def _by_names(root: Root, said: str) -> Iterator[str]:
    """Yield the paths that end as a recorded one does, in this run and in others of the place."""
    parts = [part for part in said.split("/") if part not in ("", ".")]
    while parts and step_in_name(parts[-1]) is None:  # `step-1/policy` lies in a step
        parts.pop()
    if not parts:
        return
    local = root.store.local_path(root.base)
    names = {"..", root.url.rstrip("/").rpartition("/")[2]}
    if local is not None:
        names |= {
            os.path.basename(os.path.abspath(local)),
            os.path.basename(os.path.realpath(local)),
        }
    if len(parts) == 1 or parts[-2] in names:
        yield join(root.base, parts[-1])
    above = root.base
    while above:
        above = above.rpartition("/")[0]
        for first in range(len(parts) - 1):
            yield join(above, "/".join(parts[first:]))


def _led_to(store: Store, files: Iterable[Entry]) -> Iterator[str]:
    """Yield the paths that symbolic links lead to, and those of all around them.

    A link may lead to another one, which lies in a third entry: both are needed. Only local stores
    have links.
    """
    top = store.local_path("")
    if top is None:
        return
    top = os.path.realpath(top)
    for file in files:
        local = None if file.link is None else store.local_path(file.path)
        if local is None:
            continue
        folder = os.path.realpath(os.path.dirname(local))
        said = os.path.normpath(os.path.join(folder, file.link or ""))
        for place in (said, os.path.realpath(local)):
            yield from _inside(top, place)


def _inside(top: str, place: str) -> Iterator[str]:
    """Yield the path in a store of a place, and those of all around it; none if it is elsewhere."""
    top = top.rstrip("/") + "/"
    path = place.removeprefix(top) if place.startswith(top) else ""
    while path:
        yield path
        path = path.rpartition("/")[0]
