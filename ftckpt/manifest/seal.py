"""Seal a checkpoint: record its present bytes, by one atomic write.

Sealing does not prove a checkpoint good. It makes every later change detectable, and the manifest
names the checks that had passed when it was written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.digests.blocks import BlockFailure, blocks, hash_files, hash_or_fail
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.manifest import HEAD, FileDigest, Manifest, PassedCheck, ThinnedFrom
from ftckpt.own_files import SUFFIX, is_leftover, is_own
from ftckpt.progress import expect_files
from ftckpt.storage.local.atomic import write_new, write_over
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind
from ftckpt.version import __version__
from ftckpt.workers import ALONE, Work

from .locate import beside, find, read

if TYPE_CHECKING:
    from ftckpt.storage import StoreOptions
    from ftckpt.storage.store import Store

# A temporary file of this age (seconds) has no running writer any more (as in retention).
_STALE = 24 * 3600


@dataclass(frozen=True, slots=True)
class SealReport:
    """The result of sealing.

    Attributes:
        written: False if an equal manifest existed.
        bytes_read: bytes that were hashed.
    """

    manifest: Manifest
    url: str
    written: bool
    bytes_read: int


def utc_now() -> str:
    """Return the time in the manifest's spelling: `2026-01-31T12:00:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def locate(
    url: str, checkpoint_name: str, options: StoreOptions | None = None
) -> tuple[Store, str]:
    """Return store and path for a new manifest at `url`.

    `url` is a file's path or URL; or a directory's (it exists, or the URL ends in `/`), in which
    the manifest is named after the checkpoint (`checkpoint_name`, the last element of its path).
    """
    from ftckpt.storage import StoreOptions as Options
    from ftckpt.storage import open_store
    from ftckpt.storage.remotes import split

    parent, name = split(url)
    options = options or Options()
    if name:
        whole = open_store(url, options)
        try:
            directory = whole.stat("").kind is EntryKind.DIRECTORY
        except NotFoundError:
            directory = False
        if directory:
            return whole, checkpoint_name + SUFFIX
        return open_store(parent, options), name
    return open_store(url, options), checkpoint_name + SUFFIX


def seal(
    checkpoint: Checkpoint,
    *,
    place: tuple[Store, str] | None = None,
    force: bool = False,
    checks: Sequence[PassedCheck] = (),
    known: Sequence[FileDigest] = (),
    work: Work = ALONE,
) -> SealReport:
    """Hash every file of `checkpoint` and write its manifest.

    Killed at any instant it leaves no manifest or a whole one. Of two concurrent sealers one
    writes, and the other finds an equal manifest, which it leaves as it is.

    Args:
        checkpoint: opened from a fresh listing.
        place: store and path of the manifest; None for beside the data.
        force: replace a different manifest.
        checks: passed before.
        known: digests of files by what was written to them: these are not read.
        work: threads, rate limit and counter of bytes.

    Raises:
        IncompleteError: not committed, or a file changed meanwhile or since it was written
            (`changed-file`).
        CorruptError: a file of the checkpoint is missing (`missing-file`).
        RefusedError: another manifest exists.
        UnsupportedError: several checkpoints lie in its directory.
        DeniedError: the place cannot be written; beside the data, the hint names another.
    """
    source = checkpoint.source
    _require_own_place(source, place)
    if checkpoint.commit.state is CommitState.UNCOMMITTED:
        raise IncompleteError(checkpoint.commit.message or f"{source.url} is not committed")
    members = _members(checkpoint)
    sizes = {name: source.size(name) for name in members}
    digests = {file.path: file.blocks for file in known if file.path in sizes}
    for file in known:
        if sizes.get(file.path, file.size) != file.size:
            raise IncompleteError(
                f"{file.path} has {sizes[file.path]} bytes, and {file.size} were written",
                kind="changed-file",
                file=file.path,
            )
    unread = {name: size for name, size in sizes.items() if name not in digests}
    work.counter.start("hashing", sum(unread.values()))
    expect_files(work.counter, sum(1 for size in unread.values() if size))
    digests |= hash_files(source, unread, work=work)
    _require_unchanged(source, members)
    manifest = Manifest(
        format=checkpoint.format,
        step=checkpoint.step,
        topology=replace(checkpoint.topology, evidence=""),
        files=[FileDigest(name, sizes[name], digests[name]) for name in members],
        unmanaged=sorted(
            n for n in source.entries if n not in sizes and not is_own(n) and not is_leftover(n)
        ),
        checks=tuple(checks),
        tool=f"ftckpt {__version__}",
        created=utc_now(),
        thinned=_thinned(source),
    )
    store, path = place or (source.store, beside(source))
    try:
        if place is None:
            _remove_left(source)
            standing = _write_beside(source, members, path, manifest, force=force)
        else:
            standing = _write(store, path, manifest, force=force)
    except DeniedError as error:
        if place is None:
            more = "--manifest ELSEWHERE writes it to another place"
            error.hint = f"{error.hint}; {more}" if error.hint else more
        raise
    return SealReport(
        manifest=standing or manifest,
        url=store.describe(path),
        written=standing is None,
        bytes_read=sum(unread.values()),
    )


def _members(checkpoint: Checkpoint) -> list[str]:
    """Return the files of a checkpoint: what its format names and what its manifest lists.

    `convert` puts `config.json` beside the weights for people and other programs. Not each format
    names it, and it belongs to what was written.
    """
    names = {name for name in checkpoint.members() if not is_own(name)}
    with suppress(FtckptError):  # one that says nothing; `_write` refuses it by name
        standing = find(checkpoint.source)
        if standing is not None:
            names |= standing.by_path.keys() & checkpoint.source.entries.keys()
    return sorted(names)


def hash_share(
    checkpoint: Checkpoint, *, place: tuple[Store, str] | None = None, work: Work = ALONE
) -> int:
    """Hash a share of what `seal` hashes, and keep the digests in `work`; return the bytes.

    Raises:
        IncompleteError: not committed, or a file changed meanwhile.
        CorruptError: a file of the checkpoint is missing (`missing-file`).
        UnsupportedError: several checkpoints lie in its directory.
    """
    source = checkpoint.source
    _require_own_place(source, place)
    if checkpoint.commit.state is CommitState.UNCOMMITTED:
        raise IncompleteError(checkpoint.commit.message or f"{source.url} is not committed")
    sizes = {name: source.size(name) for name in _members(checkpoint)}
    work.counter.start("hashing", None)
    done = sum(nbytes for nbytes in _hashed(source, sizes, work))
    _require_unchanged(source, list(sizes))
    return done


def _hashed(source: Source, sizes: Mapping[str, int], work: Work) -> Iterator[int]:
    for one in work.run(blocks(source, sizes, work.limiter), hash_or_fail):
        if isinstance(one, BlockFailure):
            raise one.error
        work.counter.add(one.length)
        yield one.length


def _require_own_place(source: Source, place: tuple[Store, str] | None) -> None:
    if source.named and place is None:
        raise UnsupportedError(
            f"{source.url} shares its directory with other checkpoints: a manifest cannot be"
            " beside each of them",
            hint="give it a directory of its own, or name another place with --manifest",
        )


def _write_beside(
    source: Source, members: Sequence[str], path: str, manifest: Manifest, *, force: bool
) -> Manifest | None:
    """Write `manifest` beside the data; return an existing equal one, or None.

    A gc may drop the checkpoint at this moment. Locally its directory is gone then and is not made
    again; in an object store the manifest is removed if its files are gone.

    Raises:
        IncompleteError: the checkpoint was removed meanwhile, or has changed.
    """
    store = source.store
    local = store.local_path(path) is not None
    try:
        standing = _write(store, path, manifest, force=force, parents=False)
    except NotFoundError as error:
        raise _removed(source) from error
    if standing is None and not local and source.changed(members):
        store.delete([path])
        raise _removed(source)
    return standing


def _remove_left(source: Source) -> None:
    """Remove temporary manifests of killed seals of this checkpoint.

    A temporary file becomes a manifest a moment after it is written, so one that is a day old has
    no running writer. A file that does not begin as a manifest is not ours. Failures are ignored:
    verify names the file.
    """
    store = source.store
    if not store.traits.local:
        return
    folder = beside(source).rpartition("/")[0]
    try:
        names = [name for name in store.names(folder) if is_leftover(name)]
        paths = [f"{folder}/{name}" if folder else name for name in names]
        stale = [path for path in paths if _is_stale_manifest(store, path)]
        store.delete(stale)
    except FtckptError:
        return


def _is_stale_manifest(store: Store, path: str) -> bool:
    """Whether a file is a killed seal's temporary manifest of at least a day."""
    entry = store.stat(path)
    if entry.kind is not EntryKind.FILE or entry.link is not None or entry.mtime is None:
        return False
    if time.time() - entry.mtime < _STALE:
        return False
    head = store.read(path, 0, min(entry.size, len(HEAD)))
    return HEAD.startswith(head)


def _removed(source: Source) -> IncompleteError:
    return IncompleteError(
        f"{source.url} was removed or saved again while it was being sealed",
        hint="ftckpt gc undelete has back what gc has dropped",
        kind="changed-file",
    )


def _write(
    store: Store, path: str, manifest: Manifest, *, force: bool, parents: bool = True
) -> Manifest | None:
    """Write `manifest`; return an existing equal one, or None."""
    data = manifest.dump()
    local = None if parents else store.local_path(path)
    try:
        if local is None:
            store.create(path, data)
        else:
            write_new(local, data, parents=False)
        return None
    except ExistsError:
        standing = _standing(store, path)
    if standing is not None and standing.same_content(manifest):
        return standing
    if not force:
        raise RefusedError(
            f"{store.describe(path)} describes other content than is there now",
            hint="look at it with verify; seal --force replaces it",
        )
    if local is None:
        store.put(path, data)
    else:
        write_over(local, data, parents=False)
    return None


def _thinned(source: Source) -> ThinnedFrom | None:
    """Return what an earlier manifest says of the checkpoint whose weights these are.

    Nothing else records it, and without it they would pass for a checkpoint to train on from.
    """
    try:
        standing = _standing(source.store, beside(source))
    except NotFoundError:
        return None
    return None if standing is None else standing.thinned


def _standing(store: Store, path: str) -> Manifest | None:
    """Return the manifest at `path`, or None if it cannot be parsed."""
    try:
        return read(store, path)
    except (CorruptError, UnsupportedError, UnsafeError):
        return None


def _require_unchanged(source: Source, members: Sequence[str]) -> None:
    """List again and compare: a file that changed while it was hashed cannot be sealed.

    Raises:
        IncompleteError: a file is gone or of another size, time or version.
    """
    for name in source.changed(members):
        raise IncompleteError(
            f"{name} changed while it was being read: the checkpoint is still being written",
            hint="seal it again when the save has finished",
            kind="changed-file",
            file=name,
        )
