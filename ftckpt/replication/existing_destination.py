"""Inspect what a destination holds already; keep everything but the same checkpoint.

Place a replica: its name in a directory, and the staging place that builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import hash_files
from ftckpt.discovery.resolve import files_at
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find
from ftckpt.own_files import MANIFEST, is_own
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.transfer.places import (
    absolute,
    around,
    identity_of,
    name_of,
    place_of,
    require_apart,
    require_apart_from_all,
    staging_name,
)
from ftckpt.transfer.staging import Staging
from ftckpt.transfer.staging.local import LocalStaging
from ftckpt.verification.blocks import check_manifest

from .options import ReplicationOptions


def destination_of(source: Source, destination: str) -> str:
    """Return where the replica stands: `DIR/` means the source's own name inside of DIR.

    The slash decides and not what is there, so that a run that is started again means the same.
    """
    if not destination.endswith("/"):
        return destination
    return destination + name_of(place_of(source))


def staging_at(
    source: Source, destination: str, stores: StoreOptions, *, by_parts: bool = False
) -> Staging:
    """Return the staging place of a replica.

    Args:
        source: what is copied; a replica of one file is one file.
        destination: its path or URL.
        stores: how to reach object stores.
        by_parts: whether several machines write it: then others must read it before it is shown.

    Raises:
        RefusedError: the destination lies inside the source, or around it.
        UsageError: one file would take the name of a bucket.
    """
    store = open_store(destination, stores)
    require_apart(source, store)
    if store.traits.local:
        return LocalStaging(absolute(store), single=source.single)
    if not source.single:
        from ftckpt.transfer.staging.remote import RemoteStaging

        return RemoteStaging(store)
    beside, name = around(destination), name_of(destination)
    if by_parts:
        from ftckpt.transfer.staging.remote import StagedObject

        staged = open_store(beside + staging_name(name), stores)
        return StagedObject(open_store(beside, stores), name, staged)
    from ftckpt.transfer.staging.object import ObjectStaging

    return ObjectStaging(open_store(beside, stores), name)


def require_apart_from_bases(opened: Callable[[], Checkpoint], destination: Store) -> None:
    """Refuse a destination inside what a checkpoint's tensors are decoded from, as far as known.

    Args:
        opened: opens the checkpoint; what cannot be opened is told of elsewhere.
        destination: where it goes.

    Raises:
        RefusedError: it lies inside one, or one where it is built.
    """
    try:
        require_apart_from_all(opened(), destination)
    except RefusedError:
        raise
    except FtckptError:
        return


def standing_at(destination: str, stores: StoreOptions) -> Source:
    """List what stands at a destination.

    Raises:
        NotFoundError: nothing does.
    """
    return files_at(destination, (), stores)


def plan_of(source: Source, names: Iterable[str], result: object) -> str:
    """Return the fingerprint of all that decides the bytes of a replica.

    Args:
        source: as it was listed.
        names: of its files that are read.
        result: what is made of them; its `repr` counts.
    """
    import xxhash

    entries = ((name, source.entries.get(name)) for name in sorted(names))
    seen = [(name, entry and (entry.size, entry.mtime, entry.etag)) for name, entry in entries]
    digest: str = xxhash.xxh3_128_hexdigest(repr((place_of(source), seen, result)).encode())
    return digest


def is_local(destination: str, stores: StoreOptions) -> bool:
    """Say whether a path or URL is on this machine."""
    return open_store(destination, stores).traits.local


def renamed(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest of a single file under another name."""
    return replace(manifest, files=[file._replace(path=name) for file in manifest.files])


def require_other(source: Source, destination: str, stores: StoreOptions) -> None:
    """Refuse to write a checkpoint onto itself, however it is spelled.

    Raises:
        ExistsError: what stands at the destination is the source.
    """
    with suppress(NotFoundError):
        if identity_of(standing_at(destination, stores)) == identity_of(source):
            raise ExistsError(
                f"{destination} is the source itself", hint="choose another destination"
            )


def require_same(
    source: Source,
    manifest: Manifest | None,
    destination: str,
    stores: StoreOptions,
    options: ReplicationOptions,
    taken: ExistsError,
) -> None:
    """Let pass a destination that holds the source's very bytes already, by its manifest.

    Args:
        source: what was to be copied.
        manifest: its own, where it is sealed; else it is read and compared with what stands there.
        destination: where something stands.
        stores: how to reach it.
        options: threads; whether what stands there is read too.
        taken: what is said otherwise.

    Raises:
        ExistsError: it holds something else, or has no manifest that would say it.
        CorruptError: it is the same checkpoint and damaged.
    """
    there = standing_at(destination, stores)
    try:
        standing = find(there)
    except (CorruptError, UnsafeError, UnsupportedError):
        standing = None
    if standing is None or there.single != source.single:
        raise taken
    if manifest is not None and not manifest.same_content(standing):
        raise taken

    def differs(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            raise taken

    if manifest is None:
        theirs = standing if not source.single else renamed(standing, next(iter(source.entries)))
        check_manifest(
            source,
            theirs,
            emit=differs,
            work=options.work,
        )
    if options.proof:
        check_manifest(
            there,
            standing,
            emit=_raise_damage,
            work=options.work,
        )


def require_beside(
    source: Source,
    names: Collection[str],
    destination: str,
    stores: StoreOptions,
    options: ReplicationOptions,
) -> None:
    """Demand that files which lie beside a checkpoint, and were to be carried too, are there.

    Raises:
        ExistsError: one is not, or is another one.
    """
    there = standing_at(destination, stores)
    sizes = {name: source.size(name) for name in names}
    other = [n for n in names if n not in there.entries or there.size(n) != sizes[n]]
    if not other and options.proof:
        ours, theirs = (hash_files(one, sizes, work=options.work) for one in (source, there))
        other = [name for name in names if ours[name] != theirs[name]]
    if other:
        raise ExistsError(
            f"{destination} holds the same checkpoint already, and not the same {other[0]} beside "
            "it",
            hint="nothing is overwritten: choose another name, or carry that file by itself",
        )


def require_as_sealed(
    source: Source, manifest: Manifest | None, options: ReplicationOptions
) -> None:
    """Demand that a source still is what its manifest says, where files are younger than that.

    A replica is compared by the two manifests: it is that of a save before, where a trainer has
    saved again into the sealed directory.

    Raises:
        CorruptError: it is not.
    """
    if manifest is None or not options.proof or not written_since(source):
        return
    ours = renamed(manifest, next(iter(source.entries))) if source.single else manifest
    check_manifest(source, ours, emit=_raise_changed, work=options.work)


def written_since(source: Source) -> bool:
    """Say whether a file was written after the source was sealed, or nobody can tell."""
    seal = source.entries.get(MANIFEST)
    if seal is None or seal.mtime is None:  # beside a single file; or the store keeps no times
        return True
    times = [e.mtime for name, e in source.entries.items() if not is_own(name)]
    return any(time is None or time > seal.mtime for time in times)


def _raise_changed(found: Finding) -> None:
    if found.severity is Severity.ERROR:
        raise as_error(
            found,
            "what was sealed is there already; if the source was saved again since, seal it "
            "(ftckpt seal --force) and copy it to another name",
        )


def _raise_damage(found: Finding) -> None:
    if found.severity is Severity.ERROR:
        damaged = replace(found, message=f"it is there already, and damaged: {found.message}")
        raise as_error(damaged, "ftckpt repair DST --from SRC mends it")
